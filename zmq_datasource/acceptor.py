"""The receiving side of the acknowledged transport: a ROUTER, staged attempts, and commits into the log.

The rules:

* ``Staged`` is answered when the attempt's file is on disk, ``Committed`` when the chunk with the
  whole transaction is. A chunk is one file that appears at once, so all of it is seen or none;
  transactions that are committed in the same moment share one.
* Everything may be asked twice, because answers get lost: what is staged is staged, what is
  committed is committed (``again``), what is unknown is refused.
* A sender has at most its credit on the way, and all together ``_BUDGET``, and a message each.
* Nothing that a sender sends ends the receiver. What it cannot do is refused, with a reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, LogWriteError, ProtocolError, SocketError
from zmq_datasource.framing import decode_plain
from zmq_datasource.framing.plain import text_of
from zmq_datasource.limited_log import LimitedLog
from zmq_datasource.messages import MESSAGE_SCHEMA
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.protocol import (
    MOST_FRAME_BYTES,
    UNKNOWN,
    Abort,
    Aborted,
    Commit,
    Committed,
    Credit,
    Data,
    End,
    Hello,
    Message,
    Refusal,
    Staged,
    Welcome,
    decode,
    encode,
    unpack_columns,
)
from zmq_datasource.sockets import OpenSocket
from zmq_datasource.transactions import Ledger
from zmq_datasource.wal.staging import Part, StagedFile, Staging
from zmq_datasource.wal.storage import LogStorage
from zmq_datasource.wal.writer import LogWriter

__all__ = ["Acceptor"]

_log = logging.getLogger(__name__)

WAIT_MS = 10
ROUND_MESSAGES = 256
# Bytes of data that one sender, and that all senders together, may have on the way. Who comes when
# those are given away sends one message at a time.
_WINDOW = 4 << 20
_BUDGET = 256 << 20
_MOST_SESSIONS = 1024
# More messages than credit lets an honest sender have here.
_RCVHWM = 64
_HOUSEKEEPING_SECONDS = 0.1


class _UnknownError(ProtocolError):
    """About an attempt that is not here (any more): a new one may do."""


@dataclass
class _Session:
    """One attempt, as far as it has come.

    Attributes:
        peer: Where to answer; another one after a reconnect.
        received: Data messages taken.
        window: Bytes of the budget that it holds.
        told: Whether it was told that a message is missing.
        finishing: Its file is being forced to the disk.
    """

    peer: bytes
    attempt: str
    producer: str
    heard: float
    received: int = 0
    window: int = 0
    told: bool = False
    file: StagedFile | None = None
    finishing: Future[None] | None = None


@dataclass
class _Commit:
    """A transaction whose chunk is being written; everybody who asks is answered then."""

    message: Commit
    attempt: str
    peers: list[bytes]
    done: Future[int] = field(default_factory=Future)


class Acceptor:
    """A ROUTER socket; use it in a ``with`` block, in one thread.

    Args:
        options: Endpoints and socket options.
        counters: Where to count.
        storage, partition: The log.
        clock: Seconds since the epoch, for ``timestamp``.

    Attributes:
        log: Where transactions go; to be set before the block.
    """

    pending = 0  # what is received is staged at once
    batch_ready = False

    def __init__(
        self,
        options: StreamReadOptions,
        counters: SourceCounters,
        storage: LogStorage,
        partition: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._counters = counters
        self._storage = storage
        self._partition = partition
        self._clock = clock
        self.log: LogWriter
        self.carried = Ledger(counters, options.max_publishers)
        self._staging = Staging(storage, partition)
        self._sessions: dict[str, _Session] = {}
        self._commits: list[_Commit] = []
        self._uncut: list[_Commit] = []  # those of this round, which will share a chunk
        self._finishing: list[_Session] = []
        self._forcing = ThreadPoolExecutor(2, thread_name_prefix="zmq-staging")
        self._deferred: list[tuple[bytes, Commit]] = []
        self._budget = _BUDGET
        self._refusals = LimitedLog(__name__, "refusals")
        self._next_housekeeping = 0.0
        self.failure: SocketError | None = None

    def __enter__(self) -> Self:
        """Open the socket, and find what was staged.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            LogError: What was staged cannot be read.
        """
        self._staging.recover()
        done = [a for a in self._storage.staged(self._partition) if self._is_done(a)]
        self._staging.remove(done)
        self._open = OpenSocket(self._options, self._prepare)
        self._socket = self._open.socket
        return self

    def _is_done(self, attempt: str) -> bool:
        part = self._staging.get(attempt)
        return part is not None and self.carried.is_committed(part.producer, part.number)

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        sock.setsockopt(zmq.RCVHWM, min(self._options.rcvhwm, _RCVHWM))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in list(self._sessions.values()):
            self._end(session)
        self._forcing.shutdown()
        self._open.close(self._options.linger)

    @property
    def waiting(self) -> bool:
        """Whether libzmq holds messages that were not received."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take(self) -> pa.RecordBatch:
        """Nothing: transactions go into the log as a whole."""
        return MESSAGE_SCHEMA.empty_table().to_batches()[0]

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """One round: wait up to ``WAIT_MS`` for a message, then take what is there, and answer.

        Returns:
            How many messages were taken.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._answer_what_is_done()
        # What is under way is done by another thread, so look again soon.
        if not self._socket.poll(1 if self._busy else WAIT_MS):
            return 0
        taken = 0
        while taken < most and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._take(peer, frames)
            taken += 1
        self._cut()
        return taken

    def _cut(self) -> None:
        """Have what was committed in this round written, as one chunk."""
        if self._uncut:
            done = self.log.cut(keep=True)
            for commit in self._uncut:
                commit.done = done
            self._commits += self._uncut
            self._uncut = []

    def keep_alive(self) -> None:
        """Let the connections do their work, and let go of what nobody wants any more."""
        self._open.watch.update()
        self._refusals.flush()
        self._let_go()

    def _let_go(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.heard > self._options.transaction_timeout:
                self._end(session)
        active = {session.producer for session in self._sessions.values()}
        abandoned = self._staging.abandoned(self._options.transaction_timeout, active)
        if abandoned:
            _log.warning("%d attempts were never committed; they are discarded", len(abandoned))
            self._staging.remove(abandoned)

    def settle(self, patience: float) -> None:
        """Answer what is under way."""
        deadline = time.monotonic() + patience
        while self._busy and time.monotonic() < deadline:
            self._answer_what_is_done()
            time.sleep(WAIT_MS / 1000)

    @property
    def _busy(self) -> bool:
        return bool(self._commits or self._finishing)

    def _answer_what_is_done(self) -> None:
        self._answer_staged()
        self._answer_commits()

    def hold_still(self) -> None:
        """To be called while nothing is received: nobody is silent who is not listened to."""
        self._open.watch.update()
        now = time.monotonic()
        for session in self._sessions.values():
            session.heard = now
        self._staging.touch()
        self._answer_what_is_done()

    # Messages.

    def _take(self, peer: bytes, frames: Sequence[bytes]) -> None:
        attempt = None
        try:
            message, buffers = decode(frames)
            attempt = getattr(message, "attempt", None)
            match message:
                case Hello():
                    self._hello(peer, message)
                case Data():
                    self._data(peer, message, buffers)
                case End():
                    self._finish(peer, message)
                case Commit():
                    self._commit(peer, message)
                case Abort():
                    self._abort(peer, message)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} message is for a sender")
        except _UnknownError as e:
            self._refuse(peer, UNKNOWN, str(e), attempt)
        except ProtocolError as e:
            self._counters.malformed += 1
            self._refuse(peer, "protocol", str(e), attempt)

    def _hello(self, peer: bytes, message: Hello) -> None:
        session = self._sessions.get(message.attempt)
        if session is None:
            if len(self._sessions) >= _MOST_SESSIONS:
                self._refuse(peer, "busy", f"{_MOST_SESSIONS} senders are at work already", message.attempt)
                return
            session = _Session(peer, message.attempt, message.producer, time.monotonic())
            session.window = _WINDOW if self._budget >= _WINDOW else 0
            self._budget -= session.window
            self._sessions[message.attempt] = session
        session.peer, session.heard = peer, time.monotonic()
        self._welcome(session)

    def _welcome(self, session: _Session) -> None:
        committed, by = self.carried.last(session.producer)
        self._answer(
            session.peer,
            Welcome(
                attempt=session.attempt,
                credit=session.window,
                received=session.received,
                committed=committed,
                by=by,
                limit=MOST_FRAME_BYTES,
            ),
        )

    def _data(self, peer: bytes, message: Data, buffers: Sequence[bytes]) -> None:
        session = self._session(peer, message.attempt)
        if message.index < session.received:  # sent again after a reconnect
            return
        if message.index > session.received:  # one before it was lost with a connection
            if not session.told:
                session.told = True
                self._welcome(session)
            return
        session.told = False
        rows = self._rows(message, buffers)
        if not self._has_room(rows.nbytes):
            self._end(session)
            self._refuse(
                peer,
                "no_room",
                f"what is staged has reached walMaxBytes={self._options.wal_max_bytes}; commit, or raise it",
                message.attempt,
            )
            return
        try:
            if session.file is None:
                part = Part(message.producer, message.number, message.partition)
                session.file = StagedFile(self._storage, self._partition, message.attempt, part)
            session.file.append(rows)
        except LogWriteError as e:
            self._end(session)
            self._refuse(peer, "storage", str(e), message.attempt)
            return
        session.received += 1
        self._answer(peer, Credit(attempt=message.attempt, received=session.received))

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may be staged; attempts that were repeated make room."""
        written = sum(s.file.bytes for s in self._sessions.values() if s.file)
        if self._staging.bytes + written + size > self._room:
            self._staging.remove(self._staging.superseded())
        return self._staging.bytes + written + size <= self._room

    @property
    def _room(self) -> int:
        return int(self._options.wal_max_bytes)

    def _rows(self, message: Data, buffers: Sequence[bytes]) -> pa.RecordBatch:
        """The rows of a data message, with ``messages.MESSAGE_SCHEMA``."""
        columns = unpack_columns(message, buffers)
        try:
            return self._make_rows(message, columns)
        except (pa.ArrowException, ValueError) as e:
            raise ProtocolError(f"data that makes no rows: {e}") from e

    def _make_rows(self, message: Data, columns: dict[str, pa.Array]) -> pa.RecordBatch:
        timestamps = [(int(self._clock() * 1_000_000), message.rows)]
        if "frames" in columns:
            lists = columns["frames"].to_pylist()
            if not all(lists):
                raise ProtocolError("a message without frames")
            batch = decode_plain([f if len(f) > 1 else f[0] for f in lists], timestamps)
            topic, value, frames = (batch.column(name) for name in ("topic", "value", "frames"))
            time_column = batch.column("timestamp")
        else:
            value = columns["value"]
            topic, bad = pa.nulls(message.rows, pa.string()), set[int]()
            if "topic" in columns:
                topic, bad = _topics(columns["topic"])
            kept = (
                [
                    [columns["topic"][row].as_py(), value[row].as_py()] if row in bad else None
                    for row in range(message.rows)
                ]
                if bad
                else None
            )
            kind = MESSAGE_SCHEMA.field("frames").type
            frames = pa.nulls(message.rows, kind) if kept is None else pa.array(kept, kind)
            time_column = pa.repeat(pa.scalar(timestamps[0][0], pa.int64()), message.rows).cast(
                MESSAGE_SCHEMA.field("timestamp").type
            )
        return pa.RecordBatch.from_arrays(
            [
                topic,
                value,
                pa.repeat(pa.scalar(message.producer), message.rows),
                pa.repeat(pa.scalar(message.number, pa.int64()), message.rows),
                time_column,
                frames,
            ],
            schema=MESSAGE_SCHEMA,
        )

    def _finish(self, peer: bytes, message: End) -> None:
        staged = self._staging.get(message.attempt)
        if staged is not None:
            self._answer(peer, Staged(attempt=message.attempt, rows=staged.rows))
            return
        session = self._session(peer, message.attempt)
        if session.finishing is not None:  # asked again: it is answered when it is done
            return
        if session.received != message.messages or session.file is None:
            raise ProtocolError(
                f"an end after {message.messages} data messages, of which {session.received} came"
            )
        if session.file.rows != message.rows:
            raise ProtocolError(f"an end after {message.rows} rows, of which {session.file.rows} came")
        # The disk takes its time with it, and others go on sending.
        session.finishing = self._forcing.submit(session.file.finish, self._options.wal_sync)
        self._finishing.append(session)

    def _answer_staged(self) -> None:
        for session in [s for s in self._finishing if s.finishing is not None and s.finishing.done()]:
            self._finishing.remove(session)
            if session.file is None or session.finishing is None:
                continue  # it was let go of meanwhile
            error = session.finishing.exception()
            if error is None:
                staged = session.file.part._replace(rows=session.file.rows)
                session.file = None
                self._staging.add(session.attempt, staged)
            self._end(session)
            if error is None:
                self._answer(session.peer, Staged(attempt=session.attempt, rows=staged.rows))
            elif isinstance(error, LogWriteError):
                self._refuse(session.peer, "storage", str(error), session.attempt)
            else:
                raise error

    def _commit(self, peer: bytes, message: Commit) -> None:
        for running in (*self._commits, *self._uncut):
            if (running.message.producer, running.message.number) == (message.producer, message.number):
                running.peers.append(peer)
                return
        if self.carried.is_committed(message.producer, message.number):
            self._let_go_of(message)
            self._answer_commit(peer, message, again=True)
            return
        if self.log.full:
            self._deferred = [d for d in self._deferred if d[1].producer != message.producer]
            self._deferred.append((peer, message))
            return
        batches, attempts = self._read(message)
        # First the rows, then that they are committed, then both to the disk, in one chunk. If that
        # fails, receiving ends; nothing is answered before it is done.
        self.log.append_whole(batches)
        self.carried.commit(message.producer, message.number, attempts[0])
        self._counters.received += message.rows
        self._counters.bytes += sum(pc.sum(pc.binary_length(b.column("value"))).as_py() or 0 for b in batches)
        self._uncut.append(_Commit(message, attempts[0], [peer]))

    def _read(self, message: Commit) -> tuple[list[pa.RecordBatch], list[str]]:
        """All rows of a transaction, checked, and its attempts in the order of its parts."""
        transaction = f"committing transaction {message.number} of {message.producer}"
        if not message.attempts or len(set(message.attempts)) < len(message.attempts):
            raise _UnknownError(
                f"{transaction}: it names {len(message.attempts)} attempts, none or one twice"
            )
        parts = {a: part for a in message.attempts if (part := self._staging.get(a)) is not None}
        ours = {
            a: p for a, p in parts.items() if (p.producer, p.number) == (message.producer, message.number)
        }
        if len(ours) < len(message.attempts):
            missing = len(message.attempts) - len(ours)
            raise _UnknownError(
                f"{transaction}: {missing} of {len(message.attempts)} attempts are not staged here"
            )
        staged = sum(part.rows for part in ours.values())
        if staged != message.rows:
            raise _UnknownError(f"{transaction}: committing {message.rows} rows, {staged} are staged")
        order = sorted(ours, key=lambda attempt: ours[attempt].partition)
        batches: list[pa.RecordBatch] = []
        for attempt in order:
            try:
                batches += self._staging.read(attempt)
            except DamagedChunkError as e:
                self._staging.remove([attempt])
                raise _UnknownError(f"{transaction}: {e}") from e
        return batches, order

    def _answer_commits(self) -> None:
        while self._commits and self._commits[0].done.done():
            commit = self._commits.pop(0)
            commit.done.result()  # an error of the log ends receiving
            message = commit.message
            self.carried.confirm(message.producer, message.number, commit.attempt)
            self._let_go_of(message)
            for peer in commit.peers:
                self._answer_commit(peer, message, again=False)
        if self._deferred and not self.log.full:
            deferred, self._deferred = self._deferred, []
            for peer, message in deferred:
                self._take(peer, encode(message))
            self._cut()

    def _let_go_of(self, message: Commit) -> None:
        """Of what other attempts have left at this transaction, and at those before it."""
        self._staging.remove(self._staging.of(message.producer, message.number))
        for session in list(self._sessions.values()):
            part = session.file.part if session.file is not None else None
            if part is not None and part.producer == message.producer and part.number <= message.number:
                self._end(session)

    def _answer_commit(self, peer: bytes, message: Commit, again: bool) -> None:
        _, by = self.carried.last(message.producer)
        self._answer(peer, Committed(producer=message.producer, number=message.number, again=again, by=by))

    def _abort(self, peer: bytes, message: Abort) -> None:
        committing = any(
            (c.message.producer, c.message.number) == (message.producer, message.number)
            for c in (*self._commits, *self._uncut)
        )
        if not committing:
            for attempt in message.attempts:
                session = self._sessions.get(attempt)
                if session is not None:
                    self._end(session)
            self._staging.remove(message.attempts)
        self._answer(peer, Aborted(producer=message.producer, number=message.number))

    # Sessions and answers.

    def _session(self, peer: bytes, attempt: str) -> _Session:
        session = self._sessions.get(attempt)
        if session is None:
            raise _UnknownError(
                f"attempt {attempt} is not known here: the receiver has restarted, or it was silent"
            )
        session.peer, session.heard = peer, time.monotonic()
        return session

    def _end(self, session: _Session) -> None:
        """The session needs nothing more."""
        if session.file is not None:
            if session.finishing is not None:
                wait([session.finishing])
            session.file.discard()
            session.file = None
        self._budget += session.window
        del self._sessions[session.attempt]

    def _refuse(self, peer: bytes, code: str, reason: str, attempt: str | None) -> None:
        self._refusals.warn("refused a message of the acknowledged transport: %s", reason)
        self._answer(peer, Refusal(code=code, reason=reason, attempt=attempt))

    def _answer(self, peer: bytes, message: Message) -> None:
        try:
            self._socket.send_multipart([peer, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            # Gone, or not reading; it will ask again.
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise


def _topics(column: pa.Array) -> tuple[pa.Array, set[int]]:
    try:
        return column.cast(pa.string()), set()
    except pa.ArrowInvalid:
        return text_of(column.to_pylist())
