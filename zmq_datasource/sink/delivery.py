"""Makes messages of rows and sends them; waits, retries and gives up where the queues are full.

As many rows as the queues have room for are sent in one call. Only the row for which there is no room is handled alone:
it waits, is retried, or is given up. Then the rows after it continue.
"""

from __future__ import annotations

import logging
import time

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.in_flight import RowBatch
from zmq_datasource.sink.sending_socket import SHORT_WAIT, SendingSocket
from zmq_datasource.sink.unsent import Unsent
from zmq_datasource.transport.core import (
    Column,
    FrameColumn,
    FramesColumn,
    NumberColumn,
    Outbox,
    SameColumn,
)

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0
# The rows of one call into the core, in which Python handles no signal.
_ROWS_PER_CALL = 10_000


class Delivery:
    """Sends a task's rows through a socket, and through another one after a connection was lost.

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
        try:
            self._send_all(sock, batch, messages, again)
        finally:
            self._counters.blocked_seconds += messages.waited_seconds

    def _send_all(self, sock: SendingSocket, batch: RowBatch, messages: Outbox, again: bool) -> None:
        start = 0
        for end in (*sorted(batch.given_up), len(batch)):  # leave out rows that were given up before
            while start < end:
                start = self._send_some(sock, batch, messages, start, min(end, start + _ROWS_PER_CALL), again)
            start = end + 1

    def _send_some(
        self, sock: SendingSocket, batch: RowBatch, messages: Outbox, start: int, end: int, again: bool
    ) -> int:
        """Send rows up to one for which there is no room, and handle that one. Returns the position of the next row."""
        at = sock.send(messages, start, end, self._short_wait) if sock.has_peer else start
        if at > start:
            self._is_stuck = False
        if at < end and sock.has_peer and self._retry(sock, messages, at):
            at = end = at + 1  # the next call sends the rows after it
        self._count_sent(batch, messages, start, at, again)
        if at == end:
            return end
        self._give_up(sock, batch, messages, at, again)
        return at + 1

    @property
    def _short_wait(self) -> float:
        is_waiting = not (self._options.noblock or self._is_stuck)
        return min(SHORT_WAIT, self._options.send_timeout) if is_waiting else 0.0

    def _columns(self, batch: RowBatch) -> list[Column]:
        """The frames of each message, in their order."""
        if batch.frames is not None:
            return [FramesColumn(batch.frames)]
        value = FrameColumn(batch.values)
        if self._is_sequenced:
            topic = SameColumn(b"") if batch.topics is None else FrameColumn(batch.topics, empty=True)
            return [topic, SameColumn(self._publisher), NumberColumn(batch.first), value]
        return [value] if batch.topics is None else [FrameColumn(batch.topics), value]

    def announce_end(self, sock: SendingSocket) -> None:
        """Send the number of rows (``framing=sequenced``). Without it a receiver could not see that the last ones are
        missing."""
        if not (self._is_sequenced and sock.has_peer and self._counters.rows):
            return
        end = Outbox([SameColumn(b""), SameColumn(self._publisher), NumberColumn(self._counters.rows)], 1)
        linger, timeout = self._options.linger, float(self._options.send_timeout)
        if not sock.send(end, 0, 1, wait=timeout if linger < 0 else min(timeout, linger / 1000)):
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )

    def _retry(self, sock: SendingSocket, messages: Outbox, at: int) -> bool:
        """Wait for room for a row, and then retry up to ``maxRetries`` times. Returns whether it was sent."""
        if self._wait(sock, messages, at):
            self._is_stuck = False
            return True
        if self._is_stuck:
            return False
        interval = float(self._options.retry_interval)
        for _ in range(self._options.max_retries):
            time.sleep(interval)
            self._counters.blocked_seconds += interval
            interval = min(interval * 2, _LONGEST_INTERVAL)
            self._counters.retries += 1
            if sock.send(messages, at, at + 1) > at or self._wait(sock, messages, at):
                return True
        self._is_stuck = True
        return False

    def _wait(self, sock: SendingSocket, messages: Outbox, at: int) -> bool:
        """Wait up to ``sendTimeout`` for room for a row. Returns whether it was sent."""
        if self._options.noblock or self._is_stuck:
            return False
        return sock.send(messages, at, at + 1, wait=self._options.send_timeout) > at

    def _give_up(self, sock: SendingSocket, batch: RowBatch, messages: Outbox, at: int, again: bool) -> None:
        if again:  # it had counted as sent
            size = messages.size(at, at + 1)
            batch.sent -= 1
            batch.sent_bytes -= size
            self._counters.sent -= 1
            self._counters.bytes -= size
        if not self._unsent.continues:
            raise self._timed_out(sock, batch.first + at)
        self._unsent.give_up(batch, at, has_peers=sock.has_peer and sock.peers_now() > 0)

    def _count_sent(self, batch: RowBatch, messages: Outbox, start: int, end: int, again: bool) -> None:
        if again:
            self._counters.resent += end - start
            return
        size = messages.size(start, end)
        batch.sent += end - start
        batch.sent_bytes += size
        self._counters.sent += end - start
        self._counters.bytes += size

    def _timed_out(self, sock: SendingSocket, row: int) -> SendTimeoutError:
        return SendTimeoutError(
            f"sending row {row} of this task: every queue has been full for {self._options.send_timeout} "
            f"({sock.peers_now()} peers up, sndhwm={self._options.sndhwm}). The consumer is too slow or has stopped. "
            "Raise sendTimeout or maxRetries, set deadLetterLocation to keep such rows, or set noblock=true to drop "
            "and count them"
        )
