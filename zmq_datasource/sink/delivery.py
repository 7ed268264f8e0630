"""Rows through a socket: made into messages, sent, tried again, counted.

As many rows as find room are sent in one call. Only the one that finds none is dealt with by itself: it waits, is tried
again or given up; after it the others go on.
"""

from __future__ import annotations

import logging
import time

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.in_flight import Part
from zmq_datasource.sink.sending_socket import SendingSocket
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
# Rows in one call, during which Python sees no signal.
_AT_ONCE = 10_000


class Delivery:
    """Sends a task's rows through a socket, which may be another one after a connection was lost.

    Args:
        options: Framing, retries and timeouts.
        unsent: Where rows go that find no room.
        counters: The task's account.
        publisher: Who numbers the messages, with ``framing=sequenced``.
    """

    def __init__(
        self, options: WriteOptions, unsent: Unsent, counters: SinkCounters, publisher: bytes
    ) -> None:
        self._options = options
        self._unsent = unsent
        self._counters = counters
        self._publisher = publisher
        self._sequenced = options.framing == "sequenced"
        self._stuck = False

    def send(self, sock: SendingSocket, part: Part, again: bool = False) -> None:
        """Send rows; those that count as sent are noted in ``part``, and those that were given up.

        Args:
            again: Whether they have been sent before, through a connection that was lost.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout``, and the task does not go on without the row.
        """
        rows = Outbox(self._columns(part), len(part))
        if not again:
            self._counters.rows += len(part)
        start = 0
        for end in (*sorted(part.given_up), len(part)):
            self._send_rows(sock, part, rows, start, end, again)
            start = end + 1

    def _send_rows(
        self, sock: SendingSocket, part: Part, rows: Outbox, start: int, end: int, again: bool
    ) -> None:
        """Send those from ``start`` up to ``end``, of which none was given up before."""
        while start < end:
            most = min(end, start + _AT_ONCE)
            at = sock.give(rows, start, most) if sock.has_peer else start
            if at > start:
                self._stuck = False
                self._note_sent(part, rows, start, at, again)
            if at < most:
                if sock.has_peer and self._insist(sock, rows, at):
                    self._note_sent(part, rows, at, at + 1, again)
                else:
                    self._give_up(sock, part, rows, at, again)
                at += 1
            start = at

    def _columns(self, part: Part) -> list[Column]:
        if part.frames is not None:
            return [FramesColumn(part.frames)]
        value = FrameColumn(part.values)
        if self._sequenced:
            topic = SameColumn(b"") if part.topics is None else FrameColumn(part.topics, empty=True)
            return [topic, SameColumn(self._publisher), NumberColumn(part.first), value]
        return [value] if part.topics is None else [FrameColumn(part.topics), value]

    def announce_end(self, sock: SendingSocket) -> None:
        """Say how many messages there were: a receiver cannot miss the last ones otherwise."""
        if not (self._sequenced and sock.has_peer and self._counters.rows):
            return
        linger, patience = self._options.linger, self._options.send_timeout * 1000
        end = Outbox([SameColumn(b""), SameColumn(self._publisher), NumberColumn(self._counters.rows)], 1)
        sock.limit_waiting(round(patience if linger < 0 else min(patience, linger)))
        try:
            sent = sock.give(end, 0, 1, wait=True)
        finally:
            sock.limit_waiting(round(patience))  # rows may have to be sent again
        if not sent:
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )

    def _insist(self, sock: SendingSocket, rows: Outbox, at: int) -> bool:
        """Send a row that has found no room, if need be again and again; False if that was in vain."""
        if self._wait(sock, rows, at):
            self._stuck = False
            return True
        if self._stuck:  # the one before it has waited for both
            return False
        interval = float(self._options.retry_interval)
        for _ in range(self._options.max_retries):
            time.sleep(interval)
            self._counters.blocked_seconds += interval
            interval = min(interval * 2, _LONGEST_INTERVAL)
            self._counters.retries += 1
            if sock.give(rows, at, at + 1) > at or self._wait(sock, rows, at):
                return True
        self._stuck = True
        return False

    def _wait(self, sock: SendingSocket, rows: Outbox, at: int) -> bool:
        """Wait for room for a row, and count for how long; whether there was some within ``sendTimeout``."""
        if self._options.noblock or self._stuck:
            return False
        began = time.monotonic()
        try:
            with sock.letting_go():
                return sock.give(rows, at, at + 1, wait=True) > at
        finally:
            self._counters.blocked_seconds += time.monotonic() - began

    def _give_up(self, sock: SendingSocket, part: Part, rows: Outbox, at: int, again: bool) -> None:
        if again:
            self._count(part, -1, -rows.size(at, at + 1))
        if not self._unsent.goes_on:
            raise self._timed_out(sock, part.first + at)
        part.given_up.add(at)
        self._unsent.give_up(part, at, anybody=sock.peers_now() > 0 and sock.has_peer)

    def _note_sent(self, part: Part, rows: Outbox, start: int, end: int, again: bool) -> None:
        if again:
            self._counters.resent += end - start
        else:
            self._count(part, end - start, rows.size(start, end))

    def _count(self, part: Part, messages: int, size: int) -> None:
        """Count rows as sent, or take them back."""
        part.sent += messages
        part.sent_bytes += size
        self._counters.sent += messages
        self._counters.bytes += size

    def _timed_out(self, sock: SendingSocket, sent: int) -> SendTimeoutError:
        return SendTimeoutError(
            f"sending row {sent} of this task: every queue has been full for {self._options.send_timeout} "
            f"({sock.peers_now()} peers up, sndhwm={self._options.sndhwm}). The consumer is too slow or has stopped; "
            "raise sendTimeout or maxRetries, set deadLetterLocation to keep such rows, or noblock=true to drop and "
            "count them"
        )
