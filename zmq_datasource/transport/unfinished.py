"""Ends a connection of a ROUTER if its peer sends a message without an end.

libzmq counts a message against RCVHWM when its last frame has arrived, and MAXMSGSIZE limits one frame. So a peer that
sends frame after frame, each of which announces another, fills the memory of its receiver: 64 bytes and more for an
empty frame, which has 2 bytes on the wire. libzmq shows neither these frames nor their number. But the requests to a
ROUTER are small, and the operating system counts the bytes of a connection (Linux, tcp). The rules:

* A connection that has given libzmq more bytes than the largest message has, and no message, is ended. libzmq then
  frees its memory. A frame has at least 2 bytes, so the bound of the bytes bounds the frames too.
* A message may have arrived and wait in libzmq. So the connection is ended only when the socket is empty, or libzmq has
  read from each of its queues since.
* Heartbeats have bytes and are no messages: a silent peer may send ``spare_bytes`` of them.

Over ipc and on other systems nothing is counted, and peers are trusted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.transport.connections import origin_of
from zmq_datasource.transport.opened import OpenSocket


@dataclass
class _Silence:
    """A connection that has delivered no message for a while.

    Attributes:
        since: The bytes that it had received at the check after its last message; 0 if it has had none.
        read_by: When the socket has read this number of messages, a message of this connection would be among them;
            None below the limit.
    """

    since: int
    read_by: int | None = None


class Unfinished:
    """Receives from one ROUTER, and watches its connections. For the thread that uses the socket.

    Args:
        opened: The socket.
        most_bytes: The bytes of the largest message.

    Attributes:
        spare_bytes: Bytes that a connection may send beyond that. It would take 20 hours of heartbeats.
        check_seconds: How often the connections are checked.
    """

    spare_bytes = 4 << 20
    check_seconds = 0.25

    def __init__(self, opened: OpenSocket, most_bytes: int) -> None:
        self._socket = opened.socket
        self._watch = opened.watch
        self._most_bytes = most_bytes
        self._silent: dict[int, _Silence] = {}  # by the connection's inode
        self._spoke: set[int] = set()  # connections that have delivered a message since the last check
        self._read = 0  # messages
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
        self._read += 1
        inode = self._watch.inode(origin_of(frames[-1]))
        if inode is not None:
            self._spoke.add(inode)
        return frames

    def check_connections(self) -> None:
        """End connections with a message without an end. Called in each round; acts every ``check_seconds``."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self.check_seconds
        self._ends.flush()
        connections = self._watch.open_connections()
        before, self._silent = self._silent, {}
        spoke, self._spoke = self._spoke, set()
        for connection in connections.current():
            silence = before.get(connection.inode) or _Silence(0)
            if connection.inode in spoke:
                silence = _Silence(connection.received)
            sent = connection.received - connection.unread - silence.since
            if sent > self._most_bytes + self.spare_bytes and not self._may_have_message(silence):
                self._ends.warn(
                    "%s has sent %d bytes of a message that does not end (a message may hold %d); it is disconnected",
                    connection.peer,
                    sent,
                    self._most_bytes,
                )
                self._watch.protocol_errors += 1
                connections.hang_up(connection)
            else:
                self._silent[connection.inode] = silence

    def _may_have_message(self, silence: _Silence) -> bool:
        """Whether a message of this connection may wait in libzmq, which reads from its queues in turn."""
        if silence.read_by is None:
            silence.read_by = self._read + 2 * self._watch.queues
        return self._read < silence.read_by and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
