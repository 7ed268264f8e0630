"""The receiving side of the acknowledged transport: a ROUTER, staged attempts, and commits into the log.

The rules:

* ``Staged`` is answered when the attempt's file is on disk, ``Committed`` when the chunk with the
  whole transaction is. A chunk is one file that appears at once, so all of it is seen or none;
  transactions that are committed in the same moment share one.
* Everything may be asked twice, because answers get lost: what is staged is staged, what is
  committed is committed (``again``), what is unknown is refused.
* Who only asks costs nothing here: a session begins with an attempt's first data, and gets a window then.
* A sender has at most its credit on the way, and all together ``_BUDGET``, and a message each. While
  that is all given away, who is silent lends his window to the others.
* Nothing that a sender sends ends the receiver. What it cannot do is refused, with a reason; an error
  that nobody expected too, and it is in the log with its cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import zmq

from zmq_datasource.acknowledged.committer import Committer, Done, TransactionLog, UnknownAttemptError
from zmq_datasource.acknowledged.protocol import (
    CONFLICT,
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
    rows_of,
)
from zmq_datasource.acknowledged.transactions import ConflictError, Ledger, conflict_with_later
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, LogWriteError, ProtocolError, SocketError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.filler import FillerFacts
from zmq_datasource.log.staging import Part, StagedFile, Staging
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.schemas import warm_up_arrow
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import count_connections
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Acceptor"]

_log = logging.getLogger(__name__)

WAIT_MS = 10
ROUND_MESSAGES = 256
# Bytes of data that one sender, and that all senders together, may have on the way. Before its first
# message has come, and while those are given away, a sender sends one message at a time.
_WINDOW = 4 << 20
_BUDGET = 256 << 20
_MOST_SESSIONS = 1024
# After so much silence a session lends its window, and its place, if others want for one.
_LENDS_WINDOW_SECONDS, _LENDS_PLACE_SECONDS = 5.0, 60.0
# More messages than credit lets an honest sender have here.
_RCVHWM = 64
_HOUSEKEEPING_SECONDS = 0.1


@dataclass
class _Session:
    """One attempt, as far as it has come.

    Attributes:
        peer: Where to answer; another one after a reconnect.
        part: What it is an attempt at.
        received: Data messages taken.
        window: Bytes of the budget that it holds.
        credit: What it was told last.
        told: Whether it was told that a message is missing.
        finishing: Its file is being forced to the disk.
    """

    peer: bytes
    attempt: str
    part: Part
    heard: float
    received: int = 0
    window: int = 0
    credit: int = 0
    told: bool = False
    file: StagedFile | None = None
    finishing: Future[None] | None = None


class _BusyError(SocketError):
    """There is no place for another session."""


class AcceptorTerms(NamedTuple):
    """What an acceptor grants its senders.

    Attributes:
        socket: A ROUTER.
        transaction_timeout: Seconds for which a silent sender's transaction is kept.
        most_staged_bytes: Of all transactions that are not committed.
        sync: Whether what is staged is forced to the disk.
    """

    socket: SocketSpec
    transaction_timeout: float
    most_staged_bytes: int
    sync: bool


class Acceptor:
    """A ROUTER socket; use it in a ``with`` block, in one thread.

    Args:
        terms: See there.
        counters: Where to count.
        storage: Where attempts are staged.
        ledger: Which transactions are committed; restored before the block.
        log: Where they go; open before the block.
        clock: Seconds since the epoch, for ``timestamp``.
        monotonic: Seconds, for how long a sender is silent.
    """

    drain_seconds = 1.0

    def __init__(
        self,
        terms: AcceptorTerms,
        counters: SourceCounters,
        storage: LogStorage,
        ledger: Ledger,
        log: TransactionLog,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._terms = terms
        self._counters = counters
        self._storage = storage
        self._clock = clock
        self._monotonic = monotonic
        self._ledger = ledger
        self._log = log
        self._staging = Staging(storage)
        self._committer = Committer(counters, self._staging, ledger, log)
        self._sessions: dict[str, _Session] = {}
        self._finishing: list[_Session] = []
        self._forcing = ThreadPoolExecutor(2, thread_name_prefix="zmq-staging")
        self._budget = _BUDGET
        self._refusals = LimitedLog(__name__, "refusals")
        self._faults = LimitedLog(__name__, "unexpected errors")
        self._next_housekeeping = 0.0

    def __enter__(self) -> Self:
        """Open the socket, and find what was staged.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            LogError: What was staged and is not needed cannot be removed.
        """
        warm_up_arrow()
        self._staging.recover()
        done = [a for a in self._storage.staged() if self._is_done(a)]
        self._staging.remove(done)
        self._open = OpenSocket(self._terms.socket, self._prepare)
        self._socket = self._open.socket
        self._unfinished = Unfinished(self._open)
        self._counters.rcvhwm = int(self._socket.getsockopt(zmq.RCVHWM))
        return self

    def _is_done(self, attempt: str) -> bool:
        part = self._staging.get(attempt)
        return part is not None and self._ledger.is_committed(part.producer, part.number)

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        sock.setsockopt(zmq.RCVHWM, min(self._terms.socket.rcvhwm or _RCVHWM, _RCVHWM))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in list(self._sessions.values()):
            self._end(session)
        self._forcing.shutdown()
        self._open.close(self._terms.socket.linger)

    def still_asking(self) -> bool:
        """Nothing is asked for here: senders repeat what they are not told of."""
        return False

    def facts(self) -> FillerFacts:
        """Nothing waits in memory: what is received is staged, and appended when its transaction is committed."""
        return FillerFacts()

    def cut(self, keep: bool) -> Future[int]:
        """Cut the log's chunk; committed transactions are in it already."""
        return self._log.cut(keep)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    @property
    def connections(self) -> int:
        """Senders that are connected."""
        return self._open.watch.peers

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends without a message."""
        return bool(self._committer.busy or self._finishing)

    def receive(self, most: int = ROUND_MESSAGES, wait: bool = True) -> int:
        """One round: wait up to ``WAIT_MS`` for a message, then take what is there, and answer.

        Args:
            wait: False where somebody else waits for the socket.

        Returns:
            How many messages were taken.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._answer_what_is_done()
        # What is under way is done by another thread, so look again soon.
        if not self._socket.poll((1 if self.busy else WAIT_MS) if wait else 0):
            return 0
        taken = 0
        while taken < most and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            peer, *frames = self._unfinished.receive(int(zmq.NOBLOCK))
            self._take(peer, frames)
            taken += 1
        self._committer.cut()
        return taken

    def keep_alive(self) -> None:
        """Let the connections do their work, and let go of what nobody wants any more."""
        self._open.watch.update()
        self._unfinished.look()
        count_connections(self._counters, [self._open.watch])
        self._refusals.flush()
        self._faults.flush()
        self._let_go()
        self._take_windows_back()

    def _let_go(self) -> None:
        now = self._monotonic()
        for session in list(self._sessions.values()):
            if now - session.heard > self._terms.transaction_timeout:
                self._end(session)
        active = {session.part.producer for session in self._sessions.values()}
        abandoned = self._staging.abandoned(self._terms.transaction_timeout, active)
        if abandoned:
            _log.warning("%d attempts were never committed; they are discarded", len(abandoned))
            self._staging.remove(abandoned)

    def _take_windows_back(self) -> None:
        """While there is none left for who comes, from those who do not use theirs."""
        if self._budget >= _WINDOW:
            return
        silent_since = self._monotonic() - _LENDS_WINDOW_SECONDS
        for session in self._sessions.values():
            if session.heard < silent_since:
                self._budget += session.window
                session.window = 0

    def settle(self, patience: float) -> None:
        """Answer what is under way."""
        deadline = time.monotonic() + patience
        while self.busy and time.monotonic() < deadline:
            self._answer_what_is_done()
            time.sleep(WAIT_MS / 1000)

    def _answer_what_is_done(self) -> None:
        self._answer_staged()
        self._answer_commits()

    def hold_still(self) -> None:
        """To be called while nothing is received: nobody is silent who is not listened to."""
        self._open.watch.update()
        self._unfinished.look()
        count_connections(self._counters, [self._open.watch])
        now = self._monotonic()
        for session in self._sessions.values():
            session.heard = now
        self._staging.touch()
        self._answer_what_is_done()

    # Messages.

    def _take(self, peer: bytes, frames: Sequence[bytes]) -> None:
        with self._refusing(peer):
            message, buffers = decode(frames)
            self._obey(peer, message, buffers)

    def _obey(self, peer: bytes, message: Message, buffers: Sequence[bytes] = ()) -> None:
        with self._refusing(peer, getattr(message, "attempt", None)):
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

    @contextmanager
    def _refusing(self, peer: bytes, attempt: str | None = None) -> Iterator[None]:
        """What cannot be done about a message is told to who has sent it, and ends nothing.

        Raises:
            LogError, zmq.ZMQError: The storage, or the socket: those are not about one message.
        """
        try:
            yield
        except UnknownAttemptError as e:
            self._refuse(peer, UNKNOWN, str(e), attempt)
        except ConflictError as e:
            self._refuse(peer, CONFLICT, str(e), attempt)
        except _BusyError as e:
            self._refuse(peer, "busy", str(e), attempt)
        except ProtocolError as e:
            self._counters.malformed += 1
            self._refuse(peer, "protocol", str(e), attempt)
        except (LogError, zmq.ZMQError):
            raise
        except Exception as e:
            self._fail(peer, attempt, e)

    def _fail(self, peer: bytes, attempt: str | None, error: BaseException) -> None:
        """Something unexpected: its attempt may be half done, so it is not gone on with."""
        self._counters.internal_errors += 1
        self._faults.fault(
            "an unexpected error at a message of the acknowledged transport: %r", error, error=error
        )
        session = self._sessions.get(attempt or "")
        if session is not None:
            self._end(session)
        reason = f"an unexpected error of the receiver ({type(error).__name__}), which its log explains"
        self._refuse(peer, "internal", reason, attempt)

    def _hello(self, peer: bytes, message: Hello) -> None:
        session = self._sessions.get(message.attempt)
        if session is None:  # nothing of it is here; that is not worth remembering
            self._welcome(peer, message.attempt, message.producer)
        else:
            session.peer, session.heard = peer, self._monotonic()
            self._welcome_again(session)

    def _welcome_again(self, session: _Session) -> None:
        session.credit = session.window
        self._welcome(session.peer, session.attempt, session.part.producer, session.credit, session.received)

    def _welcome(self, peer: bytes, attempt: str, producer: str, credit: int = 0, received: int = 0) -> None:
        last = self._ledger.last(producer)
        self._answer(
            peer,
            Welcome(
                attempt=attempt,
                credit=credit,
                received=received,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
                limit=MOST_FRAME_BYTES,
            ),
        )

    def _data(self, peer: bytes, message: Data, buffers: Sequence[bytes]) -> None:
        if message.attempt in self._sessions or message.index > 0:
            session = self._session(peer, message.attempt)
            if message.index < session.received:  # sent again after a reconnect
                return
            if session.finishing is not None:
                raise ProtocolError(f"data message {message.index} of an attempt after its end")
            if session.part[:3] != (message.producer, message.number, message.partition):
                raise ProtocolError(f"data message {message.index} of an attempt at something else")
            if message.index > session.received:  # one before it was lost with a connection
                if not session.told:
                    session.told = True
                    self._welcome_again(session)
                return
            session.told = False
        elif self._staging.get(message.attempt) is not None:  # a copy that was long on its way
            return
        rows = rows_of(message, buffers, int(self._clock() * 1_000_000))
        session = self._sessions.get(message.attempt) or self._begin(peer, message)
        if not self._has_room(rows.nbytes):
            self._end(session)
            self._refuse(
                peer,
                "no_room",
                f"what is staged has reached walMaxBytes={self._terms.most_staged_bytes}; commit, or raise it",
                message.attempt,
            )
            return
        try:
            if session.file is None:
                session.file = StagedFile(self._storage, message.attempt, session.part)
            session.file.append(rows)
        except LogWriteError as e:
            self._end(session)
            self._refuse(peer, "storage", str(e), message.attempt)
            return
        session.received += 1
        if not session.window and self._budget >= _WINDOW:
            self._budget -= _WINDOW
            session.window = _WINDOW
        if session.window != session.credit:
            self._welcome_again(session)
        self._answer(peer, Credit(attempt=message.attempt, received=session.received))

    def _begin(self, peer: bytes, message: Data) -> _Session:
        """A session for an attempt whose first data has come.

        Raises:
            ConflictError, UnknownAttemptError: Its transaction is done, or a later one.
            _BusyError: There are too many.
        """
        newest = self._ledger.newest(message.producer)
        if newest is not None and message.number < newest.number:
            raise conflict_with_later(message.producer, message.number, newest.number)
        if self._ledger.is_committed(message.producer, message.number):
            raise UnknownAttemptError(
                f"transaction {message.number} of {message.producer} was committed before this attempt began: repeat it"
            )
        now = self._monotonic()
        if len(self._sessions) >= _MOST_SESSIONS:
            sending = [session for session in self._sessions.values() if session.finishing is None]
            longest = min(sending, key=lambda session: session.heard, default=None)
            if longest is None or now - longest.heard < _LENDS_PLACE_SECONDS:
                raise _BusyError(
                    f"{_MOST_SESSIONS} senders are at work already; repeat the transaction later"
                )
            self._end(longest)
        part = Part(message.producer, message.number, message.partition)
        session = _Session(peer, message.attempt, part, now)
        self._sessions[message.attempt] = session
        return session

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may be staged; attempts that were repeated make room."""
        written = sum(s.file.bytes for s in self._sessions.values() if s.file)
        if self._staging.bytes + written + size > self._room:
            self._staging.remove(self._staging.superseded())
        return self._staging.bytes + written + size <= self._room

    @property
    def _room(self) -> int:
        return int(self._terms.most_staged_bytes)

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
        session.finishing = self._forcing.submit(session.file.finish, self._terms.sync)
        self._finishing.append(session)

    def _answer_staged(self) -> None:
        for session in [s for s in self._finishing if s.finishing is not None and s.finishing.done()]:
            self._finishing.remove(session)
            with self._refusing(session.peer, session.attempt):
                self._answer_finished(session)

    def _answer_finished(self, session: _Session) -> None:
        if session.file is None or session.finishing is None:
            return  # it was let go of meanwhile
        try:
            session.finishing.result()
        except LogWriteError as e:
            self._end(session)
            self._refuse(session.peer, "storage", str(e), session.attempt)
            return
        rows = session.file.rows
        session.file = None
        self._staging.add(session.attempt, session.part._replace(rows=rows))
        self._end(session)
        self._answer(session.peer, Staged(attempt=session.attempt, rows=rows))

    def _commit(self, peer: bytes, message: Commit) -> None:
        if self._committer.commit(peer, message):
            self._committed(Done(message, [peer], again=True))

    def _answer_commits(self) -> None:
        for done in self._committer.done():
            with self._refusing(done.peers[0]):
                self._committed(done)
        for peer, message in self._committer.take_deferred():
            self._obey(peer, message)
        self._committer.cut()

    def _committed(self, done: Done) -> None:
        """Answer, and let go of what other attempts have left at this transaction, and at those before it."""
        message = done.message
        self._staging.remove(self._staging.of(message.producer, message.number))
        for session in list(self._sessions.values()):
            part = session.part
            if part.producer == message.producer and part.number <= message.number:
                self._end(session)
        last = self._ledger.last(message.producer)
        answer = Committed(
            producer=message.producer,
            number=message.number,
            again=done.again,
            by=None if last is None else last.attempt,
        )
        for peer in done.peers:
            self._answer(peer, answer)

    def _abort(self, peer: bytes, message: Abort) -> None:
        committing = self._committer.is_at(message.producer, message.number)
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
            raise UnknownAttemptError(
                f"attempt {attempt} is not known here: the receiver has restarted, or it was silent"
            )
        session.peer, session.heard = peer, self._monotonic()
        return session

    def _end(self, session: _Session) -> None:
        """The session needs nothing more."""
        self._budget += session.window
        del self._sessions[session.attempt]
        if session.file is not None:
            if session.finishing is not None:
                wait([session.finishing])
            file, session.file = session.file, None
            file.discard()

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
