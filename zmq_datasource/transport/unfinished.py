"""A message that never ends: recognised by what its connection receives, and ended by hanging up.

libzmq counts a message against RCVHWM once its last frame has come, and MAXMSGSIZE bounds one frame. So a peer that
sends frame after frame, each announcing another, fills the memory of its receiver. The rules:

* The operating system counts what a connection receives (Linux, tcp). A connection that has received more than one
  message may hold since it last gave one is *suspected*.
* As long as there is a suspect, bulk reads look at each message's origin, which costs more. A connection that gives a
  message is suspected no longer: frames come in order, so no earlier message of it is unfinished.
* A suspect that has received as much again and given nothing, though all was read that there was, is hung up;
  libzmq then frees what it held.

So an unfinished message has about twice the limit at most, for each connection. In memory it may take 32 times as much,
because an empty frame has 2 bytes on the wire, and 64 in libzmq's queue. Over ipc, and on other systems, nobody counts,
and peers are trusted with this.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import zmq

from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.transport.core import Inbox, Taken
from zmq_datasource.transport.kernel import Connection, connections, hang_up
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.origin import origin_of
from zmq_datasource.transport.peers import PeerWatch

__all__ = ["Unfinished"]


@dataclass
class _Traffic:
    """What a connection has received.

    Attributes:
        received: In all, as of the last look.
        finished: By when it had given a message, as far as was looked at.
        suspected: By when it was suspected; None if it is not.
        due: The number of messages read by which one of it must have been among them; None before the limit.
    """

    received: int = 0
    finished: int = 0
    suspected: int | None = None
    due: int | None = None


class Unfinished:
    """Watches one receiving socket; belongs to the thread that uses it.

    Args:
        opened: The socket.
        most_bytes: That an honest message has, if that is less than any may have.

    Attributes:
        careful: Whether there is a suspect.
        in_kernel: Bytes that the kernel may have received and libzmq has not read.
        look_seconds: How often it looks at the connections.
    """

    in_kernel = 64 << 20
    look_seconds = 1.0

    def __init__(self, opened: OpenSocket, most_bytes: int | None = None) -> None:
        self._most_bytes = MAX_MESSAGE_BYTES if most_bytes is None else min(most_bytes, MAX_MESSAGE_BYTES)
        self._limit = self._most_bytes + self.in_kernel
        self._socket = opened.socket
        self._watch: PeerWatch = opened.watch
        self._traffic: dict[int, _Traffic] = {}
        self._read = 0  # messages whose origin was looked at
        self._next_look = 0.0
        self.careful = False
        self._ends = LimitedLog(__name__, "messages that do not end")

    def receive(self, most_frames: int) -> list[zmq.Frame]:
        """The next message, without waiting. Of more than ``most_frames`` one is kept, so that its reader refuses it.

        Raises:
            zmq.Again: There is none.
        """
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= most_frames:
                frames.append(frame)
        self.saw(origin_of(frames[-1]))
        return frames

    def take(self, inbox: Inbox, most: int, room: int, wait: bool) -> Taken:
        """``inbox.take``, and while there is a suspect see where each message comes from."""
        if not self.careful:
            taken = inbox.take(self._socket, most, room, wait)
            if taken.messages:  # the last one's origin costs nothing, and saves most from being suspected
                self.saw(inbox.origin)
            return taken
        messages, begin = 0, inbox.size
        while messages < most and inbox.size - begin < room:
            one = inbox.take(self._socket, 1, room, wait and not messages)
            messages += one.messages
            if one.empty:
                return Taken(messages, 0, True)
            self.saw(inbox.origin)
            if one.excess:
                return Taken(messages, one.excess, False)
        return Taken(messages, 0, False)

    def saw(self, descriptor: int) -> None:
        """A message was read that came by this connection."""
        self._read += 1
        inode = self._watch.inode(descriptor)
        traffic = None if inode is None else self._traffic.get(inode)
        if traffic is not None:
            traffic.finished = traffic.received
            if traffic.suspected is not None:
                traffic.suspected = traffic.due = None
                self.careful = self._has_suspects

    @property
    def _has_suspects(self) -> bool:
        return any(traffic.suspected is not None for traffic in self._traffic.values())

    def look(self) -> None:
        """Look, now and then, at what the connections have received."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self.look_seconds
        self._ends.flush()
        current = connections(self._watch)
        self._traffic = {inode: self._traffic.get(inode) or _Traffic() for inode in self._watch.inodes}
        for connection in current:
            traffic = self._traffic[connection.inode]
            traffic.received = connection.received
            if self._never_ends(traffic):
                self._end(connection, traffic)
        self.careful = self._has_suspects

    def _never_ends(self, traffic: _Traffic) -> bool:
        if traffic.received - traffic.finished <= self._limit:
            return False
        if traffic.suspected is None:
            traffic.suspected = traffic.received
        elif traffic.due is not None:
            # libzmq reads from its connections in turn: after one turn it has read from each that had a message.
            empty = not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            return empty or self._read >= traffic.due
        elif traffic.received - traffic.suspected > self._limit:
            traffic.due = self._read + 2 * self._watch.queues
        return False

    def _end(self, connection: Connection, traffic: _Traffic) -> None:
        self._ends.warn(
            "%s has sent %d bytes of a message that does not end (a message may hold %d); it is disconnected",
            connection.peer,
            traffic.received - traffic.finished,
            self._most_bytes,
        )
        self._watch.protocol_errors += 1
        hang_up(self._watch, connection)
        traffic.finished, traffic.suspected, traffic.due = traffic.received, None, None
