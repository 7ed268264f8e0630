"""Asks one publisher's ROUTER for messages again (vLLM's replay protocol), without ever waiting.

The rules:

* One request at a time. It asks for everything from the first missing message on, because the
  protocol has no end of range; what was not missing is left out when it comes.
* The publisher's ROUTER drops replies when its queue is full, in the middle too, and even the end.
  So the end of a replay proves nothing: what is still missing is asked for again, as long as
  each request brings something.
* What a whole replay did not bring the publisher no longer has. After silence a request is
  repeated, three times. Then the gap is settled: it is not asked for again, after a restart either.
* A request belongs to an epoch and to a connection. When the publisher starts anew, what was asked
  of the one before is void; and after silence the connection is made anew, so that late
  replies are not taken for new ones.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.framing.fields import UnfitError
from zmq_datasource.framing.replay import TOPIC_WANTED, Reply, read_reply, request
from zmq_datasource.limited_log import LimitedLog
from zmq_datasource.messages import MAX_MESSAGE_BYTES
from zmq_datasource.option_types import Endpoint, Endpoints, SourceSocket
from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import Gap, Judge, Key
from zmq_datasource.sockets import OpenSocket

__all__ = ["Replayer"]

_ATTEMPTS = 3
# Between two requests: a publisher that has nothing more is not to be asked as fast as it loses.
_PAUSE = 0.1
# The publisher sends as fast as it can: its own queue is what limits a replay.
_RCVHWM = 100_000
_REPLY_OVERHEAD = 200


class Replayer:
    """Heals the gaps of one publisher. Belongs to the receiving thread.

    Args:
        options: Security and limits of the socket are those of the feed.
        endpoint: Where the publisher's live messages come from.
        replay_endpoint: Its ROUTER.
        counters: Where to count.
        clock: Seconds, monotonic.

    Attributes:
        first: Whether the live flow waits for this replay: history comes before it.
    """

    def __init__(
        self,
        options: ReadOptions,
        endpoint: Endpoint,
        replay_endpoint: Endpoint,
        counters: SourceCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout = float(options.replay_timeout)
        self._options = msgspec.structs.replace(
            options,
            socket_type=SourceSocket("DEALER"),
            connect=Endpoints((replay_endpoint,)),
            rcvhwm=max(options.rcvhwm, _RCVHWM),
        )
        self._endpoint = endpoint
        self._key = str(endpoint).encode()
        self._counters = counters
        self._clock = clock
        self._open: OpenSocket | None = None
        # The running request: from which position, up to which, of which epoch, on which connection.
        self._asked: int | None = None
        self._asked_to = 0
        self._epoch = 0
        self._connection = 0
        self._deadline = 0.0
        self._ended = False
        self._missing_before = 0
        self._attempts = 0
        self._next_request: float | None = None  # when to look again for what is missing
        self._replies: list[Reply] = []
        self._lines = LimitedLog(__name__, "lines about replays")
        self.pending_bytes = 0
        self.first = False

    def open(self) -> None:
        """Connect.

        Raises:
            EndpointError: The endpoint cannot be connected.
        """
        self._open = OpenSocket(self._options, _name)

    def close(self) -> None:
        if self._open is not None:
            self._open.close(linger=0)
            self._open = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._opened.socket

    @property
    def _opened(self) -> OpenSocket:
        assert self._open is not None
        return self._open

    @property
    def pending(self) -> int:
        """Replies received but not handed over yet."""
        return len(self._replies)

    def keep_alive(self) -> None:
        """Let the connection do its work."""
        watch = self._opened.watch
        watch.update()
        watch.redial()
        watch.report_absent()
        self._lines.flush()

    def postpone(self) -> None:
        """Nobody reads replies at present: that is no silence of the publisher."""
        self._deadline = self._clock() + self._timeout

    def fetch_first(self, start: int) -> None:
        """Ask for history, for which the live flow waits: until it has come, or nothing comes."""
        self.first = True
        self._ask(start)

    def receive(self, most: int, most_bytes: int) -> int:
        """Take the replies that are there.

        Returns:
            How many there were.
        """
        sock = self.socket
        for taken in range(most):
            if self.pending_bytes >= most_bytes:
                return taken
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return taken
            try:
                if sum(map(len, frames)) > MAX_MESSAGE_BYTES:
                    raise UnfitError(f"more than {MAX_MESSAGE_BYTES} bytes, which no row can hold")
                reply = read_reply(frames)
            except UnfitError as e:
                self._counters.malformed_replies += 1
                self._lines.warn("a replay from %s makes no sense: %s", self._options.connect, e)
                continue
            if self._asked is None:
                continue  # nobody has asked for it (any more)
            self._deadline = self._clock() + self._timeout
            if reply.sequence is None:
                self._ended = True
                continue
            self._replies.append(reply)
            self.pending_bytes += len(reply.value) + len(reply.topic or b"") + _REPLY_OVERHEAD
        return most

    def take(self, judge: Judge) -> Sequence[Reply]:
        """Hand over what was received, unless the publisher has started anew since it was asked."""
        replies, self._replies, self.pending_bytes = self._replies, [], 0
        self._opened.watch.update()
        void = self._epoch != _epoch(judge, self._key) or self._reconnected
        if self._asked is not None and void:
            self._end_request()
            self._reopen()
            return []
        return replies

    @property
    def _reconnected(self) -> bool:
        return self._opened.watch.connections > max(self._connection, 1)

    @property
    def due(self) -> bool:
        """Whether ``step`` has something to do."""
        now = self._clock()
        if self._asked is None:
            return self._next_request is not None and now >= self._next_request
        return self._ended or now >= self._deadline

    def step(self, judge: Judge, live_waits: bool) -> list[Gap]:
        """Look at what is still missing, and ask for it or give it up. Call when all was judged.

        Args:
            live_waits: Whether the live flow, if it is held, has messages.

        Returns:
            What is given up.
        """
        if self._asked is not None:
            if not self.due:
                return []
            given_up = self._conclude(judge, live_waits)
            if given_up or self._asked is not None:
                return given_up
        missing = self._missing(judge)
        now = self._clock()
        if not missing:
            self._next_request = None
        elif self._next_request is None or now >= self._next_request:
            self._next_request = now + _PAUSE
            self._missing_before = sum(gap.size for gap in missing)
            self._asked_to = missing[-1].last
            self._epoch = _epoch(judge, self._key)
            self._ask(missing[0].first)
        return []

    def _missing(self, judge: Judge) -> list[Gap]:
        return [gap for gap in judge.missing(self._key) if not gap.settled]

    def _conclude(self, judge: Judge, live_waits: bool) -> list[Gap]:
        """A request has ended, or is silent: whether what it did not bring is given up."""
        silent, first, start = not self._ended, self.first, self._asked
        self._end_request()
        if silent:
            self._reopen()
        if first:
            # What the replay had not, the live flow may have had in its queue meanwhile.
            self._next_request = self._clock() + _PAUSE
            # History that did not come though there is more shows as a gap, and is asked for then.
            if silent and not live_waits and start is not None:
                # The publisher may not be there yet: its live flow is silent too.
                self.first = True
                self._ask(self._first_again(judge, start))
            elif silent:
                self._lines.warn("no replay from %s within %s s", self._options.connect, self._timeout)
            return []
        asked_for = [gap for gap in self._missing(judge) if gap.first <= self._asked_to]
        still = sum(gap.size for gap in asked_for)
        self._attempts = 0 if still < self._missing_before else self._attempts + 1
        if not self._attempts or (silent and self._attempts < _ATTEMPTS):
            return []
        self._attempts = 0
        if asked_for:
            self._lines.warn(
                "%d messages from %s are not to be had from %s", still, self._endpoint, self._options.connect
            )
        self._next_request = self._clock() + _PAUSE
        return asked_for

    def _first_again(self, judge: Judge, start: int) -> int:
        expected = judge.next_number(self._key)
        return start if expected is None else expected

    def _end_request(self) -> None:
        self._asked, self._ended, self.first = None, False, False
        self._replies, self.pending_bytes = [], 0

    def _reopen(self) -> None:
        """A new connection, to which nothing that was asked for before is sent."""
        self.close()
        # A name that does not resolve (any more) is libzmq's to try again: nobody waits for it here.
        self._open = OpenSocket(self._options, _name, check_hosts=False)

    def _ask(self, start: int) -> None:
        self._asked = start
        self._connection = self._opened.watch.connections
        self._deadline = self._clock() + self._timeout
        # A queue full of requests is that of a publisher who is away; the silence ends this one.
        with suppress(zmq.Again):
            self.socket.send_multipart(request(start), zmq.NOBLOCK)
        self._lines.info("asking %s for messages from sequence %d on", self._options.connect, start)


def _name(sock: zmq.Socket[bytes]) -> None:
    """A proxy then tells each message's topic; to a publisher a name is a name."""
    sock.setsockopt(zmq.ROUTING_ID, TOPIC_WANTED + uuid.uuid4().hex.encode())


def _epoch(judge: Judge, key: Key) -> int:
    counter = judge.counters.get(key)
    return 0 if counter is None else counter.epoch
