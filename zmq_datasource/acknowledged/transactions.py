"""The transactions of a log: which are committed, and how staged ones are written into it.

* A producer's transactions are committed in the order of their numbers, so the last number shows that all before it are
  done. The number is stored with the rows (``log.state``): the chunk with a transaction's rows also has its number.
* Only the last transaction may be repeated, also while its chunk is being written, and only with the same rows. An
  older number, or other rows under the last one, are refused (``ConflictError``).
* A transaction counts as committed, and is answered, when its chunk is on disk.
* First a transaction's attempts are checked. Then rows and number are appended together. If writing them fails,
  receiving ends, and the log's next writer finds neither.
* Transactions that are committed in the same moment share a chunk. Their rows are read from the files of the attempts,
  one data message at a time, while the chunk is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import Commit, as_text
from zmq_datasource.acknowledged.staging import Staging
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    ConflictError,
    DamagedChunkError,
    DiskFaultError,
    ProtocolError,
    UnknownAttemptError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.log import CarriedState, StoredRows, Times

_WAY_OUT = (
    "The cause is a sender that continues from an older or a copied state: a restored checkpoint, a copy of a query "
    "beside the query, a driver that was wrongly taken for dead. End the wrong one, or start it under another name: "
    "with a new checkpoint, transactionId or name of the Producer"
)


class Transaction(NamedTuple):
    """A committed transaction.

    Attributes:
        attempt: One of its attempts.
        rows, digest: The number of its rows and their digest; None if the sender has left the digest out.
    """

    number: int
    attempt: str
    rows: int
    digest: str | None = None

    def check_is(self, producer: str, number: int, rows: int, digest: str | None) -> None:
        """Check a transaction that a sender repeats.

        Raises:
            ConflictError: It has an older number, or other rows.
        """
        if number < self.number:
            raise conflict_with_later(producer, number, self.number)
        if rows == self.rows and (self.digest is None or digest is None or digest == self.digest):
            return
        raise ConflictError(
            f"transaction {number} of {producer}: it is in the log with {self.rows} rows (digest {self.digest}), and "
            f"not with these {rows} rows (digest {digest}). {_WAY_OUT}. Another cause is a batch that differs when it "
            "is computed again: random numbers, the time of day, a source that cannot be read again"
        )


def conflict_with_later(producer: str, number: int, last: int) -> ConflictError:
    """The error for a transaction whose number is below the last committed number."""
    return ConflictError(
        f"transaction {number} of {producer}: the log already has transaction {last} of this producer, and only the "
        f"last one can be repeated; no row of this one was taken. {_WAY_OUT}"
    )


class CommittedTransactions(CarriedState):
    """Remembers the last transaction of each producer.

    A transaction that was appended to the log (``commit``) counts as committed once its chunk is on disk (``confirm``),
    because a crash could undo it before.

    Args:
        counters: Stored with the transactions.
        limit: The most producers. If there are more, the one with the oldest transaction is forgotten.
    """

    def __init__(self, counters: SourceCounters, limit: int) -> None:
        super().__init__(counters)
        self._limit = limit
        self._last: dict[str, Transaction] = {}
        self._durable: dict[str, Transaction] = {}

    def last(self, producer: str) -> Transaction | None:
        """The producer's last transaction that is on disk."""
        return self._durable.get(producer)

    def newest(self, producer: str) -> Transaction | None:
        """The producer's last transaction that was appended to the log, on disk or not."""
        return self._last.get(producer)

    def is_committed(self, producer: str, number: int) -> bool:
        """Whether the transaction, or a later one, is on disk."""
        last = self.last(producer)
        return last is not None and number <= last.number

    def commit(self, producer: str, transaction: Transaction) -> None:
        """Note that a transaction's rows were appended to the log."""
        self._last.pop(producer, None)
        self._last[producer] = transaction
        while len(self._last) > self._limit:
            oldest = next(iter(self._last))
            del self._last[oldest]
            self._durable.pop(oldest, None)

    def confirm(self, producer: str, transaction: Transaction) -> None:
        """Note that a transaction's rows are on disk."""
        if producer in self._last:
            self._durable[producer] = transaction

    # log.state

    def _sections(self) -> Mapping[str, Any]:
        return {"transactions": self._last}

    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> bool:
        if "transactions" not in sections:
            return False
        self._last = msgspec.json.decode(sections["transactions"], type=dict[str, Transaction])
        self._durable = dict(self._last)
        return True


class TransactionLog(Protocol):
    """The methods of a log that a committer uses (``log.writer.LogWriter``, and the proxy's ``Journal``)."""

    @property
    def full(self) -> bool:
        """Whether the log takes no rows now."""

    def append_stored(self, rows: StoredRows) -> None:
        """Append all rows; if this raises an error, none of them."""

    def cut(self) -> Future[int]:
        """Have all appended rows written. The future is done when they are on disk."""


class Done(NamedTuple):
    """A committed transaction, and the peers that have asked for it.

    Attributes:
        again: Whether it was committed before the first of them asked.
    """

    message: Commit
    peers: list[bytes]
    again: bool


class _Rows(NamedTuple):
    """The rows of a transaction."""

    stored: StoredRows
    digest: str
    value_bytes: int


