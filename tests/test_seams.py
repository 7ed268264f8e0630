"""Tests reach the package through public names, so that the inside can be replaced without touching them.

A reach into a private name is found by syntax: ``thing._name`` (not of ``self`` or ``cls``, not of a class that the
test file itself defines), ``from zmq_datasource... import _name``, and a private name in the text that
``monkeypatch.setattr`` or ``mock.patch`` takes. ``REACHES`` has the number of them for each file, which only goes down.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# A file that is not here has none. Today no file has any.
REACHES: dict[str, int] = {}


def reaches(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each reach into a private name."""
    tree = ast.parse(source)
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


def _counted(path: Path) -> list[tuple[int, str]]:
    return sorted((line, name) for line, name in reaches(path.read_text()) if name not in PUBLIC_ALL_THE_SAME)


def test_tests_reach_into_no_more_private_names_than_before() -> None:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
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
"""
    names = sorted(name for _, name in reaches(source) if name not in PUBLIC_ALL_THE_SAME)
    assert names == [
        "_Hidden",
        "_LIMIT",
        "_NUMBER",
        "_SECONDS",
        "_clean",
        "_index",
        "_patched",
        "_text",
    ]
