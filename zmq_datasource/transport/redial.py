"""Connects again where libzmq does not, without throwing away what was received.

libzmq gives up an endpoint if it takes the end of a connection for a fault of the peer: another mechanism or socket
type, or a frame over MAXMSGSIZE. Where libzmq connects again by itself it says so (CONNECT_RETRIED), and is left alone.
``disconnect`` throws away the messages that were received from an endpoint and not read, so it waits until they are.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq

from zmq_datasource.options.socket import Endpoint

__all__ = ["Redialer"]

_log = logging.getLogger(__name__)


class Redialer:
    """The endpoints of one socket that must be connected again. Times are monotonic seconds.

    Attributes:
        first_seconds, last_seconds: After a failed handshake: the delay before the next attempt, which doubles up to
            the last.
        lost_seconds: The delay after a connection that was up has ended.
        messages_read: Messages that the user of the socket has read.
    """

    first_seconds, last_seconds = 1.0, 30.0
    lost_seconds = 1.0

    def __init__(self, sock: zmq.Socket[bytes], connect: Sequence[Endpoint]) -> None:
        self._sock = sock
        self._connect = connect
        self._due: dict[str, tuple[float, float]] = {}  # by endpoint: when, and the delay
        self._lost: set[str] = set()  # endpoints that were connected, and are not any more
        # By endpoint: the number of read messages from which on none of its last connection is left in the socket.
        self._read_by: dict[str, int | float] = {}
        self._empty_at = 0.0
        self.messages_read = 0

    def after_failure(self, endpoint: str) -> None:
        """A handshake with an endpoint has failed."""
        _, delay = self._due.get(endpoint, (0.0, self.first_seconds / 2))
        delay = min(delay * 2, self.last_seconds)
        self._due[endpoint] = (time.monotonic() + delay, delay)

    def after_loss(self, endpoint: str) -> None:
        """A connection that was up has ended."""
        self._lost.add(endpoint)
        # Only for sockets that send nothing: disconnect would drop the queue of the others.
        if int(self._sock.type) in (zmq.SUB, zmq.XSUB, zmq.PULL):
            self._due[endpoint] = (time.monotonic() + self.lost_seconds, self.lost_seconds)

    def cancel(self, endpoint: str) -> None:
        """libzmq connects to the endpoint by itself, or is connected."""
        self._due.pop(endpoint, None)
        self._lost.discard(endpoint)
        self._read_by.pop(endpoint, None)

    def note_empty(self) -> None:
        """The socket had no more messages just now."""
        self._empty_at = time.monotonic()

    def dial(self, queues: int) -> int:
        """Connect to the endpoints that are due and have no unread messages.

        Args:
            queues: The most queues that libzmq keeps for the socket.

        Returns:
            How many connections libzmq has ended for good because of what their peer sent.
        """
        now, faults = time.monotonic(), 0
        for endpoint in map(str, self._connect):
            due, delay = self._due.get(endpoint, (math.inf, 0.0))
            if now < due:
                continue
            if endpoint in self._lost:
                self._lost.discard(endpoint)
                faults += 1
                _log.warning(
                    "libzmq has ended the connection to %s for what the peer sent: a frame over zmq.maxmsgsize (%d "
                    "bytes), or bytes that are not ZMTP. What was sent after it is lost; connecting again",
                    endpoint,
                    self._sock.getsockopt(zmq.MAXMSGSIZE),
                )
            if self._has_unread(endpoint, due, queues):
                continue
            self._read_by.pop(endpoint, None)
            self._due[endpoint] = (now + delay, delay)
            with suppress(zmq.ZMQError):  # it is not connected any more
                self._sock.disconnect(endpoint)
            self._sock.connect(endpoint)
        return faults

    def _has_unread(self, endpoint: str, since: float, queues: int) -> bool:
        """Whether the socket may still have messages of a connection that ended before ``since``."""
        if self._empty_at >= since or not int(self._sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return False
        # Other peers may send so much that the socket is never empty. libzmq reads from its queues in turn, and none
        # holds more than the high-water mark: after this number of messages it has read all that this queue held.
        hwm = int(self._sock.getsockopt(zmq.RCVHWM)) or math.inf
        return self.messages_read < self._read_by.setdefault(
            endpoint, self.messages_read + queues * (hwm + 1)
        )
