"""Receiving into a log: the loop, back-pressure end to end, draining, faults. No Spark."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pyarrow as pa
import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import (
    Offering,
    Socket,
    at_failpoints,
    bound,
    free_endpoint,
    keep_handlers,
    log_rows,
    need,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    EndpointError,
    LogWriteError,
    MessageLossError,
    ZmqDataSourceError,
)
from zmq_datasource.log.state import FillerFacts
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.filling import Filling, filling_of
from zmq_datasource.source.intake import Intake
from zmq_datasource.source.receive_loop import ReceiveLoop
from zmq_datasource.source.receiver import LogReceiver, Receiver
from zmq_datasource.spark.stream_reader import ZmqStreamReader

Context = zmq.Context[Socket]


class Filler:
    """A filler that receives one message a round, and notes the calls."""

    drain_seconds = 5.0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.messages = self.pending = 0
        self.error: Exception | None = None
        self.cannot_open: Exception | None = None

    def __enter__(self) -> Filler:
        if self.cannot_open is not None:
            raise self.cannot_open
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append("close")

    def wake(self) -> None:
        pass

    def receive(self, gather: float = 0.0) -> int:
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

    def facts(self) -> FillerFacts:
        return FillerFacts(self.pending)


class Log(LogWriter):
    """A log that is in the state that a test wants."""

    full: Any = False
    busy: Any = False
    slow: Any = False
    fault: Any = None
    failure: Any = None


@contextmanager
def running(filler: Filler, flush_interval: str = "1h", **state: Any) -> Iterator[tuple[FeedReceiver, Log]]:
    """A receiver that receives with this filler into a log in this state, and its log."""

    def fill(options: Any, storage: LogStorage, counters: SourceCounters, *_: Any) -> Filling:
        log = Log(storage, chunk_bytes=1 << 20, max_bytes=1 << 30)
        for name, value in state.items():
            setattr(log, name, value)
        return Filling(log, cast("Any", filler), Intake(options, counters))

    with TemporaryDirectory() as place:
        options = {"connect": "tcp://127.0.0.1:9", "socketType": "PULL", "walLocation": place}
        receiver = FeedReceiver(stream_options(**options, walFlushInterval=flush_interval), fill=fill)
        receiver.start()
        try:
            yield receiver, cast("Log", receiver.log)
        finally:
            with suppress(ZmqDataSourceError):  # a test has seen it
                receiver.stop()


def sealed(receiver: FeedReceiver, filler: Filler) -> int:
    """Ask for a chunk; what the filler answers."""
    filler.pending = 1
    end = receiver.seal()
    filler.pending = 0
    return end


@pytest.fixture(autouse=True)
def _stop_sooner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "socket_has" not in request.node.name:  # no publisher sends when the other tests stop
        stop_sooner(monkeypatch)
    monkeypatch.setattr(ReceiveLoop, "tick_seconds", 0.001)


# The loop, with any filler.


def test_a_request_to_seal_raises_the_error_that_has_ended_receiving() -> None:
    filler = Filler()
    with running(filler) as (receiver, _):
        assert sealed(receiver, filler) == 7
        filler.error = MessageLossError("never came")
        wait_for(lambda: receiver.state == "ended", "the end")
        with pytest.raises(MessageLossError, match="never came"):
            receiver.seal()
        assert not receiver.storage.writer()


def test_a_pause_receives_nothing_and_answers_requests_to_seal() -> None:
    filler = Filler()
    with running(filler) as (receiver, log):
        log.full, counters = True, receiver.counters
        wait_for(lambda: counters.paused_by == "logFull", "the pause")
        wait_for(lambda: filler.asked[-1] == "extend_timeouts", "the last round")
        received = filler.asked.count("receive")
        assert (
            filler.asked[filler.asked.index("extend_timeouts") - 1] == "cut"
        )  # what was there is handed over
        assert sealed(receiver, filler) == 7
        log.fault = "no space left"  # another cause, the same pause
        wait_for(lambda: counters.paused_by == "diskFault", "the other cause")
        assert filler.asked.count("receive") == received
        log.full, log.fault = False, None
        wait_for(lambda: filler.asked.count("receive") > received, "receiving to go on")
        assert (counters.pauses["logFull"], counters.pauses["diskFault"], counters.paused_by) == (1, 1, None)


def test_while_the_disk_is_busy_no_chunk_is_cut() -> None:
    filler = Filler()
    with running(filler, "1ms", busy=True, open_bytes=1) as (_, log):
        wait_for(lambda: filler.asked.count("receive") > 10, "some rounds")
        assert "cut" not in filler.asked
        log.busy = False
        wait_for(lambda: "cut" in filler.asked, "the cut that was due")


def test_a_stop_does_not_wait_for_the_end_of_a_feed() -> None:
    filler = Filler()
    filler.messages, filler.drain_seconds = 10**9, 0.05
    with running(filler) as (receiver, _):
        receiver.stop()
        assert filler.messages > 0
        assert receiver.failure is None


# A receiver that fills a log.


@contextmanager
def received(
    context: Context, append: Callable[[pa.RecordBatch], None], kind: type[Receiver] = Receiver
) -> Iterator[LogReceiver]:
    """A receiver that has received three messages, and the ``append`` of its log."""
    push, endpoint = bound(context, zmq.PUSH)
    options = stream_options(connect=endpoint, socketType="PULL")
    log = cast("Any", SimpleNamespace(append=append, cut=Future))
    with LogReceiver(kind(options, SourceCounters(), 1 << 20), log) as it:
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
        assert (it.facts().pending, it.facts().pending_bytes) == (3, 3)
        with pytest.raises(LogWriteError):
            it.cut()
        assert (it.facts().pending, it.facts().refused) == (0, 3)


# A receiver with its sockets.


def at_each_write(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let the store of the log call this before each write."""
    at_failpoints(monkeypatch, lambda name: name == "log.store.before_write" and act())


