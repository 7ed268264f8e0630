"""The core without a compiler: the same calls and answers as the two classes of ``_core.c``, by pyzmq's own methods.

``core`` says what each method means. Here every message is a list of Python's bytes, so this is slow.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from itertools import accumulate, chain

import zmq
from xxhash import xxh3_64_intdigest

from zmq_datasource.messages.raw import RawMessages, raw_of
from zmq_datasource.transport.columns import Column

_MOST_BYTES = 2**31 - 1  # the largest offset of 32 bits
_MOST_COLUMNS = 8


class Inbox:
    def __init__(self) -> None:
        self._messages: list[list[bytes]] = []
        self.size = 0

    @property
    def messages(self) -> int:
        return len(self._messages)

    def take(
        self, sock: zmq.Socket[bytes], most: int, room: int, largest: int, wait: bool
    ) -> tuple[int, int, int]:
        if not 0 <= largest <= _MOST_BYTES:
            raise ValueError(f"largest is {largest}: what offsets of 32 bits reach is possible")
        taken, enough = 0, self.size + room
        while taken < most and self.size < enough and self.size <= _MOST_BYTES - largest:
            flags = 0 if wait and not taken else zmq.NOBLOCK
            try:
                message = sock.recv_multipart(flags)
            except zmq.ZMQError as e:
                return taken, 0, int(e.errno or errno.EIO)
            size = sum(map(len, message))
            if size > largest:
                return taken, size, 0
            self._messages.append(message)
            self.size += size
            taken += 1
        return taken, 0, 0

    def hand_over(self) -> RawMessages:
        messages, self._messages, self.size = self._messages, [], 0
        return raw_of(messages)


class Outbox:
    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        if not 1 <= len(columns) <= _MOST_COLUMNS or rows < 0:
            raise ValueError(f"{rows} rows of {len(columns)} columns: 1 to {_MOST_COLUMNS} are possible")
        frames = zip(*(column.frames(rows) for column in columns), strict=True)
        self._messages = [list(chain.from_iterable(message)) for message in frames]
        if not all(self._messages):
            raise ValueError("a row has no frame")
        self.waited = 0  # microseconds
        self._ends = list(accumulate((sum(map(len, message)) for message in self._messages), initial=0))

    def size(self, start: int, end: int) -> int:
        self._check(start, end)
        return self._ends[end] - self._ends[start]

    def give(
        self, sock: zmq.Socket[bytes], start: int, end: int, wait: int, refresh_every: int
    ) -> tuple[int, int]:
        self._check(start, end)
        last = self.waited + wait
        for row in range(start, end):
            if refresh_every > 0 and (row - start) % refresh_every == 0:
                sock.getsockopt(zmq.EVENTS)
            try:
                if not self._send(sock, self._messages[row], max(0, last - self.waited)):
                    return row, errno.EINTR
            except zmq.ZMQError as e:
                return row, int(e.errno or errno.EIO)
        return end, 0

    def _send(self, sock: zmq.Socket[bytes], message: list[bytes], wait: int) -> bool:
        """Send a message; False if its connection was lost meanwhile, so that it must be sent again.

        Args:
            wait: How many microseconds to wait for room.

        Raises:
            zmq.Again: There is no room. Nothing was sent.
        """
        first, *rest = message
        flags = zmq.SNDMORE if rest else 0
        try:
            sock.send(first, flags | zmq.NOBLOCK)
        except zmq.Again:
            began = time.monotonic()
            try:
                # Also without a wait: libzmq may not have looked whether there is room. A signal does not prolong it.
                sock.poll(-(-wait // 1000), zmq.POLLOUT)
            finally:
                self.waited += round((time.monotonic() - began) * 1e6) if wait else 0
            sock.send(first, flags | zmq.NOBLOCK)
        is_sent = True
        for left, frame in zip(reversed(range(len(rest))), rest, strict=True):
            try:
                sock.send(frame, zmq.SNDMORE | zmq.NOBLOCK if left else zmq.NOBLOCK)
            except zmq.Again:
                # Later frames are refused only if the connection of the first one is lost. libzmq then discards the
                # rest of the message, and still wants all of it: otherwise the next message would be taken for a part
                # of it.
                is_sent = False
        return is_sent

    def digest(self, _: int | None = None) -> int:
        return sum(map(_digest, self._messages)) % 2**64

    def _check(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= len(self._messages):
            raise ValueError(f"rows {start} to {end} of {len(self._messages)}")


def _digest(frames: list[bytes]) -> int:
    digest = 0
    for frame in frames:
        digest = xxh3_64_intdigest(frame, digest)
    return digest
