"""The package as a whole: what is public, and that it can be had."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import zmq_datasource
from zmq_datasource import errors

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(zmq_datasource.__path__, "zmq_datasource.")
    if "__main__" not in name
]


def test_all_errors_are_public() -> None:
    assert set(errors.__all__) <= set(zmq_datasource.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_calls_public_exists(name: str) -> None:
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", []):
        assert hasattr(module, public)


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "ZmqDataSourceError"])
def test_every_error_is_of_the_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.ZmqDataSourceError)


def test_importing_the_package_starts_no_jvm_and_opens_no_socket() -> None:
    code = (
        "import sys, zmq_datasource, pyspark_zmq, threading, psutil;"
        "assert threading.active_count() == 1;"
        "assert not psutil.Process().net_connections();"
        "assert not psutil.Process().children()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
