"""The command line as a process, and what it serves over HTTP."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support import REPOSITORY, log_options, wait_for
from zmq_datasource.cli import main


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


@contextmanager
def receiving(location: Path | str, **options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``zmq-datasource receive``, from the moment that it receives on; killed at the end of the block."""
    flags = {flag for parameter in main.commands["receive"].params for flag in parameter.opts}
    words = []
    for name, value in (log_options(location) | {"walFlushInterval": "20ms"} | options).items():
        flag = "--" + re.sub("([A-Z])", r"-\1", name).lower()
        words += [flag, value] if flag in flags else ["-o", f"{name}={value}"]
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory, "ready")
        command = [sys.executable, "-m", "zmq_datasource", "receive", "--ready-file", str(ready), *words]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for(lambda: ready.exists() or process.poll() is not None, "a receiver")
                assert process.poll() is None
                yield process
            finally:
                process.kill()


def end_family(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def page(port: int | None, path: str = "/metrics") -> tuple[int, str]:
    """The status and the text of a page; 0 and nothing while no one listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""
    except OSError:
        return 0, ""
