"""The receiving side's socket: a ROUTER that brings messages to ``reception`` and sends its answers.

The rules for received messages that wait (``Backlog``):

* The socket is emptied into the backlog at once, even while nothing can be written. The reason is that libzmq bounds
  the messages of a connection, but not their bytes, and keeps the messages of a connection that has ended.
* A sender has at most ``most_each`` bytes here, or one message. Only a program that ignores the protocol sends more.
* All senders together have at most ``most_bytes``. Beyond that, a sender with fewer bytes displaces the newest message
  of the sender with the most.
* A message for which there is no room is dropped, as if it were lost with its connection: its sender sends it again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import zmq

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import MOST_FRAME_BYTES, MOST_FRAMES
from zmq_datasource.acknowledged.reception import AcceptorTerms, Reception
from zmq_datasource.acknowledged.transactions import CommittedTransactions, TransactionLog
from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import FillerFacts
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import count_connections
from zmq_datasource.transport.spec import SocketSpec, frame_limit
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Acceptor", "AcceptorTerms", "Backlog"]

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
_HOUSEKEEPING_SECONDS = 0.1
# A sender may have 8 MiB on the way, and send them again. 256 senders (``SenderBounds``) may each have two messages of
# 1 MiB.
_MOST_EACH, _MOST_BYTES = 16 << 20, 512 << 20

_T = TypeVar("_T")


@dataclass
class _Entry(Generic[_T]):
    peer: bytes
    size: int
    message: _T | None


class Backlog(Generic[_T]):
    """A queue of messages, oldest first.

    Args:
        most_each, most_bytes: The most bytes of one sender, and of all senders together.

    Attributes:
        bytes: Of all messages here.
        dropped: The number of messages for which there was no room.
    """

    def __init__(self, most_each: int = _MOST_EACH, most_bytes: int = _MOST_BYTES) -> None:
        self._most_each, self._most_bytes = most_each, most_bytes
        self._queue: deque[_Entry[_T]] = deque()
        self._of: dict[bytes, deque[_Entry[_T]]] = {}
        self._bytes_of: dict[bytes, int] = {}
        self.bytes = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    def make_room(self, peer: bytes, size: int) -> bool:
        """Make room for a message, perhaps by dropping others of senders that have more here.

        Returns:
            Whether there is room, so that ``add`` must be called. If not, others were perhaps dropped, too.
        """
        held = self._bytes_of.get(peer, 0)
        if (held and held + size > self._most_each) or size > self._most_bytes:
            self.dropped += 1
            return False
        while self.bytes + size > self._most_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            if self._bytes_of[largest] <= held + size:
                self.dropped += 1
                return False
            self._drop_newest(largest)
        return True

    def _drop_newest(self, peer: bytes) -> None:
        entry = self._of[peer].pop()
        entry.message = None
        self._discount(entry)
        self.dropped += 1

    def add(self, peer: bytes, size: int, message: _T) -> None:
        """Queue a message that ``make_room`` has admitted."""
        entry = _Entry(peer, size, message)
        self._queue.append(entry)
        self._of.setdefault(peer, deque()).append(entry)
        self._bytes_of[peer] = self._bytes_of.get(peer, 0) + size
        self.bytes += size

    def pop(self) -> tuple[bytes, int, _T] | None:
        """Remove and return the oldest message, with its sender and size; None if there is none."""
        while self._queue:
            entry = self._queue.popleft()
            if entry.message is not None:
                self._of[entry.peer].popleft()
                self._discount(entry)
                return entry.peer, entry.size, entry.message
        return None

    def _discount(self, entry: _Entry[_T]) -> None:
        self.bytes -= entry.size
        self._bytes_of[entry.peer] -= entry.size
        if not self._of[entry.peer]:
            del self._of[entry.peer], self._bytes_of[entry.peer]


class Acceptor:
    """Fills a log with transactions (a ``log.filler.Filler``); use it in a ``with`` block, in one thread.

    Args:
        spec: A ROUTER.
        terms: The limits for senders.
        counters: Counts what is received.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before the block.
        log: Where transactions are committed; open before the block.
        clock: Seconds, monotonic.

    Attributes:
        reception: Processes the messages.
        socket: The ROUTER, for a poller to wait on; in the block.
    """

    drain_seconds = 1.0

    def __init__(
        self,
        spec: SocketSpec,
        terms: AcceptorTerms,
        counters: SourceCounters,
        files: AttemptFiles,
        transactions: CommittedTransactions,
        log: TransactionLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._counters = counters
        self._log = log
        self._monotonic = clock
        self._forcing = ThreadPoolExecutor(2, thread_name_prefix="zmq-staging")
        self.reception = Reception(terms, counters, files, transactions, log, self._forcing)
        self._backlog: Backlog[tuple[list[bytes], Callable[[str], bool]]] = Backlog()
        self._drops = LimitedLog(__name__, "dropped messages")
        self._next_housekeeping = 0.0

    def __enter__(self) -> Self:
        """Open the socket, and find the staged attempts.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
            LogError: A staged attempt cannot be read or deleted.
        """
        self.reception.recover(self._monotonic())
        self._open = OpenSocket(self._spec, self._prepare)
        self.socket = self._open.socket
        self._rights = NameRights(self._spec.allowed_clients)
        self._unfinished = Unfinished(self._open, _MOST_MESSAGE_BYTES)
        self._counters.rcvhwm = int(self.socket.getsockopt(zmq.RCVHWM))
        return self

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(MOST_FRAME_BYTES))
        sock.setsockopt(zmq.RCVHWM, min(self._spec.rcvhwm or _RCVHWM, _RCVHWM))

    def __exit__(self, *_: object) -> None:
        self.reception.close()
        self._forcing.shutdown()
        self._open.close(linger=0)

    @property
    def connections(self) -> int:
        """The number of senders that are connected."""
        return self._open.watch.peers

    @property
    def busy(self) -> bool:
        """Whether there is work to do even if no message comes."""
        return self.reception.busy or bool(self._backlog)

    def receive(self, most: int = ROUND_MESSAGES, wait: bool = True) -> int:
        """Wait up to ``WAIT_MS`` for a message, obey the messages that have come, and answer.

        Args:
            most: The most messages in one call.
            wait: False if the caller has waited for the socket.

        Returns:
            The number of messages that were obeyed.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._watch_connections()
            self.reception.check_timeouts(self._monotonic())
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._answer_completed()
        self._fill_backlog()
        if not self._backlog:
            # If ``busy``, wait only 1 ms, because another thread will be done soon.
            if not self.socket.poll((1 if self.busy else WAIT_MS) if wait else 0):
                return 0
            self._fill_backlog()
        taken = filled = 0
        while taken < most and (entry := self._backlog.pop()) is not None:
            peer, size, (frames, may_use) = entry
            try:
                self.reception.receive(peer, frames, self._monotonic(), may_use)
            finally:
                self._answer()
            taken += 1
            filled += size
            if filled > _FILL_BYTES:
                filled = 0
                self._fill_backlog()
        self.reception.cut()
        return taken

    def _fill_backlog(self) -> None:
        """Receive the messages that have come. A message beyond the bounds is dropped."""
        for _ in range(_FILL_MESSAGES):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                break
            sender, *parts = self._unfinished.receive(1 + MOST_FRAMES)
            peer, size = sender.bytes, sum(len(part) + _FRAME_OVERHEAD for part in parts)
            before = self._backlog.dropped
            if size <= _MOST_MESSAGE_BYTES and self._backlog.make_room(peer, size):
                frames = [part.bytes for part in parts]
                self._backlog.add(peer, size, (frames, self._rights.of((parts or [sender])[-1])))
            elif size > _MOST_MESSAGE_BYTES:
                self._backlog.dropped += 1
            if dropped := self._backlog.dropped - before:
                self._drops.warn(
                    "dropped %d messages: their senders have more on the way than the protocol allows, or very many "
                    "senders share the memory; the senders have to send them again",
                    dropped,
                )

    def _watch_connections(self) -> None:
        self._open.watch.update()
        self._unfinished.check_connections()
        self._drops.flush()
        count_connections(self._counters, [self._open.watch])

    def _answer_completed(self) -> None:
        try:
            self.reception.answer_completed(self._monotonic())
        finally:
            self._answer()

    def _answer(self) -> None:
        for peer, frames in self.reception.answers():
            try:
                self.socket.send_multipart([peer, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as e:
                # The sender has gone or does not read. It will ask again.
                if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise

    def extend_timeouts(self) -> None:
        """Keep connections alive and stop the senders' timeouts. Call it often while nothing is received."""
        self._watch_connections()
        self._fill_backlog()
        try:
            self.reception.extend_timeouts(self._monotonic())
        finally:
            self._answer()

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` for rows that are being written, and answer their senders. Called once, at the end."""
        deadline = time.monotonic() + seconds
        while self.reception.busy and time.monotonic() < deadline:
            self._answer_completed()
            time.sleep(WAIT_MS / 1000)

    def cut(self) -> Future[int]:
        """Cut the log's chunk, which has the committed transactions already."""
        return self._log.cut()

    def is_connected(self) -> bool:
        """See ``log.Filler``."""
        return bool(self._open.watch.open_connections().inodes)

    def facts(self) -> FillerFacts:
        """Return no figures: no row waits in memory. Rows are staged, and appended when they are committed."""
        return FillerFacts()