@dataclass
class _Running:
    """A transaction whose chunk is being written, and the peers to answer then."""

    message: Commit
    transaction: Transaction
    peers: list[bytes]
    done: Future[int] = field(default_factory=Future)

    def is_for(self, producer: str, number: int) -> bool:
        return (self.message.producer, self.message.number) == (producer, number)


class Committer:
    """Commits staged attempts; for the receiving thread.

    Args:
        counters: Counts the committed rows and bytes.
        staging: Has the attempts.
        transactions: Has the committed transactions.
        log: Where they are committed.
    """

    def __init__(
        self,
        counters: SourceCounters,
        staging: Staging,
        transactions: CommittedTransactions,
        log: TransactionLog,
    ) -> None:
        self._counters = counters
        self._staging = staging
        self._transactions = transactions
        self._log = log
        self._running: list[_Running] = []
        self._uncut: list[_Running] = []  # appended since the last cut

    @property
    def busy(self) -> bool:
        """Whether a chunk is being written."""
        return bool(self._running)

    def is_writing(self, producer: str, number: int) -> bool:
        """Whether this transaction is being written."""
        return any(running.is_for(producer, number) for running in (*self._running, *self._uncut))

    def commit(self, peer: bytes, message: Commit) -> bool:
        """Append a transaction to the log.

        Returns:
            Whether it is committed already. If not, ``done`` yields it later. While the log is full, or the disk
            refuses, nothing happens, and the sender asks again.

        Raises:
            UnknownAttemptError: Not all attempts and rows are staged here.
            ConflictError: Another transaction is committed under this number, or a later number is.
            ProtocolError: The rows do not have the digest that the sender has sent.
            LogError: The log has failed.
        """
        newest = self._transactions.newest(message.producer)
        if newest is not None and message.number <= newest.number:
            newest.check_is(message.producer, message.number, message.rows, message.digest)
        for running in (*self._running, *self._uncut):
            if running.is_for(message.producer, message.number):
                running.peers.append(peer)
                return False
        if self._transactions.is_committed(message.producer, message.number):
            return True
        if self._log.full:
            return False
        try:
            rows = self._read(message)
        except DiskFaultError:
            return False
        transaction = Transaction(message.number, message.attempts[0], message.rows, rows.digest)
        failpoints.reach("acknowledged.commit.before_append")
        self._log.append_stored(rows.stored)
        # From here on nothing can fail, so that rows and number are both appended.
        self._transactions.commit(message.producer, transaction)
        self._counters.count(message.rows, rows.value_bytes)
        self._uncut.append(_Running(message, transaction, [peer]))
        return False

    def cut(self) -> None:
        """Have the transactions that were appended since the last call written, as one chunk."""
        if self._uncut:
            failpoints.reach("acknowledged.commit.after_append")
            done = self._log.cut()
            for running in self._uncut:
                running.done = done
            self._running += self._uncut
            self._uncut = []

    def done(self) -> Iterator[Done]:
        """Yield the transactions that have reached the disk since the last call.

        Raises:
            LogError: The log has failed.
        """
        while self._running and self._running[0].done.done():
            running = self._running.pop(0)
            running.done.result()
            self._transactions.confirm(running.message.producer, running.transaction)
            yield Done(running.message, running.peers, again=False)

    def _read(self, message: Commit) -> _Rows:
        """The rows of a transaction in the order of its parts, checked.

        Raises:
            UnknownAttemptError: Not all attempts and rows are staged here.
            ProtocolError: The rows do not have the digest that the sender has sent.
        """
        transaction = f"committing transaction {message.number} of {message.producer}"
        wanted = len(message.attempts)
        if not wanted or len(set(message.attempts)) < wanted:
            raise UnknownAttemptError(
                f"{transaction}: it names {wanted} attempts: none, or one of them twice"
            )
        parts = {a: part for a in message.attempts if (part := self._staging.get(a)) is not None}
        ours = {
            attempt: part
            for attempt, part in parts.items()
            if (part.producer, part.number) == (message.producer, message.number)
        }
        if len(ours) < wanted:
            raise UnknownAttemptError(
                f"{transaction}: {wanted - len(ours)} of {wanted} attempts are not staged here"
            )
        names = sorted(ours, key=lambda attempt: ours[attempt].partition)
        for attempt in names:
            try:
                for _ in self._staging.files.read(attempt):  # checks it
                    pass
            except DamagedChunkError as e:
                self._staging.remove([attempt])
                raise UnknownAttemptError(f"{transaction}: {e}") from e
        found = [ours[attempt] for attempt in names]
        staged = sum(attempt.rows for attempt in found)
        if staged != message.rows:
            raise UnknownAttemptError(f"{transaction}: committing {message.rows} rows, {staged} are staged")
        digest = as_text(sum(attempt.digest for attempt in found))
        if message.digest is not None and message.digest != digest:
            raise ProtocolError(
                f"{transaction}: its digest is {message.digest}, but the staged rows have {digest}; nothing was "
                "written. docs/protocol.md says how a digest is calculated; a sender may leave it out"
            )
        times = reduce(Times.union, (attempt.times for attempt in found))
        stored = StoredRows(staged, times, partial(_read_all, self._staging.files, names))
        return _Rows(stored, digest, sum(attempt.value_bytes for attempt in found))


def _read_all(files: AttemptFiles, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for name in names:
        yield from files.read(name)
