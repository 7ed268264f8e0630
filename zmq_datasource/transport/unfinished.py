"""Ends a connection if its peer sends a message without an end.

libzmq counts a message against RCVHWM when its last frame has arrived, and MAXMSGSIZE limits one frame. So a peer that
sends frame after frame, each of which announces another, fills the memory of its receiver. The rules:

* The operating system counts the bytes that a connection receives (Linux, tcp). The *limit* is the size of the
  largest message plus ``in_kernel``. A connection that has received more since its last message is *suspected*.
* While there is a suspect, the origin of each message is checked, which makes bulk reading slower. A connection that
  delivers a message is not suspected any more: frames arrive in order, so none of its earlier messages is unfinished.
* A suspect that has received the same amount once more and delivered nothing, although the socket's queues were read,
  is ended. libzmq then frees its memory.

So an unfinished message has at most about twice the limit for each connection. It may take 32 times as much memory,
because an empty frame has 2 bytes on the wire and 64 in libzmq's queue. Over ipc and on other systems nothing is
counted, and peers are trusted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.transport.connections import Connection, Connections, origin_of
from zmq_datasource.transport.core import Inbox, Taken
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import PeerWatch

__all__ = ["Unfinished"]


@dataclass
class _Traffic:
    """The bytes of one connection.

    Attributes:
        received: All bytes that it has received, at the last check.
        finished: ``received`` at its last known message.
        suspected_at: ``received`` when it became suspected; None if it is not.
        deliver_by: When this number of messages has been read, an honest connection has delivered one; None below the
            limit.
    """

    received: int = 0
    finished: int = 0
    suspected_at: int | None = None
    deliver_by: int | None = None


class Unfinished:
    """Watches one receiving socket. For the thread that uses the socket.

    Args:
        opened: The socket.
        most_bytes: Limit of a message's bytes, if it is lower than that of a row.

    Attributes:
        has_suspects: Whether a connection is suspected.
        in_kernel: Bytes that the kernel may have received and libzmq has not read.
        check_seconds: How often the connections are checked.
    """

    in_kernel = 64 << 20
    check_seconds = 1.0

    def __init__(self, opened: OpenSocket, most_bytes: int | None = None) -> None:
        self._most_bytes = MAX_MESSAGE_BYTES if most_bytes is None else min(most_bytes, MAX_MESSAGE_BYTES)
        self._limit = self._most_bytes + self.in_kernel
        self._socket = opened.socket
        self._watch: PeerWatch = opened.watch
        self._traffic: dict[int, _Traffic] = {}
        self._read = 0  # messages with a checked origin
        self._next_check = 0.0
        self.has_suspects = False
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
        self.note_message(origin_of(frames[-1]))
        return frames

    def take(self, inbox: Inbox, most: int, room: int, wait: bool) -> Taken:
        """Call ``inbox.take``, message by message while there is a suspect."""
        if not self.has_suspects:
            taken = inbox.take(self._socket, most, room, wait)
            if taken.messages:  # the compiled core knows the last one's origin anyway
                self.note_message(inbox.origin)
            return taken
        messages, begin = 0, inbox.size
        while messages < most and inbox.size - begin < room:
            one = inbox.take(self._socket, 1, room, wait and not messages)
            messages += one.messages
            if not one.messages and not one.excess:  # the socket is empty, or the inbox is full
                return Taken(messages, 0, one.empty)
            self.note_message(inbox.origin)
            if one.excess:
                return Taken(messages, one.excess, False)
        return Taken(messages, 0, False)

    def note_message(self, descriptor: int) -> None:
        """Count a message that was read, and lift the suspicion from its connection."""
        self._read += 1
        inode = self._watch.inode(descriptor)
        traffic = None if inode is None else self._traffic.get(inode)
        if traffic is not None:
            traffic.finished = traffic.received
            if traffic.suspected_at is not None:
                traffic.suspected_at = traffic.deliver_by = None
                self._update_suspects()

    def _update_suspects(self) -> None:
        self.has_suspects = any(traffic.suspected_at is not None for traffic in self._traffic.values())

    def check_connections(self) -> None:
        """End connections with a message without an end. Called in each round; acts every ``check_seconds``."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self.check_seconds
        self._ends.flush()
        connections = self._watch.open_connections()
        current = connections.current()
        self._traffic = {inode: self._traffic.get(inode) or _Traffic() for inode in connections.inodes}
        for connection in current:
            traffic = self._traffic[connection.inode]
            traffic.received = connection.received
            if self._never_ends(traffic):
                self._end(connections, connection, traffic)
        self._update_suspects()

    def _never_ends(self, traffic: _Traffic) -> bool:
        if traffic.received - traffic.finished <= self._limit:
            return False
        if traffic.suspected_at is None:
            traffic.suspected_at = traffic.received
        elif traffic.deliver_by is not None:
            # libzmq reads from its queues in turn: after one turn it has read from each that had a message.
            empty = not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            return empty or self._read >= traffic.deliver_by
        elif traffic.received - traffic.suspected_at > self._limit:
            traffic.deliver_by = self._read + 2 * self._watch.queues
        return False

    def _end(self, connections: Connections, connection: Connection, traffic: _Traffic) -> None:
        self._ends.warn(
            "%s has sent %d bytes of a message that does not end (a message may hold %d); it is disconnected",
            connection.peer,
            traffic.received - traffic.finished,
            self._most_bytes,
        )
        self._watch.protocol_errors += 1
        connections.hang_up(connection)
        traffic.finished, traffic.suspected_at, traffic.deliver_by = traffic.received, None, None
