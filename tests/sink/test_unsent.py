"""Rows that are not sent: each is counted once, under its reason, as dropped or as a dead letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import binary, write_options
from zmq_datasource.counters import SinkCounters
from zmq_datasource.options.types import Location
from zmq_datasource.sink.in_flight import RowBatch
from zmq_datasource.sink.unsent import StagedDeadLetters, Unsent


@pytest.mark.parametrize(
    ("noblock", "has_peers", "reason"),
    [(True, True, "hwm"), (True, False, "no_peer"), (False, True, "timeout"), (False, False, "no_peer")],
)
def test_each_row_has_its_reason(tmp_path: Path, noblock: bool, has_peers: bool, reason: str) -> None:
    options = write_options(connect="tcp://127.0.0.1:1", noblock=noblock)
    batch = RowBatch(binary([b"a", b"b"]), None, None, 0)
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        for kept in (letters, None):
            counters = SinkCounters()
            Unsent(options, kept, counters).give_up(batch, 1, has_peers=has_peers)
            assert dict(counters.dead_lettered) == ({reason: 1} if kept else {})
            assert dict(counters.dropped) == ({} if kept else {reason: 1})


def test_options_decide_whether_a_task_continues_and_keeps_its_rows(tmp_path: Path) -> None:
    def decided(noblock: bool, letters: StagedDeadLetters | None) -> tuple[bool, bool]:
        unsent = Unsent(write_options(connect="tcp://127.0.0.1:1", noblock=noblock), letters, SinkCounters())
        return unsent.continues, unsent.needs_rows

    letters = StagedDeadLetters(Location(tmp_path), "q", 0, 0)
    assert decided(False, None) == (False, True)
    assert decided(True, None) == (True, False)
    assert decided(False, letters) == (True, True)
    assert decided(True, letters) == (True, True)


def test_rows_that_are_written_off_no_longer_count_as_sent(tmp_path: Path) -> None:
    """A row that was given up before is not counted twice."""
    options = write_options(connect="tcp://127.0.0.1:1", noblock=True)
    batch = RowBatch(binary([b"a", b"bb", b"ccc"]), None, None, 0, sent=2, sent_bytes=4, given_up={1})
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        for kept in (letters, None):
            counters = SinkCounters(rows=3, sent=2, bytes=4)
            assert Unsent(options, kept, counters).write_off([batch]) == 2
            assert (counters.sent, counters.bytes) == (0, 0)
            assert (counters.dead_lettered if kept else counters.dropped) == {"connection_lost": 2}


def test_rows_without_a_value_are_given_up_by_any_task(tmp_path: Path) -> None:
    options = write_options(connect="tcp://127.0.0.1:1")
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        for kept in (letters, None):
            batch, counters = RowBatch(binary([None, b"a", None]), None, None, 0), SinkCounters()
            Unsent(options, kept, counters).leave_out_nulls(batch)
            assert batch.given_up == {0, 2}
            assert (counters.dead_lettered if kept else counters.dropped) == {"null": 2}
