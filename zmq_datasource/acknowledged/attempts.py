"""The receiving side's attempts: their rows are received and staged, file by file, until a commit takes them.

The rules:

* A sender that has sent no data has no session, and takes no place.
* ``Staged`` is answered when the file of the attempt is on disk.
* While the disk refuses to stage rows, the rows that it has refused stay in memory and are written again. All other
  data is answered ``busy``. After ``retry_seconds`` data is refused (``storage``), until the disk takes rows again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait

from zmq_datasource.acknowledged.protocol import (
    BUSY,
    Data,
    End,
    Hello,
    Staged,
    Taken,
    Welcome,
    rows_of,
)
from zmq_datasource.acknowledged.sessions import AcceptorTerms, AttemptSession, CollectedAnswers, Sessions
from zmq_datasource.acknowledged.staging import StagedFile, Staging
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Committer, conflict_with_later
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    DiskFaultError,
    LogWriteError,
    ProtocolError,
    RefusedError,
    UnknownAttemptError,
)
from zmq_datasource.host import failpoints

_log = logging.getLogger(__name__)

# What a data message takes in a staged file besides its rows, at least.
_BATCH_OVERHEAD = 512
# How often rows that the disk has refused are written again.
_RETRY_SECONDS = 0.1
_DISK_REFUSES = "the receiver's disk refuses to stage rows; send them again later"


class _DiskFault:
    """The session with rows that the disk refuses to stage now, and since when it refuses."""

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        self.session: AttemptSession | None = None
        self._since: float | None = None
        self._next_retry = 0.0

    def refused(self, session: AttemptSession, now: float, error: DiskFaultError) -> float | None:
        """Keep the session, to write its rows again, and return None. After ``retry_seconds`` of refusal, keep nothing,
        and return the seconds."""
        if self._since is None:
            self._since = now
            _log.warning("staging rows: %s; trying again for up to %.0f s", error, self._retry_seconds)
        waited = now - self._since
        if waited >= self._retry_seconds:
            return waited
        self.session, self._next_retry = session, now + _RETRY_SECONDS
        return None

    def take_due(self, now: float) -> AttemptSession | None:
        """The session with rows to write again now; None if none is due."""
        if self.session is None or now < self._next_retry:
            return None
        session, self.session = self.session, None
        return session

    def accepted(self, now: float) -> None:
        """Note that the disk has staged rows, which ends its refusal."""
        if self._since is not None:
            _log.warning("the disk stages rows again after %.1f s", now - self._since)
            self._since = None


class Attempts:
    """Receives and stages attempts; in the receiving thread. ``now`` is in seconds of a clock that stands still while
    nothing is received (``Reception.extend_timeouts``).

    A method that takes a message raises errors that ``CollectedAnswers.refusing`` turns into refusals.

    Args:
        terms: The limits.
        counters: Counts malformed messages and errors.
        staging: The attempts that are staged.
        transactions: Which transactions are committed.
        committer: Says which transactions are being written: their files must stay.
        forcing: Forces files to the disk, which takes long, in other threads.
        clock: Seconds since the epoch, for the column ``timestamp``.

    Attributes:
        sessions: The attempts that are being received.
        answers: The answers to senders.
    """

    def __init__(
        self,
        terms: AcceptorTerms,
        counters: SourceCounters,
        staging: Staging,
        transactions: CommittedTransactions,
        committer: Committer,
        forcing: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms = terms
        self._staging = staging
        self._transactions = transactions
        self._committer = committer
        self._forcing = forcing
        self._clock = clock
        self.sessions = Sessions(terms.senders)
        self.answers = CollectedAnswers(counters, self._abandon)
        self._finishing: list[AttemptSession] = []
        self._fault = _DiskFault(terms.retry_seconds)

    @property
    def busy(self) -> bool:
        """Whether a file is being forced to the disk, which is answered later."""
        return bool(self._finishing)

    def recover(self, now: float) -> None:
        """Find the attempts that earlier writers have staged, and delete those that are committed.

        Raises:
            LogError: A file cannot be read or deleted.
        """
        self._staging.recover(now, self._transactions.is_committed)

    def close(self) -> None:
        """Delete the files of unfinished attempts."""
        for session in self.sessions:
            self._forget(session)

    # Messages.

    def hello(self, peer: bytes, message: Hello, now: float) -> None:
        """Answer how much of an attempt is here, and what its producer has committed last."""
        session, last = self.sessions.get(message.attempt), self._transactions.last(message.producer)
        if session is not None:
            session.mark_heard(peer, now)
        self.answers.add(
            peer,
            Welcome(
                attempt=message.attempt,
                received=0 if session is None else session.received,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
                busy=self._fault.session is not None or (session is None and self.sessions.is_full(now)),
            ),
        )

    def data(self, peer: bytes, message: Data, buffers: Sequence[bytes], now: float) -> None:
        """Add rows to their attempt, and write them. The first data of an attempt begins its session."""
        session = self.sessions.get(message.attempt)
        if session is not None or message.index > 0:
            session = self._session(peer, message.attempt, now)
            if not session.expects(message):
                self.answers.add(peer, Taken(attempt=message.attempt, received=session.received))
                return
        elif self._staging.get(message.attempt) is not None:
            return  # a late copy of the attempt's first data
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
        self._write(session, now)

    def _begin(self, peer: bytes, message: Data, now: float) -> AttemptSession:
        """Add a session for an attempt, at its first data.

        Raises:
            ConflictError: A later transaction of the producer is in the log, perhaps not on disk yet.
            UnknownAttemptError: The transaction is committed.
            RefusedError: There are too many attempts.
        """
        newest = self._transactions.newest(message.producer)
        if newest is not None and message.number < newest.number:
            raise conflict_with_later(message.producer, message.number, newest.number)
        if self._transactions.is_committed(message.producer, message.number):
            raise UnknownAttemptError(
                f"transaction {message.number} of {message.producer} was committed before this attempt began: send the "
                "commit again, without data"
            )
        if self._attempts >= self._terms.most_attempts:
            self._staging.remove(self._unused(self._staging.superseded()))
            if self._attempts >= self._terms.most_attempts:
                raise RefusedError(
                    "no_room",
                    f"{self._terms.most_attempts} attempts are staged and not committed; commit or abort some",
                )
        replaced = self.sessions.to_replace(peer, now)
        if replaced is not None:
            self._forget(replaced)
        file = StagedFile(
            self._staging.files, message.attempt, message.producer, message.number, message.partition
        )
        session = AttemptSession(peer, message.attempt, now, file)
        self.sessions.add(session)
        return session

    @property
    def _attempts(self) -> int:
        return len(self._staging) + len(self.sessions)

    def _has_room(self, size: int) -> bool:
        """Whether this many more bytes may be staged, perhaps after attempts that have a newer one are deleted."""
        size += self.sessions.staged_bytes
        if self._staging.bytes + size > self._terms.most_staged_bytes:
            self._staging.remove(self._unused(self._staging.superseded()))
        return self._staging.bytes + size <= self._terms.most_staged_bytes

    def _unused(self, attempts: Sequence[str]) -> list[str]:
        """Leave out the attempts whose transaction is being committed: the log may be making a chunk of their file."""
        parts = [(attempt, self._staging.get(attempt)) for attempt in attempts]
        return [a for a, part in parts if part and not self._committer.is_writing(part.producer, part.number)]

    # The disk.

    def _check_disk(self) -> None:
        """Raise RefusedError while rows of any session wait for the disk, so that no other rows do."""
        if self._fault.session is not None:
            raise RefusedError(BUSY, _DISK_REFUSES)

    def _write(self, session: AttemptSession, now: float) -> None:
        """Write the rows of a session to its file. Then answer, or force the file to the disk if it has its end.

        Raises:
            RefusedError: The disk refuses. If the code is ``busy``, ``retry_refused`` writes the rows again.
        """
        try:
            session.file.write()
        except DiskFaultError as e:
            waited = self._fault.refused(session, now, e)
            if waited is None:
                raise RefusedError(BUSY, _DISK_REFUSES) from e
            self._forget(session)
            raise RefusedError("storage", f"{e}. The disk has refused for {waited:.0f} s") from e
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
        self.answers.add(session.peer, Taken(attempt=session.attempt, received=session.received))

    def retry_refused(self, now: float) -> None:
        """Write the rows again that the disk has refused, if it is time. Call it often."""
        session = self._fault.take_due(now)
        if session is None:
            return
        with self.answers.refusing(session.peer, session.attempt):
            try:
                self._write(session, now)
            except RefusedError as e:
                if e.code != BUSY:  # the sender has that answer already
                    raise

    def end(self, peer: bytes, message: End, now: float) -> None:
        """Have the file of an attempt completed and forced to the disk; ``answer_staged`` answers then."""
        if (staged := self._staging.get(message.attempt)) is not None:
            self.answers.add(peer, Staged(attempt=message.attempt, rows=staged.rows))
            return
        session = self._session(peer, message.attempt, now)
        if session.finishing is not None:  # ``answer_staged`` answers both this message and the first one
            return
        if session.received != message.messages or not session.received:
            raise ProtocolError(
                f"an end after {message.messages} data messages, of which {session.received} came"
            )
        if session.file.rows != message.rows:
            raise ProtocolError(f"an end after {message.rows} rows, of which {session.file.rows} came")
        self._check_disk()
        session.file.is_ended = True
        self._write(session, now)

    def answer_staged(self, now: float) -> None:
        """Answer for the attempts that are on the disk by now. Call it often."""
        for session in [s for s in self._finishing if s.finishing is not None and s.finishing.done()]:
            self._finishing.remove(session)
            with self.answers.refusing(session.peer, session.attempt):
                self._answer_finished(session, now)

    def _answer_finished(self, session: AttemptSession, now: float) -> None:
        if session.finishing is None or self.sessions.get(session.attempt) is not session:
            return  # the session was forgotten meanwhile
        try:
            attempt = session.finishing.result()
        except LogWriteError as e:
            self._forget(session)
            raise RefusedError("storage", str(e)) from e
        self._staging.add(session.attempt, attempt, session.file.bytes, now)
        self.sessions.remove(session)  # the file is the staging's now
        failpoints.reach("acknowledged.staged.before_answer")
        self.answers.add(session.peer, Staged(attempt=session.attempt, rows=attempt.rows))

    # Ends.

    def check_timeouts(self, now: float) -> None:
        """Discard the attempts of silent senders, and staged attempts that were not committed in time."""
        for session in self.sessions:
            if now - session.heard > self._terms.transaction_timeout:
                self._forget(session)
        active = {session.file.part[0] for session in self.sessions}
        abandoned = self._unused(self._staging.abandoned(self._terms.transaction_timeout, active, now))
        if abandoned:
            _log.warning("discarding %d attempts that were never committed", len(abandoned))
            self._staging.remove(abandoned)

    def discard(self, producer: str, number: int, attempts: Sequence[str]) -> None:
        """Discard those of the attempts that are for this transaction, unless the transaction is being written."""
        if self._committer.is_writing(producer, number):
            return
        for attempt in attempts:
            session, part = self.sessions.get(attempt), self._staging.get(attempt)
            if session is not None and session.file.part[:2] == (producer, number):
                self._forget(session)
            if part is not None and (part.producer, part.number) == (producer, number):
                self._staging.remove([attempt])

    def discard_through(self, producer: str, number: int) -> None:
        """Discard all attempts for this transaction and for those before it: it is committed."""
        self._staging.remove(self._staging.attempts_of(producer, number))
        for session in self.sessions:
            if session.file.part[0] == producer and session.file.part[1] <= number:
                self._forget(session)

    def _session(self, peer: bytes, attempt: str, now: float) -> AttemptSession:
        session = self.sessions.get(attempt)
        if session is None:
            raise UnknownAttemptError(
                f"attempt {attempt} is not known here: the receiver has restarted, or the sender was silent"
            )
        session.mark_heard(peer, now)
        return session

    def _abandon(self, attempt: str | None) -> None:
        session = self.sessions.get(attempt)
        if session is not None:
            self._forget(session)

    def _forget(self, session: AttemptSession) -> None:
        """End a session, and delete its file."""
        self.sessions.remove(session)
        if self._fault.session is session:
            self._fault.session = None
        if session.finishing is not None:
            wait([session.finishing])
        session.file.discard()
