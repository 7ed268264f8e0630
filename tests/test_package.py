"""The package as a whole: what is public, and that it can be had."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest

import zmq_datasource
from tests.support import REPOSITORY
from zmq_datasource import errors
from zmq_datasource.cli import main
from zmq_datasource.options import ReadOptions, WriteOptions
from zmq_datasource.options.parser import describe
from zmq_datasource.spark.registration import why_workers_lack_package

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(zmq_datasource.__path__, "zmq_datasource.")
    if "__main__" not in name
]


def test_package_citation_and_changelog_name_one_version() -> None:
    release = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "release.py"))
    assert set(release["versions"]().values()) == {zmq_datasource.__version__}


def test_mutation_testing_names_files_that_exist() -> None:
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["mutmut"]
    for name in (*declared["only_mutate"], *declared["pytest_add_cli_args_test_selection"]):
        assert list(REPOSITORY.glob(name)), name


def _is_command(line: str) -> bool:
    """Whether the command line is understood, as far as the names of its commands and options go."""
    command: click.Command = main
    _, *words = line.split()
    try:
        while isinstance(command, click.Group) and words:
            _, found, words = command.resolve_command(click.Context(command), words)
            assert found is not None
            command = found
        command.make_context(None, [*words, "--help"])
    except click.UsageError:
        return False
    except click.exceptions.Exit:  # after the help
        return not isinstance(command, click.Group)
    raise AssertionError(f"{line}: no help")


def _has_argument(call: re.Match[str]) -> bool:
    return call[2] in inspect.signature(getattr(zmq_datasource, call[1])).parameters


def test_the_changelog_names_what_is_gone_and_what_there_is_instead() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| gone or moved | instead |\n| --- | --- |\n")
    rows = [line.strip("| ").split(" | ") for line in table.partition("\n\n")[0].split("\n")]
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md")))
    options = {option.name for kind in (ReadOptions, WriteOptions) for option in describe(kind)}
    for gone, instead in rows:
        for name in re.findall("`([^`]+)`", gone):
            if name.startswith("zmq-datasource "):
                assert not _is_command(name), name
            if call := re.fullmatch(r"(\w+)\((\w+)=...\)", name):
                assert not _has_argument(call), name
        for name in re.findall("`([^`]+)`", instead):
            if name.startswith("zmq-datasource "):
                assert _is_command(name), name
            elif call := re.fullmatch(r"(\w+)\((\w+)=...\)", name):
                assert _has_argument(call), name
            elif not name.startswith("make "):
                assert name.partition("=")[0] in options or name in re.findall(r"\w+", pages), name


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_calls_public_exists(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public)


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({name: set(_imports(name)) for name in MODULES}).prepare()  # CycleError has the circle


def _imports(name: str) -> Iterator[str]:
    """The modules that a module imports, also in functions and for types only."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    if not spec.origin.endswith(".py"):
        return  # the compiled core
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            yield from (modules or {node.module} & set(MODULES)) - {name}


def test_every_error_that_can_reach_a_user_is_in_the_tree_that_is_documented() -> None:
    for name in MODULES:
        importlib.import_module(name)
    found, waiting = set(), [errors.ZmqDataSourceError]
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        if error.__module__.startswith("zmq_datasource"):
            found.add(f"{error.__module__}.{error.__name__}")
    assert found == {f"zmq_datasource.errors.{name}" for name in errors.__all__}


def test_importing_the_package_starts_no_jvm_and_opens_no_socket() -> None:
    code = (
        "import sys, zmq_datasource, pyspark_zmq, threading, psutil;"
        "assert threading.active_count() == 1;"
        "assert not psutil.Process().net_connections();"
        "assert not psutil.Process().children()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_workers_of_another_python_are_judged_without_starting_the_drivers_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is the same environment"))
    assert why_workers_lack_package(sys.executable) is None


def test_workers_without_the_package_are_named_with_the_way_out(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    for words, lacks in (("-I -S", True), ("", False)):
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        python.chmod(0o700)
        why = why_workers_lack_package(str(python))
        assert (why is not None) == lacks
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    why = why_workers_lack_package(str(python)) or ""
    assert str(python) in why
    assert f"set PYSPARK_PYTHON={sys.executable}" in why
    assert "DATA_SOURCE_NOT_FOUND" in why
    assert "which is not here" in (why_workers_lack_package("no-such-python") or "")


@pytest.mark.parametrize(
    "module",
    [
        "receive",
        "acknowledged.producer",
        "proxy.subscriber",
        "proxy.process",
        "proxy.server",
        "cli",
        "workbench.doctor",
    ],
)
def test_what_needs_no_spark_does_not_import_it(module: str) -> None:
    code = f"import sys, zmq_datasource.{module}; print([m for m in ('pyspark', 'py4j', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_without_pyspark_it_is_said_what_to_install() -> None:
    code = "import importlib.util; importlib.util.find_spec = lambda name: None; from zmq_datasource import register"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'zmq_datasource[spark]'" in done.stderr


def test_an_older_pyspark_is_refused_with_its_version_and_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("__version__ = '4.1.4'\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from zmq_datasource import register"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    assert "needs PySpark 4.2 or newer, and 4.1.4 is installed" in done.stderr
    assert "pip install --upgrade" in done.stderr


def test_what_is_public_is_there_when_it_is_asked_for() -> None:
    for name in zmq_datasource.__all__:
        assert getattr(zmq_datasource, name) is not None
        assert name in dir(zmq_datasource)
    with pytest.raises(AttributeError, match="no attribute 'registre'"):
        zmq_datasource.registre  # noqa: B018 - it is asked for
