"""One task's way to its consumers: rows are sent, sent again after a lost connection, and accounted for.

The rules:

* As many rows as the queues have room for are sent in one call. Only the row for which there is no room is handled
  alone: it waits, is retried, or is given up. Then the rows after it continue (``Delivery``).
* A row counts as sent when the socket has accepted it. ``finish`` then waits until it has left this machine.
* What a PUSH has sent may be lost with a connection, and nothing shows which rows were in that connection. So all rows
  that are ``in_flight`` are sent again, or no longer count as sent (``noblock``).
* At the end of a task, a consumer that has the last row may leave. If its connection has ended in order, after the
  peer's machine had received everything, nothing was in it. Earlier this is not looked at: the peer may be a middlebox
  with a memory of its own.
* A row whose value is null is no message. It is dropped or becomes a dead letter, and the rows after it continue.
* A PUB sends each row once, to the subscribers that are connected.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator
from typing import Self

import pyarrow as pa

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import ConnectionLostError, NoPeerError, SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.in_flight import KEEP, InFlight, RowBatch
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.sink.unsent import StagedDeadLetters, Unsent
from zmq_datasource.transport.columns import Column, FrameColumn, FramesColumn, NumberColumn, SameColumn
from zmq_datasource.transport.core import Outbox

_log = logging.getLogger(__name__)

# The rows of one call into the core, in which Python handles no signal.
_ROWS_PER_CALL = 10_000
# Seconds. While rows are sent, a queue is full again and again, for some 100 µs.
SHORT_WAIT = 0.1


class Delivery:
    """Sends a task's rows through a socket, and sends them again after a connection was lost.

    Args:
        options: Framing, retries and timeouts.
        unsent: Takes the rows for which there is no room.
        counters: The task's account.
        publisher: The name in the messages of ``framing=sequenced``.
    """

    def __init__(
        self, options: WriteOptions, unsent: Unsent, counters: SinkCounters, publisher: bytes
    ) -> None:
        self._options = options
        self._unsent = unsent
        self._counters = counters
        self._publisher = publisher
        self._is_sequenced = options.framing == "sequenced"
        # Whether the last row was retried in vain. If so, the next row is tried once, without waiting.
        self._is_stuck = False

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
            self._unsent.leave_out_nulls(batch)
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
        if sock.has_peer:
            at = sock.send(messages, start, end, min(SHORT_WAIT, self._wait_seconds))
            self._is_stuck = self._is_stuck and at == start
        is_given_up = at < end and not (sock.has_peer and self._retry(sock, messages, at))
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
        """Wait for room for a row, and then retry up to ``maxRetries`` times. Returns whether it was sent."""

        def send_now() -> bool:
            return sock.send(messages, at, at + 1, self._wait_seconds) > at

        self._is_stuck = not (send_now() or (not self._is_stuck and self._unsent.retry(send_now)))
        return not self._is_stuck

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
        if not self._unsent.continues:
            raise SendTimeoutError(
                f"sending row {batch.first + at} of this task: every queue has been full for "
                f"{self._options.send_timeout} ({sock.peers_now()} peers up, sndhwm={self._options.sndhwm}). The "
                "consumer is too slow or has stopped. Raise sendTimeout or maxRetries, set deadLetterLocation to keep "
                "such rows, or set noblock=true to drop and count them"
            )
        self._unsent.give_up(batch, at, has_peers=sock.has_peer and sock.peers_now() > 0)

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
# A task that keeps many rows looks whether all queues are empty. It waits while the peers take something, and no longer
# than this while they take nothing.
_STALL_SECONDS = 1.0
# How long a task waits at its end for a peer whose connection has ended.
_RETURN_SECONDS = 0.5
# How long closing waits for the queue of such a peer, which may be empty.
_GONE_MS = 500


class Sender:
    """A PUSH or PUB socket for the rows of one task; use it in a ``with`` block, in one thread.

    If the block ends without ``finish``, because of an error, queued messages are dropped: the task has failed, and
    Spark runs it again.

    Args:
        dead_letters: Takes the rows that cannot be sent. If it is None, they are dropped (``noblock``), or the first
            one fails the task; rows whose value is null are always dropped.
        publisher: The name in the messages of ``framing=sequenced``. A row that is dropped keeps its sequence, so that
            a receiver sees the gap.
        keep: How many bytes of sent rows are kept at least, to be sent again after a lost connection.

    Attributes:
        counters: The account so far; complete after ``finish``.
        socket: The socket, in the ``with`` block; ``finish`` may replace it.
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
        self._is_pub = options.socket_type == "PUB"
        self.counters = SinkCounters()
        self._unsent = Unsent(options, dead_letters, self.counters)
        self._delivery = Delivery(options, self._unsent, self.counters, publisher.encode())
        self.in_flight = InFlight(keep)

    def __enter__(self) -> Self:
        """Open the socket and wait for the peers.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
            NoPeerError: The peers have not come within ``connectTimeout``. With ``noblock`` or dead letters the task
                continues instead, and its rows are dropped or become dead letters.
        """
        self.socket = SendingSocket(self._options, self._unsent.continues)
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
        sock = self.socket
        self._recover()
        # Before the rows are sent: a consumer that has the last row may leave before this thread runs again.
        sock.hold_connections()
        self._delivery.send(sock, batch)
        if self._is_pub:
            return
        if self._options.noblock:
            batch.drop_columns()
        look = self.in_flight.add(batch)
        sock.hold_connections()  # those that were made meanwhile, too
        if look:
            empty = sock.wait_until_flushed(_STALL_SECONDS, 0.0 if self._options.noblock else math.inf)
            self.in_flight.looked(empty and not sock.losses() and sock.all_connected)

    # Lost connections.

    def _recover(self, attempts: Iterator[None] | None = None) -> None:
        """Send the rows again, or write them off, if connections were lost since the last call.

        Args:
            attempts: The attempts so far; given by ``finish``, when the task has no more rows and consumers may leave.

        Raises:
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
            SendTimeoutError: As in ``send``.
        """
        sock, at_end = self.socket, attempts is not None
        while sock.losses():
            time.sleep(_QUEUE_DROP_SECONDS)
            sock.process_commands()
            has_left = at_end and not sock.wait_until_connected(_RETURN_SECONDS)
            losses = sock.losses()
            is_harmless = has_left and sock.ended_in_order(losses)
            sock.mark_handled(losses)
            if is_harmless or not self.in_flight.batches:
                continue
            if self._options.noblock:
                self._write_off()
                continue
            attempts = attempts or self._attempts()
            next(attempts)
            self._send_again()
            sock.wait_until_flushed(self._options.send_timeout, quiet=_QUIET_SECONDS)

    def _attempts(self) -> Iterator[None]:
        """Bound how often rows are sent again, one lost connection after the other, with a pause between two attempts.

        Raises:
            ConnectionLostError: There have been enough attempts.
        """
        seconds = self._options.send_timeout
        deadline = time.monotonic() + seconds
        for made in itertools.count():
            if made >= _LEAST_ATTEMPTS and time.monotonic() >= deadline:
                raise ConnectionLostError(
                    f"sending to {self._options.endpoints}: {made + 1} connections were lost, one after the other for "
                    f"{seconds}, before their rows had left. Find out why the peer or the network ends them (a row "
                    "larger than the peer's zmq.maxmsgsize, for example), or raise sendTimeout"
                )
            if made:
                time.sleep(min(0.05 * 2**made, _LONGEST_PAUSE))
            yield

    def _send_again(self) -> None:
        batches = list(self.in_flight.batches)
        _log.warning(
            "a connection to %s was lost: sending %d rows again that may have been in it",
            self._options.endpoints,
            sum(batch.sent for batch in batches),
        )
        for batch in batches:
            self._delivery.send(self.socket, batch, again=True)

    def _write_off(self) -> None:
        lost = self._unsent.write_off(self.in_flight.batches)
        self.in_flight.clear()
        _log.warning(
            "a connection to %s was lost: %d rows that may have been in it do not count as sent",
            self._options.endpoints,
            lost,
        )

    # The end.

    def finish(self) -> SinkCounters:
        """Wait up to ``linger`` until the queues are empty, and close. Call it once, after the last row.

        Raises:
            SendTimeoutError: The queues are not empty after ``linger``. With ``noblock`` this is only counted.
            NoPeerError: A connection was lost, and there is no peer to which its rows could be sent again.
            ConnectionLostError, SendTimeoutError: As in ``send``.
        """
        attempts = self._attempts()
        linger = math.inf if self._options.linger < 0 else self._options.linger / 1000
        while True:
            self._recover(attempts)
            queued = self._delivery.announce_end(self.socket) or self._may_be_queued
            deadline = time.monotonic() + linger
            self.socket.hold_connections()
            # A task that has queued nothing would wait for connections that have nothing of it.
            flushed = not queued or self.socket.wait_until_flushed(linger, linger)
            if self.socket.losses() or (not flushed and time.monotonic() < deadline):
                continue  # a connection has ended
            if self._close(deadline):
                return self.counters
            next(attempts)
            self._open_again()
            self._send_again()

    @property
    def _may_be_queued(self) -> bool:
        """Whether a queue may still have a row that counts as sent."""
        return self.counters.sent > 0 and (self._is_pub or bool(self.in_flight.batches))

    def _open_again(self) -> None:
        try:
            self.socket = SendingSocket(self._options, self._unsent.continues)
        except NoPeerError as e:
            raise NoPeerError(f"sending rows again whose connection was lost: {e}") from e

    def _close(self, deadline: float) -> bool:
        """Close the socket. Returns False if rows are to be sent again through another one."""
        counters, sock = self.counters, self.socket
        counters.peers, counters.sndhwm = sock.watch.peers, sock.sndhwm
        linger = -1 if deadline == math.inf else max(1, round((deadline - time.monotonic()) * 1000))
        # libzmq does not connect again while it lingers, so the queue of a peer that has gone stays as it is.
        has_left = not (self._is_pub or self._options.noblock or sock.all_connected)
        if has_left:
            linger = _GONE_MS if linger < 0 else min(linger, _GONE_MS)
        if not self._may_be_queued:
            linger = 0
        if not sock.close(linger) and linger:
            if has_left:
                return False
            self._flush_timed_out()
        if self._is_pub and sock.watch.lost:
            _log.warning(
                "%d subscribers left during the task; what was queued for them is lost", sock.watch.lost
            )
        return True

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