def fail() -> None:
    raise OSError(28, "No space left on device")


@contextmanager
def ingesting(location: Path, endpoint: str, **options: object) -> Iterator[FeedReceiver]:
    ingest = FeedReceiver(
        stream_options(connect=endpoint, walLocation=location, **{"socketType": "PULL", **options})
    )
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


def numbers(location: Path) -> list[int]:
    return [int(v) for v in log_rows(location).column("value").to_pylist()]


def send_numbers(sock: Socket, count: int) -> None:
    for i in range(count):
        sock.send(b"%d" % i)


def test_messages_that_a_durable_subscriber_awaits_are_sealed_soon(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint, walFlushInterval="1h") as ingest:
        send_numbers(push, 1)
        wait_for(lambda: ingest.received_end == 1, "a message that is not sealed")
        for end in range(3):
            ingest.await_rows(end)
            wait_for(lambda end=end: ingest.log.durable_end == end + 1, "the chunk")
            send_numbers(push, 1)
        wait_for(lambda: ingest.received_end == 4, "a message that nobody awaits")
        assert ingest.log.durable_end == 3


def test_messages_become_durable_after_the_flush_interval(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint, walFlushInterval="50ms") as ingest:
        send_numbers(push, 1)
        wait_for(lambda: ingest.log.durable_end == 1, "one durable message without asking")


def test_stop_receives_the_messages_that_the_socket_has(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=200_000)
    with ingesting(tmp_path, endpoint):
        send_numbers(push, 100_000)
    assert numbers(tmp_path) == list(range(100_000))
    assert "stopping to receive" not in caplog.text


