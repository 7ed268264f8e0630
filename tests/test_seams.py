"""Tests reach the package through public names, so that the inside can be replaced without touching them.

A reach into a private name is found by syntax: ``thing._name`` (not of ``self`` or ``cls``, not of a class that the
test file itself defines), ``from zmq_datasource... import _name``, and a private name in the text that
``monkeypatch.setattr`` or ``mock.patch`` takes. Programs that a test file holds as text count too. ``REACHES`` has the
number of reaches of each file.

A replacement is wider: a test sets an attribute of a module or a class of the package, also one with a public name.
An argument of the product is better. ``MOST_REPLACEMENTS`` is their number in all tests. Both numbers only go down.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# A file that is not here has none. Today no file has any.
REACHES: dict[str, int] = {}
MOST_REPLACEMENTS = 153


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each reach into a private name."""
    for begin, tree in _programs(source):
        yield from ((begin + line, name) for line, name in _reaches(tree))


@functools.cache
def _programs(source: str) -> list[tuple[int, ast.AST]]:
    """The file itself, and each text in it that is a program which imports the package; with the line before it."""
    tree = ast.parse(source)
    found: list[tuple[int, ast.AST]] = [(0, tree)]
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if re.search(r"(from|import) zmq_datasource", text):
                try:
                    found.append((node.lineno - 1, ast.parse(textwrap.dedent(text))))
                except SyntaxError:
                    continue
    return found


def _reaches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    own = set(_own_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if _is_private(name) and name not in own:
                if not (isinstance(value, ast.Name) and value.id in ("self", "cls")):
                    yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("zmq_datasource"):
                yield from ((node.lineno, alias.name) for alias in names if _is_private(alias.name))
            case ast.Call(func=ast.Attribute(attr="setattr" | "delattr" | "patch" | "object")):
                for argument in node.args[:2]:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        name = argument.value.rpartition(".")[2]
                        if _is_private(name) and name not in own:
                            yield node.lineno, name


def _is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z0-9]\w*", name) is not None and not name.endswith("__")


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that the file itself gives: methods of its classes, what ``self`` has, and its functions."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if _is_private(name):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()) if _is_private(
                name
            ):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) if _is_private(name):
                yield name


def replacements(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each attribute of the package's modules and classes that is set."""
    for begin, tree in _programs(source):
        yield from ((begin + line, name) for line, name in _replacements(tree))


def _replacements(tree: ast.AST) -> Iterator[tuple[int, str]]:
    imported = set(_imported_names(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"), args=[ast.Constant(value=str(name)), *_]
            ):
                if name.startswith("zmq_datasource."):
                    yield node.lineno, name
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr"), args=[ast.expr() as owner, name, *_]
            ):
                if _root(owner) in imported:
                    yield node.lineno, f"{ast.unparse(owner)}.{ast.unparse(name)}"
            case ast.Assign(targets=targets):
                for target in (part for whole in targets for part in ast.walk(whole)):
                    if isinstance(target, ast.Attribute) and _root(target) in imported:
                        yield node.lineno, ast.unparse(target)


def _imported_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("zmq_datasource"):
                yield from (alias.asname or alias.name for alias in names)
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.startswith("zmq_datasource"):
                        yield alias.asname or "zmq_datasource"


def _root(node: ast.expr) -> str:
    """The name at the beginning of ``name.of.something``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


# Of the standard library, documented there, or named so by another library.
PUBLIC_ALL_THE_SAME = frozenset(
    {
        "_asdict",
        "_replace",
        "_fields",
        "_make",
        "_field_defaults",
        "_jvm",
        "_jsc",
        "_jsparkSession",
        "_jdf",
        "_jsq",
        "_sc",
        "_gateway",
        "_exit",
    }
)


def _files() -> list[Path]:
    """All but this one, whose text is an example of everything."""
    return [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]


def _counted(path: Path) -> list[tuple[int, str]]:
    return sorted((line, name) for line, name in reaches(path.read_text()) if name not in PUBLIC_ALL_THE_SAME)


def test_tests_reach_into_no_more_private_names_than_before() -> None:
    found = {}
    for path in _files():
        if at := _counted(path):
            found[path.relative_to(TESTS).as_posix()] = at
    wrong = []
    for name in sorted(found.keys() | REACHES.keys()):
        at, most = found.get(name, []), REACHES.get(name, 0)
        if len(at) > most:
            where = ", ".join(f"line {line}: {private}" for line, private in at)
            wrong.append(
                f"{name}: {len(at)} reaches, {most} are allowed ({where}); use public names, or take clocks, "
                "limits and faults as arguments"
            )
        elif len(at) < most:
            wrong.append(f"{name}: {len(at)} reaches, not {most}: lower the number in REACHES")
    assert wrong == []


def test_tests_replace_no_more_of_the_package_than_before() -> None:
    found = [
        f"{path.relative_to(TESTS).as_posix()}, line {line}: {name}"
        for path in _files()
        for line, name in replacements(path.read_text())
    ]
    assert len(found) <= MOST_REPLACEMENTS, "\n".join(found)


def test_each_kind_of_reach_is_found() -> None:
    source = """
from zmq_datasource.log import writer, _Hidden
from zmq_datasource.log.writer import _LIMIT, Writer

class Fake(Writer):
    _clock: float
    def _own(self): self._mine = self._theirs
    def public(self): return self._own()

def test_it(monkeypatch, fake):
    writer._clean(); fake._mine; fake._own(); fake._clock; fake.__dict__; fake.row._asdict()
    fake.log._index = 1
    monkeypatch.setattr(writer, "_SECONDS", 1)
    monkeypatch.setattr("zmq_datasource.log.writer._NUMBER", 1)
    with mock.patch.object(writer, "_patched"), mock.patch("zmq_datasource.log.writer._text"):
        pass

PROGRAM = '''
from zmq_datasource.log.writer import Writer
Writer.seconds = Writer._in_a_program
'''
"""
    names = sorted(name for _, name in reaches(source) if name not in PUBLIC_ALL_THE_SAME)
    assert names == [
        "_Hidden",
        "_LIMIT",
        "_NUMBER",
        "_SECONDS",
        "_clean",
        "_in_a_program",
        "_index",
        "_patched",
        "_text",
    ]
    assert [name for _, name in replacements(source)] == [
        "writer.'_SECONDS'",
        "zmq_datasource.log.writer._NUMBER",
        "Writer.seconds",
    ]
