"""Moves many messages in one call between sockets and Arrow's buffers, by the compiled core or the Python core.

The compiled core (``_core.c``) is built with the package where there is a C compiler. Without it ``python_core`` gives
the same results more slowly. ``ZMQ_DATASOURCE_CORE=python`` in the environment chooses the Python core; ``NAME`` says
which core is in use.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import pyarrow as pa
import zmq

from zmq_datasource.messages.columns import FRAMES, MAX_MESSAGE_BYTES
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.transport import python_core
from zmq_datasource.transport.columns import Column

_log = logging.getLogger(__name__)

# The functions of libzmq that the compiled core calls, in the order in which it takes their addresses.
_FUNCTIONS = (
    *(
        "zmq_msg_init",
        "zmq_msg_recv",
        "zmq_msg_data",
        "zmq_msg_size",
        "zmq_msg_more",
        "zmq_msg_close",
        "zmq_msg_send",
    ),
    *("zmq_send", "zmq_poll", "zmq_getsockopt", "zmq_setsockopt", "zmq_errno"),
    *("zmq_stopwatch_start", "zmq_stopwatch_intermediate", "zmq_stopwatch_stop"),
)


def _addresses(module: str, names: Sequence[str]) -> bytes:
    """The addresses of functions of a library, found through a module that is linked with it. None promises that."""
    library = ctypes.CDLL(import_module(module).__file__)
    return bytes(
        (ctypes.c_void_p * len(names))(*(ctypes.cast(library[name], ctypes.c_void_p) for name in names))
    )


def _load() -> Any:
    """The compiled core, with pyzmq's own libzmq and xxhash loaded, or the Python core if that is impossible."""
    # In other versions of libzmq the size of a message may differ.
    if os.environ.get("ZMQ_DATASOURCE_CORE") != "python" and zmq.zmq_version_info()[0] == 4:
        try:
            compiled = import_module("zmq_datasource.transport._core")
            compiled.load(
                _addresses("zmq.backend.cython._zmq", _FUNCTIONS)
                + _addresses("xxhash._xxhash", ["XXH3_64bits_withSeed"])
            )
            return compiled
        except ModuleNotFoundError:  # it was not built
            pass
        except (ImportError, AttributeError, OSError, ValueError) as e:
            _log.warning("the compiled core cannot be used, so Python does its work, more slowly: %s", e)
    return python_core


# The core in use; a test sets the other one.
implementation: Any = _load()

# Its name: "compiled" or "python".
NAME = "python" if implementation is python_core else "compiled"


def _error(number: int) -> zmq.ZMQError:
    return zmq.ContextTerminated() if number == zmq.ETERM else zmq.ZMQError(number)


class Run(NamedTuple):
    """Messages that were taken from one socket within a millisecond.

    Attributes:
        at: When the last of them was taken, in microseconds since the call began.
        messages: How many.
        source: The position of the socket among those of the call.
    """

    at: int
    messages: int
    source: int


class Taken(NamedTuple):
    """The result of one ``Inbox.take``.

    Attributes:
        runs: What was taken, in order.
        empty: For each socket, whether it had no more messages when it was tried last.
        excess: The size of one more message, which was discarded because it is too large; 0 if there was none.
        excess_source: The position of its socket.
    """

    runs: Sequence[Run]
    empty: Sequence[bool]
    excess: int
    excess_source: int

    @property
    def messages(self) -> int:
        """The number of messages that were taken."""
        return sum(run.messages for run in self.runs)


# How long one try to send a message on waits for room.
_ROOM_MS = 5


