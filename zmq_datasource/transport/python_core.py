"""The compiled core's two halves in Python, for where it could not be built: the same calls, the same answers."""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import zmq

from zmq_datasource.transport.pyzmq_internals import more_frames, recv_of, send_of

__all__ = ["Inbox", "Outbox"]

_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_MOST_BYTES = 2**31 - 1  # what 32-bit offsets reach


class Inbox:
    """See ``core.Inbox`` and ``_core.c``; ``take`` is given the pyzmq socket."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._ends = array("i", [0])
        self.size = 0
        self.origin = -1

    @property
    def messages(self) -> int:
        return len(self._ends) - 1

    def take(
        self, sock: zmq.Socket[bytes], most: int, room: int, largest: int, wait: bool
    ) -> tuple[int, int, int]:
        recv, more = recv_of(sock), more_frames(sock)
        taken, start, excess = 0, self.size, 0
        while taken < most and self.size - start < room:
            try:
                first = recv(0 if wait and not taken else _NOBLOCK, most != 1)
            except zmq.ZMQError as e:
                return taken, 0, int(e.errno or errno.EIO)
            frames = [first]
            more.ask()
            while more.flag.value:
                frames.append(recv(_NOBLOCK, most != 1))
                more.ask()
            if most == 1:
                self.origin = int(frames[-1].get(zmq.MessageOption.SRCFD))
                frames = [frame.bytes for frame in frames]
            size = sum(map(len, frames))
            if size > largest:
                excess = size
                break
            if self.size + size > _MOST_BYTES:
                return taken, 0, errno.ENOMEM
            self._frames += frames
            self._ends.append(len(self._frames))
            self.size += size
            taken += 1
        return taken, excess, 0

    def hand_over(self) -> tuple[bytes, array[int], array[int]]:
        frames, ends = self._frames, self._ends
        self._frames, self._ends, self.size = [], array("i", [0]), 0
        return b"".join(frames), array("i", accumulate(map(len, frames), initial=0)), ends


class Outbox:
    """See ``core.Outbox``; ``give`` is given the pyzmq socket.

    Args:
        columns: The frames that each has of every row.
    """

    def __init__(self, columns: Sequence[Sequence[list[bytes]]], rows: int) -> None:
        messages, *others = columns
        for column in others:
            messages = [frames + more for frames, more in zip(messages, column, strict=False)]
        if len(messages) < rows or not all(messages):
            wrong = next((row for row, frames in enumerate(messages) if not frames), len(messages))
            raise ValueError(f"row {wrong} has no frame, or is not within its column")
        self._messages = messages
        self._ends = list(accumulate((sum(map(len, frames)) for frames in messages), initial=0))
        self._rows = rows

    def size(self, start: int, end: int) -> int:
        return self._ends[end] - self._ends[start]

    def give(
        self, sock: zmq.Socket[bytes], start: int, end: int, wait: bool, refresh_every: int
    ) -> tuple[int, int]:
        if start < 0 or end > self._rows:
            raise ValueError(f"rows {start} to {end} of {self._rows}")
        send, flags = send_of(sock), 0 if wait else _NOBLOCK
        for row in range(start, end):
            if refresh_every and (row - start) % refresh_every == 0:
                sock.getsockopt(zmq.EVENTS)
            message = self._messages[row]
            try:
                try:
                    _send(send, message, flags)
                except zmq.Again:
                    if wait:
                        raise
                    sock.getsockopt(zmq.EVENTS)
                    _send(send, message, flags)
            except zmq.ZMQError as e:
                return row, int(e.errno or errno.EIO)
        return end, 0


def _send(send: Callable[..., Any], message: Sequence[bytes], flags: int) -> None:
    """A queue has room for a message or has not: once the first frame is in, none of the others is refused."""
    if len(message) == 1:
        send(message[0], flags)
        return
    send(message[0], flags | _SNDMORE)
    for frame in message[1:-1]:
        send(frame, _SNDMORE)
    send(message[-1], 0)
