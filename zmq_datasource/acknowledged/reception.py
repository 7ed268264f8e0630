"""The receiving side of the transaction protocol, without its socket: messages and the time in, answers out.

The rules:

* ``Staged`` is answered when the attempt's file is on disk, and ``Committed`` when the chunk with the whole transaction
  is. A chunk is one file that appears at once, so a reader sees all of a transaction or none of it. Transactions that
  are committed in the same moment share a chunk.
* Every message may be repeated, because answers get lost: a staged attempt stays staged, a committed transaction stays
  committed (``again``), and an unknown attempt is refused.
* A sender that has sent no data has no session, and takes no place.
* While the disk refuses to stage rows, the rows that it has refused stay in memory and are written again. All other
  data is answered ``busy``. After ``retry_seconds`` data is refused (``storage``), until the disk takes rows again.
* No message ends the receiver. A message that cannot be obeyed is refused with a reason, also after an unexpected
  error, which the receiver's log explains.
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
    BUSY,
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
from zmq_datasource.log import StagedFile, StagedFiles, Staging, TransactionPart
from zmq_datasource.transport.authentication import any_name

__all__ = ["AcceptorTerms", "Reception"]

_log = logging.getLogger(__name__)

# What a data message takes in a staged file besides its rows, at least.
_BATCH_OVERHEAD = 512
# How often rows that the disk has refused are written again.
_RETRY_SECONDS = 0.1
_DISK_REFUSES = "the receiver's disk refuses to stage rows; send them again later"


class AcceptorTerms(NamedTuple):
    """The limits for senders.

    Attributes:
        transaction_timeout: Seconds after which the attempts of a silent sender are discarded.
        most_staged_bytes: The bytes on disk of all attempts that are not committed.
        most_attempts: Their number. Each is a file, which the next writer has to open.
        retry_seconds: How long senders wait for a disk that refuses.
        senders: How many send at a time.
    """

    transaction_timeout: float
    most_staged_bytes: int
    most_attempts: int = 16_384
    retry_seconds: float = 300.0
    senders: SenderBounds = SENDER_BOUNDS


class _DiskFault:
    """The session whose rows the disk refuses to stage at present, and since when it refuses."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self.session: Session | None = None
        self._since: float | None = None
        self._next_retry = 0.0

    def refused(self, session: Session, now: float, error: DiskFaultError) -> float | None:
        """Keep a session for another attempt. If the disk has refused for too long, return for how many seconds."""
        if self._since is None:
            self._since = now
            _log.warning("staging rows: %s; trying again for up to %.0f s", error, self._retry_seconds)
        waited = now - self._since
        if waited >= self._retry_seconds:
            return waited
        self.session, self._next_retry = session, now + _RETRY_SECONDS
        return None

    def take_due(self, now: float) -> Session | None:
        """The session whose rows are to be written again now."""
        if self.session is None or now < self._next_retry:
            return None
        session, self.session = self.session, None
        return session

    def accepted(self, now: float) -> None:
        """The disk has staged rows."""
        if self._since is not None:
            _log.warning("the disk stages rows again after %.1f s", now - self._since)
            self._since = None


