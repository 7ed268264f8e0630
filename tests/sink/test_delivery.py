"""Rows for which there is no room wait, are retried or given up, and are counted once; the other rows are sent."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
from pyarrow import parquet

from tests.support import Socket, binary, bound, wait_for, write_options
from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import SendTimeoutError
from zmq_datasource.options.types import Location
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.in_flight import RowBatch
from zmq_datasource.sink.sender import SHORT_WAIT, Delivery, Sender
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.transport.core import Outbox

Context = zmq.Context[Socket]
ENDPOINT = "tcp://127.0.0.1:1"


class Script:
    """A socket that refuses each row as often as its dictionary says, and records what it takes."""

    has_peer = True

    def __init__(self, refused: dict[int, int]) -> None:
        self.refused = refused
        self.taken: list[int] = []
        self.waited: list[tuple[int, float]] = []

    def send(self, messages: Outbox, start: int, end: int, wait: float = 0.0) -> int:
        if wait > SHORT_WAIT:
            self.waited.append((start, wait))
        for row in range(start, end):
            if self.refused.get(row):
                self.refused[row] -= 1
                return row
            self.taken.append(row)
        return end

    def peers_now(self) -> int:
        return 1


def deliver(
    script: Script,
    batch: RowBatch,
    again: bool = False,
    letters: StagedDeadLetters | None = None,
    **options: Any,
) -> SinkCounters:
    parsed, counters = write_options(connect=ENDPOINT, **options), SinkCounters()
    if again:
        counters.rows, counters.sent, counters.bytes = len(batch), batch.sent, batch.sent_bytes
    delivery = Delivery(parsed, letters, counters, b"p")
    delivery.send(cast("SendingSocket", script), batch, again)
    return counters


def rows_of(count: int, **sent: Any) -> RowBatch:
    """Rows of as many bytes as their position says."""
    return RowBatch(binary([b"x" * at for at in range(count)]), None, None, 100, **sent)


def test_a_row_without_room_waits_and_the_rows_after_it_follow() -> None:
    batch = rows_of(10)
    script = Script({4: 1, 7: 1})
    counters = deliver(script, batch)
    assert script.taken == list(range(10))
    assert script.waited == [(4, 60.0), (7, 60.0)]
    assert (counters.sent, counters.bytes) == (batch.sent, batch.sent_bytes) == (10, sum(range(10)))


def test_with_noblock_the_row_without_room_is_dropped_alone() -> None:
    batch = rows_of(10)
    script = Script({0: 9, 4: 9, 5: 9, 9: 9})
    counters = deliver(script, batch, noblock=True)
    assert script.taken == [1, 2, 3, 6, 7, 8]
    assert not script.waited
    assert batch.given_up == {0, 4, 5, 9}
    assert (counters.rows, counters.sent, dict(counters.dropped)) == (10, 6, {"hwm": 4})
    assert counters.bytes == batch.sent_bytes == sum(script.taken)


def test_the_error_names_the_row_of_the_task() -> None:
    batch = rows_of(10)
    with pytest.raises(SendTimeoutError, match="sending row 106 of this task"):
        deliver(Script({6: 99}), batch)
    assert batch.sent == 6


@pytest.mark.parametrize(("linger", "seconds"), [("300ms", 0.3), ("30s", 20.0), (-1, 20.0)])
def test_the_announced_end_waits_for_linger_at_most_and_rows_after_it_for_send_timeout(
    linger: str | int, seconds: float
) -> None:
    script, counters = Script({1: 1}), SinkCounters(rows=5)
    options = write_options(connect=ENDPOINT, framing="sequenced", linger=linger, sendTimeout="20s")
    delivery = Delivery(options, None, counters, b"p")
    delivery.announce_end(cast("SendingSocket", script))
    delivery.send(cast("SendingSocket", script), rows_of(2), again=True)
    assert script.waited == [(0, seconds), (1, 20.0)]


def test_retries_are_made_for_the_first_of_several_refused_rows() -> None:
    """Once another row is sent, the next refused one is retried."""
    batch = rows_of(10)
    counters = deliver(Script({2: 99, 3: 99, 5: 99}), batch, noblock=True, maxRetries=3, retryInterval="1ms")
    assert batch.given_up == {2, 3, 5}
    assert counters.retries == 6
    assert counters.blocked_seconds == pytest.approx(2 * 0.007)
    assert counters.balanced


def test_a_retry_that_helps_counts_its_row_as_sent() -> None:
    batch = rows_of(10)
    script = Script({2: 3})
    counters = deliver(script, batch, noblock=True, maxRetries=3, retryInterval="1ms")
    assert script.taken == list(range(10))
    assert (counters.sent, counters.retries, counters.dropped.total()) == (10, 2, 0)


def test_rows_that_were_given_up_are_not_sent_again() -> None:
    given_up = {0, 3, 4, 9}
    batch = rows_of(10, sent=6, sent_bytes=sum([1, 2, 5, 6, 7, 8]), given_up=set(given_up))
    script = Script({})
    counters = deliver(script, batch, again=True)
    assert script.taken == [1, 2, 5, 6, 7, 8]
    assert (counters.resent, counters.sent, batch.sent, batch.given_up) == (6, 6, 6, given_up)


def test_a_row_that_cannot_be_sent_again_no_longer_counts_as_sent(tmp_path: Path) -> None:
    batch = rows_of(10, sent=9, sent_bytes=sum([0, 1, 2, 4, 5, 6, 7, 8, 9]), given_up={3})
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters:
        script = Script({5: 99})
        counters = deliver(script, batch, again=True, letters=letters)
    assert script.taken == [0, 1, 2, 4, 6, 7, 8, 9]
    assert batch.given_up == {3, 5}
    assert (counters.resent, counters.sent, batch.sent) == (8, 8, 8)
    assert counters.bytes == batch.sent_bytes == sum(script.taken)
    assert counters.dead_lettered == {"timeout": 1}


@pytest.mark.parametrize("framing", ["plain", "sequenced"])
def test_each_row_is_delivered_or_a_dead_letter(context: Context, tmp_path: Path, framing: str) -> None:
    """The consumer stops and continues, so that some rows of each call find room and others do not."""
    rows, ended = 20_000, threading.Event()
    pull, endpoint = bound(context, zmq.PULL, rcvhwm=50, rcvbuf=4096)
    options = write_options(
        connect=endpoint,
        sendTimeout="0s",
        sndhwm=50,
        zmq_sndbuf=4096,
        linger="20s",
        framing=framing,
        deadLetterLocation=tmp_path,
    )
    got: list[list[bytes]] = []

    def read() -> None:
        while pull.poll(50) or not ended.is_set():
            for _ in range(200):
                if pull.poll(0):
                    got.append(pull.recv_multipart())
            ended.wait(0.001)

    reading = threading.Thread(target=read)
    reading.start()
    values = [b"%05d" % at + b"x" * 100 for at in range(rows)]
    topics = [b"t" if at % 2 else None for at in range(rows)]
    with (
        StagedDeadLetters(Location(tmp_path), "q", 0, 0) as letters,
        Sender(options, letters, publisher="p") as sender,
    ):
        for at in range(0, rows, 2000):
            sender.send(binary(values[at : at + 2000]), binary(topics[at : at + 2000]))
        counters = sender.finish()
    wait_for(lambda: len([m for m in got if m[-1].endswith(b"x")]) >= counters.sent, "all that was sent")
    ended.set()
    reading.join(30)
    assert counters.balanced
    assert counters.dead_lettered["timeout"] == rows - counters.sent > 0
    arrived = [message for message in got if message[-1].endswith(b"x")]
    kept = parquet.read_table(tmp_path / "_staging" / "q-0" / letters.names[0]).to_pylist()
    assert [message[-1] for message in arrived] == sorted(message[-1] for message in arrived)
    assert sorted([message[-1] for message in arrived] + [row["value"] for row in kept]) == values
    assert counters.bytes == sum(len(frame) for message in arrived for frame in message)
    for row in kept:
        assert row["topic"] == topics[int(row["value"][:5])]
    for message in arrived:
        at = int(message[-1][:5])
        if framing == "sequenced":
            assert message[:3] == [topics[at] or b"", b"p", at.to_bytes(8, "big")]
        else:
            assert message[:-1] == [t for t in [topics[at]] if t is not None]
