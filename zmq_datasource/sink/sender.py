"""One task's way to its consumers: rows are sent, sent again after a lost connection, and accounted for.

The rules:

* As many rows as the queues have room for are sent in one call. Only the row for which there is no room is handled
  alone: it waits, is retried, or is given up. Then the rows after it continue (``Delivery``).
* A row counts as sent when the socket has accepted it. ``finish`` then waits until it has left this machine.
* What a PUSH has sent may be lost with a connection, and nothing shows which rows were in that connection. So all rows
  that are ``in_flight`` are sent again. While a queue does not become empty, they cannot be forgotten, and at a bound
  the task waits: there is no room for more rows.
* At the end of a task the consumers may leave. Then nothing is sent again, if they had read everything.
* With ``noblock`` nothing is kept or sent again.
* A row whose value is null is no message. It is dropped or becomes a dead letter, and the rows after it continue.
* A PUB sends each row once, to the subscribers that are connected.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import ConnectionLostError, SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.in_flight import KEEP, InFlight, RowBatch
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.transport.columns import Column, FrameColumn, FramesColumn, NumberColumn, SameColumn
from zmq_datasource.transport.core import Outbox

_log = logging.getLogger(__name__)

# The rows of one call into the core, in which Python handles no signal.
_ROWS_PER_CALL = 10_000
# Seconds. While rows are sent, a queue is full again and again, for some 100 µs.
SHORT_WAIT = 0.1
# Seconds; the longest pause between two tries to send a row.
_LONGEST_INTERVAL = 10.0


class Delivery:
    """Sends a task's rows through a socket, and sends them again after a connection was lost.

    Args:
        options: Framing, retries and timeouts.
        dead_letters: Takes the rows that cannot be sent. If it is None, they are dropped (``noblock``), or the first
            one fails the task; rows whose value is null are always dropped.
        counters: The task's account.
        publisher: The name in the messages of ``framing=sequenced``.

    Attributes:
        has_room: Whether the task may keep more rows. If not, no new row is sent.
    """

    def __init__(
        self,
        options: WriteOptions,
        dead_letters: StagedDeadLetters | None,
        counters: SinkCounters,
        publisher: bytes,
    ) -> None:
        self._options = options
        self._dead_letters = dead_letters
        self._counters = counters
        self._publisher = publisher
        self._is_sequenced = options.framing == "sequenced"
        # Whether the last row was retried in vain. If so, the next row is tried once, without waiting.
        self._is_stuck = False
        self.has_room = True

    def send(self, sock: SendingSocket, batch: RowBatch, again: bool = False) -> None:
        """Send rows, and note in ``batch`` how many were sent, and which ones were given up.

        Args:
            again: Whether the rows were sent before, through a connection that was lost.

        Raises:
            SendTimeoutError: The queues were full for ``sendTimeout``, and the task fails at the first unsent row.
        """
        messages = Outbox(self._columns(batch), len(batch))
        if not again:
            self._counters.rows += len(batch)
            if batch.values is not None and batch.values.null_count:
                for at in pc.indices_nonzero(batch.values.is_null()).to_pylist():
                    self._leave_out(batch, at, "null")
        start = 0
        try:
            for end in (*sorted(batch.given_up), len(batch)):  # leave out rows that were given up before
                while start < end:
                    start = self._send_some(
                        sock, batch, messages, start, min(end, start + _ROWS_PER_CALL), again
                    )
                start = end + 1
        finally:
            self._counters.blocked_seconds += messages.waited_seconds

    def _send_some(
        self, sock: SendingSocket, batch: RowBatch, messages: Outbox, start: int, end: int, again: bool
    ) -> int:
        """Send rows up to one for which there is no room, and handle that one. Returns the position of the next row."""
        at = start
        may_send = sock.has_peer and (again or self.has_room)
        if may_send:
            at = sock.send(messages, start, end, min(SHORT_WAIT, self._wait_seconds))
            self._is_stuck = self._is_stuck and at == start
        is_given_up = at < end and not (may_send and self._retry(sock, messages, at))
        if at < end and not is_given_up:
            at += 1
        self._count(batch, messages.size(start, at), at - start, again)
        if is_given_up:
            self._give_up(sock, batch, messages, at, again)
        return at + is_given_up

    @property
    def _wait_seconds(self) -> float:
        """How long to wait for room for a row."""
        return 0.0 if self._options.noblock or self._is_stuck else self._options.send_timeout

    def _retry(self, sock: SendingSocket, messages: Outbox, at: int) -> bool:
        """Wait for room for a row, and then try up to ``maxRetries`` times more, after pauses that double.

        Returns:
            Whether it was sent.
        """
        interval = float(self._options.retry_interval)
        for retry in range(1 if self._is_stuck else 1 + self._options.max_retries):
            if retry:
                time.sleep(interval)
                self._counters.blocked_seconds += interval
                self._counters.retries += 1
                interval = min(interval * 2, _LONGEST_INTERVAL)
            if sock.send(messages, at, at + 1, self._wait_seconds) > at:
                self._is_stuck = False
                return True
        self._is_stuck = True
        return False

    def _count(self, batch: RowBatch, size: int, rows: int, again: bool) -> None:
        if again:
            self._counters.resent += rows
            return
        batch.sent += rows
        batch.sent_bytes += size
        self._counters.sent += rows
        self._counters.bytes += size

    def _give_up(self, sock: SendingSocket, batch: RowBatch, messages: Outbox, at: int, again: bool) -> None:
        if again:  # it had counted as sent
            self._count(batch, -messages.size(at, at + 1), -1, again=False)
        if not (self._options.noblock or self._dead_letters):
            raise SendTimeoutError(
                f"sending row {batch.first + at} of this task: there was no room for {self._options.send_timeout} "
                f"({sock.peers_now()} peers up, sndhwm={self._options.sndhwm}). A consumer is too slow or has stopped. "
                "Raise sendTimeout or maxRetries, set deadLetterLocation to keep such rows, or set noblock=true to "
                "drop and count them"
            )
        has_peers = sock.has_peer and sock.peers_now() > 0
        reason = "no_peer" if not has_peers else "hwm" if self._options.noblock else "timeout"
        self._leave_out(batch, at, reason)

    def _leave_out(self, batch: RowBatch, at: int, reason: str) -> None:
        """Drop a row, or keep it as a dead letter. The rows after it keep their numbers in the task."""
        batch.given_up.add(at)
        if self._dead_letters is None:
            self._counters.dropped[reason] += 1
        else:
            columns = (batch.topics, batch.values, batch.frames)
            self._dead_letters.add(reason, *(None if each is None else each[at].as_py() for each in columns))
            self._counters.dead_lettered[reason] += 1

    def _columns(self, batch: RowBatch) -> list[Column]:
        """The frames of each message, in their order."""
        if batch.frames is not None:
            return [FramesColumn(batch.frames)]
        value = FrameColumn(batch.values, empty=True)  # rows without a value are given up, and not sent
        if self._is_sequenced:
            topic = SameColumn(b"") if batch.topics is None else FrameColumn(batch.topics, empty=True)
            return [topic, SameColumn(self._publisher), NumberColumn(batch.first), value]
        return [value] if batch.topics is None else [FrameColumn(batch.topics), value]

    def announce_end(self, sock: SendingSocket) -> bool:
        """Send the number of rows (``framing=sequenced``). Without it a receiver could not see that the last ones are
        missing. Returns whether this was sent."""
        if not (self._is_sequenced and sock.has_peer and self._counters.rows):
            return False
        end = Outbox([SameColumn(b""), SameColumn(self._publisher), NumberColumn(self._counters.rows)], 1)
        linger, timeout = self._options.linger, float(self._options.send_timeout)
        if not sock.send(end, 0, 1, wait=timeout if linger < 0 else min(timeout, linger / 1000)):
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )
            return False
        return True


# libzmq reports the end of a connection before it drops the connection's queue, which must get no more rows.
_QUEUE_DROP_SECONDS = 0.05
# A peer that cannot take a row hangs up at once. So rows that were sent again count as sent if no connection is lost
# for this long.
_QUIET_SECONDS = 0.1
# How often rows are sent again at least, one lost connection after the other, and the longest pause before.
_LEAST_ATTEMPTS, _LONGEST_PAUSE = 3, 2.0
# The least time for which a task that may keep no more rows waits for a peer that takes nothing.
_STALL_SECONDS = 1.0


class Sender:
    """A PUSH or PUB socket for the rows of one task; use it in a ``with`` block, in one thread.

    If the block ends without ``finish``, because of an error, queued messages are dropped: the task has failed, and
    Spark runs it again.

    Args:
        dead_letters, publisher: See ``Delivery``. A row that is dropped keeps its sequence, so that
            a receiver sees the gap.
        keep: How many bytes of sent rows are kept at least, to be sent again after a lost connection. At twice as many
            the task waits until all queues are empty.

    Attributes:
        counters: The account so far; complete after ``finish``.
        socket: The socket, in the ``with`` block.
        in_flight: The rows that would be sent again if a connection were lost now.
    """

    def __init__(
        self,
        options: WriteOptions,
        dead_letters: StagedDeadLetters | None = None,
        publisher: str = "",
        keep: int = KEEP,
    ) -> None:
        self._options = options
        self._keeps = options.socket_type == "PUSH" and not options.noblock
        self.counters = SinkCounters()
        self._continues = options.noblock or dead_letters is not None
        self._delivery = Delivery(options, dead_letters, self.counters, publisher.encode())
        self.in_flight = InFlight(keep)

    def __enter__(self) -> Self:
        """Open the socket and wait for the peers.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
            NoPeerError: The peers have not come within ``connectTimeout``. With ``noblock`` or dead letters the task
                continues instead, and its rows are dropped or become dead letters.
        """
        self.socket = SendingSocket(self._options, self._continues)
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close(linger=0)

    def send(
        self, value: pa.Array | None = None, topic: pa.Array | None = None, frames: pa.Array | None = None
    ) -> None:
        """Send a message for each row: its value, after its topic if that is not null; or its frames.

        Args:
            value, topic: Binary, with offsets of 32 or 64 bits. A row whose value is null is dropped, or becomes a dead
                letter.
            frames: Lists of binary, in place of value and topic. No list is empty or null, and no frame is null.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout`` (without ``noblock`` and dead letters).
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
        """
        batch = RowBatch(value, topic, frames, self.counters.rows)
        if self._keeps:
            self._recover()
            self._delivery.has_room = self._make_room()
            self.socket.hold_connections()
        self._delivery.send(self.socket, batch)
        if self._keeps:
            self.in_flight.add(batch)

    def _make_room(self) -> bool:
        """If the task keeps many rows, wait until all queues are empty, and forget the old rows.

        Returns:
            Whether more rows may be kept. If not, a peer has taken nothing for ``sendTimeout``.

        Raises:
            ConnectionLostError, SendTimeoutError: As in ``send``.
        """
        patience = max(float(self._options.send_timeout), _STALL_SECONDS) if self._delivery.has_room else 0.0
        while self.in_flight.is_full:
            flushed = self.socket.wait_until_flushed(patience)
            if not flushed:
                time.sleep(_QUEUE_DROP_SECONDS)  # if a connection has ended, libzmq reports it now
            if self._recover():
                continue
            if flushed:
                self.in_flight.forget_old()
            return flushed
        return True

    # Lost connections.

    def _recover(self, at_end: bool = False) -> bool:
        """Send all rows that are kept again, if connections were lost since the last call. Returns whether they were.

        Args:
            at_end: See ``SendingSocket.take_losses``.

        Raises:
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
            SendTimeoutError: As in ``send``.
        """
        seconds, made = self._options.send_timeout, 0
        deadline = time.monotonic() + seconds
        while self._keeps and self.socket.take_losses(at_end):
            if made >= _LEAST_ATTEMPTS and time.monotonic() >= deadline:
                raise self._lost_again(made + 1, seconds)
            time.sleep(min(_QUEUE_DROP_SECONDS * 2**made, _LONGEST_PAUSE))
            self.socket.take_losses()
            made += 1
            if self.in_flight.batches:
                self._send_again()
                self.socket.wait_until_flushed(seconds, quiet=_QUIET_SECONDS)
        return made > 0

    def _lost_again(self, times: int, seconds: float) -> ConnectionLostError:
        return ConnectionLostError(
            f"sending to {self._options.endpoints}: {times} connections were lost, one after the other for "
            f"{seconds}, before their rows had left. Find out why the peer or the network ends them (a row "
            "larger than the peer's zmq.maxmsgsize, for example), or raise sendTimeout"
        )

    def _send_again(self) -> None:
        batches = list(self.in_flight.batches)
        _log.warning(
            "a connection to %s was lost: sending %d rows again that may have been in it",
            self._options.endpoints,
            sum(batch.sent for batch in batches),
        )
        for batch in batches:
            self._delivery.send(self.socket, batch, again=True)

    # The end.

    def finish(self) -> SinkCounters:
        """Wait up to ``linger`` until the queues are empty, and close. Call it once, after the last row.

        Raises:
            SendTimeoutError: The queues are not empty after ``linger``. With ``noblock`` this is only counted.
            ConnectionLostError, SendTimeoutError: As in ``send``.
        """
        linger = math.inf if self._options.linger < 0 else self._options.linger / 1000
        made, most = 0, max(linger, float(self._options.send_timeout))
        began = time.monotonic()
        while True:
            made += self._recover(at_end=True)
            # A consumer may take nothing, and be ended and started again, for ever.
            if made >= _LEAST_ATTEMPTS and time.monotonic() - began >= most:
                raise self._lost_again(made, most)
            # A task that has queued nothing would wait for connections that have nothing of it.
            queued = self._delivery.announce_end(self.socket) or self.counters.sent > 0
            deadline = time.monotonic() + linger
            flushed = not queued or self.socket.wait_until_flushed(linger, linger)
            if self._recover(at_end=True):
                made += 1
                continue
            if flushed or time.monotonic() >= deadline:  # else a connection has ended
                self._close(deadline, queued)
                return self.counters

    def _close(self, deadline: float, queued: bool) -> None:
        counters, sock = self.counters, self.socket
        counters.peers, counters.sndhwm = sock.watch.peers, sock.sndhwm
        linger = -1 if deadline == math.inf else max(1, round((deadline - time.monotonic()) * 1000))
        if not queued:
            linger = 0
        if not sock.close(linger) and queued:
            self._flush_timed_out()
        if not self._keeps and sock.watch.lost:
            _log.warning(
                "%d connections were lost during the task, with what was queued for them", sock.watch.lost
            )

    def _flush_timed_out(self) -> None:
        options, counters = self._options, self.counters
        if not options.noblock:
            raise SendTimeoutError(
                f"flushing after {counters.sent} messages: linger={options.linger} ran out with messages still queued; "
                "libzmq cannot tell how many. Raise linger, or set noblock=true to accept the loss"
            )
        counters.unflushed_tasks += 1
        _log.warning(
            "linger=%s ran out with messages still queued; libzmq cannot tell how many", options.linger
        )
