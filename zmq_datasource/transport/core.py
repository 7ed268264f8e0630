"""Messages between sockets and Arrow's buffers, many in one call: by the compiled core, or without it in Python.

The compiled core (``_core.c``) is built with the package wherever there is a C compiler. Without it everything works
in the same way and more slowly. ``ZMQ_DATASOURCE_CORE=python`` in the environment leaves it out; ``NAME`` says which is
in use.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import zmq

from zmq_datasource.messages.raw import RawMessages
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
    "columns_of",
]


_log = logging.getLogger(__name__)


def _load() -> Any:
    """The compiled core, ready for use; without one the core in Python."""
    if os.environ.get("ZMQ_DATASOURCE_CORE") == "python":
        return python_core
    try:
        compiled = import_module("zmq_datasource.transport._core")
    except ModuleNotFoundError:
        return python_core
    except ImportError as e:
        _log.warning("the compiled core cannot be loaded, so Python does its work, more slowly: %s", e)
        return python_core
    addresses = functions_of_libzmq()
    if addresses is None:
        return python_core
    compiled.load(addresses)
    return compiled


_implementation = _load()

# Which is in use: "compiled" or "python".
NAME = "python" if _implementation is python_core else "compiled"


def _error(number: int) -> zmq.ZMQError:
    return zmq.ContextTerminated() if number == zmq.ETERM else zmq.ZMQError(number)


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
        self._filled: Any = _implementation.Inbox()

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
        """The descriptor of the connection that the last message came by; -1 where that is not known.

        The core in Python knows it of a message that was taken alone (``most=1``).
        """
        return int(self._filled.origin)

    def take(
        self,
        sock: zmq.Socket[bytes],
        most: int,
        room: int,
        wait: bool = False,
        largest: int | None = None,
    ) -> Taken:
        """Take messages until none is there, or no room; or a signal came, whose handler runs then.

        An inbox reaches 2 GiB at most, and takes nothing if it has no room for one of the largest messages.

        Args:
            most: Their number.
            room: Bytes after which it is enough; the last message may be larger.
            wait: Whether to wait for the first, up to the socket's RCVTIMEO.
            largest: Bytes of the largest message that is kept, below 2 GiB; by default what a row can hold. A larger
                one is discarded, and is the last.

        Raises:
            zmq.ZMQError: The socket cannot be received from. What was taken before is kept.
            MemoryError: There is no memory for a message, which is lost. What was taken before is kept.
        """
        if largest is None:
            largest = MAX_MESSAGE_BYTES
        messages, excess, error = 0, 0, errno.EINTR
        while error == errno.EINTR and not messages:
            if sock.closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            messages, excess, error = self._filled.take(sock, most, room, largest, wait)
        if error == errno.ENOMEM:
            raise MemoryError("receiving a message")
        if error not in (0, errno.EAGAIN, errno.EINTR):
            raise _error(error)
        return Taken(messages, excess, error == errno.EAGAIN)

    def hand_over(self) -> RawMessages:
        """The messages; the inbox is empty then."""
        count = self.messages
        buffers = [pa.py_buffer(filled) for filled in self._filled.hand_over()]
        first, middle, last = (_column(*buffers[at : at + 2]) for at in (0, 2, 4))
        lists, several = buffers[6:]
        if count:
            first = pa.Array.from_buffers(pa.binary(), count, [several, *first.buffers()[1:]])
        return RawMessages(
            first,
            last,
            pa.Array.from_buffers(FRAMES, count, [None, lists], children=[middle]) if len(middle) else None,
        )


def _column(data: pa.Buffer, ends: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(), ends.size // 4 - 1, [None, ends, data])


# Rows to messages: the columns of a message's frames, in their order.


@dataclass(frozen=True)
class FrameColumn:
    """A frame of each row: binary or text, of 32 or 64 bit offsets.

    A null is no frame, or with ``empty`` one without bytes.
    """

    values: pa.Array
    empty: bool = False

    def described(self) -> tuple[Any, ...]:
        wide = _is_wide(self.values.type)
        valid, offsets, data = self.values.buffers()
        return 0, data, offsets, valid, None, wide, self.empty, self.values.offset, 0


@dataclass(frozen=True)
class SameColumn:
    """The same frame in each row."""

    content: bytes

    def described(self) -> tuple[Any, ...]:
        return 1, self.content, None, None, None, False, False, 0, 0


@dataclass(frozen=True)
class NumberColumn:
    """A frame of 8 bytes: a number, big-endian, that goes on from row to row.

    Attributes:
        first: That of row 0.
    """

    first: int

    def described(self) -> tuple[Any, ...]:
        return 2, None, None, None, None, False, False, self.first, 0


@dataclass(frozen=True)
class FramesColumn:
    """Frames of each row, as a list of binary; neither a list nor a frame is null."""

    messages: pa.Array

    def described(self) -> tuple[Any, ...]:
        messages = self.messages
        if not pa.types.is_list(messages.type):
            raise TypeError(f"lists with offsets of 32 bits are needed, and not {messages.type}")
        wide = _is_wide(messages.type.value_type)
        frames = messages.values
        valid, lists = messages.buffers()[:2]
        _, offsets, data = frames.buffers()
        return 3, data, offsets, valid, lists, wide, False, messages.offset, frames.offset


def _is_wide(values: pa.DataType) -> bool:
    """Whether offsets have 64 bits.

    Raises:
        TypeError: There are no offsets.
    """
    if pa.types.is_binary(values) or pa.types.is_string(values):
        return False
    if pa.types.is_large_binary(values) or pa.types.is_large_string(values):
        return True
    raise TypeError(f"frames are binary, and not {values}")


Column: TypeAlias = FrameColumn | SameColumn | NumberColumn | FramesColumn


def columns_of(raw: RawMessages, number: int | None = None) -> list[Column]:
    """Raw messages as they came.

    Args:
        number: If given, each gets its number (the first of them this) after its first frame; one of a single frame
            gets an empty frame in front of it, so that its value stays the last.
    """
    numbers: list[Column] = [] if number is None else [NumberColumn(number)]
    middle: list[Column] = [] if raw.middle is None else [FramesColumn(raw.middle)]
    return [FrameColumn(raw.first, empty=bool(numbers)), *numbers, *middle, FrameColumn(raw.last)]


class Outbox:
    """Rows that are to be messages.

    Args:
        columns: What each message has, in the order of its frames.
        rows: How many.

    Raises:
        ValueError: A row has no frame, a column's offsets lead out of it, or its numbers do not fit 63 bits.
        TypeError: A column has no binary.
    """

    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        self._rows: Any = _implementation.Outbox(tuple(column.described() for column in columns), rows)

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
            zmq.ZMQError: The socket cannot be sent to, and may hold a part of a message: it is to be closed.
        """
        error = errno.EINTR
        while error == errno.EINTR:
            if sock.closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            start, error = self._rows.give(sock, start, end, wait, refresh_every)
        if error not in (0, errno.EAGAIN):
            raise _error(error)
        return int(start)
