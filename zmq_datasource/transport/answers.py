"""Sends the answers of a ROUTER without waiting for a client, and counts the bytes that the network has not taken.

libzmq limits the number of queued messages, but not their bytes. A server bounds its memory by checking ``bytes`` and
``connections_of`` before it answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import zmq

from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.spec import frame_limit


def set_router_options(sock: zmq.Socket[bytes], rcvhwm: int, sndhwm: int, most_request_bytes: int) -> None:
    """Make a ROUTER report clients that are gone, and refuse large requests. Called before it is bound."""
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(most_request_bytes))
    sock.setsockopt(zmq.RCVHWM, rcvhwm)
    sock.setsockopt(zmq.SNDHWM, sndhwm)
    find_dead_peers(sock)


class _Sent(NamedTuple):
    peer: bytes
    tracker: zmq.MessageTracker
    size: int


class Answers:
    """Sends answers by a ROUTER. For one thread. Between ``begin`` and ``finish`` nothing else may be sent.

    Attributes:
        stuck: Whether a client's queue had no room for ``begin``; the caller resets it.
    """

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._sent: dict[Hashable, list[_Sent]] = {}
        self.stuck = False

    def begin(self, peer: bytes) -> bool:
        """Take a place in the queue of a client; ``finish`` must follow. Return False if the queue is full.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        for _ in range(2):
            try:
                # Only the first frame of a message can be refused.
                self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
                return True
            except zmq.Again:
                self._socket.getsockopt(zmq.EVENTS)  # makes libzmq check again whether there is room
        self.stuck = True
        return False

    def finish(self, peer: bytes, frames: Sequence[Any], owner: Hashable = None) -> None:
        """Send the frames of an answer after ``begin``. Large frames are not copied.

        Args:
            owner: The answer counts for this owner until libzmq has sent its last frame; None does not count it.
        """
        *parts, last = frames
        for part in parts:
            self._socket.send(part, zmq.SNDMORE, copy=False)
        if owner is None:
            self._socket.send(last)
            return
        # libzmq releases frames in their order, so the last one is enough to track.
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self._socket.send(frame, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        size = sum(memoryview(each).nbytes for each in frames)
        self._sent.setdefault(owner, []).append(_Sent(peer, frame.tracker, size))

    def send(self, peer: bytes, frames: Sequence[Any], owner: Hashable = None) -> bool:
        """Send an answer; return False if the client's queue is full.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        has_place = self.begin(peer)
        if has_place:
            self.finish(peer, frames, owner)
        return has_place

    def connections_of(self, owner: Hashable) -> list[bytes]:
        """The clients to which answers of an owner are on their way, one entry for each answer."""
        left = [sent for sent in self._sent.get(owner, ()) if not sent.tracker.done]
        if left:
            self._sent[owner] = left
        else:
            self._sent.pop(owner, None)
        return [sent.peer for sent in left]

    @property
    def bytes(self) -> int:
        """The bytes of all answers that are on their way."""
        return sum(
            sent.size
            for owner in list(self._sent)
            if self.connections_of(owner)
            for sent in self._sent[owner]
        )
