"""The receiving thread and what it runs: any filler, any log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import zmq

from tests.support import Socket, bound, stop_sooner, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import EndpointError, LogWriteError, MessageLossError
from zmq_datasource.log.filler import FillerFacts
from zmq_datasource.source.receiver import LogReceiver, Receiver
from zmq_datasource.source.receiving import ReceivingThread

Context = zmq.Context[Socket]


class Filler:
    """A filler that receives one message a round, and notes the calls."""

    drain_seconds = 5.0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.messages = 0
        self.error: Exception | None = None
        self.cannot_open: Exception | None = None

    def __enter__(self) -> Filler:
        if self.cannot_open is not None:
            raise self.cannot_open
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append("close")

    def receive(self) -> int:
        self.asked.append("receive")
        if self.error is not None:
            raise self.error
        if not self.messages:
            return 0
        self.messages -= 1
        return 1

    def cut(self) -> Future[int]:
        self.asked.append("cut")
        done: Future[int] = Future()
        done.set_result(7)
        return done

    def extend_timeouts(self) -> None:
        self.asked.append("extend_timeouts")

    def finish(self, seconds: float) -> None:
        self.asked.append("finish")

    def is_connected(self) -> bool:
        return True

    def facts(self) -> FillerFacts:
        return FillerFacts()


def log() -> Any:
    return SimpleNamespace(
        fault=None,
        full=False,
        busy=False,
        slow=False,
        failure=None,
        open_bytes=0,
        end_within=lambda seconds: None,
    )


def thread_of(filler: Filler, log: Any, counters: SourceCounters | None = None) -> ReceivingThread:
    counters = counters or SourceCounters()
    return ReceivingThread(filler, log, counters, flush_interval=3600.0)


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)
    monkeypatch.setattr(ReceivingThread, "tick_seconds", 0.001)


def test_start_raises_the_error_of_a_socket_that_cannot_be_opened() -> None:
    filler = Filler()
    filler.cannot_open = EndpointError("in use")
    thread = thread_of(filler, log())
    with pytest.raises(EndpointError, match="in use"):
        thread.start()
    thread.stop()
    assert filler.asked == []


def test_a_request_to_seal_raises_the_error_that_has_ended_receiving() -> None:
    filler = Filler()
    thread = thread_of(filler, log())
    thread.start()
    assert thread.request_seal().result(10).result(10) == 7
    filler.error = MessageLossError("never came")
    wait_for(lambda: thread.failure, "the end")
    with pytest.raises(MessageLossError, match="never came"):
        thread.request_seal()
    with pytest.raises(MessageLossError):
        thread.raise_failure()
    thread.stop()


def test_a_pause_receives_nothing_and_answers_requests_to_seal() -> None:
    filler, full, counters = Filler(), log(), SourceCounters()
    thread = thread_of(filler, full, counters)
    thread.start()
    full.full = True
    wait_for(lambda: counters.paused_by == "logFull", "the pause")
    wait_for(lambda: filler.asked[-1] == "extend_timeouts", "the last round")
    received = filler.asked.count("receive")
    assert filler.asked[filler.asked.index("extend_timeouts") - 1] == "cut"  # what was there is handed over
    assert thread.request_seal().result(10).result(10) == 7
    full.fault = "no space left"  # another cause, the same pause
    wait_for(lambda: counters.paused_by == "diskFault", "the other cause")
    assert filler.asked.count("receive") == received
    full.full, full.fault = False, None
    wait_for(lambda: filler.asked.count("receive") > received, "receiving to go on")
    assert (counters.pauses["logFull"], counters.pauses["diskFault"], counters.paused_by) == (1, 1, None)
    thread.stop()


def test_while_the_disk_is_busy_no_chunk_is_cut() -> None:
    filler, busy = Filler(), log()
    busy.busy, busy.open_bytes = True, 1
    counters = SourceCounters()
    thread = ReceivingThread(filler, busy, counters, flush_interval=0.0)
    thread.start()
    wait_for(lambda: filler.asked.count("receive") > 10, "some rounds")
    assert "cut" not in filler.asked
    busy.busy = False
    wait_for(lambda: "cut" in filler.asked, "the cut that was due")
    thread.stop()


def test_a_disk_that_refuses_for_too_long_ends_a_pause() -> None:
    filler, full = Filler(), log()
    thread = thread_of(filler, full)
    full.fault = "no space left"
    thread.start()
    full.failure = LogWriteError("tried again for long enough")
    wait_for(lambda: thread.failure, "the end")
    assert thread.failure is full.failure
    thread.stop()


def test_a_stop_drains_the_sockets_and_then_finishes() -> None:
    filler, slow = Filler(), log()
    thread = thread_of(filler, slow)
    slow.slow = True  # nothing is received before the stop
    thread.start()
    filler.messages = 3
    slow.slow = False
    thread.stop()
    assert filler.messages == 0
    assert filler.asked[-2:] == ["finish", "close"]


def test_a_stop_does_not_wait_for_the_end_of_a_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    filler = Filler()
    filler.messages, filler.drain_seconds = 10**9, 0.05
    thread = thread_of(filler, log())
    thread.start()
    thread.stop()
    assert filler.messages > 0
    assert thread.failure is None


# A receiver that fills a log.


@contextmanager
def received(
    context: Context, append: Callable[[pa.RecordBatch], None], kind: type[Receiver] = Receiver
) -> Iterator[LogReceiver]:
    """A receiver that has received three messages, and the ``append`` of its log."""
    push, endpoint = bound(context, zmq.PUSH)
    options = stream_options(connect=endpoint, socketType="PULL")
    log = cast("Any", SimpleNamespace(append=append, cut=Future))
    with LogReceiver(kind(options, SourceCounters(), 1 << 20), log, "PULL") as it:
        for _ in range(3):
            push.send(b"x")
        wait_for(lambda: it.receive() < 0 or it.receiver.pending == 3, "three messages")
        yield it


def test_messages_that_cannot_become_rows_are_counted_as_lost(context: Context) -> None:
    class Unreadable(Receiver):
        def take(self) -> pa.RecordBatch:
            super().take()
            raise RuntimeError("an error of ours")

    with received(context, lambda _: None, Unreadable) as it:
        with pytest.raises(RuntimeError):
            it.cut()
        assert (it.facts().pending, it.facts().refused) == (0, 3)


def test_messages_that_the_log_refuses_are_counted_as_lost(context: Context) -> None:
    def refuse(_: pa.RecordBatch) -> None:
        assert it.facts().appending
        raise LogWriteError("no space left")

    with received(context, refuse) as it:
        assert it.facts() == FillerFacts(pending=3)
        with pytest.raises(LogWriteError):
            it.cut()
        assert (it.facts().pending, it.facts().refused) == (0, 3)


def test_messages_before_a_failure_are_appended_first(context: Context) -> None:
    class Failing(Receiver):
        failure: Any = None

    rows: list[int] = []
    with received(context, lambda messages: rows.append(messages.num_rows), Failing) as it:
        Failing.failure = MessageLossError("never came")
        with pytest.raises(MessageLossError):
            it.cut()
        assert rows == [3]
        assert it.facts() == FillerFacts()
