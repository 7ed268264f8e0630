"""The receiving side of the transaction protocol, without its socket: frames and a time in, answers out.

The rules:

* ``Staged`` is answered when the attempt's file is on disk, ``Committed`` when the chunk with the
  whole transaction is. A chunk is one file that appears at once, so all of it is seen or none;
  transactions that are committed in the same moment share one.
* Everything may be asked twice, because answers get lost: what is staged is staged, what is
  committed is committed (``again``), what is unknown is refused.
* Who only asks costs nothing here: a session begins with an attempt's first data.
* Nothing that a sender sends ends the receiver. What it cannot do is refused, with a reason; an error
  that nobody expected too, and it is in the log with its cause.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from typing import Any, NamedTuple

from zmq_datasource.acknowledged.answers import Answers, RefusedError
from zmq_datasource.acknowledged.committer import Committer, Done, TransactionLog, UnknownAttemptError
from zmq_datasource.acknowledged.digests import digest_of_rows
from zmq_datasource.acknowledged.protocol import (
    Abort,
    Aborted,
    Commit,
    Committed,
    Data,
    End,
    Hello,
    Message,
    Staged,
    Taken,
    Welcome,
    decode,
    rows_of,
)
from zmq_datasource.acknowledged.sessions import SENDER_BOUNDS, SenderBounds, Session, Sessions
from zmq_datasource.acknowledged.transactions import CommittedTransactions, conflict_with_later
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, DiskFaultError, LogWriteError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.log import Part, StagedFile, StagedFiles, Staging
from zmq_datasource.transport.authentication import any_name

__all__ = ["AcceptorTerms", "Reception"]

_log = logging.getLogger(__name__)

# What a data message takes in a staged file beside its rows, at least.
_BATCH_OVERHEAD = 512


class AcceptorTerms(NamedTuple):
    """The limits that hold for senders.

    Attributes:
        transaction_timeout: Seconds for which a silent sender's transaction is kept.
        most_staged_bytes: Of all transactions that are not committed, on disk.
        most_attempts: Of all transactions that are not committed. Each is a file, which the next writer has to open.
        senders: How many send at a time.
    """

    transaction_timeout: float
    most_staged_bytes: int
    most_attempts: int = 16_384
    senders: SenderBounds = SENDER_BOUNDS


class Reception:
    """What is received, staged, committed and answered; in one thread. ``now`` is in monotonic seconds.

    Nobody is silent who is not listened to: silence is measured by a clock that stands still in a pause.

    Args:
        terms: See there.
        counters: Where to count.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before anything is taken.
        log: Where they go.
        forcing: Forces files to the disk, which takes its time.
        clock: Seconds since the epoch, for ``timestamp``.

    A LogError that a method raises is the storage's, and not about one message.
    """

    def __init__(
        self,
        terms: AcceptorTerms,
        counters: SourceCounters,
        files: StagedFiles,
        transactions: CommittedTransactions,
        log: TransactionLog,
        forcing: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms = terms
        self._counters = counters
        self._files = files
        self._transactions = transactions
        self._forcing = forcing
        self._clock = clock
        self._staging = Staging(files)
        self._committer = Committer(counters, self._staging, transactions, log)
        self._sessions = Sessions(terms.senders)
        self._finishing: list[Session] = []
        self._looked = self._paused_seconds = 0.0
        self._answers = Answers(counters, self._abandon)

    @property
    def sessions(self) -> Sessions:
        """Those that send."""
        return self._sessions

    def recover(self, now: float) -> None:
        """Find what was staged, and remove what is not needed.

        Raises:
            LogError: It cannot be removed.
        """
        self._looked = now
        self._staging.recover(now)
        self._staging.remove([attempt for attempt in self._files.names() if self._is_done(attempt)])

    def _is_done(self, attempt: str) -> bool:
        part = self._staging.get(attempt)
        return part is not None and self._transactions.is_committed(part.producer, part.number)

    def close(self) -> None:
        """Close the files of unfinished attempts."""
        for session in self._sessions:
            self._end(session)

    @property
    def busy(self) -> bool:
        """Whether something is under way that ends without a message."""
        return bool(self._committer.busy or self._finishing)

    def answers(self) -> list[tuple[bytes, list[Any]]]:
        """What is to be said since the last call: to whom, and the frames."""
        return self._answers.take()

    # Time.

    def _listened(self, now: float) -> float:
        """The time by a clock that stands still in pauses."""
        self._looked = now
        return now - self._paused_seconds

    def look(self, now: float) -> None:
        """To be called now and then: let go of what nobody wants any more."""
        now = self._listened(now)
        self._answers.flush()
        for session in self._sessions:
            if now - session.heard > self._terms.transaction_timeout:
                self._end(session)
        active = {session.part.producer for session in self._sessions}
        abandoned = self._unused(self._staging.abandoned(self._terms.transaction_timeout, active, now))
        if abandoned:
            _log.warning("%d attempts were never committed; they are discarded", len(abandoned))
            self._staging.remove(abandoned)

    def keep_alive_while_paused(self, now: float) -> None:
        """To be called while nothing is received."""
        self._paused_seconds += now - self._looked
        self.go_on(now)

    def go_on(self, now: float) -> None:
        """Answer what is done by now, and do what had to wait."""
        self._answer_staged(self._listened(now))
        self._answer_commits()

    def cut(self) -> None:
        """Have what was committed in this moment written, as one chunk."""
        self._committer.cut()

    # Messages.

    def take(
        self,
        peer: bytes,
        frames: Sequence[bytes],
        now: float,
        may_use: Callable[[str], bool] = any_name,
    ) -> None:
        """Take in a message; ``answers`` says what comes of it.

        Args:
            may_use: Whether the peer may commit under a producer's name.
        """
        with self._answers.refusing(peer):
            message, buffers = decode(frames)
            name = getattr(message, "producer", None)
            if name is not None and not may_use(name):
                raise RefusedError(
                    "forbidden", f"the name {name!r} belongs to another key (allowedClients at the receiver)"
                )
            self._obey(peer, message, buffers, self._listened(now))

    def _obey(self, peer: bytes, message: Message, buffers: Sequence[bytes], now: float) -> None:
        with self._answers.refusing(peer, getattr(message, "attempt", None)):
            match message:
                case Hello():
                    self._hello(peer, message, now)
                case Data():
                    self._data(peer, message, buffers, now)
                case End():
                    self._finish(peer, message, now)
                case Commit():
                    self._commit(peer, message)
                case Abort():
                    self._abort(peer, message)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} message is for a sender")

    def _hello(self, peer: bytes, message: Hello, now: float) -> None:
        session, last = self._sessions.get(message.attempt), self._transactions.last(message.producer)
        if session is not None:  # of another attempt nothing is here; that is not worth remembering
            session.heard_from(peer, now)
        self._answers.add(
            peer,
            Welcome(
                attempt=message.attempt,
                received=0 if session is None else session.received,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
                busy=session is None and self._sessions.is_full(now),
            ),
        )

    def _data(self, peer: bytes, message: Data, buffers: Sequence[bytes], now: float) -> None:
        session = self._sessions.get(message.attempt)
        if session is not None or message.index > 0:
            session = self._session(peer, message.attempt, now)
            if not session.expects(message):
                self._answers.add(peer, Taken(attempt=message.attempt, received=session.received))
                return
        elif self._staging.get(message.attempt) is not None:
            return  # a copy that was long on its way
        rows = rows_of(message, buffers, int(self._clock() * 1_000_000))
        session = session or self._begin(peer, message, now)
        if not self._has_room(rows.nbytes + _BATCH_OVERHEAD):
            self._end(session)
            raise RefusedError(
                "no_room",
                f"what is staged has reached walMaxBytes={self._terms.most_staged_bytes}; commit, or raise it",
            )
        try:
            if session.file is None:
                session.file = StagedFile(self._files, message.attempt, session.part)
            session.file.append(rows)
        except LogWriteError as e:
            self._end(session)
            raise RefusedError("storage", str(e)) from e
        failpoints.reach("acknowledged.data.after_append")
        session.received += 1
        session.digest += digest_of_rows(rows)
        self._answers.add(peer, Taken(attempt=message.attempt, received=session.received))

    def _begin(self, peer: bytes, message: Data, now: float) -> Session:
        """A session for an attempt whose first data has come.

        Raises:
            ConflictError, UnknownAttemptError: Its transaction is done, or a later one.
            RefusedError: There are too many.
        """
        newest = self._transactions.newest(message.producer)
        if newest is not None and message.number < newest.number:
            raise conflict_with_later(message.producer, message.number, newest.number)
        if self._transactions.is_committed(message.producer, message.number):
            raise UnknownAttemptError(
                f"transaction {message.number} of {message.producer} was committed before this attempt began: repeat it"
            )
        if self._attempts >= self._terms.most_attempts:
            self._staging.remove(self._unused(self._staging.superseded()))
            if self._attempts >= self._terms.most_attempts:
                raise RefusedError(
                    "no_room",
                    f"{self._terms.most_attempts} attempts are staged and not committed; commit or abort some",
                )
        leaving = self._sessions.must_leave(peer, now)
        if leaving is not None:
            self._end(leaving)
        part = Part(message.producer, message.number, message.partition)
        session = Session(peer, message.attempt, part, now)
        self._sessions.add(session)
        return session

    @property
    def _attempts(self) -> int:
        return len(self._staging) + len(self._sessions)

    def _has_room(self, size: int) -> bool:
        """Whether so many bytes more may be staged; attempts that were repeated make room."""
        size += self._sessions.staged_bytes
        if self._staging.bytes + size > self._terms.most_staged_bytes:
            self._staging.remove(self._unused(self._staging.superseded()))
        return self._staging.bytes + size <= self._terms.most_staged_bytes

    def _unused(self, attempts: Sequence[str]) -> list[str]:
        """Those of some attempts whose transaction is not being committed: the log may be making a chunk of a file."""
        parts = [(attempt, self._staging.get(attempt)) for attempt in attempts]
        return [a for a, part in parts if part and not self._committer.is_at(part.producer, part.number)]

    def _finish(self, peer: bytes, message: End, now: float) -> None:
        if self._staging.get(message.attempt) is not None:
            with suppress(DiskFaultError):  # no file can be opened now: it is asked again
                self._answers.add(peer, Staged(attempt=message.attempt, rows=self._rows_of(message.attempt)))
            return
        session = self._session(peer, message.attempt, now)
        if session.finishing is not None:  # asked again: it is answered when it is done
            return
        if session.received != message.messages or session.file is None:
            raise ProtocolError(
                f"an end after {message.messages} data messages, of which {session.received} came"
            )
        if session.file.rows != message.rows:
            raise ProtocolError(f"an end after {message.rows} rows, of which {session.file.rows} came")
        # The disk takes its time with it, and others go on sending.
        session.finishing = self._forcing.submit(session.file.finish)
        self._finishing.append(session)

    def _rows_of(self, attempt: str) -> int:
        try:
            return self._staging.rows(attempt)
        except DamagedChunkError as e:
            self._staging.remove([attempt])
            raise UnknownAttemptError(str(e)) from e

    def _answer_staged(self, now: float) -> None:
        for session in [s for s in self._finishing if s.finishing is not None and s.finishing.done()]:
            self._finishing.remove(session)
            with self._answers.refusing(session.peer, session.attempt):
                self._answer_finished(session, now)

    def _answer_finished(self, session: Session, now: float) -> None:
        if session.file is None or session.finishing is None:
            return  # it was let go of meanwhile
        try:
            filled = session.finishing.result()
        except LogWriteError as e:
            self._end(session)
            raise RefusedError("storage", str(e)) from e
        file, session.file = session.file, None
        rows = file.rows
        part = session.part._replace(rows=rows, digest=session.digest, value_bytes=file.value_bytes)
        self._staging.add(session.attempt, part, file.bytes, now, filled)
        self._end(session)
        failpoints.reach("acknowledged.staged.before_answer")
        self._answers.add(session.peer, Staged(attempt=session.attempt, rows=rows))

    def _commit(self, peer: bytes, message: Commit) -> None:
        if self._committer.commit(peer, message):
            self._committed(Done(message, [peer], again=True))

    def _answer_commits(self) -> None:
        for done in self._committer.done():
            with self._answers.refusing(done.peers[0]):
                self._committed(done)

    def _committed(self, done: Done) -> None:
        """Answer, and let go of what other attempts have left at this transaction, and at those before it."""
        failpoints.reach("acknowledged.committed.before_answer")
        message = done.message
        self._staging.remove(self._staging.of(message.producer, message.number))
        for session in self._sessions:
            part = session.part
            if part.producer == message.producer and part.number <= message.number:
                self._end(session)
        last = self._transactions.last(message.producer)
        answer = Committed(
            producer=message.producer,
            number=message.number,
            again=done.again,
            by=None if last is None else last.attempt,
        )
        for peer in done.peers:
            self._answers.add(peer, answer)
        failpoints.reach("acknowledged.committed.after_answer")

    def _abort(self, peer: bytes, message: Abort) -> None:
        if not self._committer.is_at(message.producer, message.number):
            asked = message.producer, message.number
            for attempt in message.attempts:
                session, part = self._sessions.get(attempt), self._staging.get(attempt)
                if session is not None and (session.part.producer, session.part.number) == asked:
                    self._end(session)
                # Of one that is not known here there is no file.
                if part is not None and (part.producer, part.number) == asked:
                    self._staging.remove([attempt])
        self._answers.add(peer, Aborted(producer=message.producer, number=message.number))

    # Sessions.

    def _session(self, peer: bytes, attempt: str, now: float) -> Session:
        session = self._sessions.get(attempt)
        if session is None:
            raise UnknownAttemptError(
                f"attempt {attempt} is not known here: the receiver has restarted, or it was silent"
            )
        session.heard_from(peer, now)
        return session

    def _abandon(self, attempt: str | None) -> None:
        session = self._sessions.get(attempt)
        if session is not None:
            self._end(session)

    def _end(self, session: Session) -> None:
        """Forget a session, and what it has staged."""
        self._sessions.remove(session)
        if session.file is not None:
            if session.finishing is not None:
                wait([session.finishing])
            file, session.file = session.file, None
            file.discard()
