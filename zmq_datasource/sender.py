"""Arrow to socket: one sending socket for one task, every row accounted for.

The rules (measured in docs/zeromq-facts.md):

* Nothing is sent before a peer is there: a finished handshake (PUSH) or a subscription (PUB).
* ``send(NOBLOCK)`` may refuse although the queue has room, because libzmq looks at its own
  mailbox only now and then. A message counts as dropped only after the socket's events were
  refreshed and a second try was refused too.
* A sent message is one that the socket *accepted*. ``finish`` waits until it has left this
  process, or says that it cannot tell.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat
from types import TracebackType
from typing import Self

import zmq

from zmq_datasource.counters import SinkCounters
from zmq_datasource.dead_letters import Row, StagedLetters
from zmq_datasource.errors import FlushTimeoutError, NoPeerError, SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sockets import OpenSocket

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0


class Sender:
    """A PUSH or PUB socket; use it in a ``with`` block, in one thread.

    Leaving the block without ``finish`` (an error on the way) gives up what is still queued:
    the task failed, and Spark will run it again.

    Args:
        letters: Where rows go that cannot be sent; None drops them (``noblock``) or fails.
        publisher: Who numbers the messages, with ``framing=sequenced``. A row that is dropped keeps
            its number, so that a receiver sees that it is missing.

    Attributes:
        counters: The account so far; final after ``finish``.
    """

    def __init__(
        self, options: WriteOptions, letters: StagedLetters | None = None, publisher: str = ""
    ) -> None:
        self._options = options
        self._letters = letters
        self._goes_on = options.noblock or letters is not None
        self._stuck = False
        self._publisher = publisher.encode()
        self._sequenced = options.framing == "sequenced"
        self.counters = SinkCounters()
        self._refusing = _Refusing("set aside" if letters is not None else "dropped")
        self._subscriptions = 0
        self._has_peer = True

    def __enter__(self) -> Self:
        """Open the socket and wait for the peers.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            NoPeerError: Nobody came within ``connectTimeout`` (with ``noblock`` or dead letters, the
                rows are dropped or set aside instead).
        """
        self._open = OpenSocket(self._options, self._prepare)
        self._socket, self._watch = self._open.socket, self._open.watch
        try:
            self._wait_for_peers()
        except BaseException:
            self._open.close(linger=0)
            raise
        # zmq.Socket.send is a Python wrapper for drafts' arguments; its base is the C function.
        self._send: Callable[..., object] = super(zmq.Socket, self._socket).send
        return self

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.SNDTIMEO, round(self._options.send_timeout * 1000))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._open.closed:
            self._open.close(linger=0)

    # Peers.

    def _wait_for_peers(self) -> None:
        poller = zmq.Poller()
        poller.register(self._watch.monitor, zmq.POLLIN)
        if self._options.socket_type == "PUB":
            poller.register(self._socket, zmq.POLLIN)
        deadline = time.monotonic() + self._options.connect_timeout
        while True:
            self._watch.update()
            self._watch.redial()
            self._count_subscriptions()
            missing = self._missing()
            if not missing:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                break
            poller.poll(round(min(left, 0.5) * 1000))
        if not self._goes_on:
            raise NoPeerError(
                f"waiting {self._options.connect_timeout} for a peer of this {self._options.socket_type}: {missing}. "
                "Start the consumer, correct the endpoint, or raise connectTimeout"
            )
        _log.warning("no peer within %s: %s", self._options.connect_timeout, missing)
        self._go_on_without()

    def _missing(self) -> str:
        """Who is still to come, in words; empty when everybody is there."""
        options, watch = self._options, self._watch
        if options.socket_type == "PUB":
            here = min(self._subscriptions, watch.peers)
            if here >= options.min_subscribers:
                return ""
            return f"{here} of minSubscribers={options.min_subscribers} have subscribed{self._refusals()}"
        absent = [str(e) for e in options.connect if not watch.up.get(str(e))]
        if absent:
            return f"no answer from {', '.join(absent)}{self._refusals()}"
        if not watch.peers:
            return f"nobody has connected to {', '.join(map(str, options.bind))}{self._refusals()}"
        return ""

    def _refusals(self) -> str:
        return "".join(f" ({endpoint}: {why})" for endpoint, why in self._watch.refused.items())

    def _count_subscriptions(self) -> None:
        if self._options.socket_type != "PUB":
            return
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self._socket.recv()
            if message[:1] == b"\x01":
                self._subscriptions += 1
            elif message[:1] == b"\x00":
                self._subscriptions -= 1

    def _go_on_without(self) -> None:
        """Leave out the endpoints that did not answer, or send nothing at all."""
        self._has_peer = self._watch.peers > 0
        if self._options.socket_type == "PUB":
            self._has_peer = self._has_peer and self._subscriptions > 0
            return
        for endpoint in map(str, self._options.connect):
            if not self._watch.up.get(endpoint):
                # Its queue would swallow sndhwm messages for a peer that may never come.
                self._socket.disconnect(endpoint)

    # Messages.

    def send_values(self, values: Sequence[bytes], topics: Sequence[bytes | None] | None = None) -> None:
        """Send one message a value; with topics, each that is not None goes in front of its value.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout`` (without ``noblock``).
        """
        self._watch.update()  # now and then, so that its queue stays short

        def row(at: int) -> Row:
            return Row(topics[at] if topics is not None else None, values[at], None)

        if self._sequenced:
            self._send_each(self._numbered(values, topics), row)
        elif topics is None and self._has_peer and not self._goes_on and not self._options.max_retries:
            self._send_plain(values)
        elif topics is None:
            self._send_each([[value] for value in values], row)
        else:
            self._send_each([[v] if t is None else [t, v] for t, v in zip(topics, values, strict=True)], row)

    def _numbered(self, values: Sequence[bytes], topics: Sequence[bytes | None] | None) -> list[list[bytes]]:
        first = self.counters.rows
        return [
            [topic or b"", self._publisher, number.to_bytes(8, "big"), value]
            for number, (topic, value) in enumerate(zip(topics or repeat(None), values), first)  # noqa: B905 - repeat() has no end
        ]

    def _announce_end(self) -> None:
        """Say how many messages there were: a receiver cannot miss the last ones otherwise."""
        linger, patience = self._options.linger, self._options.send_timeout * 1000
        self._socket.setsockopt(zmq.SNDTIMEO, round(patience if linger < 0 else min(patience, linger)))
        try:
            self._send_message([b"", self._publisher, self.counters.rows.to_bytes(8, "big")], 0)
        except zmq.Again:
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )

    def send_frames(self, messages: Sequence[list[bytes]]) -> None:
        """Send messages of one or more frames each.

        Raises:
            SendTimeoutError: As in ``send_values``.
        """
        self._watch.update()
        self._send_each(messages, lambda at: Row(None, None, messages[at]))

    def _send_plain(self, values: Sequence[bytes]) -> None:
        """The fast path: one frame, waiting only where the queue is full."""
        send, counters, noblock, again = self._send, self.counters, int(zmq.NOBLOCK), zmq.Again
        counters.rows += len(values)
        sent = 0
        try:
            for sent, value in enumerate(values):  # noqa: B007 - after an error it says how many
                try:
                    send(value, noblock)
                except again:
                    self._wait_and_send([value])
        except again as e:
            raise self._timed_out(counters.sent + sent) from e
        counters.sent += len(values)
        counters.bytes += sum(map(len, values))

    def _send_each(self, messages: Sequence[list[bytes]], row: Callable[[int], Row]) -> None:
        counters = self.counters
        counters.rows += len(messages)
        self._refusing.look()
        for at, message in enumerate(messages):
            if self._has_peer and self._deliver(message):
                counters.sent += 1
                counters.bytes += sum(map(len, message))
            else:
                self._give_up(row(at))

    def _deliver(self, message: list[bytes]) -> bool:
        """Send a message, if need be again and again; False if that was in vain."""
        if self._try(message):
            self._stuck = False
            return True
        if self._stuck:  # the one before it has waited for both
            return False
        interval = float(self._options.retry_interval)
        for _ in range(self._options.max_retries):
            time.sleep(interval)
            self.counters.blocked_seconds += interval
            interval = min(interval * 2, _LONGEST_INTERVAL)
            self.counters.retries += 1
            if self._try(message):
                return True
        self._stuck = True
        return False

    def _try(self, message: list[bytes]) -> bool:
        if self._offer(message):
            return True
        if self._options.noblock or self._stuck:
            return False
        try:
            self._wait_and_send(message)
        except zmq.Again:
            return False
        return True

    def _wait_and_send(self, message: list[bytes]) -> None:
        """Wait for room, and count for how long; raises ``zmq.Again`` after ``sendTimeout``."""
        began = time.monotonic()
        try:
            self._send_message(message, 0)
        finally:
            self.counters.blocked_seconds += time.monotonic() - began

    def _give_up(self, row: Row) -> None:
        if not self._goes_on:
            raise self._timed_out(self.counters.sent)
        self._watch.update()
        reason = (
            "no_peer"
            if not (self._has_peer and self._watch.peers)
            else "hwm"
            if self._options.noblock
            else "timeout"
        )
        self._refusing.note(reason)
        if self._letters is None:
            self.counters.dropped[reason] += 1
        else:
            self._letters.add(row, reason)
            self.counters.dead_lettered[reason] += 1

    def _offer(self, message: list[bytes]) -> bool:
        try:
            self._send_message(message, zmq.NOBLOCK)
        except zmq.Again:
            self._socket.getsockopt(zmq.EVENTS)
            try:
                self._send_message(message, zmq.NOBLOCK)
            except zmq.Again:
                return False
        return True

    def _send_message(self, message: list[bytes], flags: int) -> None:
        if len(message) == 1:
            self._send(message[0], flags)
            return
        # A queue has room for a message or has not: once the first frame is in, none of the
        # others is refused.
        self._send(message[0], flags | zmq.SNDMORE)
        for frame in message[1:-1]:
            self._send(frame, zmq.SNDMORE)
        self._send(message[-1], 0)

    def _timed_out(self, sent: int) -> SendTimeoutError:
        self._watch.update()
        return SendTimeoutError(
            f"sending row {sent} of this task: every queue has been full for {self._options.send_timeout} "
            f"({self._watch.peers} peers up, sndhwm={self._options.sndhwm}). The consumer is too slow or has stopped; "
            "raise sendTimeout or maxRetries, set deadLetterLocation to keep such rows, or noblock=true to drop and "
            "count them"
        )

    # The end.

    def finish(self) -> SinkCounters:
        """Close and wait up to ``linger`` for the queues to empty.

        Raises:
            FlushTimeoutError: They did not; with ``noblock`` this is counted instead.
        """
        self._watch.update()
        if self._sequenced and self._has_peer and self.counters.rows:
            self._announce_end()
        if self._watch.lost and self._options.bind:
            _log.warning("%d peers left during the task; what was queued for them is lost", self._watch.lost)
        self._refusing.end()
        self.counters.peers = self._watch.peers
        self.counters.sndhwm = int(self._socket.getsockopt(zmq.SNDHWM))
        linger = self._options.linger
        if not self._open.close(linger) and self.counters.sent:
            if not self._options.noblock:
                raise FlushTimeoutError(
                    f"flushing after {self.counters.sent} messages: linger={linger} ran out with messages still "
                    "queued; how many, libzmq cannot tell. Raise linger, or set noblock=true to accept the loss"
                )
            self.counters.unflushed_tasks += 1
            _log.warning("linger=%s ran out with messages still queued; how many is not knowable", linger)
        return self.counters


class _Refusing:
    """Says in a long task that its rows are not being sent, and when that is over; short ones are told by their batch.

    A consumer that is a little too slow is full and has room again thousands of times a second: that
    is one state, not thousands.
    """

    _SECONDS = 5.0

    def __init__(self, done: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._done = done
        self._clock = clock
        self._reasons: Counter[str] = Counter()
        self._began = self._last = 0.0
        self._said = False

    def note(self, reason: str) -> None:
        """A row is not sent."""
        self._last = self._clock()
        if not self._reasons:
            self._began = self._last
        self._reasons[reason] += 1
        if not self._said and self._last - self._began >= self._SECONDS:
            self._said = True
            _log.warning("rows are being %s: %s in %.0f s", self._done, self._told(), self._SECONDS)

    def look(self) -> None:
        """To be called now and then."""
        if self._reasons and self._clock() - self._last >= self._SECONDS:
            self.end()

    def end(self) -> None:
        """Tell what it came to."""
        if self._said:
            _log.warning(
                "rows are no longer %s: %s in %.0f s", self._done, self._told(), self._last - self._began
            )
        self._said = False
        self._reasons.clear()

    def _told(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self._reasons.items()))
