"""Rows that are not sent: each is counted once, under its reason, as dropped or as a dead letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import binary, write_options
from zmq_datasource.counters import SinkCounters
from zmq_datasource.options.types import Location
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.in_flight import Part
from zmq_datasource.sink.unsent import RefusalLog, Unsent


@pytest.mark.parametrize(
    ("noblock", "anybody", "reason"),
    [(True, True, "hwm"), (True, False, "no_peer"), (False, True, "timeout"), (False, False, "no_peer")],
)
def test_each_row_has_its_reason(tmp_path: Path, noblock: bool, anybody: bool, reason: str) -> None:
    options = write_options(connect="tcp://127.0.0.1:1", noblock=noblock)
    part = Part(binary([b"a", b"b"]), None, None, 0)
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        for kept in (letters, None):
            counters = SinkCounters()
            Unsent(options, kept, counters).give_up(part, 1, anybody=anybody)
            assert dict(counters.dead_lettered) == ({reason: 1} if kept else {})
            assert dict(counters.dropped) == ({} if kept else {reason: 1})


def test_what_a_task_does_without_a_row_is_decided_by_its_options(tmp_path: Path) -> None:
    def decided(noblock: bool, letters: StagedDeadLetters | None) -> tuple[bool, bool]:
        unsent = Unsent(write_options(connect="tcp://127.0.0.1:1", noblock=noblock), letters, SinkCounters())
        return unsent.goes_on, unsent.keeps

    letters = StagedDeadLetters(Location(tmp_path), "q", 0, 0)
    assert decided(False, None) == (False, True)
    assert decided(True, None) == (True, False)
    assert decided(False, letters) == (True, True)
    assert decided(True, letters) == (True, True)


def test_rows_that_are_written_off_were_sent_no_more(tmp_path: Path) -> None:
    """Those that had been given up before are not counted again."""
    options = write_options(connect="tcp://127.0.0.1:1", noblock=True)
    part = Part(binary([b"a", b"bb", b"ccc"]), None, None, 0, sent=2, sent_bytes=4, given_up={1})
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        for kept in (letters, None):
            counters = SinkCounters(rows=3, sent=2, bytes=4)
            assert Unsent(options, kept, counters).write_off([part]) == 2
            assert (counters.sent, counters.bytes) == (0, 0)
            assert (counters.dead_lettered if kept else counters.dropped) == {"connection_lost": 2}


def test_a_long_refusal_is_one_line_and_its_end_another(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = RefusalLog("dropped", clock=lambda: now[0])
    for second in range(8):  # full and free again, thousands of times
        now[0] = float(second)
        for _ in range(1000):
            refusals.note("hwm")
            refusals.look()
    assert [r.message for r in caplog.records] == ["rows are being dropped: 5001 hwm in 5 s"]
    now[0] = 12.5
    refusals.look()
    refusals.look()
    assert [r.message for r in caplog.records][1:] == ["rows are no longer dropped: 8000 hwm in 7 s"]
    refusals.note("hwm")  # a short one is told by its batch
    refusals.end()
    assert len(caplog.records) == 2
