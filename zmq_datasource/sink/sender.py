"""Arrow to socket: one sending socket for one task, every row accounted for.

The rules (measured in docs/zeromq-facts.md):

* Nothing is sent before a peer is there: a finished handshake (PUSH) or a subscription (PUB).
* ``send(NOBLOCK)`` may refuse although the queue has room, because libzmq looks at its own
  mailbox only now and then. A message counts as dropped only after the socket's events were
  refreshed and a second try was refused too.
* A sent message is one that the socket *accepted*. ``finish`` waits until it has left this
  process, or says that it cannot tell.
* What a PUSH has accepted may be lost with a connection. Which rows were in it nobody knows, so all that
  are ``in_flight`` are sent again; with ``noblock`` they no longer count as sent.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import repeat
from socket import socket
from types import TracebackType
from typing import Self

import zmq

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import ConnectionLostError, FlushTimeoutError, NoPeerError, SendTimeoutError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import Row, StagedLetters
from zmq_datasource.sink.in_flight import Column, InFlight, Part
from zmq_datasource.transport.kernel import ended_in_order
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.pyzmq_internals import send_of
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

_LONGEST_INTERVAL = 10.0

# The reason of rows that were in flight when a connection was lost.
_LOST = "connection_lost"
# How long libzmq may take from the end of a connection until it no longer queues anything for it.
_LETTING_GO_SECONDS = 0.05
# Before rows are sent again once more.
_LONGEST_PAUSE = 2.0
# How long a peer must bear what was sent again, before that counts as done.
_QUIET_SECONDS = 0.1
# How long a task with noblock may wait to see whether its queues are empty.
_GLANCE_SECONDS = 0.01
# How long to wait at the end for a peer that has gone, or for its queue to turn out empty.
_GONE_MS = 500


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
        self._in_flight = InFlight()
        self._held = ExitStack()
        self._connections: list[tuple[socket, bool]] = []

    def __enter__(self) -> Self:
        """Open the socket and wait for the peers.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            NoPeerError: Nobody came within ``connectTimeout`` (with ``noblock`` or dead letters, the
                rows are dropped or set aside instead).
        """
        self._connect()
        return self

    def _connect(self) -> None:
        self._subscriptions, self._cut = 0, 0
        self._has_peer = True
        self._absent: set[str] = set()
        self._open = OpenSocket(SocketSpec.of_sink(self._options), self._prepare)
        self._socket, self._watch = self._open.socket, self._open.watch
        try:
            self._wait_for_peers()
        except BaseException:
            self._open.close(linger=0)
            raise
        self._send = send_of(self._socket)

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.SNDTIMEO, round(self._options.send_timeout * 1000))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held.close()
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
                self._absent.add(endpoint)

    # Messages.

    def send_values(self, values: Column, topics: Column = None) -> None:
        """Send one message a value; with topics, each that is not None goes in front of its value.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout`` (without ``noblock``).
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
        """
        self._take(Part(values, topics, None, self.counters.rows))

    def send_frames(self, messages: Column) -> None:
        """Send messages of one or more frames each.

        Raises:
            SendTimeoutError, ConnectionLostError: As in ``send_values``.
        """
        self._take(Part(None, None, messages, self.counters.rows))

    def _take(self, part: Part) -> None:
        self._recover()
        self._let_go()
        if self._options.noblock:  # which does not keep a peer waiting that is to see its connection's end
            self._hold()
        self._refusing.look()
        self._send_part(part)
        if self._options.socket_type == "PUB":  # it is for those who are there, and no more
            return
        if not self._keeps:
            part.forget()
        self._in_flight.add(part)
        if not self._options.noblock:
            self._hold()  # at once: a consumer that has the last row may leave
        if self._in_flight.due:
            self._look_whether_all_has_left()

    def _send_part(self, part: Part, again: bool = False) -> None:
        listed = part.listed()
        if not again:
            self.counters.rows += len(listed)
        plain = part.frames is None and part.topics is None and not self._sequenced
        if plain and self._has_peer and not self._goes_on and not self._options.max_retries:
            self._send_plain(listed.values, part, again)
            return
        for at, message in enumerate(self._messages(listed)):
            if at in part.given_up:
                continue
            size = sum(map(len, message))
            if self._has_peer and self._deliver(message):
                if again:
                    self.counters.resent += 1
                else:
                    self._count(part, 1, size)
                continue
            if again:
                self._count(part, -1, -size)
            self._give_up(part, at, _row(listed, at))

    def _count(self, part: Part, messages: int, size: int) -> None:
        """These count as sent, or no longer."""
        part.sent += messages
        part.sent_bytes += size
        self.counters.sent += messages
        self.counters.bytes += size

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

    def _announce_end(self) -> None:
        """Say how many messages there were: a receiver cannot miss the last ones otherwise."""
        if not (self._sequenced and self._has_peer and self.counters.rows):
            return
        linger, patience = self._options.linger, self._options.send_timeout * 1000
        self._socket.setsockopt(zmq.SNDTIMEO, round(patience if linger < 0 else min(patience, linger)))
        try:
            self._send_message([b"", self._publisher, self.counters.rows.to_bytes(8, "big")], 0)
        except zmq.Again:
            _log.warning(
                "the queues stayed full: a receiver cannot see whether the last messages are missing"
            )

    def _send_plain(self, values: Sequence[bytes], part: Part, again: bool) -> None:
        """The fast path: one frame, waiting only where the queue is full."""
        send, noblock, full = self._send, int(zmq.NOBLOCK), zmq.Again
        sent = 0
        try:
            for sent, value in enumerate(values):  # noqa: B007 - after an error it says how many
                try:
                    send(value, noblock)
                except full:
                    self._wait_and_send([value])
        except full as e:
            raise self._timed_out(part.first + sent) from e
        if again:
            self.counters.resent += len(values)
        else:
            self._count(part, len(values), sum(map(len, values)))

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

    def _give_up(self, part: Part, at: int, row: Row) -> None:
        if not self._goes_on:
            raise self._timed_out(part.first + at)
        part.given_up.add(at)
        self._watch.update()
        reason = (
            "no_peer"
            if not (self._has_peer and self._watch.peers)
            else "hwm"
            if self._options.noblock
            else "timeout"
        )
        self._refusing.note(reason)
        self._set_aside(row, reason)

    def _set_aside(self, row: Row, reason: str) -> None:
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

    # Lost connections.

    @property
    def _keeps(self) -> bool:
        """Whether rows can be had again: to be sent, or to be set aside."""
        return not self._options.noblock or self._letters is not None

    def _hold(self) -> None:
        """Keep handles on the connections, which tell later how they ended.

        While they are held, the peer of a connection that libzmq has closed does not learn of it.
        """
        for sock, ipc in self._watch.hold():
            self._connections.append((self._held.enter_context(sock), ipc))

    def _let_go(self) -> None:
        self._held.close()
        self._connections.clear()

    def _look_whether_all_has_left(self) -> None:
        # With noblock only numbers are kept, which is not worth a wait.
        most = math.inf if self._keeps else _GLANCE_SECONDS
        empty = self._open.settle(self._options.send_timeout, most)
        self._in_flight.looked(empty and not self._is_cut() and self._all_up)

    @property
    def _all_up(self) -> bool:
        """Whether no endpoint that was there has gone, whose queue waits for it."""
        return all(self._watch.up.get(str(e)) or str(e) in self._absent for e in self._options.connect)

    def _is_cut(self) -> bool:
        """Whether a connection was lost since this was last dealt with."""
        self._watch.update()
        return self._watch.cut != self._cut

    def _recover(self, attempts: _Attempts | None = None) -> None:
        """Deal with the connections that were lost since the last look: send again, or count."""
        attempts = attempts or _Attempts(self._options)
        while self._is_cut():
            ends, self._cut = self._watch.cut - self._cut, self._watch.cut
            if self._options.socket_type == "PUB" or not self._in_flight.parts:
                return
            # libzmq tells of the end before it lets go of the connection's queue, which must get nothing more.
            time.sleep(_LETTING_GO_SECONDS)
            self._socket.getsockopt(zmq.EVENTS)
            if self._options.noblock:
                if not ended_in_order(self._connections, ends):
                    self._write_off()
                return
            self._let_go()
            attempts.next()
            self._send_again()
            self._look_whether_it_stays()

    def _look_whether_it_stays(self) -> None:
        """A peer that cannot bear one of the rows hangs up again at once."""
        self._open.settle(self._options.send_timeout, quiet=_QUIET_SECONDS)

    def _send_again(self) -> None:
        parts = list(self._in_flight.parts)
        _log.warning(
            "a connection to %s was lost: %d rows that may have been in it are sent again",
            self._options.endpoints,
            sum(part.sent for part in parts),
        )
        for part in parts:
            self._send_part(part, again=True)

    def _write_off(self) -> None:
        """With ``noblock`` nothing is sent twice: what may be lost does not count as sent."""
        lost = 0
        for part in self._in_flight.parts:
            lost += part.sent
            self.counters.sent -= part.sent
            self.counters.bytes -= part.sent_bytes
            if self._letters is None:
                self.counters.dropped[_LOST] += part.sent
                continue
            listed = part.listed()
            for at in range(len(listed)):
                if at not in part.given_up:
                    self._set_aside(_row(listed, at), _LOST)
        self._in_flight.clear()
        _log.warning(
            "a connection to %s was lost: %d rows may have been in it, and do not count as sent",
            self._options.endpoints,
            lost,
        )

    # The end.

    def finish(self) -> SinkCounters:
        """Close and wait up to ``linger`` for the queues to empty.

        Raises:
            FlushTimeoutError: They did not; with ``noblock`` this is counted instead.
            NoPeerError: A connection was lost, and nobody is there to send its rows to again.
            ConnectionLostError, SendTimeoutError: As in ``send_values``.
        """
        attempts = _Attempts(self._options)
        linger = math.inf if self._options.linger < 0 else self._options.linger / 1000
        self._make_good(attempts)
        self._announce_end()
        self._refusing.end()
        while True:
            deadline = time.monotonic() + linger
            self._let_go()
            self._hold()
            if linger:
                self._open.settle(linger, linger)
            if self._make_good(attempts):
                self._announce_end()
                continue
            self._let_go()
            if self._close(deadline):
                return self.counters
            attempts.next()
            self._connect_again()
            self._send_again()
            self._announce_end()

    def _make_good(self, attempts: _Attempts) -> bool:
        """Recover at the end of the task, when a consumer that has the last row may leave.

        Nobody can tell such a one from a peer that hung up because of a row it cannot bear, nor from a
        middlebox, unless by whether it comes back.

        Returns:
            Whether rows were sent again.
        """
        if self._is_cut() and not self._comes_back():
            ends = self._watch.cut - self._cut
            if ended_in_order(self._connections, ends):
                self._cut += ends
        before = self.counters.resent
        self._recover(attempts)
        return self.counters.resent > before

    def _comes_back(self) -> bool:
        deadline = time.monotonic() + _GONE_MS / 1000
        while not (self._watch.peers and self._all_up):
            left = deadline - time.monotonic()
            if self._options.noblock or left <= 0:
                return False
            self._watch.monitor.poll(math.ceil(left * 1000))
            self._watch.update()
        return not self._options.noblock

    def _connect_again(self) -> None:
        try:
            self._connect()
        except NoPeerError as e:
            raise NoPeerError(f"sending rows again whose connection was lost: {e}") from e

    def _close(self, deadline: float) -> bool:
        """Close; False if a connection was lost whose rows are to be sent again."""
        options, counters = self._options, self.counters
        counters.peers = self._watch.peers
        counters.sndhwm = int(self._socket.getsockopt(zmq.SNDHWM))
        may_repeat = not options.noblock and options.socket_type != "PUB" and bool(self._in_flight.parts)
        left = -1 if deadline == math.inf else max(1, round((deadline - time.monotonic()) * 1000))
        gone = may_repeat and not self._all_up
        if gone:
            # libzmq does not connect any more once it lingers: what is queued for who has gone stays there.
            left = _GONE_MS if left < 0 else min(left, _GONE_MS)
        if options.socket_type == "PUSH" and not self._in_flight.parts:  # nothing that still counts
            left = 0
        flushed = self._open.close(left) or not left
        if self._open.lost and self._in_flight.parts:
            if may_repeat:
                return False
            self._write_off()
        if not flushed and gone:
            return False
        if not flushed and counters.sent:
            if not options.noblock:
                raise FlushTimeoutError(
                    f"flushing after {counters.sent} messages: linger={options.linger} ran out with messages still "
                    "queued; how many, libzmq cannot tell. Raise linger, or set noblock=true to accept the loss"
                )
            counters.unflushed_tasks += 1
            _log.warning(
                "linger=%s ran out with messages still queued; how many is not knowable", options.linger
            )
        if options.socket_type == "PUB" and self._watch.lost:
            _log.warning("%d peers left during the task; what was queued for them is lost", self._watch.lost)
        return True


def _row(part: Part, at: int) -> Row:
    if part.frames is not None:
        return Row(None, None, part.frames[at])
    return Row(part.topics[at] if part.topics is not None else None, part.values[at], None)


class _Attempts:
    """How often, and for how long, what a lost connection may have had is sent again before that is in vain."""

    _TIMES = 3

    def __init__(self, options: WriteOptions) -> None:
        self._seconds, self._endpoints = options.send_timeout, options.endpoints
        self._deadline = time.monotonic() + self._seconds
        self._times = 0

    def next(self) -> None:
        """Wait a moment before another attempt.

        Raises:
            ConnectionLostError: There have been enough.
        """
        if self._times >= self._TIMES and time.monotonic() >= self._deadline:
            raise ConnectionLostError(
                f"sending to {self._endpoints}: {self._times + 1} connections were lost, one after the other for "
                f"{self._seconds}, before their rows had left. See why the peer or the network ends them (a row over "
                "the peer's zmq.maxmsgsize, for example), or raise sendTimeout"
            )
        if self._times:
            time.sleep(min(0.05 * 2**self._times, _LONGEST_PAUSE))
        self._times += 1


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
