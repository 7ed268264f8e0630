"""The publishers' side: what comes from XSUB and PULL sockets, as it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages import MAX_MESSAGE_BYTES
from zmq_datasource.options import ProxySocketOptions
from zmq_datasource.proxy.rows import Frame, Messages
from zmq_datasource.sockets import OpenSocket, more_frames

__all__ = ["Front", "now_us"]

_log = logging.getLogger(__name__)

# Most messages of one round, as in ``receiver``; its bytes are bounded by the options.
ROUND_MESSAGES = 1024
# From here on a message is not copied on its way through: libzmq's own buffer is passed on.
_LARGE_BYTES = 4096


class _Copying:
    """Whether frames are copied out of libzmq, which is faster for small ones; by the last round's size."""

    copy = True

    def learn(self, messages: int, size: int) -> None:
        if messages:
            self.copy = size < messages * _LARGE_BYTES


class Front:
    """One receiving socket; in one thread.

    Args:
        options: Its type, endpoints and marks.
        counters: Where to count what is discarded.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, options: ProxySocketOptions, counters: SourceCounters) -> None:
        self.name = f"{options.socket_type} {options.endpoints}"
        self._options = options
        self._counters = counters
        self.opened = OpenSocket(options, lambda sock: None)
        self.socket = self.opened.socket
        self._more = more_frames(self.socket)
        self._first, self._rest = _Copying(), _Copying()
        # The C function below zmq.Socket's Python wrapper.
        self._recv: Callable[..., Any] = super(zmq.Socket, self.socket).recv

    def subscribe(self, requests: Sequence[bytes]) -> None:
        """Pass on what subscribers ask for: a byte 1 or 0, then the topic."""
        for request in requests:
            self.socket.send(request)

    def receive(self) -> Messages:
        """What is there, up to the bounds of a round."""
        recv, noblock = self._recv, int(zmq.NOBLOCK)
        copy_first, copy = self._first.copy, self._rest.copy
        ask_more, more = self._more
        topics: list[bytes | None] = []
        values: list[Frame] = []
        others: dict[int, list[Frame]] = {}
        room = limit = self._options.round_bytes
        try:
            while len(values) < ROUND_MESSAGES and room > 0:
                first = recv(noblock, copy_first)
                ask_more()
                room -= len(first)
                if not more.value:
                    topics.append(None)
                    values.append(first)
                    continue
                value = recv(noblock, copy)
                ask_more()
                room -= len(value)
                if more.value:
                    frames = others[len(values)] = [first, value]
                    while more.value:
                        value = recv(noblock, copy)
                        frames.append(value)
                        room -= len(value)
                        ask_more()
                topics.append(first if copy_first else bytes(memoryview(first)))
                values.append(value)
        except zmq.Again:
            pass
        messages = Messages(topics, values, others)
        if values:
            if room < limit - MAX_MESSAGE_BYTES:
                self._discard_oversize(messages)
            self._first.learn(topics.count(None), limit - room)
            self._rest.learn(len(topics) - topics.count(None), limit - room)
        return messages

    def _discard_oversize(self, messages: Messages) -> None:
        """Only the last one of a round can be so large, because it ends the round."""
        at = len(messages) - 1
        size = sum(map(len, messages.frames(at)))
        if size > MAX_MESSAGE_BYTES:
            messages.topics.pop()
            messages.values.pop()
            messages.others.pop(at, None)
            self._counters.oversize += 1
            _log.error(
                "%s: discarded a message of %d bytes: a row holds at most %d",
                self.name,
                size,
                MAX_MESSAGE_BYTES,
            )

    def keep_alive(self) -> None:
        """Let the connections do their work."""
        self.socket.getsockopt(zmq.EVENTS)
        watch = self.opened.watch
        watch.update()
        watch.redial()
        watch.report_absent()

    def close(self) -> None:
        self.opened.close(linger=0)


def now_us() -> int:
    """Microseconds since the epoch."""
    return int(time.time() * 1_000_000)