class Reception:
    """Receives, stages, commits and answers; for one thread. ``now`` is in monotonic seconds.

    A sender is silent only while this side listens: its timeouts stand still during a pause (``postpone``).

    A LogError that a method raises is about the log, and not about one message.

    Args:
        terms: The limits.
        counters: Counts rows, malformed messages and errors.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before the first message.
        log: Where transactions are committed.
        forcing: Runs what takes long: forcing files to the disk.
        clock: Seconds since the epoch, for the column ``timestamp``.
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
        self._fault = _DiskFault(terms.retry_seconds)
        self._last_call = self._paused_seconds = 0.0
        self._answers = Answers(counters, self._abandon)

    @property
    def sessions(self) -> Sessions:
        """The attempts that are being received."""
        return self._sessions

    @property
    def staged_bytes(self) -> int:
        """The bytes on disk of the attempts that are received and not committed."""
        return self._staging.bytes

    def recover(self, now: float) -> None:
        """Find the staged attempts of the writer before, and delete those that are committed.

        Raises:
            LogError: A file cannot be read or deleted.
        """
        self._last_call = now
        self._staging.recover(now)
        self._staging.remove([attempt for attempt in self._files.names() if self._is_committed(attempt)])

    def _is_committed(self, attempt: str) -> bool:
        part = self._staging.get(attempt)
        return part is not None and self._transactions.is_committed(part.producer, part.number)

    def close(self) -> None:
        """Delete the files of unfinished attempts."""
        for session in self._sessions:
            self._forget(session)

    @property
    def busy(self) -> bool:
        """Whether an answer is due when another thread is done, without a further message."""
        return bool(self._committer.busy or self._finishing)

    def answers(self) -> list[tuple[bytes, list[Any]]]:
        """The answers since the last call: to which peer, and the frames."""
        return self._answers.take()

    # Time.

    def _without_pauses(self, now: float) -> float:
        """The time by a clock that stands still in pauses."""
        self._last_call = now
        return now - self._paused_seconds

    def check_timeouts(self, now: float) -> None:
        """Discard the attempts of senders that are silent, and attempts that are never committed. Call it often."""
        now = self._without_pauses(now)
        self._answers.flush()
        for session in self._sessions:
            if now - session.heard > self._terms.transaction_timeout:
                self._forget(session)
        active = {session.part.producer for session in self._sessions}
        abandoned = self._unused(self._staging.abandoned(self._terms.transaction_timeout, active, now))
        if abandoned:
            _log.warning("discarding %d attempts that were never committed", len(abandoned))
            self._staging.remove(abandoned)

    def postpone(self, now: float) -> None:
        """Stop the clock of the timeouts since the last call. Call it often while nothing is received."""
        self._paused_seconds += now - self._last_call
        self.answer_completed(now)

    def answer_completed(self, now: float) -> None:
        """Answer for the files and chunks that are on disk by now. Call it often."""
        now = self._without_pauses(now)
        self._retry_refused(now)
        self._answer_staged(now)
        self._answer_commits()

    def cut(self) -> None:
        """Have the transactions of this moment written, as one chunk."""
        self._committer.cut()

    # Messages.

    def receive(
        self,
        peer: bytes,
        frames: Sequence[bytes],
        now: float,
        may_use: Callable[[str], bool] = any_name,
    ) -> None:
        """Obey a message or refuse it.

        Args:
            may_use: Whether the peer may commit under the name of this producer.
        """
        with self._answers.refusing(peer):
            message, buffers = decode(frames)
            name = getattr(message, "producer", None)
            if name is not None and not may_use(name):
                raise RefusedError(
                    "forbidden", f"the name {name!r} belongs to another key (allowedClients at the receiver)"
                )
            self._obey(peer, message, buffers, self._without_pauses(now))

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
        if session is not None:
            session.mark_heard(peer, now)
        self._answers.add(
            peer,
            Welcome(
                attempt=message.attempt,
                received=0 if session is None else session.received,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
                busy=self._fault.session is not None or (session is None and self._sessions.is_full(now)),
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
        self._check_disk()
        rows = rows_of(message, buffers, int(self._clock() * 1_000_000))
        session = session or self._begin(peer, message, now)
        if not self._has_room(rows.nbytes + _BATCH_OVERHEAD):
            self._forget(session)
            raise RefusedError(
                "no_room",
                f"the staged attempts have reached walMaxBytes={self._terms.most_staged_bytes}; commit, or raise it",
            )
        session.file.append(rows)
        session.digest += digest_of_rows(rows)
        self._write(session, now)

    def _begin(self, peer: bytes, message: Data, now: float) -> Session:
        """Add a session for an attempt, at its first data.

        Raises:
            ConflictError, UnknownAttemptError: The transaction is committed, or a later one.
            RefusedError: There are too many attempts.
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
        replaced = self._sessions.to_replace(peer, now)
        if replaced is not None:
            self._forget(replaced)
        part = TransactionPart(message.producer, message.number, message.partition)
        session = Session(peer, message.attempt, part, now, StagedFile(self._files, message.attempt, part))
        self._sessions.add(session)
        return session

    @property
    def _attempts(self) -> int:
        return len(self._staging) + len(self._sessions)

    def _has_room(self, size: int) -> bool:
        """Whether this many more bytes may be staged. Deletes attempts that were repeated, if that makes room."""
        size += self._sessions.staged_bytes
        if self._staging.bytes + size > self._terms.most_staged_bytes:
            self._staging.remove(self._unused(self._staging.superseded()))
        return self._staging.bytes + size <= self._terms.most_staged_bytes

    def _unused(self, attempts: Sequence[str]) -> list[str]:
        """Leave out the attempts whose transaction is being committed: the log may be making a chunk of their file."""
        parts = [(attempt, self._staging.get(attempt)) for attempt in attempts]
        return [a for a, part in parts if part and not self._committer.is_at(part.producer, part.number)]

    # The disk.

    def _check_disk(self) -> None:
        """Raise RefusedError while rows of any session wait for the disk, so that no other rows do."""
        if self._fault.session is not None:
            raise RefusedError(BUSY, _DISK_REFUSES)

    def _write(self, session: Session, now: float) -> None:
        """Write the rows of a session to its file. Then answer, or force the file to the disk if it has its end.

        Raises:
            RefusedError: The disk refuses. If the code is ``busy``, ``_retry_refused`` writes the rows again.
        """
        try:
            session.file.write()
        except DiskFaultError as e:
            waited = self._fault.refused(session, now, e)
            if waited is None:
                raise RefusedError(BUSY, _DISK_REFUSES) from e
            self._forget(session)
            raise RefusedError(
                "storage", f"{e}. The disk has refused for {waited:.0f} s (walRetryTimeout)"
            ) from e
        except LogWriteError as e:
            self._forget(session)
            raise RefusedError("storage", str(e)) from e
        self._fault.accepted(now)
        if session.file.is_ended:
            # The disk takes its time, and other senders are served meanwhile.
            session.finishing = self._forcing.submit(session.file.finish)
            self._finishing.append(session)
            return
        failpoints.reach("acknowledged.data.after_append")
        session.received += 1
        self._answers.add(session.peer, Taken(attempt=session.attempt, received=session.received))

    def _retry_refused(self, now: float) -> None:
        session = self._fault.take_due(now)
        if session is None:
            return
        with self._answers.refusing(session.peer, session.attempt):
            try:
                self._write(session, now)
            except RefusedError as e:
                if e.code != BUSY:  # the sender has that answer already
                    raise

    def _finish(self, peer: bytes, message: End, now: float) -> None:
        if self._staging.get(message.attempt) is not None:
            with suppress(DiskFaultError):  # no file can be opened now; the sender asks again
                self._answers.add(peer, Staged(attempt=message.attempt, rows=self._rows_of(message.attempt)))
            return
        session = self._session(peer, message.attempt, now)
        if session.finishing is not None:  # this is answered when the first one is
            return
        if session.received != message.messages or not session.received:
            raise ProtocolError(
                f"an end after {message.messages} data messages, of which {session.received} came"
            )
        if session.file.rows != message.rows:
            raise ProtocolError(f"an end after {message.rows} rows, of which {session.file.rows} came")
        self._check_disk()
        session.file.end()
        self._write(session, now)

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
        if session.finishing is None or self._sessions.get(session.attempt) is not session:
            return  # the session was forgotten meanwhile
        try:
            filled = session.finishing.result()
        except LogWriteError as e:
            self._forget(session)
            raise RefusedError("storage", str(e)) from e
        file = session.file
        part = session.part._replace(rows=file.rows, digest=session.digest, value_bytes=file.value_bytes)
        self._staging.add(session.attempt, part, file.bytes, now, filled)
        self._sessions.remove(session)  # the file is the staging's now
        failpoints.reach("acknowledged.staged.before_answer")
        self._answers.add(session.peer, Staged(attempt=session.attempt, rows=file.rows))

    # Transactions.

    def _commit(self, peer: bytes, message: Commit) -> None:
        if self._committer.commit(peer, message):
            self._committed(Done(message, [peer], again=True))

    def _answer_commits(self) -> None:
        for done in self._committer.done():
            with self._answers.refusing(done.peers[0]):
                self._committed(done)

    def _committed(self, done: Done) -> None:
        """Answer for a transaction, and delete what other attempts have staged for it or for those before it."""
        failpoints.reach("acknowledged.committed.before_answer")
        message = done.message
        self._staging.remove(self._staging.of(message.producer, message.number))
        for session in self._sessions:
            part = session.part
            if part.producer == message.producer and part.number <= message.number:
                self._forget(session)
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
                    self._forget(session)
                if part is not None and (part.producer, part.number) == asked:
                    self._staging.remove([attempt])
        self._answers.add(peer, Aborted(producer=message.producer, number=message.number))

    # Sessions.

    def _session(self, peer: bytes, attempt: str, now: float) -> Session:
        session = self._sessions.get(attempt)
        if session is None:
            raise UnknownAttemptError(
                f"attempt {attempt} is not known here: the receiver has restarted, or the sender was silent"
            )
        session.mark_heard(peer, now)
        return session

    def _abandon(self, attempt: str | None) -> None:
        session = self._sessions.get(attempt)
        if session is not None:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """End a session, and delete its file."""
        self._sessions.remove(session)
        if self._fault.session is session:
            self._fault.session = None
        if session.finishing is not None:
            wait([session.finishing])
        session.file.discard()
