"""The receiving side of the transaction protocol, as a state machine: messages and times in, answers and acts out.

It has no socket, no file, no clock and no thread. Its link (``acceptor``) gives it each message of a sender, does the
acts that it asks for, in their order, and tells it the outcome.

An attempt is *receiving* until its sender has sent the end, *ending* until its file is whole and forced to the disk,
and then *staged*, until its transaction is committed, or it is aborted, abandoned or replaced. A restart finds the
staged attempts again. The others are lost, and their senders begin again.

A commit is *asked*, and its rows are *checked* in their files. Then rows and number are *appended* together, and they
are committed when their chunk is on the disk. A chunk appears at once, so a reader sees all of a transaction or none.

=============  ==================================================  =====================================================
sender         if                                                  then
=============  ==================================================  =====================================================
Hello          always                                              Welcome; no other effect
Data           the next one of its attempt                         Write; when it is written, Taken
Data           another one                                         Taken: from where on to send it again
End            all data are here                                   Finish; when it is on the disk, Staged
Commit         the last transaction of its producer, same rows     Committed again
Commit         an older number, or other rows                      refused as a conflict
Commit         all attempts are staged                             Check, Append; when the chunk is there, Committed
Abort          no commit of its transaction runs                   Remove the attempts; Aborted
=============  ==================================================  =====================================================

The rules:

* Every message may be repeated, because answers get lost, and has the same answer and no second effect.
* No message and no fault of a file ends the receiver. What cannot be done is refused, with a code and a reason.
* While the disk refuses rows, they are answered ``busy``, and their sender sends them again. After ``retry_seconds``
  they are refused.
* A connection sends one attempt at a time: the first data of another one ends that which is receiving.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from zmq_datasource.acknowledged.attempt_files import Stored
from zmq_datasource.acknowledged.protocol import (
    BUSY,
    CONFLICT,
    INTERNAL,
    UNKNOWN,
    Abort,
    Aborted,
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
    as_text,
    decode,
)
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction, conflict_with_later
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    ConflictError,
    DamagedChunkError,
    DiskFaultError,
    LogWriteError,
    ProtocolError,
    RefusedError,
    UnknownAttemptError,
)
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.transport.authentication import any_name

_log = logging.getLogger(__name__)


class Terms(NamedTuple):
    """The limits for senders.

    Attributes:
        transaction_timeout: Seconds after which the attempts of a silent sender are discarded.
        most_staged_bytes: The bytes on disk of all attempts that are not committed. One data message may exceed them.
        most_transaction_bytes: The bytes of one transaction.
        most_attempts: The number of attempts. Each is a file, which the next writer has to open.
        retry_seconds: How long senders wait for a disk that refuses.
    """

    transaction_timeout: float
    most_staged_bytes: int
    most_transaction_bytes: int = 1 << 62
    most_attempts: int = 16_384
    retry_seconds: float = 300.0


@dataclass(eq=False)
class Received:
    """An attempt.

    Attributes:
        name: Its 32 hexadecimal digits.
        stored: Its part of a transaction, and what its file has.
        peer: Where to answer; another one after a reconnect.
        heard: When the last message of its sender came; of a staged attempt when it was staged.
    """

    name: str
    stored: Stored
    peer: bytes
    heard: float
    state: Literal["receiving", "ending", "staged"] = "receiving"


@dataclass(eq=False)
class Asked:
    """A commit that is not answered yet.

    Attributes:
        parts: Its attempts, in the order of their rows.
        peers: The senders that have asked for it.
    """

    producer: str
    transaction: Transaction
    parts: Sequence[Received]
    peers: list[bytes]

    @property
    def names(self) -> list[str]:
        """The names of its attempts."""
        return [attempt.name for attempt in self.parts]


class Answer(NamedTuple):
    """Send a message to a peer."""

    peer: bytes
    message: Message


class Write(NamedTuple):
    """Write the rows of a data message to the file of an attempt; then ``written``."""

    attempt: Received
    data: Data
    buffers: Sequence[bytes]


class Finish(NamedTuple):
    """Complete the file of an attempt, and force it to the disk; then ``finished``. Takes long."""

    attempt: Received


class Check(NamedTuple):
    """Read the files of a commit and check them; then ``checked``. Takes long."""

    asked: Asked


class Append(NamedTuple):
    """Append the rows of a commit to the log; then ``appended``, and when they are on the disk ``durable``."""

    asked: Asked


class Remove(NamedTuple):
    """Delete the file of an attempt."""

    name: str


Act: TypeAlias = Answer | Write | Finish | Check | Append | Remove


class Reception:
    """The state machine. ``now`` is in seconds of a clock that stands still while nothing is received.

    After each call, do the ``acts``. If one raises an error that is not of the log, call ``failed``.

    Args:
        terms: The limits.
        transactions: What is committed.
        counters: Counts rows, malformed messages and errors.

    Attributes:
        acts: What is to be done, oldest first. The link takes them out.
        log_is_full: Set by the link: while it is true no commit begins, and the senders ask again.
    """

    def __init__(self, terms: Terms, transactions: CommittedTransactions, counters: SourceCounters) -> None:
        self._terms = terms
        self._transactions = transactions
        self._counters = counters
        self._open: dict[str, Received] = {}  # receiving or ending
        self._staged: dict[str, Received] = {}  # in the order of staging
        self._bytes = 0  # of all of these
        self._asked: dict[tuple[str, int], Asked] = {}
        self._refuses_since: float | None = None  # the disk
        self._checked_at: float | None = None
        self._refusals = LimitedLog(__name__, "refusals")
        self._faults = LimitedLog(__name__, "unexpected errors")
        self.acts: deque[Act] = deque()
        self.log_is_full = False

    @property
    def receiving(self) -> int:
        """How many attempts are not staged."""
        return len(self._open)

    def recover(self, name: str, stored: Stored, now: float) -> None:
        """Take an attempt that an earlier writer has staged."""
        if self._transactions.is_committed(*stored.transaction):
            self.acts.append(Remove(name))
        else:
            self._staged[name] = Received(name, stored, b"", now, "staged")
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
                    "forbidden",
                    f"the name {producer!r} belongs to another key (allowedClients at the receiver)",
                )
            self._transactions.mark_heard(producer)
            match message:
                case Hello():
                    self._hello(peer, message, now)
                case Data():
                    self._data(peer, message, buffers, now)
                case End():
                    self._end(peer, message, now)
                case Commit():
                    self._commit(peer, message)
                case Abort():
                    self._abort(peer, message)
                case _:
                    raise ProtocolError(f"a {type(message).__name__} message is for a sender")
        except Exception as e:
            self._refuse([peer], name, e)

    def _hello(self, peer: bytes, message: Hello, now: float) -> None:
        attempt, last = self._find(message.attempt), self._transactions.last(message.producer)
        if attempt is not None:
            attempt.peer, attempt.heard = peer, now
        self._answer(
            peer,
            Welcome(
                attempt=message.attempt,
                received=0 if attempt is None else attempt.stored.messages,
                committed=None if last is None else last.number,
                by=None if last is None else last.attempt,
            ),
        )

    def _data(self, peer: bytes, message: Data, buffers: Sequence[bytes], now: float) -> None:
        attempt = self._find(message.attempt)
        if attempt is None and message.index == 0:
            attempt = self._begin(peer, message, now)
        attempt = self._known(attempt, message.attempt)
        attempt.peer, attempt.heard = peer, now
        received = attempt.stored.messages
        if message.index >= received and attempt.state != "receiving":
            raise ProtocolError(f"data message {message.index} of an attempt after its end")
        if attempt.stored.part != (message.producer, message.number, message.partition):
            raise ProtocolError(f"data message {message.index} for another part than that of its attempt")
        if message.index == received:
            self.acts.append(Write(attempt, message, buffers))
        else:
            self._answer(peer, Taken(attempt=attempt.name, received=received))

    def _begin(self, peer: bytes, message: Data, now: float) -> Received:
        """Add an attempt, at its first data.

        Raises:
            ConflictError: A later transaction of the producer is in the log, perhaps not on disk yet.
            UnknownAttemptError: The transaction is committed.
            RefusedError: There are too many attempts or producers.
        """
        producer, number = message.producer, message.number
        newest = self._transactions.newest(producer)
        if newest is not None and number < newest.number:
            raise conflict_with_later(producer, number, newest.number)
        if self._transactions.is_committed(producer, number):
            raise UnknownAttemptError(
                f"transaction {number} of {producer} was committed before this attempt began: send the commit again, "
                "without data"
            )
        self._transactions.check_room(producer)
        self._make_room(1)
        for other in list(self._open.values()):
            if other.peer == peer and other.state == "receiving":
                self._forget(other)
        stored = Stored(producer, number, message.partition)
        attempt = self._open[message.attempt] = Received(message.attempt, stored, peer, now)
        return attempt

    def _end(self, peer: bytes, message: End, now: float) -> None:
        attempt = self._known(self._find(message.attempt), message.attempt)
        stored = attempt.stored
        if attempt.state == "staged":
            self._answer(peer, Staged(attempt=attempt.name, rows=stored.rows))
            return
        attempt.peer, attempt.heard = peer, now
        if attempt.state == "receiving":  # else ``finished`` answers
            if (message.messages, message.rows) != (stored.messages, stored.rows):
                raise ProtocolError(
                    f"an end after {message.messages} data messages with {message.rows} rows, of which "
                    f"{stored.messages} with {stored.rows} came"
                )
            attempt.state = "ending"
            self.acts.append(Finish(attempt))

    def _commit(self, peer: bytes, message: Commit) -> None:
        producer, number = key = message.producer, message.number
        newest, asked = self._transactions.newest(producer), self._asked.get(key)
        if newest is not None and number <= newest.number:
            newest.check_is(producer, number, message.rows, message.digest)
        if asked is not None:
            asked.transaction.check_is(producer, number, message.rows, message.digest)
            asked.peers.append(peer)
        elif newest is not None and number == newest.number:
            self._answer_committed(producer, number, [peer], again=True)
        elif not self.log_is_full:  # else the sender asks again
            asked = self._asked[key] = self._gather(peer, message)
            self.acts.append(Check(asked))

    def _gather(self, peer: bytes, message: Commit) -> Asked:
        """The attempts of a commit, whose figures are those that it names.

        Raises:
            UnknownAttemptError: Not all attempts and rows are staged here.
            ProtocolError: The rows do not have the digest that the sender has sent.
            RefusedError: There are too many producers, or bytes.
        """
        producer, number = message.producer, message.number
        transaction = f"committing transaction {number} of {producer}"
        wanted = len(message.attempts)
        found = (self._staged[name] for name in {*message.attempts} & self._staged.keys())
        parts = [attempt for attempt in found if attempt.stored.transaction == (producer, number)]
        parts.sort(key=lambda attempt: attempt.stored.partition)
        if not parts or len(parts) < wanted:
            raise UnknownAttemptError(
                f"{transaction}: of {wanted} attempts, {len(parts)} different ones are staged here"
            )
        rows = sum(attempt.stored.rows for attempt in parts)
        if rows != message.rows:
            raise UnknownAttemptError(f"{transaction}: committing {message.rows} rows, {rows} are staged")
        digest = as_text(sum(attempt.stored.digest for attempt in parts))
        if message.digest not in (None, digest):
            raise ProtocolError(
                f"{transaction}: its digest is {message.digest}, but the staged rows have {digest}; nothing was "
                "written. docs/protocol.md says how a digest is calculated; a sender may leave it out"
            )
        size, most = sum(attempt.stored.size for attempt in parts), self._terms.most_transaction_bytes
        if size > most:
            raise RefusedError(
                "too_large",
                f"{transaction}: it has {size} bytes, and {most} are the most for a log in a bucket, where a "
                "transaction is one object. Commit smaller ones, or receive into a directory (walLocation)",
            )
        self._transactions.check_room(producer)
        return Asked(producer, Transaction(number, message.attempts[0], rows, digest), parts, [peer])

    def _abort(self, peer: bytes, message: Abort) -> None:
        key = message.producer, message.number
        if key not in self._asked:
            for name in message.attempts:
                attempt = self._find(name)
                if attempt is not None and attempt.stored.transaction == key:
                    self._forget(attempt)
        self._answer(peer, Aborted(producer=message.producer, number=message.number))

    # The outcome of acts.

    def written(self, attempt: Received, stored: Stored) -> None:
        """The rows of a data message are in the file of their attempt."""
        if self._refuses_since is not None:
            _log.warning("the disk takes the rows of attempts again")
            self._refuses_since = None
        self._bytes += stored.size - attempt.stored.size
        attempt.stored = stored
        try:
            self._make_room(0)
        except RefusedError as e:
            self._forget(attempt)
            self._refuse([attempt.peer], attempt.name, e)
        else:
            self._answer(attempt.peer, Taken(attempt=attempt.name, received=stored.messages))

    def finished(self, attempt: Received, stored: Stored, now: float) -> None:
        """The file of an attempt is whole, and on the disk."""
        attempt.state = "staged"
        if self._open.pop(attempt.name, None) is not attempt:
            self.acts.append(Remove(attempt.name))  # the attempt was forgotten meanwhile
            return
        self._staged[attempt.name] = attempt
        self._bytes += stored.size - attempt.stored.size
        attempt.stored, attempt.heard = stored, now
        self._answer(attempt.peer, Staged(attempt=attempt.name, rows=stored.rows))

    def checked(self, asked: Asked) -> None:
        """The files of a commit have all rows."""
        newest = self._transactions.newest(asked.producer)
        number = asked.transaction.number
        if newest is not None and number <= newest.number:
            error = conflict_with_later(asked.producer, number, newest.number)
            self._drop(asked, error)
        else:
            self.acts.append(Append(asked))

    def appended(self, asked: Asked) -> None:
        """The rows of a commit were appended to the log. Call this before the log is cut, so that the chunk of the rows
        has their number."""
        self._transactions.commit(asked.producer, asked.transaction)
        parts = asked.parts
        self._counters.count(asked.transaction.rows, sum(part.stored.value_bytes for part in parts))

    def durable(self, asked: Asked) -> None:
        """The chunk with the rows of a commit is on the disk."""
        producer, number = asked.producer, asked.transaction.number
        self._transactions.confirm(producer, asked.transaction)
        del self._asked[producer, number]
        self._answer_committed(producer, number, asked.peers, again=False)
        for attempt in self._all():
            if attempt.stored.producer == producer and attempt.stored.number <= number:
                self._forget(attempt)

    def failed(self, act: Act, error: Exception, now: float) -> None:
        """An act has failed. An error of the log itself is not for this method: it ends receiving."""
        if isinstance(act, Write | Finish):
            attempt = act.attempt
            attempt.state = "receiving"
            if isinstance(error, DiskFaultError):
                error = self._disk_refuses(error, now)
            elif isinstance(error, LogWriteError):
                error = RefusedError("storage", str(error))
            is_kept = isinstance(error, ProtocolError) or getattr(error, "code", None) == BUSY
            if not is_kept or not attempt.stored.messages or self._find(attempt.name) is not attempt:
                self._forget(attempt)
            self._refuse([attempt.peer], attempt.name, error)
        elif isinstance(act, Check | Append):
            if isinstance(error, DamagedChunkError):
                for attempt in act.asked.parts:  # the sender sends all of them again
                    self._forget(attempt)
                error = UnknownAttemptError(str(error))
            self._drop(act.asked, error)
        elif isinstance(act, Remove):
            _log.warning("%s", error)  # the next writer finds the file, and that its transaction is committed

    def _disk_refuses(self, error: DiskFaultError, now: float) -> RefusedError:
        seconds = self._terms.retry_seconds
        if self._refuses_since is None:
            self._refuses_since = now
            _log.warning("%s; its senders try again for up to %.0f s", error, seconds)
        waited = now - self._refuses_since
        if waited < seconds:
            return RefusedError(BUSY, "the receiver's disk refuses rows; send them again later")
        return RefusedError("storage", f"{error}. The disk has refused for {waited:.0f} s")

    def _drop(self, asked: Asked, error: Exception) -> None:
        """Forget a commit that has failed. If the disk refuses for now, its senders ask again."""
        del self._asked[asked.producer, asked.transaction.number]
        if not isinstance(error, DiskFaultError):
            self._refuse(asked.peers, None, error)

    # Time.

    def check_timeouts(self, now: float) -> None:
        """Discard the attempts of silent senders, and those that are never committed. Call it about once a second."""
        self._transactions.pass_time(now - (self._checked_at or now))
        self._checked_at = now
        self._refusals.flush()
        self._faults.flush()
        deadline = now - self._terms.transaction_timeout
        heard: dict[str, float] = {}  # by producer
        for it in self._all():
            heard[it.stored.producer] = max(it.heard, heard.get(it.stored.producer, 0.0))
        for it in self._all():
            last = heard[it.stored.producer] if it.state == "staged" else it.heard
            if last < deadline and it.state != "ending" and it.stored.transaction not in self._asked:
                _log.warning("discarding attempt %s, which was not committed in time", it.name)
                self._forget(it)

    # The attempts.

    def _find(self, name: str) -> Received | None:
        return self._open.get(name) or self._staged.get(name)

    def _known(self, attempt: Received | None, name: str) -> Received:
        if attempt is None:
            raise UnknownAttemptError(
                f"attempt {name} is not known here: the receiver has restarted, or the sender was silent"
            )
        return attempt

    def _all(self) -> list[Received]:
        return [*self._open.values(), *self._staged.values()]

    def _make_room(self, more: int) -> None:
        """Make room for so many more attempts, perhaps by forgetting those that have a newer one at the same part: they
        are only useful if the newer one fails.

        Raises:
            RefusedError: The attempts that are left have reached a limit.
        """
        if not self._lacks_room(more):
            return
        newest = {it.stored.part: it for it in self._staged.values()}
        for it in list(self._staged.values()):
            if newest[it.stored.part] is not it and it.stored.transaction not in self._asked:
                self._forget(it)
        if self._lacks_room(more):
            most = self._terms
            raise RefusedError(
                "no_room",
                f"the attempts that are not committed have reached walMaxBytes={most.most_staged_bytes} or their most, "
                f"{most.most_attempts}; commit or abort some, or raise walMaxBytes",
            )

    def _lacks_room(self, more: int) -> bool:
        count = len(self._open) + len(self._staged) + more
        return self._bytes > self._terms.most_staged_bytes or count > self._terms.most_attempts

    def _forget(self, attempt: Received) -> None:
        if self._find(attempt.name) is attempt:
            del (self._open if attempt.name in self._open else self._staged)[attempt.name]
            self._bytes -= attempt.stored.size
        if attempt.state != "ending":  # else ``finished`` removes its file
            self.acts.append(Remove(attempt.name))

    # Answers.

    def _answer(self, peer: bytes, message: Message) -> None:
        self.acts.append(Answer(peer, message))

    def _answer_committed(self, producer: str, number: int, peers: Sequence[bytes], again: bool) -> None:
        last = self._transactions.last(producer)
        by = None if last is None else last.attempt
        for peer in peers:
            self._answer(peer, Committed(producer=producer, number=number, again=again, by=by))

    def _refuse(self, peers: Sequence[bytes], name: str | None, error: Exception) -> None:
        code, reason = INTERNAL, str(error)
        match error:
            case UnknownAttemptError():
                code = UNKNOWN
            case ConflictError():
                code = CONFLICT
            case RefusedError():
                code = error.code
            case ProtocolError():
                code = "protocol"
                self._counters.malformed += 1
            case _:
                self._counters.internal_errors += 1
                self._faults.fault(
                    "an unexpected error at a message of the transaction protocol: %r", error, error=error
                )
                reason = (
                    f"an unexpected error of the receiver ({type(error).__name__}), which its log explains"
                )
                if (attempt := self._find(name or "")) is not None:
                    self._forget(attempt)
        self._refusals.warn("refused a message of the transaction protocol: %s", reason)
        for peer in peers:
            self._answer(peer, Refusal(code=code, reason=reason, attempt=name))