class Tee:
    """Sends each message that an inbox takes on to an XPUB, as it came. For the thread of the inbox.

    If the queue of a subscriber is full, ``drops`` decides. With it the tee waits up to 5 ms for room, then lets libzmq
    drop messages for this subscriber, and does not wait again for 100 ms. Without it the message stays in the tee, and
    the inbox takes nothing until it has left.

    Args:
        sock: An XPUB with XPUB_NODROP.
    """

    def __init__(self, sock: zmq.Socket[bytes], drops: bool) -> None:
        sock.setsockopt(zmq.SNDTIMEO, _ROOM_MS)
        self._sock = sock
        self._tee = implementation.Tee(sock, drops)

    @property
    def pending(self) -> bool:
        """Whether a message, or the rest of one, waits for room."""
        return int(self._tee.sent) < int(self._tee.frames)

    @property
    def published(self) -> int:
        """The number of messages that libzmq has taken."""
        return int(self._tee.published)

    @property
    def full(self) -> int:
        """The number of messages that have found a full queue: the high-water mark was reached."""
        return int(self._tee.full)

    @property
    def waited_seconds(self) -> float:
        """How long sending has waited for room."""
        return self._tee.waited / 1e6  # type: ignore[no-any-return]

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for room for the message that waits, and then drop it where there is none.

        Call it before the socket is closed: libzmq may abort if a socket is closed within a message (libzmq#3442).

        Raises:
            zmq.ZMQError: Sending fails.
        """
        nothing, deadline = Inbox(), time.monotonic() + seconds
        while self.pending and (left := deadline - time.monotonic()) > 0:
            nothing.take([], 1, 1, wait=left, tee=self)
        if self.pending:
            self._sock.setsockopt(zmq.XPUB_NODROP, 0)
            nothing.take([], 1, 1, tee=self)


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


class Inbox:
    """Takes messages from sockets, and hands them over as columns. For one thread."""

    def __init__(self) -> None:
        self._filled = implementation.Inbox()

    @property
    def messages(self) -> int:
        """The number of messages in it."""
        return int(self._filled.messages)

    @property
    def size(self) -> int:
        """The bytes of the messages' frames."""
        return int(self._filled.size)

    def take(
        self,
        socks: Sequence[zmq.Socket[bytes]],
        most: int,
        room: int,
        *,
        wait: float = 0.0,
        gather: float = 0.0,
        largest: int | None = None,
        tee: Tee | None = None,
        alarms: Sequence[zmq.Socket[bytes] | int] = (),
    ) -> Taken:
        """Take messages from sockets in turn, until they have none, the room is used up, or a signal arrives.

        It waits without the GIL. After a signal its handler runs, and the call returns. An inbox holds at most 2 GiB,
        and takes nothing if a message of the largest size would not fit any more.

        Args:
            most: Limit of the number of messages.
            room: Bytes after which taking ends; the last message may exceed them.
            wait: How many seconds to wait for the first message.
            gather: For how many seconds from its beginning the call goes on after the first message.
            largest: Limit of a message's bytes, below 2 GiB; by default that of a row. A larger message is discarded,
                and taking ends.
            tee: Sends on what is taken. While it waits for room (``Tee.pending``), nothing is taken.
            alarms: Sockets and descriptors that end a wait when they are readable.

        Raises:
            zmq.ZMQError: Receiving or sending fails. Messages that were taken before are kept.
            MemoryError: There is no memory for a message, which is lost. Messages that were taken before are kept.
        """
        if largest is None:
            largest = MAX_MESSAGE_BYTES
        if any(sock.closed for sock in (*socks, *alarms) if not isinstance(sock, int)):
            raise zmq.ZMQError(zmq.ENOTSOCK)
        runs, empty, excess, source, error = self._filled.take(
            (*socks, *alarms),
            len(socks),
            most,
            room,
            largest,
            _microseconds(wait),
            _microseconds(gather),
            None if tee is None else tee._tee,
        )
        if error == errno.ENOMEM:
            raise MemoryError("receiving a message")
        if error not in (0, errno.EINTR):
            raise _error(error)
        return Taken([Run(*run) for run in runs], [bool(one) for one in empty], excess, source)

    def hand_over(self) -> RawMessages:
        """Return the messages, and empty the inbox."""
        if isinstance(self._filled, python_core.Inbox):
            return self._filled.hand_over()
        count = self.messages
        buffers = [pa.foreign_buffer(*filled) for filled in self._filled.hand_over()]
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


def digest(columns: Sequence[Column], rows: int) -> int:
    """The sum of the rows' digests, modulo 2^64. Raises what ``Outbox`` does.

    The digest of a row is a chain over its frames: XXH3-64 of each frame, seeded with the hash of the frame before it,
    and with 0 for the first.
    """
    return int(_outbox(columns, rows).digest())


def _outbox(columns: Sequence[Column], rows: int) -> Any:
    return implementation.Outbox(tuple(column.described() for column in columns), rows)


class Outbox:
    """Sends rows as messages.

    Args:
        columns: The parts of each message, in the order of its frames.
        rows: The number of rows.

    Raises:
        ValueError: A row has no frame, a column has wrong offsets, or its numbers do not fit 63 bits.
        TypeError: A column is not binary.
    """

    def __init__(self, columns: Sequence[Column], rows: int) -> None:
        self._rows = _outbox(columns, rows)

    def size(self, start: int, end: int) -> int:
        """The bytes of all frames of the rows from ``start`` up to ``end``."""
        return int(self._rows.size(start, end))

    @property
    def waited_seconds(self) -> float:
        """How long ``give`` has waited for room, in all calls."""
        return self._rows.waited / 1e6  # type: ignore[no-any-return]

    def give(self, sock: zmq.Socket[bytes], start: int, end: int, wait: float = 0.0) -> int:
        """Send rows from ``start`` up to ``end``, until there is no room.

        A message is sent whole or not at all. Before a message counts as refused, libzmq is made to look for room:
        without that it may refuse although its queue has room (docs/zeromq-facts.md).

        Args:
            wait: How many seconds to wait for room. The call ends when its messages have waited so long in all, and
                the next one finds no room.

        Returns:
            The row that found no room, or ``end``.

        Raises:
            zmq.ZMQError: Sending fails. The socket may have a part of a message, so it must be closed.
        """
        error, before = errno.EINTR, self._rows.waited
        if wait and not sock.closed:
            sock.setsockopt(zmq.SNDTIMEO, math.ceil(wait * 1000))
        while error == errno.EINTR:
            if sock.closed:
                raise zmq.ZMQError(zmq.ENOTSOCK)
            # A signal does not begin the wait again.
            left = max(0, round(wait * 1e6) - (self._rows.waited - before))
            start, error = self._rows.give(sock, start, end, left)
        if error not in (0, errno.EAGAIN):
            raise _error(error)
        return int(start)
