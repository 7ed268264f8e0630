"""Messages between sockets and Arrow's buffers, many in one call: by the compiled core, or without it in Python.

The compiled core (``_core.c``) is built with the package wherever there is a C compiler. Without it everything works
in the same way and more slowly. ``ZMQ_DATASOURCE_CORE=python`` in the environment leaves it out; ``NAME`` says which is
in use.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import zmq

from zmq_datasource.messages.schemas import FRAMES, MAX_MESSAGE_BYTES
from zmq_datasource.transport import python_core
from zmq_datasource.transport.pyzmq_internals import functions_of_libzmq

__all__ = [
    "NAME",
    "Column",
    "FrameColumn",
    "FramesColumn",
    "Inbox",
    "NumberColumn",
    "Outbox",
    "SameColumn",
    "Taken",
]


def _load() -> Any:
    """The compiled core, ready for use; None if there is none."""
    if os.environ.get("ZMQ_DATASOURCE_CORE") == "python":
        return None
    try:
        from zmq_datasource.transport import _core  # type: ignore[attr-defined]  # noqa: PLC0415 - it may not be there
    except ImportError:
        return None
    addresses = functions_of_libzmq()
    if addresses is None:
        return None
    _core.load(addresses)
    return _core


_compiled = _load()

# Which is in use: "compiled" or "python".
NAME = "python" if _compiled is None else "compiled"


class Taken(NamedTuple):
    """What one ``Inbox.take`` has done.

    Attributes:
        messages: How many were taken.
        excess: The size of one more that was discarded, because it is larger than a row can be; 0 if none was.
        empty: Whether there are no more.
    """

    messages: int
    excess: int
    empty: bool


class Inbox:
    """Messages that were taken from sockets and not handed over. For one thread."""

    def __init__(self) -> None:
        self._filled: Any = python_core.Inbox() if _compiled is None else _compiled.Inbox()

    @property
    def messages(self) -> int:
        """How many it holds."""
        return int(self._filled.messages)

    @property
    def size(self) -> int:
        """The bytes of their frames."""
        return int(self._filled.size)

    @property
    def origin(self) -> int:
        """The descriptor of the connection that the last message came by, if it was taken alone (``most=1``)."""
        return int(self._filled.origin)

    def take(
        self,
        sock: zmq.Socket[bytes],
        most: int,
        room: int,
        wait: bool = False,
        largest: int = MAX_MESSAGE_BYTES,
    ) -> Taken:
        """Take messages until none is there, or no room.

        Args:
            most: Their number.
            room: Bytes after which it is enough; the last message may be larger.
            wait: Whether to wait for the first, up to the socket's RCVTIMEO.
            largest: Bytes of the largest message that is kept. A larger one is discarded, and is the last.

        Raises:
            zmq.ZMQError: The socket cannot be received from. What was taken before is kept.
            MemoryError: There is no memory for a message, which is lost.
        """
        if sock.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        given = sock if _compiled is None else sock.underlying
        messages, excess, error = self._filled.take(given, most, room, largest, wait)
        if error and error != errno.EAGAIN:
            if error == errno.ENOMEM:
                raise MemoryError("receiving a message")
            raise zmq.ZMQError(error)
        return Taken(messages, excess, bool(error))

    def hand_over(self) -> pa.ListArray:
        """The messages, as lists of their frames (``messages.schemas.FRAMES``); the inbox is empty then."""
        data, frames, messages = map(pa.py_buffer, self._filled.hand_over())
        count = messages.size // 4 - 1
        contents = pa.Array.from_buffers(pa.binary(), frames.size // 4 - 1, [None, frames, data])
        return pa.Array.from_buffers(FRAMES, count, [None, messages], children=[contents])


# Rows to messages: the columns of a message's frames, in their order.


@dataclass(frozen=True)
class FrameColumn:
    """A frame of each row: binary, of 32 or 64 bit offsets. A null is no frame, or with ``empty`` one without bytes."""

    values: pa.Array
    empty: bool = False

    def described(self) -> tuple[Any, ...]:
        valid, offsets, data = self.values.buffers()
        wide = pa.types.is_large_binary(self.values.type)
        return 0, data, offsets, valid, None, wide, self.empty, self.values.offset, -1

    def frames(self, rows: int) -> list[list[bytes]]:
        none = [b""] * self.empty
        return [none if value is None else [value] for value in self.values[:rows].to_pylist()]


@dataclass(frozen=True)
class SameColumn:
    """The same frame in each row."""

    content: bytes

    def described(self) -> tuple[Any, ...]:
        return 1, self.content, None, None, None, False, False, 0, -1

    def frames(self, rows: int) -> list[list[bytes]]:
        return [[self.content]] * rows


@dataclass(frozen=True)
class NumberColumn:
    """A frame of 8 bytes: a number, big-endian, that goes on from row to row.

    Attributes:
        first: That of row 0.
    """

    first: int

    def described(self) -> tuple[Any, ...]:
        return 2, None, None, None, None, False, False, self.first, -1

    def frames(self, rows: int) -> list[list[bytes]]:
        return [[number.to_bytes(8, "big")] for number in range(self.first, self.first + rows)]


@dataclass(frozen=True)
class FramesColumn:
    """All frames of each row, as a list of binary.

    Attributes:
        number: If not -1, each message gets its number (of row 0 this) behind its first frame; one of a single
            frame gets an empty frame in front of it, so that its value stays the last.
    """

    messages: pa.Array
    number: int = -1

    def described(self) -> tuple[Any, ...]:
        messages = self.messages
        contents = messages.values
        if contents.offset:
            messages = pa.concat_arrays([messages, messages.slice(0, 0)])
            contents = messages.values
        _, offsets, data = contents.buffers()
        wide = pa.types.is_large_binary(contents.type)
        return 3, data, offsets, None, messages.buffers()[1], wide, False, messages.offset, self.number

    def frames(self, rows: int) -> list[list[bytes]]:
        messages: list[list[bytes]] = self.messages[:rows].to_pylist()
        if self.number < 0:
            return messages
        numbers = (number.to_bytes(8, "big") for number in range(self.number, self.number + rows))
        return [
            [b"", number, *frames] if len(frames) <= 1 else [frames[0], number, *frames[1:]]
            for number, frames in zip(numbers, messages, strict=False)
        ]


Column: TypeAlias = FrameColumn | SameColumn | NumberColumn | FramesColumn


class Outbox:
    """Rows that are to be messages.

    Args:
        columns: What each message has, in the order of its frames.
        rows: How many.

    Raises:
        ValueError: A row has no frame, or a column's offsets lead out of it.
    """

    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        self._rows: Any
        if _compiled is None:
            self._rows = python_core.Outbox([column.frames(rows) for column in columns], rows)
        else:
            self._rows = _compiled.Outbox(tuple(column.described() for column in columns), rows)

    def size(self, start: int, end: int) -> int:
        """The bytes of all frames of the rows from ``start`` up to ``end``."""
        return int(self._rows.size(start, end))

    def give(
        self, sock: zmq.Socket[bytes], start: int, end: int, wait: bool = False, refresh_every: int = 0
    ) -> int:
        """Send rows from ``start`` up to ``end``, as far as there is room.

        A message is sent whole or not at all. Before one counts as refused libzmq has looked for room: without that
        it may refuse although the queue has some (docs/zeromq-facts.md).

        Args:
            wait: Whether to wait for room for each, up to the socket's SNDTIMEO.
            refresh_every: After so many messages libzmq is made to look for room, where a queue that it takes for full
                would drop without refusing; 0 for never.

        Returns:
            The row that found no room, or ``end``.

        Raises:
            zmq.ZMQError: The socket cannot be sent to.
        """
        if sock.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        given = sock if _compiled is None else sock.underlying
        position, error = self._rows.give(given, start, end, wait, refresh_every)
        if error and error != errno.EAGAIN:
            raise zmq.ZMQError(error)
        return int(position)