@pytest.mark.spark  # takes its time
def test_a_full_log_holds_the_sender_back_and_nothing_is_lost(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    count, size, limit = 3000, 10_000, 2 << 20
    sent = 0
    blocked = threading.Event()
    options = {"walMaxBytes": limit, "rcvhwm": 10, "zmq_rcvbuf": 4096}

    def send() -> None:
        nonlocal sent
        assert push.poll(30_000, zmq.POLLOUT)  # connected
        for i in range(count):
            if not push.poll(1000, zmq.POLLOUT):
                blocked.set()
            push.send(b"%d" % i + b" " * size)
            sent += 1

    sending = threading.Thread(target=send)
    memory = psutil.Process()
    with ingesting(tmp_path, endpoint, **options) as ingest:
        before = memory.memory_info().rss
        sending.start()
        assert blocked.wait(30), "the sender was never held back"
        assert sent < count / 2
        assert on_disk(tmp_path) <= limit + (512 << 10)
        assert memory.memory_info().rss - before < 100 << 20
        assert ingest.counters.pauses.total() >= 1  # a moment of a slow disk counts too
        paused = sum(ingest.counters.paused_seconds.values())
        assert paused > 0
        # Spark catches up: it reads everything, and commits a batch when it has planned the next.
        done = 0
        while done < count:
            done = ingest.seal()
            assert on_disk(tmp_path) <= limit + (1 << 20)
            need(ingest.storage, done)
        sending.join(30)
        assert ingest.counters.received == count == done


def on_disk(location: Path) -> int:
    # Not by glob, which also lists a chunk that is just being written and has another name soon.
    return sum(chunk.size for chunk in LogStorage(str(location)).chunks())


def test_a_port_in_use_leaves_the_log_free(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    failed = FeedReceiver(stream_options(bind=endpoint, walLocation=tmp_path, socketType="PULL"))
    with pytest.raises(EndpointError, match="binding"):
        failed.start()
    with ingesting(tmp_path, endpoint):
        pass


def test_a_disk_that_fails_ends_receiving_with_its_reason(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    options = {"connect": endpoint, "walLocation": tmp_path, "socketType": "PULL"}
    ingest = FeedReceiver(stream_options(**options), fill=partial(filling_of, retry_seconds=0.1))
    ingest.start()
    send_numbers(push, 5)
    wait_for(lambda: ingest.seal() == 5, "5 durable messages")

    at_each_write(monkeypatch, fail)
    send_numbers(push, 5)
    with pytest.raises(LogWriteError, match=r"No space left on device.*tried again for 0\.1 s"):
        wait_for(lambda: ingest.seal() == 10, "the failure")
    with pytest.raises(LogWriteError, match="No space left on device"):
        ingest.stop()
    assert any("could not be sealed and are lost" in r.message for r in caplog.records)
    monkeypatch.undo()
    assert numbers(tmp_path) == list(range(5))


def test_receive_for_ends_at_the_timeout_or_after_silence(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with ingesting(tmp_path, endpoint) as ingest:
        assert ingest.receive_for(0.05, None) == 0
        send_numbers(push, 10)
        assert ingest.receive_for(30, 0.3) == 10


def test_receiving_never_waits_for_sealing(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=100_000)
    go_on = threading.Event()

    with ingesting(tmp_path, endpoint, walFlushInterval="10ms") as ingest:
        at_each_write(monkeypatch, lambda: go_on.wait(60))
        send_numbers(push, 1)
        wait_for(lambda: ingest.log.unsealed, "a chunk in the hands of the disk")
        try:
            for count in range(2, 22):  # through many flush intervals
                until = time.monotonic() + 0.02
                send_numbers(push, 1)
                wait_for(lambda: ingest.received_end == count, f"message {count} taken")  # noqa: B023
                wait_for(lambda: time.monotonic() > until, "the next interval")  # noqa: B023
            send_numbers(push, 50_000)
            wait_for(lambda: ingest.received_end == 50_021, "all messages taken meanwhile")
            assert ingest.log.durable_end == 0
        finally:
            go_on.set()
        wait_for(lambda: ingest.log.durable_end == 50_021, "the disk caught up")
    sealed = list(LogStorage(str(tmp_path)).chunks())
    assert len(sealed) <= 6, "what had come meanwhile is sealed together"
    assert len(numbers(tmp_path)) == 50_021


# What a stop loses.


def brief(options: StreamReadOptions) -> FeedReceiver:
    """A receiver that drains its socket for a shorter time."""
    ingest = FeedReceiver(options)
    ingest.open()
    ingest.filler.drain_seconds = 0.5
    return ingest


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_each_stop_reports_a_push_that_still_sends(
    pause: float,
    context: Context,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Even if the socket is empty at the moment of the stop."""
    stop_sooner(monkeypatch, 5.0)  # later, in fact: on a loaded machine the sender may pause for long
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    with Offering(push, pause):
        for run in range(1, 4):
            ingest = brief(stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint))
            ingest.start()
            before = ingest.log.durable_end
            wait_for(lambda i=ingest, b=before: i.seal() > b, "a message")
            ingest.stop()
            assert caplog.text.count("their number is unknown: messages still came") == run


# The next query at the same port.


def test_a_query_that_binds_waits_for_the_stopped_one_that_still_drains(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's cell that is run again, with another log, while the PUSH goes on."""
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch, 1.0)  # the PUSH may be slow, too
    endpoint, ended = free_endpoint(), threading.Event()

    def send() -> None:
        push = context.socket(zmq.PUSH)
        push.setsockopt(zmq.LINGER, 0)
        push.connect(endpoint)
        while not ended.wait(0.005):
            push.send(b"x", zmq.NOBLOCK)

    def query(name: str) -> ZmqStreamReader:
        options = {"socketType": "PULL", "bind": endpoint, "walLocation": str(tmp_path / name)}
        return ZmqStreamReader(parse(StreamReadOptions, options))

    def await_rows(reader: ZmqStreamReader) -> None:
        begin = reader.initialOffset()
        wait_for(lambda: reader.latestOffset(begin, ReadMaxRows(1)) != begin, "messages")

    sending = threading.Thread(target=send)
    sending.start()
    one, two = query("one"), query("two")
    try:
        await_rows(one)
        stopping = threading.Thread(target=one.stop)
        stopping.start()
        await_rows(two)
        stopping.join(30)
    finally:
        ended.set()
        sending.join(30)
        two.stop()
