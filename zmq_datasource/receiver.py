"""Socket to Arrow: one receiving socket, drained in rounds, handed over as record batches.

A round waits for the first message and then takes what is there without waiting, so its cost
is spread over as many messages as have gathered, and a slow feed keeps exact timestamps. The
receiver belongs to one thread and starts none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.framing import RawMessage, decode_plain
from zmq_datasource.messages import MAX_MESSAGE_BYTES
from zmq_datasource.options import ReadOptions
from zmq_datasource.sockets import OpenSocket, more_frames

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

# Bounds of one round: no round keeps the thread from its other duties for long, and none
# holds more than about this much (or one message) in Python objects.
ROUND_MESSAGES = 1024
_ROUND_BYTES = 4 << 20
# How long a round waits for its first message; the delay of the thread's other duties.
WAIT_MS = 10
# When to make a record batch of what was received: Spark is fastest with 10,000 rows and more.
BATCH_MESSAGES = 16_384
BATCH_BYTES = 8 << 20
_HOUSEKEEPING_SECONDS = 0.1


class Receiver:
    """A SUB or PULL socket; use it in a ``with`` block, in one thread.

    Args:
        options: Socket type, endpoints, topics and socket options.
        counters: Where to count.
        batch_bytes: Size at which a batch is ready and a round ends; what is held in memory.
        clock: Seconds since the epoch, for ``timestamp``.
    """

    def __init__(
        self,
        options: ReadOptions,
        counters: SourceCounters,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._counters = counters
        self._batch_bytes = min(batch_bytes, BATCH_BYTES)
        self._clock = clock
        self._messages: list[RawMessage] = []
        self._timestamps: list[tuple[int, int]] = []
        self._next_housekeeping = 0.0
        self.pending_bytes = 0

    def __enter__(self) -> Self:
        """Open the socket.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
        """
        # The first use of some of Arrow imports pandas where there is one: a third of a second in
        # which a fast publisher's queue would run over.
        decode_plain([b"", [b"", b""]], [(0, 2)])
        self._open = OpenSocket(self._options, self._prepare)
        self._socket = self._open.socket
        self._more = more_frames(self._socket)
        return self

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        if self._options.socket_type == "SUB":
            for topic in self._options.topics:
                sock.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close(self._options.linger)

    @property
    def pending(self) -> int:
        """Messages received but not handed over yet."""
        return len(self._messages)

    @property
    def waiting(self) -> bool:
        """Whether libzmq holds messages that were not received."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def batch_ready(self) -> bool:
        """Whether enough has gathered for a batch of good size."""
        return len(self._messages) >= BATCH_MESSAGES or self.pending_bytes >= self._batch_bytes

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """One round: wait up to ``WAIT_MS`` for a message, then take what is there.

        Args:
            most: Take no more than this many messages.

        Returns:
            How many messages were taken; 0 if none came.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        # Local names and nothing but what bounds the round: this loop sets the source's speed.
        recv, noblock = self._socket.recv, int(zmq.NOBLOCK)
        ask_more, more = self._more
        messages = self._messages
        append, before = messages.append, len(messages)
        room = limit = min(_ROUND_BYTES, self._batch_bytes)
        timestamp = 0
        try:
            frame = recv()
            timestamp = int(self._clock() * 1_000_000)
            for turn in range(most):
                if turn:
                    frame = recv(noblock)
                ask_more()
                if more.value:
                    message = self._rest(frame)
                    append(message)
                    room -= sum(map(len, message))
                else:
                    append(frame)
                    room -= len(frame)
                if room <= 0:
                    break
        except zmq.Again:
            pass
        if room < limit - MAX_MESSAGE_BYTES:
            room += self._discard_oversize(messages)
        taken = len(messages) - before
        if taken:
            self._timestamps.append((timestamp, taken))
        self.pending_bytes += limit - room
        return taken

    def _rest(self, first: bytes) -> list[bytes]:
        """The whole message; its frames arrive together, so none of these waits."""
        message = [first]
        while self._more.flag.value:
            message.append(self._socket.recv(zmq.NOBLOCK))
            self._more.ask()
        return message

    def take(self) -> pa.RecordBatch:
        """Hand over what was received, as a batch with ``messages.MESSAGE_SCHEMA``."""
        messages, timestamps = self._messages, self._timestamps
        self._messages, self._timestamps, self.pending_bytes = [], [], 0
        batch = decode_plain(messages, timestamps)
        self._counters.received += batch.num_rows
        self._counters.bytes += pc.sum(pc.binary_length(batch.column("value"))).as_py() or 0
        return batch

    def keep_alive(self) -> None:
        """Let libzmq and the connections do their work without receiving.

        A SUB renews its subscriptions after a publisher's restart only while its thread
        touches the socket; call this at least every few hundred milliseconds in a pause.
        """
        self._socket.getsockopt(zmq.EVENTS)
        self._open.watch.update()
        self._open.watch.redial()
        self._open.watch.report_absent()

    def _discard_oversize(self, messages: list[RawMessage]) -> int:
        """Discard the last message if no row can hold it; return the bytes that were freed.

        Only the last one of a round can be so large, because it ends the round.
        """
        message = messages[-1]
        size = sum(map(len, message)) if isinstance(message, list) else len(message)
        if size <= MAX_MESSAGE_BYTES:
            return 0
        messages.pop()
        self._counters.oversize += 1
        _log.error(
            "discarded a message of %d bytes: a row holds at most %d; have it sent in parts",
            size,
            MAX_MESSAGE_BYTES,
        )
        return size
