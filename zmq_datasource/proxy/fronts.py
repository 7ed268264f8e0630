"""The publishers' side: what comes from XSUB and PULL sockets, as it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.framing import RawMessage
from zmq_datasource.messages import MAX_MESSAGE_BYTES
from zmq_datasource.options import ProxySocketOptions
from zmq_datasource.sockets import OpenSocket, more_frames

__all__ = ["Front"]

_log = logging.getLogger(__name__)

# Bounds of one round, as in ``receiver``.
ROUND_MESSAGES = 1024
_ROUND_BYTES = 4 << 20
# From here on a message is not copied on its way through: libzmq's own buffer is passed on.
_LARGE_BYTES = 4096


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
        self._large = False
        # The C function below zmq.Socket's Python wrapper.
        self._recv: Callable[..., Any] = super(zmq.Socket, self.socket).recv

    def subscribe(self, requests: Sequence[bytes]) -> None:
        """Pass on what subscribers ask for: a byte 1 or 0, then the topic."""
        for request in requests:
            self.socket.send(request)

    def receive(self) -> list[RawMessage]:
        """What is there, up to the bounds of a round. Frames of large messages are ``zmq.Frame``."""
        recv, noblock, copy = self._recv, int(zmq.NOBLOCK), not self._large
        ask_more, more = self._more
        messages: list[RawMessage] = []
        append, room = messages.append, _ROUND_BYTES
        try:
            for _ in range(ROUND_MESSAGES):
                frame = recv(noblock, copy)
                ask_more()
                if more.value:
                    message = [frame]
                    while more.value:
                        frame = recv(noblock, copy)
                        message.append(frame)
                        ask_more()
                    append(message)
                    room -= sum(map(len, message))
                else:
                    append(frame)
                    room -= len(frame)
                if room <= 0:
                    break
        except zmq.Again:
            pass
        if messages:
            self._large = (_ROUND_BYTES - room) // len(messages) >= _LARGE_BYTES
            if room < _ROUND_BYTES - MAX_MESSAGE_BYTES:
                self._discard_oversize(messages)
        return messages

    def _discard_oversize(self, messages: list[RawMessage]) -> None:
        """Only the last one of a round can be so large, because it ends the round."""
        message = messages[-1]
        size = sum(map(len, message)) if isinstance(message, list) else len(message)
        if size > MAX_MESSAGE_BYTES:
            messages.pop()
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
