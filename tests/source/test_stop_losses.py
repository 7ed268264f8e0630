"""What a stop has lost is recorded beside the log: the next run logs it, and the metrics show it. No JVM."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, bound, fill_disk, offer, stop_sooner, stream_options, tiny_disk, wait_for
from zmq_datasource.errors import LogFormatError, LogWriteError
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.monitoring.source import SourceMonitor
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.feed import Feed
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.receiver import LogReceiver
from zmq_datasource.source.receiving import ReceivingThread, StopRecord, read_record

Context = zmq.Context[Socket]


def brief(options: StreamReadOptions) -> Ingest:
    """A receiver that drains its socket for a shorter time."""
    ingest = Ingest(options)
    assert isinstance(ingest.filler, LogReceiver)
    ingest.filler.drain_seconds = 0.5
    return ingest


@contextmanager
def sending(push: Socket, seconds: float) -> Iterator[list[int]]:
    """A PUSH that sends a message every ``seconds``; the list has the sent numbers."""
    sent: list[int] = []
    end = threading.Event()

    def send() -> None:
        while not end.wait(seconds):
            if offer(push, b"%d" % len(sent)):
                sent.append(len(sent))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        end.set()
        thread.join(30)


def end_of(log: Path) -> int:
    return read_index(LogStorage(str(log))).end


@pytest.mark.spark  # no Spark, but a process that drains for five seconds
def test_receive_reports_losses_when_it_is_stopped_while_a_push_sends(
    context: Context, tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=1)
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL"]
    command += ["--connect", endpoint, "--wal-location", str(tmp_path)]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with sending(push, 0.01) as sent:
            wait_for(lambda: len(sent) > 100, "messages")
            program.send_signal(signal.SIGTERM)
            _, said = program.communicate(timeout=60)
    finally:
        program.kill()
        program.wait(30)
    assert "messages still came 5 s after the stop" in said
    record = read_record(LogStorage(str(tmp_path)))
    assert (record.stops, record.told, record.messages) == (1, False, 0)
    assert record.last is not None
    assert record.last["messages"] is None


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.05])
def test_each_stop_reports_a_push_that_still_sends(
    pause: float, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the socket is empty at the moment of the stop."""
    stop_sooner(monkeypatch, 5.0)  # later, in fact: on a loaded machine the sender may pause for long
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    with sending(push, pause):
        for run in range(1, 4):
            ingest = brief(stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint))
            ingest.start()
            before = ingest.log.durable_end
            wait_for(lambda i=ingest, b=before: i.seal() > b, "a message")
            ingest.stop()
            assert read_record(LogStorage(str(tmp_path))).stops == run


def test_the_next_run_logs_the_loss_once_and_counts_it(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    options = stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint)
    with sending(push, 0.01):
        first = brief(options)
        first.start()
        wait_for(lambda: first.seal() > 0, "a message")
        first.stop()
    for warnings in (1, 0):
        caplog.clear()
        ingest = Ingest(options)
        ingest.start()
        try:
            assert caplog.text.count("lost an unknown number of messages: messages still came") == warnings
            told = SourceMonitor(ingest, options).metrics()
            assert (told["messagesLostAtStop"], told["stopsWithLosses"]) == (0, 1)
            following = Feed(stream_options(walLocation=tmp_path))
            following.open()
            told = SourceMonitor(following, options).metrics()
            assert (told["messagesLostAtStop"], told["stopsWithLosses"]) == (0, 1)
        finally:
            ingest.stop()


def test_a_stop_that_loses_nothing_records_nothing(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    ingest = Ingest(stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint))
    ingest.start()
    for number in range(100):
        push.send(b"%d" % number)
    wait_for(lambda: ingest.received_end == 100, "all of it")
    ingest.stop()
    assert end_of(tmp_path) == 100
    assert read_record(LogStorage(str(tmp_path))) == StopRecord()


def test_a_full_disk_has_room_for_the_record_of_a_stop(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the recorded number is exact."""
    monkeypatch.setattr(ReceivingThread, "refused_seconds", 0.2)
    monkeypatch.setattr(LogWriter, "close_seconds", 0.2)
    push, endpoint = bound(context, zmq.PUSH)
    with tiny_disk(tmp_path / "tiny", "4m") as disk:
        log = disk / "log"
        options = stream_options(walLocation=log, socketType="PULL", connect=endpoint, walFlushInterval="1h")
        ingest = Ingest(options)
        ingest.start()
        for number in range(10):
            push.send(b"%d" % number)
        wait_for(lambda: ingest.seal() == 10, "ten messages")
        blocker = fill_disk(disk)
        for number in range(5):
            push.send(b"%d" % number)
        wait_for(lambda: ingest.received_end == 15, "five more")
        with pytest.raises(LogWriteError, match="No space left"):
            ingest.stop()
        assert "No space left" in str(read_record(LogStorage(str(log))).last)
        blocker.unlink()
        again = Ingest(options)
        again.start()
        try:
            assert (again.log.durable_end, again.counters.lost_at_stop, again.counters.lossy_stops) == (
                10,
                5,
                1,
            )
        finally:
            again.stop()


def test_a_record_that_is_not_valid_is_refused_with_its_name(context: Context, tmp_path: Path) -> None:
    _, endpoint = bound(context, zmq.PUSH)
    options = stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint)
    ingest = Ingest(options)
    ingest.start()
    ingest.stop()
    (tmp_path / "0" / "stops.json").write_text('{"messages": "many"}')
    with pytest.raises(LogFormatError, match=r"0/stops\.json: it is not the record of losses at stops"):
        Ingest(options).start()
    assert not LogStorage(str(tmp_path)).is_written()


def test_a_query_that_follows_sees_a_loss_without_another_message(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    options = stream_options(walLocation=tmp_path, socketType="PULL", connect=endpoint)
    ingest = brief(options)
    ingest.start()
    with sending(push, 0.01):
        wait_for(lambda: ingest.seal() > 0, "a message")
        following = Feed(stream_options(walLocation=tmp_path))
        following.open()
        assert following.facts().receiver is not None
        ingest.stop()

    def stops() -> int:
        receiver = following.facts().receiver
        return 0 if receiver is None else receiver.lossy_stops

    wait_for(lambda: stops() == 1, "that it is seen")
