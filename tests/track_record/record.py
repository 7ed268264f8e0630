"""Reads the patches, and finds the tests that are marked as failing for a known fault."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
DIRECTORY = Path(__file__).parent

_FIELDS = ("Fault", "Mended", "Caught by")
_SEED = re.compile(r"weather --topology [\w-]+ --first \d+( --failpoint [\w.]+)?")
_TEST = re.compile(r"tests/[\w/]+\.py::\S.*")
_KNOWN = re.compile(r"issue (?P<issue>\d+),? line (?P<line>\d+): (?P<fault>.+)", re.DOTALL)


class Patch(NamedTuple):
    """One mended fault, and the change that brings it back."""

    path: Path
    fault: str
    mended: str
    caught_by: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def files(self) -> list[str]:
        """The files that the patch changes, relative to the repository's root."""
        return re.findall(r"^\+\+\+ b/(\S+)", self.path.read_text(encoding="utf-8"), re.MULTILINE)

    @property
    def seed(self) -> list[str]:
        """The arguments of ``tests.weather``, if a seed of the weather machine catches the fault; else empty."""
        return self.caught_by.split()[1:] if _SEED.fullmatch(self.caught_by) else []


class KnownFault(NamedTuple):
    """A test with a strict xfail mark: its fault is known, and still there."""

    test: str
    line: int
    reason: str
    strict: bool


def read_patch(path: Path) -> Patch:
    """Parse one patch; ValueError says what its header lacks."""
    header, _, diff = path.read_text(encoding="utf-8").partition("\n\n")
    fields: dict[str, str] = {}
    for line in re.sub(r"\n[ \t]+", " ", header).splitlines():
        name, colon, value = line.partition(": ")
        if not colon or name not in _FIELDS or name in fields or not value.strip():
            raise ValueError(
                f"{path.name}: header line {line!r}: expected one each of {_FIELDS}, with a value"
            )
        fields[name] = value.strip()
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise ValueError(f"{path.name}: the header has no {missing}; an empty line ends the header")
    if not diff.startswith("diff --git "):
        raise ValueError(f"{path.name}: expected the output of 'git diff' after the header's empty line")
    patch = Patch(path, *(fields[name] for name in _FIELDS))
    if not (_TEST.fullmatch(patch.caught_by) or _SEED.fullmatch(patch.caught_by)):
        raise ValueError(
            f"{path.name}: Caught by {patch.caught_by!r}: expected tests/....py::test_name, "
            "or weather --topology NAME --first SEED"
        )
    outside = [file for file in patch.files if not file.startswith(("zmq_datasource/", "pyspark_zmq/"))]
    if outside or not patch.files:
        raise ValueError(f"{path.name}: a patch changes the package alone, not {outside}")
    return patch


def read_patches() -> list[Patch]:
    return [read_patch(path) for path in sorted(DIRECTORY.glob("*.patch"))]


def git_apply(patch: Patch, tree: Path, *options: str) -> str:
    """Apply a patch to the files of a tree. Returns git's complaint, and "" if the patch applies.

    The tree need not be a repository; a repository that happens to lie around it is not looked at.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        # One line of context is enough: a change nearby is no reason to touch the patch.
        ["git", "apply", "-C1", *options, str(patch.path)],
        cwd=tree,
        env=environment | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout.strip() or f"git apply ended with {done.returncode}"


def known_faults() -> Iterator[KnownFault]:
    """Every xfail mark of the tests whose reason begins with the line of an issue."""
    for path in sorted(Path(REPOSITORY, "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "xfail" not in text:
            continue
        tree = ast.parse(text, str(path))
        for node in ast.walk(tree):
            marks = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            at = path.relative_to(REPOSITORY).as_posix()
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                at += f"::{node.name}"
            elif isinstance(
                node, ast.Call
            ):  # a parameter's mark: pytest.param(..., marks=pytest.mark.xfail(...))
                marks = [keyword.value for keyword in node.keywords if keyword.arg == "marks"]
                at += f":{node.lineno}"
            elif isinstance(node, ast.Assign):  # a mark with a name, or pytestmark
                marks = [node.value]
                at += f":{node.lineno}"
            for call in (c for mark in marks for c in ast.walk(mark) if isinstance(c, ast.Call)):
                if not isinstance(call.func, ast.Attribute) or call.func.attr != "xfail":
                    continue
                given = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
                found = _KNOWN.match(str(given.get("reason")))
                if found:
                    yield KnownFault(
                        at, int(found["line"]), str(given["reason"]), given.get("strict") is True
                    )
