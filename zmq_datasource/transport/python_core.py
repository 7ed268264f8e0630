"""The compiled core's two halves in Python, for where it could not be built: the same calls, the same answers.

``core.py`` says what they mean; what is given to them, and what they give, is as in ``_core.c``.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import zmq

from zmq_datasource.transport.origin import origin_of
from zmq_datasource.transport.pyzmq_internals import more_frames, recv_of, send_of

__all__ = ["Inbox", "Outbox"]

_NOBLOCK, _SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_MOST_BYTES = 2**31 - 1  # what offsets of 32 bits reach
_LARGEST_NUMBER = 2**63 - 1
_MOST_COLUMNS = 8


class Inbox:
    """See ``core.Inbox``."""

    def __init__(self) -> None:
        # In one list, so that a signal's handler that raises leaves messages that are whole.
        self._messages: list[list[bytes]] = []
        self.size = 0
        self.origin = -1

    @property
    def messages(self) -> int:
        return len(self._messages)

    def take(
        self, sock: zmq.Socket[bytes], most: int, room: int, largest: int, wait: bool
    ) -> tuple[int, int, int]:
        if not 0 <= largest <= _MOST_BYTES:
            raise ValueError(f"largest is {largest}: what offsets of 32 bits reach is possible")
        self.origin = -1  # known of a message that is taken alone
        recv, more = recv_of(sock), more_frames(sock)
        taken, enough = 0, self.size + room
        while taken < most and self.size < enough and self.size <= _MOST_BYTES - largest:
            try:
                frames = [recv(0 if wait and not taken else _NOBLOCK, most != 1)]
                more.ask()
                while more.flag.value:
                    frames.append(recv(_NOBLOCK, most != 1))
                    more.ask()
            except zmq.ZMQError as e:
                return taken, 0, int(e.errno or errno.EIO)
            if most == 1:
                self.origin = origin_of(frames[-1])
                frames = [frame.bytes for frame in frames]
            size = sum(map(len, frames))
            if size > largest:
                return taken, size, 0
            self._messages.append(frames)
            self.size += size
            taken += 1
        return taken, 0, 0

    def hand_over(self) -> tuple[bytes | bytearray | array[int], ...]:
        messages, self._messages, self.size = self._messages, [], 0
        first = [message[0] if len(message) > 1 else b"" for message in messages]
        middle = [message[1:-1] for message in messages]
        between = [frame for frames in middle for frame in frames]
        last = [message[-1] for message in messages]
        several = bytearray((len(messages) + 7) // 8)
        for row, message in enumerate(messages):
            several[row >> 3] |= (len(message) > 1) << (row & 7)
        columns = [part for frames in (first, between, last) for part in (b"".join(frames), _offsets(frames))]
        return *columns, _offsets(middle), several


def _offsets(parts: Sequence[Sequence[Any]]) -> array[int]:
    return array("i", accumulate(map(len, parts), initial=0))


class Outbox:
    """See ``core.Outbox``."""

    def __init__(self, columns: Sequence[tuple[Any, ...]], rows: int) -> None:
        if not 1 <= len(columns) <= _MOST_COLUMNS or rows < 0:
            raise ValueError(f"{rows} rows of {len(columns)} columns: 1 to {_MOST_COLUMNS} are possible")
        self._columns = [_Column(rows, *column) for column in columns]
        self._rows = rows
        # Made once, for sending and for counting.
        self._messages = [self._message(row) for row in range(rows)]
        self._ends = list(accumulate((sum(map(len, frames)) for frames in self._messages), initial=0))

    def _message(self, row: int) -> list[Any]:
        try:
            frames = [frame for column in self._columns for frame in column.frames(row)]
        except IndexError:
            frames = []
        if not frames:
            raise ValueError(f"row {row} has no frame, or is not within its column")
        return frames

    def size(self, start: int, end: int) -> int:
        rows = self._within(start, end)
        return self._ends[rows.stop] - self._ends[rows.start]

    def give(
        self, sock: zmq.Socket[bytes], start: int, end: int, wait: bool, refresh_every: int
    ) -> tuple[int, int]:
        send = send_of(sock)
        flags = 0 if wait else _NOBLOCK
        for row in self._within(start, end):
            if refresh_every > 0 and (row - start) % refresh_every == 0:
                sock.getsockopt(zmq.EVENTS)
            first, *rest = self._messages[row]
            try:
                try:
                    send(first, flags | _SNDMORE if rest else flags)
                except zmq.Again:
                    if wait:
                        raise
                    sock.getsockopt(zmq.EVENTS)
                    send(first, flags | _SNDMORE if rest else flags)
                if not _send_rest(send, rest):
                    return row, errno.EINTR
            except zmq.ZMQError as e:
                return row, int(e.errno or errno.EIO)
        return end, 0

    def _within(self, start: int, end: int) -> range:
        if not 0 <= start <= end <= self._rows:
            raise ValueError(f"rows {start} to {end} of {self._rows}")
        return range(start, end)


def _send_rest(send: Any, frames: Sequence[Any]) -> bool:
    """Send what follows a first frame; False if that was in vain.

    It is refused only if the connection is lost that the message was on its way to. libzmq has forgotten the message
    then, and swallows the rest of it, which must be given.
    """
    lost = False
    for at, frame in enumerate(frames, 1):
        try:
            send(frame, _NOBLOCK | _SNDMORE if at < len(frames) else _NOBLOCK)
        except zmq.Again:
            lost = True
    return not lost


class _Column:
    """What a column has of a row; an IndexError if it does not reach there."""

    def __init__(
        self,
        rows: int,
        kind: int,
        data: Any,
        offsets: Any,
        valid: Any,
        lists: Any,
        wide: bool,
        empty: bool,
        first: int,
        inner: int,
    ) -> None:
        if first < 0 or inner < 0 or max(first, inner) > _LARGEST_NUMBER - rows:
            raise ValueError("a column begins below 0, or its numbers do not fit 63 bits")
        self._data = _view(data, "B")
        self._offsets = _view(offsets, "q" if wide else "i")
        self._valid = None if valid is None else _view(valid, "B")
        self._lists = _view(lists, "i")
        self._empty, self._first, self._inner = empty, first, inner
        self._kind = kind

    def frames(self, row: int) -> Sequence[Any]:
        # Bound methods kept here would make a cycle, which holds the buffers until it is collected.
        return (_Column._frame, _Column._same, _Column._count, _Column._list)[self._kind](self, row)

    def _frame(self, row: int) -> Sequence[Any]:
        i = self._first + row
        if self._is_valid(i):
            return [self._element(i)]
        return [b""] if self._empty else []

    def _same(self, row: int) -> Sequence[Any]:
        return [self._data]

    def _count(self, row: int) -> Sequence[Any]:
        return [(self._first + row).to_bytes(8, "big")]

    def _list(self, row: int) -> Sequence[Any]:
        i = self._first + row
        begin, end = _range(self._lists, i)
        if not self._is_valid(i):
            raise IndexError(i)
        return [self._element(self._inner + at) for at in range(begin, end)]

    def _is_valid(self, i: int) -> bool:
        return self._valid is None or bool(self._valid[i >> 3] >> (i & 7) & 1)

    def _element(self, i: int) -> memoryview:
        begin, end = _range(self._offsets, i)
        if end > len(self._data):
            raise IndexError(i)
        return self._data[begin:end]


def _view(buffer: Any, kind: Literal["B", "i", "q"]) -> memoryview:
    items = array(kind)
    size = 0 if buffer is None else memoryview(buffer).nbytes // items.itemsize * items.itemsize
    return memoryview(buffer)[:size].cast(kind) if size else memoryview(items)


def _range(offsets: memoryview, i: int) -> tuple[int, int]:
    begin, end = offsets[i], offsets[i + 1]
    if not 0 <= begin <= end:
        raise IndexError(i)
    return begin, end
