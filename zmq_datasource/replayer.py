"""Asks one publisher's ROUTER for messages again (vLLM's replay protocol), without ever waiting.

The rules:

* One request at a time. It asks for everything from the first missing message on, because the
  protocol has no end of range; what was not missing is left out when it comes.
* The publisher's ROUTER drops replies when its queue is full, in the middle too, and even the end.
  So the end of a replay proves nothing: what is still missing is asked for again, as long as
  each request brings something.
* What a whole replay did not bring the publisher no longer has. After silence a request is
  repeated on a new connection, so that late replies are not taken for new ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from zmq_datasource.framing.fields import UnfitError
from zmq_datasource.framing.replay import Reply, read_reply, request
from zmq_datasource.option_types import Endpoint, Endpoints, SourceSocket
from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import Gap, Judge
from zmq_datasource.sockets import OpenSocket

__all__ = ["Replayer"]

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
# The publisher sends as fast as it can: its own queue is what limits a replay.
_RCVHWM = 100_000


class Replayer:
    """Heals the gaps of one publisher. Belongs to the receiving thread.

    Args:
        options: Security and limits of the socket are those of the feed.
        endpoint: Where the publisher's live messages come from.
        replay_endpoint: Its ROUTER.
        clock: Seconds, monotonic.

    Attributes:
        first: Whether the live flow waits for this replay: history comes before it.
    """

    def __init__(
        self,
        options: ReadOptions,
        endpoint: Endpoint,
        replay_endpoint: Endpoint,
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
        self._clock = clock
        self._open: OpenSocket | None = None
        self._asked: int | None = None
        self._asked_to = 0
        self._deadline = 0.0
        self._ended = False
        self._attempts = 0
        self._missing_before = 0
        self._epoch = 0
        self._settled = 0  # gaps that end below this position will not be asked for again
        self._replies: list[Reply] = []
        self.pending_bytes = 0
        self.first = False

    def open(self) -> None:
        """Connect.

        Raises:
            EndpointError: The endpoint cannot be connected.
        """
        self._open = OpenSocket(self._options, lambda sock: None)

    def close(self) -> None:
        if self._open is not None:
            self._open.close(linger=0)
            self._open = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._open is not None
        return self._open.socket

    @property
    def pending(self) -> int:
        """Replies received but not handed over yet."""
        return len(self._replies)

    def keep_alive(self) -> None:
        """Let the connection do its work."""
        assert self._open is not None
        self._open.watch.update()
        self._open.watch.redial()
        self._open.watch.report_absent()

    def fetch_first(self, start: int) -> None:
        """Ask for history, for which the live flow waits: until it has come, or nothing comes."""
        self.first = True
        self._ask(start)

    def receive(self, most: int, most_bytes: int) -> int:
        """Take the replies that are there.

        Returns:
            How many there were.
        """
        taken, sock = 0, self.socket
        while taken < most and self.pending_bytes < most_bytes:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                reply = read_reply(frames)
            except UnfitError as e:
                _log.warning("a replay from %s makes no sense: %s", self._options.connect, e)
                continue
            self._deadline = self._clock() + self._timeout
            if reply.sequence is None:
                self._ended = self._asked is not None
                continue
            self._replies.append(reply)
            self.pending_bytes += len(reply.value) + 100
            taken += 1
        return taken

    def take(self) -> Sequence[Reply]:
        """Hand over what was received."""
        replies, self._replies, self.pending_bytes = self._replies, [], 0
        return replies

    @property
    def due(self) -> bool:
        """Whether a request has ended, so that ``step`` should be called."""
        return self._asked is not None and (self._ended or self._clock() >= self._deadline)

    def step(self, judge: Judge) -> list[Gap]:
        """Look at what is still missing, and ask for it or give it up. Call when all was judged.

        Returns:
            What is given up.
        """
        counter = judge.counters.get(self._key)
        if counter is not None and counter.epoch != self._epoch:
            self._epoch, self._settled = counter.epoch, 0
        if self._asked is not None and not self.due:
            return []
        missing = [gap for gap in judge.missing(self._key) if gap.last >= self._settled]
        given_up: list[Gap] = []
        if self._asked is not None:
            given_up = self._conclude(missing, silent=not self._ended)
        if given_up:
            self._settled = given_up[-1].last + 1
            missing = []
        if missing and self._asked is None:
            self._missing_before = sum(gap.size for gap in missing)
            self._asked_to = missing[-1].last
            self._ask(missing[0].first)
        return given_up

    def abandon(self, gaps: Sequence[Gap]) -> list[Gap]:
        """These cannot be filled any more.

        Returns:
            Those of them that are of this publisher, and were not given up before.
        """
        return [gap for gap in gaps if gap.key == self._key and gap.last >= self._settled]

    def _conclude(self, missing: Sequence[Gap], silent: bool) -> list[Gap]:
        """A request has ended: whether what it did not bring is given up."""
        asked_for = [gap for gap in missing if gap.first <= self._asked_to]
        still = sum(gap.size for gap in asked_for)
        progress = still < self._missing_before
        if self.first:
            progress = True  # history that did not come shows as a gap, and is asked for then
            if silent:
                _log.warning(
                    "no replay from %s for %.0f s; going on without", self._options.connect, self._timeout
                )
        self._attempts = 0 if progress else self._attempts + 1
        if silent:
            self.close()
            self.open()
        self._asked, self._ended, self.first = None, False, False
        if progress or not asked_for or (silent and self._attempts < _ATTEMPTS):
            return []
        _log.warning(
            "%d messages from %s are not to be had from %s any more",
            still,
            self._endpoint,
            self._options.connect,
        )
        self._attempts = 0
        return list(asked_for)

    def _ask(self, start: int) -> None:
        self._asked = start
        self._deadline = self._clock() + self._timeout
        # A queue full of requests is that of a publisher who is away; the silence ends this one.
        with suppress(zmq.Again):
            self.socket.send_multipart(request(start), zmq.NOBLOCK)
        _log.info("asking %s for messages from sequence %d on", self._options.connect, start)
