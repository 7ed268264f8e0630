"""The receiving side of the transaction protocol, as a state machine: messages and times in, answers out.

It has no socket, no clock and no thread. Its link (``acceptor``) gives it each message of a sender, and sends its
answers. It writes rows to the files of attempts and appends them to the log, which are given to it.

An attempt is *receiving* until its sender has sent the end, *ending* until its file is whole and forced to the disk,
and then *staged*, until its transaction is committed, or it is abandoned or replaced. A restart finds the staged
attempts again. The others are lost, and their senders begin again.

A commit appends rows and number together, and they are committed when their chunk is on the disk. A chunk appears at
once, so a reader sees all of a transaction or none. Transactions that are committed while the disk has enough to do
share a chunk. Each chunk has the last transactions of all producers, so thousands that wait would fill the memory.

=============  ==================================================  =====================================================
sender         if                                                  then
=============  ==================================================  =====================================================
Hello          always                                              Welcome; no other effect
Data           the next one of its attempt                         write it to the file; Taken
Data           one that is here                                    Taken
Data           of a transaction that is being committed            nothing yet
End            all data are here                                   finish the file; when it is on the disk, Staged
Commit         the last transaction of its producer, same rows     Committed again
Commit         an older number, or other rows                      refused as a conflict
Commit         all attempts are staged                             append; when the chunk is there, Committed
=============  ==================================================  =====================================================

The rules:

* Every message may be repeated, because answers get lost, and has the same answer and no second effect.
* No message ends the receiver. What cannot be done is refused, with a reason.
* What cannot be done now, because the disk refuses or the log is full, is not answered: its sender asks again.
* What takes long is done in other threads: files are forced to the disk by a pool. The log reads the rows of a commit,
  one data message at a time, while it writes their chunk.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from zmq_datasource.acknowledged.attempt_files import AttemptFiles, Stored
from zmq_datasource.acknowledged.protocol import (
    REFUSED,
    UNKNOWN,
    Commit,
    Committed,
    Data,
    End,
    Hello,
    Message,
    Refusal,
    Staged,
    Taken,
    Welcome,
    decode,
    rows_of,
)
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction, conflict_with_later
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    ConflictError,
    DiskFaultError,
    LogWriteError,
    ProtocolError,
    RefusedError,
    UnknownAttemptError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import LogWriter, StoredRows
from zmq_datasource.transport.authentication import any_name

_log = logging.getLogger(__name__)

# A chunk of several transactions is written when it has this many bytes. In a bucket it is in memory then.
_ENOUGH_BYTES = 32 << 20


class Terms(NamedTuple):
    """The limits for senders.

    Attributes:
        transaction_timeout: Seconds after which the attempts of a silent sender are discarded.
        most_staged_bytes: The bytes on disk of all attempts that are not committed. One data message may exceed them.
        most_transaction_bytes: The bytes of one transaction.
        most_attempts: The number of attempts. Each is a file.
    """

    transaction_timeout: float
    most_staged_bytes: int
    most_transaction_bytes: int = 1 << 62
    most_attempts: int = 16_384


@dataclass(eq=False)
class Received:
    """An attempt.

    Attributes:
        name: Its 32 hexadecimal digits.
        stored: Its part of a transaction, and what its file has.
        peer: Where to answer; another one after a reconnect.
        heard: When the last message of its sender came. A staged attempt is named only by its commit.
    """

    name: str
    stored: Stored
    peer: bytes
    heard: float
    state: Literal["receiving", "ending", "staged"] = "receiving"


@dataclass(eq=False)
class Asked:
    """A commit that is not answered yet, and the sender that has asked for it last."""

    producer: str
    transaction: Transaction
    peer: bytes


class Answer(NamedTuple):
    """A message to a peer."""

    peer: bytes
    message: Message


class Reception:
    """The state machine. ``now`` is in monotonic seconds. Call ``go_on`` after ``receive``, and often while ``busy``.

    Args:
        terms: The limits.
        transactions: What is committed.
        counters: Counts rows, malformed messages and errors.
        files: Where attempts are staged.
        log: Where transactions are committed.
        pool: Threads for what takes long.
        clock: Seconds since the epoch, for the column ``timestamp``.

    Attributes:
        answers: The answers to send, oldest first. The link takes them out.
    """

    def __init__(
        self,
        terms: Terms,
        transactions: CommittedTransactions,
        counters: SourceCounters,
        files: AttemptFiles,
        log: LogWriter,
        pool: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._terms = terms
        self._transactions = transactions
        self._counters = counters
        self._files, self._log = files, log
        self._pool, self._clock = pool, clock
        self._attempts: dict[str, Received] = {}  # the oldest first
        self._bytes = 0  # of all of these
        self._ending: list[tuple[Received, Future[Stored]]] = []
        self._asked: dict[tuple[str, int], Asked] = {}
        self._appended: list[Asked] = []
        self._appended_bytes = 0
        self._written: deque[tuple[list[Asked], Future[int]]] = deque()
        self._checked_at: float | None = None
        self._refusals = LimitedLog(__name__, "refusals")
        self._faults = LimitedLog(__name__, "faults of transactions")
        self.answers: deque[Answer] = deque()

    @property
    def busy(self) -> bool:
        """Whether an answer waits for another thread."""
        return bool(self._ending or self._appended or self._written)

    def recover(self, now: float) -> None:
        """Find the attempts of the writer before.

        Raises:
            LogError: A file cannot be read.
        """
        for name, stored in self._files.recover():
            attempt = Received(name, stored, b"", now, "staged")
            last = self._transactions.last(stored.producer)
            if last is not None and stored.number <= last.number:
                self._remove(attempt)
            else:
                self._attempts[name] = attempt
                self._bytes += stored.size

    # Messages.

    def receive(
        self, peer: bytes, frames: Sequence[bytes], now: float, may_use: Callable[[str], bool] = any_name
    ) -> None:
        """Take a message of a sender.

        Args:
            may_use: Whether the peer may commit under the name of this producer.
        """
        name: str | None = None
        try:
            message, buffers = decode(frames)
            name = getattr(message, "attempt", None)
            producer = getattr(message, "producer", "")
            if producer and not may_use(producer):
                raise RefusedError(
                    f"the name {producer!r} belongs to another key (allowedClients at the receiver)",
                )
            self._transactions.mark_heard(producer)
            match message:
                case Hello():
                    self._hello(peer, message)
                case Data():
                    self._data(peer, message, buffers, now)
                case End():
                    self._end(peer, message, now)
                case Commit():
                    self._commit(peer, message, now)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} message is for a sender")
        except Exception as e:
            self._refuse(peer, name, e)

    def _hello(self, peer: bytes, message: Hello) -> None:
        last = self._transactions.last(message.producer)
        self._answer(
            peer,
            Welcome(
                attempt=message.attempt,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
            ),
        )

    def _data(self, peer: bytes, message: Data, buffers: Sequence[bytes], now: float) -> None:
        if message.index == 0 and message.attempt not in self._attempts:
            if (message.producer, message.number) in self._asked:
                return  # it is not known yet whether the transaction is committed: the sender asks again
            self._begin(peer, message, now)
        attempt = self._known(message.attempt)
        attempt.peer, attempt.heard = peer, now
        received = attempt.stored.messages
        if message.index >= received and attempt.state != "receiving":
            raise ProtocolError(f"data message {message.index} of an attempt after its end")
        if message.index > received:
            raise ProtocolError(f"data message {message.index} of an attempt of which {received} are here")
        if attempt.stored.part != (message.producer, message.number, message.partition):
            raise ProtocolError(f"data message {message.index} for another part than that of its attempt")
        if message.index == received:
            self._write(attempt, message, buffers)
        self._answer(peer, Taken(attempt=attempt.name, received=attempt.stored.messages))

    def _write(self, attempt: Received, message: Data, buffers: Sequence[bytes]) -> None:
        try:
            rows = rows_of(message, buffers, int(self._clock() * 1_000_000))
            stored = self._files.append(attempt.name, attempt.stored, rows)
            failpoints.reach("acknowledged.data.after_append")
        except Exception:
            if not attempt.stored.messages:
                self._forget(attempt)
            raise
        self._bytes += stored.size - attempt.stored.size
        attempt.stored = stored
        self._make_room(0)

    def _begin(self, peer: bytes, message: Data, now: float) -> None:
        """Add an attempt, at its first data.

        Raises:
            ConflictError: A later transaction of the producer is in the log, perhaps not on disk yet.
            UnknownAttemptError: The transaction is in the log.
            RefusedError: There are too many attempts or producers.
        """
        producer, number = message.producer, message.number
        newest = self._transactions.newest(producer)
        if newest is not None and number < newest.number:
            raise conflict_with_later(producer, number, newest.number)
        if newest is not None and number == newest.number:
            raise UnknownAttemptError(
                f"transaction {number} of {producer} was committed before this attempt began: send the commit again, "
                "without data"
            )
        self._transactions.check_room(producer)
        self._make_room(1)
        stored = Stored(producer, number, message.partition)
        self._attempts[message.attempt] = Received(message.attempt, stored, peer, now)

    def _end(self, peer: bytes, message: End, now: float) -> None:
        attempt = self._known(message.attempt)
        stored = attempt.stored
        if attempt.state == "staged":
            self._answer(peer, Staged(attempt=attempt.name, rows=stored.rows))
            return
        attempt.peer, attempt.heard = peer, now
        if attempt.state == "receiving":  # else ``go_on`` answers
            if (message.messages, message.rows) != (stored.messages, stored.rows):
                raise ProtocolError(
                    f"an end after {message.messages} data messages with {message.rows} rows, of which "
                    f"{stored.messages} with {stored.rows} came"
                )
            attempt.state = "ending"
            self._ending.append((attempt, self._pool.submit(self._files.finish, attempt.name, stored)))

    def _commit(self, peer: bytes, message: Commit, now: float) -> None:
        producer, number = key = message.producer, message.number
        for name in {*message.attempts} & self._attempts.keys():
            self._attempts[name].heard = now
        newest = self._transactions.newest(producer)
        if newest is not None and number <= newest.number:
            newest.check_is(producer, number, message.rows, message.digest)
            if key in self._asked:
                self._asked[key].peer = peer  # ``go_on`` answers
            else:
                last = self._transactions.last(producer)
                by = None if last is None else last.attempt
                self._answer(peer, Committed(producer=producer, number=number, again=True, by=by))
        elif not (self._log.full or self._log.fault or self._log.failure):  # else the sender asks again
            parts = self._parts_of(message)
            failpoints.reach("acknowledged.commit.before_append")
            latest = max(part.stored.latest for part in parts)
            read = partial(self._files.read, [part.name for part in parts])
            self._log.append_stored(StoredRows(message.rows, latest, read))
            self._counters.count(message.rows, sum(part.stored.value_bytes for part in parts))
            transaction = Transaction(number, message.attempts[0], message.rows, message.digest)
            self._transactions.commit(producer, transaction)
            asked = self._asked[key] = Asked(producer, transaction, peer)
            self._appended.append(asked)
            self._appended_bytes += sum(part.stored.size for part in parts)

    def _parts_of(self, message: Commit) -> list[Received]:
        """The attempts of a commit, in the order of their rows.

        Raises:
            UnknownAttemptError: Not all attempts and rows are staged here.
            RefusedError: There are too many producers, or bytes.
        """
        producer, number = message.producer, message.number
        transaction = f"committing transaction {number} of {producer}"
        wanted = len(message.attempts)
        found = (self._attempts[name] for name in {*message.attempts} & self._attempts.keys())
        parts = [it for it in found if it.state == "staged" and it.stored.transaction == (producer, number)]
        parts.sort(key=lambda attempt: attempt.stored.partition)
        if not parts or len(parts) < wanted:
            raise UnknownAttemptError(
                f"{transaction}: of {wanted} attempts, {len(parts)} different ones are staged here"
            )
        rows = sum(attempt.stored.rows for attempt in parts)
        if rows != message.rows:
            raise UnknownAttemptError(f"{transaction}: committing {message.rows} rows, {rows} are staged")
        size, most = sum(attempt.stored.size for attempt in parts), self._terms.most_transaction_bytes
        if size > most:
            raise RefusedError(
                f"{transaction}: it has {size} bytes, and {most} are the most for a log in a bucket, where a "
                "transaction is one object. Commit smaller ones, or receive into a directory (walLocation)",
            )
        self._transactions.check_room(producer)
        return parts

    # What other threads have done.

    def go_on(self, now: float) -> None:
        """Cut the log after commits, and answer what other threads have done.

        Raises:
            LogError: The log has failed.
        """
        if self._appended and (not self._log.busy or self._appended_bytes >= _ENOUGH_BYTES):
            failpoints.reach("acknowledged.commit.after_append")
            self._written.append((self._appended, self._log.cut()))
            self._appended, self._appended_bytes = [], 0
        for ended in [it for it in self._ending if it[1].done()]:
            self._ending.remove(ended)
            self._note_ended(*ended, now)
        while self._written and self._written[0][1].done():
            commits, written = self._written.popleft()
            written.result()
            for asked in commits:
                failpoints.reach("acknowledged.committed.before_answer")
                self._note_durable(asked)

    def _note_ended(self, attempt: Received, done: Future[Stored], now: float) -> None:
        is_known, stored = self._attempts.get(attempt.name) is attempt, None
        attempt.state = "receiving"
        try:
            stored = done.result()
            failpoints.reach("acknowledged.staged.before_answer")
        except Exception as e:
            self._refuse(attempt.peer, attempt.name, e)
        if not is_known:  # it was forgotten meanwhile
            self._remove(attempt)
        elif stored is not None:
            self._bytes += stored.size - attempt.stored.size
            attempt.state, attempt.stored, attempt.heard = "staged", stored, now
            self._answer(attempt.peer, Staged(attempt=attempt.name, rows=stored.rows))

    def _note_durable(self, asked: Asked) -> None:
        producer, number = asked.producer, asked.transaction.number
        self._transactions.confirm(producer, asked.transaction)
        del self._asked[producer, number]
        # Not ``last``: an anonymous producer may be forgotten meanwhile.
        by = asked.transaction.attempt
        self._answer(asked.peer, Committed(producer=producer, number=number, again=False, by=by))
        for attempt in list(self._attempts.values()):
            if attempt.stored.producer == producer and attempt.stored.number <= number:
                self._forget(attempt)
        failpoints.reach("acknowledged.committed.after_answer")

    # Time.

    def check_timeouts(self, now: float) -> None:
        """Discard the attempts of silent senders, and those that are never committed. Call it often."""
        self._transactions.pass_time(now - (self._checked_at or now))
        self._checked_at = now
        self._refusals.flush()
        self._faults.flush()
        deadline = now - self._terms.transaction_timeout
        for it in list(self._attempts.values()):
            if it.heard < deadline and it.state != "ending" and it.stored.transaction not in self._asked:
                _log.warning("discarding attempt %s, which was not committed in time", it.name)
                self._forget(it)

    # The attempts.

    def _known(self, name: str) -> Received:
        if name not in self._attempts:
            raise UnknownAttemptError(
                f"attempt {name} is not known here: the receiver has restarted, or the sender was silent"
            )
        return self._attempts[name]

    def _make_room(self, more: int) -> None:
        """Make room for so many more attempts, perhaps by forgetting those that have a newer one at the same part: they
        are only useful if the newer one fails.

        Raises:
            RefusedError: The attempts that are left have reached a limit.
        """
        if not self._lacks_room(more):
            return
        newest = {it.stored.part: it for it in self._attempts.values()}
        for it in list(self._attempts.values()):
            if newest[it.stored.part] is not it and it.stored.transaction not in self._asked:
                self._forget(it)
        if self._lacks_room(more):
            most = self._terms
            raise RefusedError(
                f"the attempts that are not committed have reached walMaxBytes={most.most_staged_bytes} or their most, "
                f"{most.most_attempts}; commit some, or raise walMaxBytes",
            )

    def _lacks_room(self, more: int) -> bool:
        most = self._terms
        return self._bytes > most.most_staged_bytes or len(self._attempts) + more > most.most_attempts

    def _forget(self, attempt: Received) -> None:
        if self._attempts.get(attempt.name) is attempt:
            del self._attempts[attempt.name]
            self._bytes -= attempt.stored.size
        if attempt.state != "ending":  # else ``go_on`` removes its file
            self._remove(attempt)

    def _remove(self, attempt: Received) -> None:
        try:
            self._files.remove(attempt.name)
        except LogWriteError as e:  # the next writer finds the file, and that its transaction is committed
            self._faults.warn("%s", e)

    # Answers.

    def _answer(self, peer: bytes, message: Message) -> None:
        self.answers.append(Answer(peer, message))

    def _refuse(self, peer: bytes, name: str | None, error: Exception) -> None:
        """Answer what could not be done; nothing if it can be done later."""
        reason, is_kept = str(error), False
        match error:
            case DiskFaultError():
                self._faults.warn("%s; the sender asks again", error)
                return
            case ProtocolError():
                is_kept = True
                self._counters.malformed += not isinstance(error, UnknownAttemptError)
            case ConflictError() | RefusedError() | LogWriteError():
                pass
            case _:
                self._counters.internal_errors += 1
                self._faults.fault(
                    "an unexpected error at a message of the transaction protocol: %r", error, error=error
                )
                reason = (
                    f"an unexpected error of the receiver ({type(error).__name__}), which its log explains"
                )
        if name in self._attempts and not is_kept:
            self._forget(self._attempts[name])
        self._refusals.warn("refused a message of the transaction protocol: %s", reason)
        code = UNKNOWN if isinstance(error, UnknownAttemptError) else REFUSED
        self._answer(peer, Refusal(code=code, reason=reason, attempt=name))
