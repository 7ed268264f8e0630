"""The receiving side's link: the ROUTER, the files of attempts and the log, around the state machine ``reception``.

The socket is emptied at once, also while nothing can be written: libzmq bounds the messages of a connection, but not
their bytes, and keeps the messages of a connection that has ended. What waits here is bounded (``Backlog``), and a
message for which there is no room is dropped, as if it were lost with its connection: its sender sends it again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Self, TypeAlias

import zmq

from zmq_datasource.acknowledged.acts import Acts
from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import MOST_FRAME_BYTES, MOST_FRAMES, encode
from zmq_datasource.acknowledged.reception import Answer, Reception, Terms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import FillerFacts, LogWriter
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import count_connections
from zmq_datasource.transport.spec import SocketSpec, frame_limit
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Acceptor", "Backlog", "Terms"]

WAIT_MS = 10
ROUND_MESSAGES = 256
# Small, because libzmq bounds messages and not bytes, and a frame may have 64 MiB. More messages wait in the kernel and
# in the backlog.
_RCVHWM = 8
# The most messages that the backlog takes in at a time. After processing so many bytes, it takes in messages again.
_FILL_MESSAGES, _FILL_BYTES = 1024, 4 << 20
# The topic and value of the largest row, and their offsets.
_MOST_MESSAGE_BYTES = 2 * MOST_FRAME_BYTES + (4 << 20)
# About what a frame takes in memory besides its bytes.
_FRAME_OVERHEAD = 100
_HOUSEKEEPING_SECONDS, _TIMEOUT_SECONDS = 0.1, 1.0
# A sender may have 8 MiB on the way, and send them again. Hundreds may each have two messages of 1 MiB.
_MOST_EACH, _MOST_BYTES = 16 << 20, 512 << 20

_Message: TypeAlias = tuple[list[bytes], Callable[[str], bool]]


class Backlog:
    """Messages that wait, oldest first. Each sender may have one of any size here, and more up to its share.

    Args:
        most_each, most_bytes: The most bytes of one sender, and of all senders together. When less is left, each sender
            has an equal share.

    Attributes:
        bytes: Of all messages here.
        dropped: The number of messages for which there was no room.
    """

    def __init__(self, most_each: int = _MOST_EACH, most_bytes: int = _MOST_BYTES) -> None:
        self._most_each, self._most_bytes = most_each, most_bytes
        self._queue: deque[tuple[bytes, int, _Message]] = deque()
        self._held: dict[bytes, int] = {}  # bytes, by sender
        self.bytes = self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, peer: bytes, size: int, message: Callable[[], _Message]) -> None:
        """Take a message if there is room, or drop it. ``message`` copies it from libzmq."""
        held = self._held.get(peer, 0)
        share = min(self._most_each, self._most_bytes // (len(self._held) + (not held)))
        if self.bytes + size > self._most_bytes or (held and held + size > share):
            self.dropped += 1
            return
        self._queue.append((peer, size, message()))
        self._held[peer] = held + size
        self.bytes += size

    def pop(self) -> tuple[bytes, int, _Message]:
        """Remove and return the oldest message, with its sender and size."""
        peer, size, message = self._queue.popleft()
        self.bytes -= size
        self._held[peer] -= size
        if not self._held[peer]:
            del self._held[peer]
        return peer, size, message


class Acceptor:
    """Fills a log with transactions; use it in a ``with`` block, in one thread.

    Args:
        spec: A ROUTER.
        terms: The limits for senders.
        counters: Counts what is received.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before the block.
        log: Where transactions are committed; open before the block.

    Attributes:
        reception: The state machine.
    """

    drain_seconds = 1.0

    def __init__(
        self,
        spec: SocketSpec,
        terms: Terms,
        counters: SourceCounters,
        files: AttemptFiles,
        transactions: CommittedTransactions,
        log: LogWriter,
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._log = log
        self.reception = Reception(terms, transactions, counters)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="zmq-staging")
        self._acts = Acts(self.reception, files, log, self._pool)
        self._paused_seconds, self._last_call = 0.0, time.monotonic()
        self._backlog = Backlog()
        self._drops = LimitedLog(__name__, "dropped messages")
        self._next_housekeeping = self._next_timeouts = 0.0

    def __enter__(self) -> Self:
        """Open the socket, and find the staged attempts.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
            LogError: The files of attempts cannot be read or deleted.
        """
        self._acts.recover(self._now())
        self._open = OpenSocket(self._spec, self._prepare)
        self._socket = self._open.socket
        self._rights = NameRights(self._spec.allowed_clients)
        self._unfinished = Unfinished(self._open, _MOST_MESSAGE_BYTES)
        self._counters.rcvhwm = int(self._socket.getsockopt(zmq.RCVHWM))
        return self

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(MOST_FRAME_BYTES))
        sock.setsockopt(zmq.RCVHWM, min(self._spec.rcvhwm or _RCVHWM, _RCVHWM))

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._open.close(linger=0)

    def _now(self) -> float:
        """The time by a clock that stands still while nothing is received."""
        self._last_call = time.monotonic()
        return self._last_call - self._paused_seconds

    def wake(self) -> None:
        """Do nothing: ``receive`` never waits for long."""

    def receive(self, gather: float = 0.0) -> int:
        """Wait up to ``WAIT_MS`` for a message, obey the messages that have come, and answer.

        Args:
            gather: Has no effect: a transaction is answered as soon as it is durable.

        Returns:
            The number of messages that were obeyed.
        """
        now = self._now()
        if self._last_call >= self._next_housekeeping:
            self._watch_connections()
        if now >= self._next_timeouts:
            self.reception.check_timeouts(now)
            self._next_timeouts = now + _TIMEOUT_SECONDS
        self._do(now)
        self._fill_backlog()
        if not self._backlog:
            # Wait only 1 ms while another thread will be done soon.
            if not self._socket.poll(1 if self._acts.busy else WAIT_MS):
                return 0
            self._fill_backlog()
        taken = filled = 0
        while taken < ROUND_MESSAGES and self._backlog:
            peer, size, (frames, may_use) = self._backlog.pop()
            self.reception.receive(peer, frames, self._now(), may_use)
            self._do(self._now())
            taken += 1
            filled += size
            if filled > _FILL_BYTES:
                filled = 0
                self._fill_backlog()
        return taken

    def _fill_backlog(self) -> None:
        """Receive the messages that have come. A message beyond the bounds is dropped."""
        before = self._backlog.dropped
        for _ in range(_FILL_MESSAGES):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            sender, *parts = self._unfinished.receive(1 + MOST_FRAMES)
            size = sum(len(part) + _FRAME_OVERHEAD for part in parts)
            self._backlog.add(sender.bytes, size, partial(self._copy, sender, parts))
        if dropped := self._backlog.dropped - before:
            self._drops.warn(
                "dropped %d messages: their senders have more on the way than the protocol allows, or very many "
                "senders share the memory; the senders have to send them again",
                dropped,
            )

    def _copy(self, sender: zmq.Frame, parts: list[zmq.Frame]) -> _Message:
        return [part.bytes for part in parts], self._rights.of((parts or [sender])[-1])

    def _watch_connections(self) -> None:
        self._open.watch.update()
        self._unfinished.check_connections()
        self._drops.flush()
        count_connections(self._counters, [self._open.watch])
        self._next_housekeeping = time.monotonic() + _HOUSEKEEPING_SECONDS

    def _do(self, now: float) -> None:
        """Do what the state machine asks for, and answer.

        Raises:
            LogError: The log has failed.
        """
        try:
            self._acts.do(now)
        finally:
            while self._acts.answers:
                self._send(self._acts.answers.popleft())

    def _send(self, answer: Answer) -> None:
        try:
            self._socket.send_multipart([answer.peer, *encode(answer.message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            # The sender has gone or does not read. It will ask again.
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def extend_timeouts(self) -> None:
        """Keep connections alive and stop the senders' timeouts. Call it often while nothing is received."""
        self._paused_seconds += time.monotonic() - self._last_call
        self._watch_connections()
        self._fill_backlog()
        self._do(self._now())

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for rows that are being written, and answer their senders. Called once, at the end."""
        deadline = time.monotonic() + seconds
        while self._acts.busy and time.monotonic() < deadline:
            self._do(self._now())
            time.sleep(WAIT_MS / 1000)

    def cut(self) -> Future[int]:
        """Cut the log's chunk, which has the committed transactions already."""
        return self._log.cut()

    def facts(self) -> FillerFacts:
        """Return no figures: no row waits in memory. Rows are in files, and appended when they are committed."""
        return FillerFacts()
