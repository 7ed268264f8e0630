"""Rows through a socket: made into messages, sent, tried again, counted. The sink's hot loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import repeat

import zmq

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.in_flight import Part
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.sink.unsent import Unsent

__all__ = ["Delivery"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0


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
        self._plain = not (self._sequenced or unsent.goes_on or options.max_retries)
        self._stuck = False

    def send(self, sock: SendingSocket, part: Part, again: bool = False) -> None:
        """Send rows; those that count as sent are noted in ``part``, and those that were given up.

        Args:
            again: Whether they have been sent before, through a connection that was lost.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout``, and the task does not go on without the row.
        """
        listed = part.listed()
        if not again:
            self._counters.rows += len(listed)
        if self._plain and part.frames is None and part.topics is None and sock.has_peer:
            self._send_plain(sock, listed.values, part, again)
            return
        for at, message in enumerate(self._messages(listed)):
            if at in part.given_up:
                continue
            size = sum(map(len, message))
            if sock.has_peer and self._deliver(sock, message):
                if again:
                    self._counters.resent += 1
                else:
                    self._count(part, 1, size)
                continue
            if again:
                self._count(part, -1, -size)
            if not self._unsent.goes_on:
                raise self._timed_out(sock, part.first + at)
            part.given_up.add(at)
            self._unsent.give_up(listed, at, anybody=sock.peers_now() > 0 and sock.has_peer)

    def announce_end(self, sock: SendingSocket) -> None:
        """Say how many messages there were: a receiver cannot miss the last ones otherwise."""
        if not (self._sequenced and sock.has_peer and self._counters.rows):
            return
        linger, patience = self._options.linger, self._options.send_timeout * 1000
        sock.limit_waiting(round(patience if linger < 0 else min(patience, linger)))
        try:
            sock.put([b"", self._publisher, self._counters.rows.to_bytes(8, "big")])
        except zmq.Again:
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )

    def _messages(self, part: Part) -> Sequence[list[bytes]]:
        values, topics = part.values, part.topics
        if part.frames is not None:
            return part.frames  # type: ignore[no-any-return]
        if self._sequenced:
            return [
                [topic or b"", self._publisher, number.to_bytes(8, "big"), value]
                for number, (topic, value) in enumerate(zip(topics or repeat(None), values), part.first)  # noqa: B905 - repeat() has no end
            ]
        if topics is None:
            return [[value] for value in values]
        return [[v] if t is None else [t, v] for t, v in zip(topics, values, strict=True)]

    def _send_plain(self, sock: SendingSocket, values: Sequence[bytes], part: Part, again: bool) -> None:
        """The fast path: one frame, waiting only where the queue is full."""
        send, noblock, full = sock.send, int(zmq.NOBLOCK), zmq.Again
        sent = 0
        try:
            for sent, value in enumerate(values):  # noqa: B007 - after an error it says how many
                try:
                    send(value, noblock)
                except full:
                    self._wait_and_send(sock, [value])
        except full as e:
            raise self._timed_out(sock, part.first + sent) from e
        if again:
            self._counters.resent += len(values)
        else:
            self._count(part, len(values), sum(map(len, values)))

    def _deliver(self, sock: SendingSocket, message: list[bytes]) -> bool:
        """Send a message, if need be again and again; False if that was in vain."""
        if sock.offer(message) or self._wait(sock, message):
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
            if sock.offer(message) or self._wait(sock, message):
                return True
        self._stuck = True
        return False

    def _wait(self, sock: SendingSocket, message: list[bytes]) -> bool:
        if self._options.noblock or self._stuck:
            return False
        try:
            self._wait_and_send(sock, message)
        except zmq.Again:
            return False
        return True

    def _wait_and_send(self, sock: SendingSocket, message: list[bytes]) -> None:
        """Wait for room, and count for how long; raises ``zmq.Again`` after ``sendTimeout``."""
        began = time.monotonic()
        try:
            sock.put(message)
        finally:
            self._counters.blocked_seconds += time.monotonic() - began

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
