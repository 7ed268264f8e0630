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
    """Sends answers by a ROUTER. For one thread."""

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._sent: dict[Hashable, list[_Sent]] = {}

    def send(self, peer: bytes, frames: Sequence[Any], owner: Hashable = None) -> bool:
        """Send an answer; return False if the client's queue is full. Large frames are not copied.

        Args:
            owner: The answer counts for this owner until libzmq has sent its last frame; None does not count it.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        try:
            # Only the first frame of a message can be refused.
            self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            self._socket.getsockopt(zmq.EVENTS)  # makes libzmq check again whether there is room
            try:
                self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            except zmq.Again:
                return False
        *parts, last = frames
        for part in parts:
            self._socket.send(part, zmq.SNDMORE, copy=False)
        # libzmq releases frames in their order, so the last one is enough to track.
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self._socket.send(frame, copy=False)
        if owner is not None:
            assert isinstance(frame.tracker, zmq.MessageTracker)
            size = sum(memoryview(each).nbytes for each in frames)
            self._sent.setdefault(owner, []).append(_Sent(peer, frame.tracker, size))
        return True

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
