"""Ends a connection of a ROUTER if its peer sends a message without an end.

libzmq counts a message against RCVHWM when its last frame has arrived, and MAXMSGSIZE limits one frame. So a peer that
sends frame after frame, each of which announces another, fills the memory of its receiver: 64 bytes and more for an
empty frame, which has 2 bytes on the wire. libzmq shows neither these frames nor their number. But the requests to a
ROUTER are small, and the operating system counts the bytes of a connection (Linux, tcp). So a connection that has given
libzmq more bytes than the largest message has, and no message, is ended. libzmq then frees its memory. A frame has at
least 2 bytes, so the bound of the bytes bounds the frames too.

Over ipc and on other systems nothing is counted, and peers are trusted.
"""

from __future__ import annotations

import time

import zmq

from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.transport.connections import origin_of
from zmq_datasource.transport.opened import OpenSocket


class Unfinished:
    """Receives from one ROUTER, and watches its connections. For the thread that uses the socket.

    Args:
        opened: The socket.
        most_bytes: The bytes of the largest message.

    Attributes:
        spare_bytes: Bytes that a connection may send beyond that: messages that wait in libzmq, up to RCVHWM, and
            heartbeats, which are no messages. It would take five hours of heartbeats.
        check_seconds: How often the connections are checked, if that takes a tenth of the time at most.
    """

    spare_bytes = 1 << 20
    check_seconds = 0.1

    def __init__(self, opened: OpenSocket, most_bytes: int) -> None:
        self._socket = opened.socket
        self._watch = opened.watch
        self._most_bytes = most_bytes
        # By inode: the bytes that a connection had received at the check after its last message.
        self._received: dict[int, int] = {}
        self._spoke: set[int] = set()  # connections that have delivered a message since the last check
        self._next_check = 0.0
        self._ends = LimitedLog(__name__, "messages that do not end")

    def receive(self, most_frames: int) -> list[zmq.Frame]:
        """Receive the next message without waiting, and keep at most one frame more than ``most_frames``.

        The extra frame makes the caller refuse the message.

        Raises:
            zmq.Again: There is no message.
        """
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= most_frames:
                frames.append(frame)
        inode = self._watch.known.inode(origin_of(frames[-1]))
        if inode is not None:
            self._spoke.add(inode)
        return frames

    def check_connections(self) -> None:
        """End connections with a message without an end. Called in each round; acts every ``check_seconds``."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._ends.flush()
        connections = self._watch.open_connections()
        before, self._received = self._received, {}
        spoke, self._spoke = self._spoke, set()
        for connection in connections.current():
            inode, received = connection.inode, connection.received
            since = received if inode in spoke else before.get(inode, 0)
            self._received[inode] = since
            sent = received - connection.unread - since
            if sent > self._most_bytes + self.spare_bytes:
                self._ends.warn(
                    "%s has sent %d bytes of a message that does not end (a message may hold %d); it is disconnected",
                    connection.peer,
                    sent,
                    self._most_bytes,
                )
                self._watch.protocol_errors += 1
                connections.hang_up(connection)
        ended = time.monotonic()
        self._next_check = ended + max(self.check_seconds, 10 * (ended - now))
