"""The core without a compiler: the same calls and answers as the classes of ``_core.c``, by pyzmq's own methods.

``core`` says what each method means. Here every message is a list of Python's bytes, so this is slow.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import pyarrow as pa
import zmq
from xxhash import xxh3_64_intdigest

from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.messages.raw import RawMessages, raw_of

_MOST_BYTES = 2**31 - 1  # the largest offset of 32 bits
_MOST_COLUMNS = 8
_FRAME, _SAME, _NUMBER = range(3)  # the kinds of columns, with lists of frames as the last one
_DROPPING_SECONDS = 0.1

Socket: TypeAlias = zmq.Socket[bytes]
Taken: TypeAlias = tuple[list[tuple[int, int, int]], list[bool], int, int, int]


class Tee:
    def __init__(self, sock: Socket, drops: bool) -> None:
        self._sock, self._drops = sock, drops
        self._message: list[bytes] = []  # that is sent now
        self.sent = 0  # how many of its frames are
        self._is_full = False
        self._waits_from = 0.0
        self.published = self.full = 0
        self.waited = 0  # microseconds

    @property
    def frames(self) -> int:
        return len(self._message)

    def send(self, message: list[bytes]) -> int:
        self._message = message
        return self.send_on()

    def send_on(self) -> int:
        while self.sent < self.frames:
            try:
                error = self._try(zmq.NOBLOCK) and self._insist()
            except zmq.ZMQError as e:
                return int(e.errno or errno.EIO)
            if error:
                return error
            self.sent += 1
        self._message, self.sent, self._is_full = [], 0, False
        self.published += 1
        return 0

    def _try(self, flags: int) -> int:
        try:
            self._sock.send(
                self._message[self.sent], flags | (zmq.SNDMORE if self.sent + 1 < self.frames else 0)
            )
        except zmq.Again:
            return errno.EAGAIN
        return 0

    def _insist(self) -> int:
        self._sock.getsockopt(zmq.EVENTS)
        if not self._try(zmq.NOBLOCK):
            return 0
        self.full += not self._is_full
        self._is_full = True
        error, began = errno.EAGAIN, time.monotonic()
        if not self._drops or began >= self._waits_from:
            error = self._try(0)
            now = time.monotonic()
            self.waited += round((now - began) * 1e6)
            self._waits_from = now + _DROPPING_SECONDS
        if error and self._drops:
            self._sock.setsockopt(zmq.XPUB_NODROP, 0)
            error = self._try(zmq.NOBLOCK)
            self._sock.setsockopt(zmq.XPUB_NODROP, 1)
        return error


class Inbox:
    def __init__(self) -> None:
        self._messages: list[list[bytes]] = []
        self.size = 0
        self._turn = 0

    @property
    def messages(self) -> int:
        return len(self._messages)

    def take(
        self,
        waited: Sequence[Socket | int],
        sockets: int,
        most: int,
        room: int,
        largest: int,
        wait: int,
        gather: int,
        tee: Tee | None,
    ) -> Taken:
        if not 0 <= largest <= _MOST_BYTES:
            raise ValueError(f"largest is {largest}: what offsets of 32 bits reach is possible")
        socks: list[Any] = list(waited[:sockets])
        alarms = waited[sockets:]
        runs: list[tuple[int, int, int]] = []
        empty = [False] * sockets
        began, before, enough = time.monotonic(), self.messages, self.size + room
        excess = source = 0

        def has_room() -> bool:
            last = _MOST_BYTES - largest  # behind that a message may not fit
            return self.messages - before < most and self.size < enough and self.size <= last

        while True:
            error = tee.send_on() if tee is not None and tee.frames else 0
            for _ in socks:
                if error or excess or not has_room():
                    break
                source = self._turn % len(socks)
                self._turn += 1
                try:
                    message = socks[source].recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError as e:
                    empty[source] = e.errno == errno.EAGAIN
                    error = 0 if empty[source] else int(e.errno or errno.EIO)
                    continue
                empty[source] = False
                size = sum(map(len, message))
                if size > largest:
                    excess = size
                    continue
                self._messages.append(message)
                self.size += size
                runs.append((round((time.monotonic() - began) * 1e6), 1, source))
                error = tee.send(message) if tee is not None else 0
            is_blocked = error == errno.EAGAIN  # a subscriber has no room
            if (error and not is_blocked) or excess or not has_room():
                break
            if not is_blocked and not all(empty):
                continue
            left = (gather if runs or gather > wait else wait) / 1e6 - (time.monotonic() - began)
            if left <= 0:
                break
            try:
                waiting = [*(() if is_blocked else socks), *alarms]
                ready = zmq.select(waiting, [], [], 0 if is_blocked else left)[0]
            except zmq.ZMQError as e:
                error = int(e.errno or errno.EIO)
                break
            if any(one in ready for one in alarms):
                break
        return runs, empty, excess, source, 0 if error == errno.EAGAIN else error

    def hand_over(self) -> RawMessages:
        messages, self._messages, self.size = self._messages, [], 0
        return raw_of(messages)


class Outbox:
    def __init__(self, columns: Sequence[tuple[Any, ...]], rows: int) -> None:
        if not 1 <= len(columns) <= _MOST_COLUMNS or rows < 0:
            raise ValueError(f"{rows} rows of {len(columns)} columns: 1 to {_MOST_COLUMNS} are possible")
        frames = zip(*(_frames_of(rows, *column) for column in columns), strict=True)
        self._messages = [list(chain.from_iterable(message)) for message in frames]
        if not all(self._messages):
            raise ValueError("a row has no frame")
        self.waited = 0  # microseconds

    def size(self, start: int, end: int) -> int:
        self._check(start, end)
        return sum(len(frame) for message in self._messages[start:end] for frame in message)

    def give(self, sock: Socket, start: int, end: int, wait: int) -> tuple[int, int]:
        self._check(start, end)
        last = self.waited + wait
        for row in range(start, end):
            try:
                if not self._send(sock, self._messages[row], max(0, last - self.waited)):
                    return row, errno.EINTR
            except zmq.ZMQError as e:
                return row, int(e.errno or errno.EIO)
        return end, 0

    def _send(self, sock: Socket, message: list[bytes], wait: int) -> bool:
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

    def digest(self) -> int:
        return sum(map(_digest, self._messages)) % 2**64

    def _check(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= len(self._messages):
            raise ValueError(f"rows {start} to {end} of {len(self._messages)}")


def _digest(frames: list[bytes]) -> int:
    digest = 0
    for frame in frames:
        digest = xxh3_64_intdigest(frame, digest)
    return digest


def _frames_of(
    rows: int, kind: int, data: Any, offsets: Any, valid: Any, lists: Any, empty: bool, first: int, inner: int
) -> list[list[bytes]]:
    """The frames that a column has in each row; see ``columns``."""
    if kind == _SAME:
        return [[data]] * rows
    if kind == _NUMBER:
        if not 0 <= first <= 2**63 - 1 - rows:
            raise ValueError("a column has numbers below 0 or beyond 63 bits")
        return [[number.to_bytes(8, "big")] for number in range(first, first + rows)]
    try:
        if kind == _FRAME:
            column = pa.Array.from_buffers(pa.binary(), rows, [valid, offsets, data], offset=first)
        else:
            count = offsets.size // 4 - 1 - inner
            frames = pa.Array.from_buffers(pa.binary(), count, [None, offsets, data], offset=inner)
            column = pa.Array.from_buffers(FRAMES, rows, [valid, lists], offset=first, children=[frames])
        column.validate(full=True)
    except pa.ArrowInvalid as e:
        raise ValueError(f"a column is damaged: {e}") from e
    values = column.to_pylist()
    if kind == _FRAME:
        absent = [b""] if empty else []
        return [absent if value is None else [value] for value in values]
    if None in values:
        raise ValueError("a row of a column of lists is null")
    return list(values)
