"""The package as a whole: what is public, and that it can be had."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zmq_datasource
from tests.support import REPOSITORY
from zmq_datasource import errors
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
        why = why_workers_lack_package(str(python), 60)
        assert (why is not None) == lacks
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    why = why_workers_lack_package(str(python), 60) or ""
    assert str(python) in why
    assert f"set PYSPARK_PYTHON={sys.executable}" in why
    assert "DATA_SOURCE_NOT_FOUND" in why
    assert "which is not here" in (why_workers_lack_package("no-such-python") or "")


@pytest.mark.parametrize(
    "module",
    [
        "receive",
        "acknowledged.producer",
        "serving.subscriber",
        "serving.proxy",
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
