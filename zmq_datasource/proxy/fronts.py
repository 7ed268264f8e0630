"""The publishers' side: what comes from XSUB and PULL sockets, as it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.proxy.rows import Frame, Messages
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.pyzmq_internals import more_frames, recv_of
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Front", "now_us"]

_log = logging.getLogger(__name__)

# Most messages of one round, as in ``receiver``; its bytes are bounded by the options.
ROUND_MESSAGES = 4096
# So many at a time; whether that was enough is seen then.
_LOOK_EVERY = 32
# From here on a message is not copied on its way through: libzmq's own buffer is passed on.
_LARGE_BYTES = 4096


class _Copying:
    """Whether frames are copied out of libzmq, which is faster for small ones; by the last round's size."""

    copy = True

    def learn(self, messages: int, size: int) -> None:
        if messages:
            self.copy = size < messages * _LARGE_BYTES


class Front:
    """One receiving socket of a proxy; belongs to one thread.

    Args:
        spec: Its type, endpoints and high-water marks.
        round_bytes: Most bytes of a round.
        counters: Where to count what is discarded.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, spec: SocketSpec, round_bytes: int, counters: SourceCounters) -> None:
        self.name = f"{spec.kind} {spec.endpoints}"
        self._round_bytes = round_bytes
        self._counters = counters
        opened = self._opened = OpenSocket(spec)
        self.socket = opened.socket
        self._more = more_frames(self.socket)
        self._unfinished = Unfinished(opened)
        self._first, self._rest = _Copying(), _Copying()
        self._recv = recv_of(self.socket)

    def subscribe(self, requests: Sequence[bytes]) -> None:
        """Pass on what subscribers ask for: a byte 1 or 0, then the topic."""
        for request in requests:
            self.socket.send(request)

    def receive(self) -> list[Messages]:
        """What is there, up to the bounds of a round, in parts that an Arrow batch can hold each."""
        topics: list[bytes | None] = []
        values: list[Frame] = []
        others: dict[int, list[Frame]] = {}
        size, limit = 0, self._round_bytes
        receive = self._receive_carefully if self._unfinished.careful else self._receive_some
        try:
            while len(values) < ROUND_MESSAGES and size < limit:
                before = len(values)
                try:
                    receive(topics, values, others)
                finally:
                    size += sum(map(len, values[before:]))
                    size += sum(len(topic) for topic in topics[before:] if topic is not None)
                    size += sum(sum(map(len, others[at][1:-1])) for at in others if at >= before)
        except zmq.Again:
            self._opened.watch.found_empty()
        self._opened.watch.taken += len(values)
        messages = Messages(topics, values, others)
        if not values:
            return []
        alone = topics.count(None)
        self._first.learn(alone, size)
        self._rest.learn(len(topics) - alone, size)
        return [messages] if size <= MAX_MESSAGE_BYTES else self._fitting(messages)

    def _receive_some(
        self, topics: list[bytes | None], values: list[Frame], others: dict[int, list[Frame]]
    ) -> None:
        """So many messages that their sizes need not be looked at one by one.

        Raises:
            zmq.Again: There are no more.
        """
        # Local names and little else: this loop and that of the backend set the proxy's speed.
        recv, noblock = self._recv, int(zmq.NOBLOCK)
        copy_first, copy = self._first.copy, self._rest.copy
        ask_more, more = self._more
        add_topic, add_value = topics.append, values.append
        for _ in range(_LOOK_EVERY):
            first = recv(noblock, copy_first)
            ask_more()
            if more.value:
                value = recv(noblock, copy)
                ask_more()
                if more.value:
                    frames = others[len(values)] = [first, value]
                    while more.value:
                        value = recv(noblock, copy)
                        frames.append(value)
                        ask_more()
                add_topic(first if copy_first else bytes(memoryview(first)))
                add_value(value)
            else:
                add_topic(None)
                add_value(first)

    def _receive_carefully(
        self, topics: list[bytes | None], values: list[Frame], others: dict[int, list[Frame]]
    ) -> None:
        """One, while some connection may be sending a message that never ends."""
        frames = self._unfinished.receive(int(zmq.NOBLOCK))
        if len(frames) > 2:
            others[len(values)] = list(frames)
        topics.append(frames[0] if len(frames) > 1 else None)
        values.append(frames[-1])

    def _fitting(self, messages: Messages) -> list[Messages]:
        """What a row can hold, in parts that a batch can hold."""
        parts: list[list[int]] = []
        room = 0
        for at in range(len(messages)):
            size = sum(map(len, messages.frames(at)))
            if size <= MAX_MESSAGE_BYTES:
                if size > room:
                    parts.append([])
                    room = MAX_MESSAGE_BYTES
                parts[-1].append(at)
                room -= size
                continue
            self._counters.oversize += 1
            _log.error(
                "%s: discarded a message of %d bytes: a row holds at most %d",
                self.name,
                size,
                MAX_MESSAGE_BYTES,
            )
        return [messages.take(part) for part in parts]

    @property
    def peers(self) -> int:
        """Connections that are up."""
        return self._opened.watch.peers

    @property
    def protocol_errors(self) -> int:
        """Connections that were ended because of what the peer sent."""
        return self._opened.watch.protocol_errors

    def keep_alive(self) -> None:
        """Let the connections do their work."""
        self.socket.getsockopt(zmq.EVENTS)
        watch = self._opened.watch
        watch.update()
        watch.redial()
        watch.report_absent()
        self._unfinished.look()

    def close(self) -> None:
        self._opened.close(linger=0)


def now_us() -> int:
    """Microseconds since the epoch."""
    return int(time.time() * 1_000_000)
