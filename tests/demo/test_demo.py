"""The demo as its user starts it: a command, its table, its exit code, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support import wait_for
from zmq_datasource.demo import findings

COMMAND = [sys.executable, "-m", "zmq_datasource", "demo"]


@contextmanager
def _demo(tmp_path: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo; afterwards none of the processes in its environment may be alive."""
    mark = f"{tmp_path}/mark"
    environment = (
        os.environ | {"COLUMNS": "120", "TMPDIR": str(tmp_path), "ZMQ_DATASOURCE_TEST": mark} | variables
    )
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            yield process
        # A process needs a moment for its last lines.
        wait_for(lambda: not _marked(mark), "the end of every process of the demo")
    finally:
        for left in _marked(mark):
            left.kill()
    assert list(tmp_path.iterdir()) == []


def _marked(mark: str) -> list[psutil.Process]:
    """Processes with our mark in their environment: the demo's, however they were started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ZMQ_DATASOURCE_TEST") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _table(output: str) -> dict[str, list[int | None]]:
    """The rows of the table of accounts: published, received, rows, sent, dropped, arrived."""
    rows = {}
    for line in output.splitlines():
        name, *cells = re.split(r"  +", line.strip())
        if name in ("aggregation", "fast sink", "slow sink") and len(cells) == 6:
            counts = [cell.replace(",", "") for cell in cells]
            rows[name] = [int(count) if count.isdecimal() else None for count in counts]
    assert len(rows) == 3, output
    return rows


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_demo_accounts_for_every_message(tmp_path: Path) -> None:
    with _demo(tmp_path, "--seconds", "3") as process:
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert errors == ""
    table = _table(output)
    published = table["aggregation"][0]
    assert published
    for row in table.values():
        assert row[:3] == [published] * 3
    _, _, rows, sent, dropped, arrived = table["fast sink"]
    assert (sent, dropped, arrived) == (rows, 0, rows)
    _, _, rows, sent, dropped, arrived = table["slow sink"]
    assert None not in (rows, sent, dropped, arrived)
    assert dropped > 0
    assert rows == sent + dropped
    assert arrived == sent  # accepted, and flushed before the task ended
    for equation in ("published = received", "received = rows", "rows = sent + dropped", "sent = arrived"):
        assert f"✓ {equation}, in each query." in output
    assert f"{dropped:,} rows found the queue full" in output
    topics = re.findall(r"^weather\.\w+ +([\d,]+)", output, re.MULTILINE)
    assert sum(int(messages.replace(",", "")) for messages in topics) == published


def test_without_java_the_error_says_what_to_install(tmp_path: Path) -> None:
    with _demo(tmp_path, JAVA_HOME="/no/such/java") as process:
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("Error: starting Spark: ")
    assert "needs Java 17" in line


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(240)
def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    with _demo(tmp_path, "--seconds", "600") as process:
        assert process.stdout is not None
        seen: list[str] = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("Streaming"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, "".join(seen) + errors
    assert errors.strip() == "Stopped."


def test_findings_name_what_is_wrong_with_the_figures() -> None:
    account = {"published": 110, "received": 105, "rows": 100, "sent": 70, "dropped": 20, "arrived": 60}
    text = "\n".join(f"{good} {said}" for good, said in findings({"slow sink": account}))
    assert "None published = received, but for 5 (slow sink): the publisher dropped them" in text
    assert "or this machine was too busy" in text
    assert "None received = rows, but for 5 (slow sink): they wait in the log" in text
    assert "False rows = sent + dropped, but for 10 (slow sink)" in text
    assert "False sent = arrived, but for 10 (slow sink)" in text
    assert "slow sink: 20 rows found the queue full" in text
