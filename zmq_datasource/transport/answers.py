"""The answers of a ROUTER: it waits for no client, and knows what the network has not taken yet.

libzmq queues messages, and bounds their number and not their bytes. A server that looks at ``bytes``, and at ``of`` a
client, before it answers has a bound for its memory, whatever its clients do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import zmq

from zmq_datasource.transport.core import Outbox
from zmq_datasource.transport.kernel import find_dead_peers
from zmq_datasource.transport.spec import frame_limit

__all__ = ["Answers", "set_router_options"]


def set_router_options(sock: zmq.Socket[bytes], rcvhwm: int, sndhwm: int, most_request_bytes: int) -> None:
    """Set the options of a ROUTER that answers: it hears of a client that is gone, and takes no large request."""
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
    """What a ROUTER sends; in one thread. An answer is begun and then finished, with nothing sent in between.

    Args:
        sock: The ROUTER.

    Attributes:
        stuck: Whether a client's queue had no room; its user sets it back.
    """

    def __init__(self, sock: zmq.Socket[bytes]) -> None:
        self._socket = sock
        self._sent: dict[Hashable, list[_Sent]] = {}
        self.stuck = False

    def begin(self, peer: bytes) -> bool:
        """Take a place in the queue of a client; ``finish`` must follow. False if there is none.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        for _ in range(2):
            try:
                # Of a message only this frame can be refused.
                self._socket.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
                return True
            except zmq.Again:
                self._socket.getsockopt(zmq.EVENTS)  # libzmq may not have looked whether there is room
        self.stuck = True
        return False

    def finish(
        self, peer: bytes, frames: Sequence[Any], owner: Hashable = None, size: int | None = None
    ) -> None:
        """Send the frames of an answer that was begun. Large frames are not copied.

        Args:
            owner: Counts the answer until libzmq has handed its last frame on; None for a short one.
            size: Its bytes, if messages that were given before belong to it; else those of the frames.
        """
        *parts, last = frames
        for part in parts:
            self._socket.send(part, zmq.SNDMORE, copy=False)
        if owner is None:
            self._socket.send(last)
            return
        # libzmq lets go of frames in their order.
        frame = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        self._socket.send(frame, copy=False)
        assert isinstance(frame.tracker, zmq.MessageTracker)
        if size is None:
            size = sum(memoryview(each).nbytes for each in frames)
        self._sent.setdefault(owner, []).append(_Sent(peer, frame.tracker, size))

    def send(
        self, peer: bytes, frames: Sequence[Any], owner: Hashable = None, size: int | None = None
    ) -> bool:
        """Begin and finish an answer; False if the client's queue has no room.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        has_place = self.begin(peer)
        if has_place:
            self.finish(peer, frames, owner, size)
        return has_place

    def give(self, outbox: Outbox, rows: int) -> bool:
        """Send rows whose first frame is the client; False if its queue had no room for all of them.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        return outbox.give(self._socket, 0, rows) == rows

    def of(self, owner: Hashable) -> list[bytes]:
        """The connections by which answers of an owner are on their way."""
        left = [sent for sent in self._sent.get(owner, ()) if not sent.tracker.done]
        if left:
            self._sent[owner] = left
        else:
            self._sent.pop(owner, None)
        return [sent.peer for sent in left]

    @property
    def bytes(self) -> int:
        """Bytes of all answers that are on their way."""
        return sum(sent.size for owner in list(self._sent) if self.of(owner) for sent in self._sent[owner])
