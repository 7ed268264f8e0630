"""The demo as its user starts it: a command, its table, its exit code, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from click.testing import CliRunner

from tests.support import bound, wait_for
from zmq_datasource.cli import main
from zmq_datasource.counters import SinkCounters
from zmq_datasource.demo.counts import QueryCounts, Tally
from zmq_datasource.demo.errors import plain_reason
from zmq_datasource.demo.verdict import findings
from zmq_datasource.monitoring.figures import sink_metrics

COMMAND = [sys.executable, "-m", "zmq_datasource", "demo"]


@contextmanager
def _demo(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start the demo; afterwards none of the processes in its environment may be alive."""
    mark = f"{tmp_path}/mark"
    environment = os.environ | {"COLUMNS": "120", "TMPDIR": str(tmp_path), "ZMQ_DATASOURCE_TEST": mark}
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
        # A process that is told to end needs a moment for its last lines.
        wait_for(lambda: not _marked(mark), "the end of every process of the demo", 10)
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
    """The rows of the table of accounts: published, received, rows, sent, dropped (hwm), arrived."""
    rows = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("│").split("│")]
        if len(cells) == 7 and cells[0] in ("aggregation", "fast sink", "slow sink"):
            rows[cells[0]] = [int(n) if (n := c.replace(",", "")).isdecimal() else None for c in cells[1:]]
    return rows


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
    assert f"rows = sent + dropped: {rows:,} = {sent:,} + {dropped:,}" in output
    assert re.search(r"weather\.oslo +[\d,]+ +\d", output)


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_demo_reads_the_users_own_feed(tmp_path: Path) -> None:
    stop = threading.Event()
    with zmq.Context() as context:
        socket, endpoint = bound(context, zmq.PUB)

        def publish() -> None:
            number = 0
            with socket:
                while not stop.wait(0.01):
                    for _ in range(5):
                        socket.send_multipart([b"mine", b"%d" % number])
                        socket.send_multipart([b"other", b"x"])
                        number += 1

        publisher = threading.Thread(target=publish)
        publisher.start()
        try:
            with _demo(tmp_path, "--endpoint", endpoint, "--topics", "mine", "--seconds", "1") as process:
                output, errors = process.communicate(timeout=200)
        finally:
            stop.set()
            publisher.join()
    assert process.returncode == 0, errors
    for name, row in _table(output).items():
        published, received, rows, *_ = row
        assert published is None, name
        assert received is not None
        assert rows is not None
        assert received >= rows > 0
    assert "mine" in output
    assert "other" not in output.split("aggregation")[0]
    assert "average bytes" in output


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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--endpoint", "localhost:5556"], "has no transport"),
        (["--endpoint", "tcp://localhost:80000"], "must be a number from 1 to 65535"),
        (
            ["--endpoint", "tcp://localhost:5556", "--socket-type", "PULL", "--topics", "a"],
            "needs socketType=SUB",
        ),
    ],
)
def test_wrong_feed_is_one_clear_line(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert word in line


def test_options_of_a_feed_need_the_feed() -> None:
    result = CliRunner().invoke(main, ["demo", "--topics", "weather"])
    assert result.exit_code == 2
    assert "--endpoint" in result.stderr


def test_tally_takes_an_event_once_and_idle_ones_as_news() -> None:
    began = datetime(2026, 1, 1, tzinfo=UTC)

    def event(
        batch: int, rows: int, received: int | None, second: int, sent: int | None = None
    ) -> dict[str, Any]:
        account = sink_metrics(SinkCounters(rows=sent or 0, sent=sent or 0))
        return {
            "batchId": batch,
            "numInputRows": rows,
            "timestamp": (began + timedelta(seconds=second)).isoformat(),
            "sources": [{} if received is None else {"metrics": {"messagesReceived": received}}],
            "sink": {} if sent is None else {"metrics": {"total": account}},
        }

    tally = Tally()
    tally.add(event(0, 0, None, 0))
    assert tally.as_of is None
    for _ in range(2):
        tally.add(event(0, 10, 12, 1, sent=10))
    tally.add(event(1, 0, 15, 2))
    assert (tally.rows, tally.received, tally.sink.sent) == (10, 15, 10)
    assert tally.as_of == began + timedelta(seconds=2)


def test_words_say_what_is_wrong_with_the_numbers() -> None:
    sink = SinkCounters(rows=100, sent=70, dropped=Counter(hwm=20))
    account = QueryCounts("slow sink", published=110, received=105, rows=100, sink=sink, arrived=60)
    said = list(findings([account], pull=False, settled=True, slow_settings="settings"))
    text = "\n".join(f"{finding.good} {finding.text}" for finding in said)
    assert "5 (slow sink)" in text
    assert "False slow sink: rows = sent + dropped: 100 = 70 + 20." in text
    assert "False slow sink: 10 messages were sent and did not arrive" in text


def test_a_busy_machine_is_no_loss() -> None:
    account = QueryCounts("aggregation", published=110, received=0, rows=0)
    said = [finding.text for finding in findings([account], pull=False, settled=False, slow_settings="")]
    assert not any("Lost" in text for text in said)


def test_plain_reason_is_the_line_that_matters() -> None:
    jvm = (
        "[STREAM_FAILED] ...\nTraceback\nzmq_datasource.errors.EndpointError: binding tcp://*:5: in use\nat x"
    )
    assert plain_reason(jvm) == "binding tcp://*:5: in use"
    assert plain_reason(RuntimeError("first\nsecond")) == "first"
    assert plain_reason(EOFError()) == "EOFError"
