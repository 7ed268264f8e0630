"""The command line as a process, and what it serves over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import REPOSITORY


def environment(directory: Path, *wanted: str) -> Path:
    """A virtual environment with the package and what else is wanted. Skips the test where that cannot be had."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    command = [directory / "bin" / "python", "-m", "pip", "install", "--quiet", str(REPOSITORY), *wanted]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{wanted} is not to be had here: {installed.stderr.strip()[-200:]}")
    return directory


@contextmanager
def program(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """``zmq-datasource`` with these arguments, until the end of the block."""
    running = subprocess.Popen(
        [sys.executable, "-m", "zmq_datasource", *arguments],
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
    )
    try:
        yield running
    finally:
        running.terminate()
        assert running.wait(30) == 0


def page(port: int | None, path: str = "/metrics") -> tuple[int, str]:
    """The status and the text of a page; 0 and nothing while no one listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""
    except OSError:
        return 0, ""
