"""Writes staged transactions into the log: all rows of one in one chunk, with its number.

The rules:

* A transaction counts as committed, and is answered, when its chunk is on disk.
* First its attempts are checked. Then rows and number are appended together. If writing them fails, receiving ends,
  and the log's next writer finds neither.
* Transactions that are committed in the same moment share a chunk. If the first part of a transaction has a large file,
  this file becomes the chunk, and the other rows are appended to it.
* The last transaction of a producer may be repeated with the same rows, also while its chunk is being written. Any
  other transaction under its number or an older one is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa

from zmq_datasource.acknowledged.protocol import Commit, as_text, digest_of_rows
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, DiskFaultError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.log import FilledFile, Staging
from zmq_datasource.messages.columns import data_bytes

__all__ = ["Committer", "Done", "TransactionLog", "UnknownAttemptError"]


class TransactionLog(Protocol):
    """The methods of a log that a committer uses (``log.writer.LogWriter``)."""

    @property
    def takes_files(self) -> bool:
        """Whether a staged file may become a chunk. False if the log passes the rows on, which needs them in memory."""

    @property
    def full(self) -> bool:
        """Whether the log takes no rows now."""

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        """Append all rows; if this raises an error, none of them.

        Args:
            filled: A file with the rows before these, which becomes a chunk. None if ``takes_files`` is false.
        """

    def cut(self) -> Future[int]:
        """Cut the chunk. The future is done when all appended rows are on disk."""


class UnknownAttemptError(ProtocolError):
    """An attempt is not here (any more). A new attempt may succeed."""


class Done(NamedTuple):
    """A committed transaction, and the peers that have asked for it.

    Attributes:
        again: Whether it was committed before the first of them asked.
    """

    message: Commit
    peers: list[bytes]
    again: bool


class _Rows(NamedTuple):
    """The rows of a transaction: those of its first parts, in a file that can become a chunk, and the other rows."""

    filled: FilledFile | None
    batches: list[pa.RecordBatch]
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
            Whether it is committed already. If not, ``done`` yields it later. While the log is full, or no file can be
            opened, nothing happens, and the sender asks again.

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
        self._log.append_whole(rows.batches, rows.filled)
        # From here on nothing can fail, so that rows and number are both appended.
        self._transactions.commit(message.producer, transaction)
        self._counters.received += message.rows
        self._counters.bytes += rows.value_bytes
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
        """Yield the transactions that are on disk since the last call.

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
        filled: FilledFile | None = None
        batches: list[pa.RecordBatch] = []
        others: list[str] = []  # whose rows are appended to ``filled``
        digest = value_bytes = staged = 0
        for position, attempt in enumerate(sorted(ours, key=lambda attempt: ours[attempt].partition)):
            try:
                if position == 0 and self._log.takes_files:
                    filled = self._staging.file_of(attempt)
                part = ours[attempt]
                figures = part.rows, part.digest, part.value_bytes
                # A part is not appended to the file if one before it is in memory: the parts stay in order.
                is_counted = filled is not None and not batches and None not in figures
                read = [] if is_counted else self._staging.read(attempt)
            except DamagedChunkError as e:
                self._staging.remove([attempt])
                raise UnknownAttemptError(f"{transaction}: {e}") from e
            if is_counted and position > 0:
                others.append(attempt)
            staged += sum(batch.num_rows for batch in read) if part.rows is None else part.rows
            digest += sum(map(digest_of_rows, read)) if part.digest is None else part.digest
            value_bytes += (
                sum(data_bytes(batch.column("value")) for batch in read)
                if part.value_bytes is None
                else part.value_bytes
            )
            batches += read
        if staged != message.rows:
            raise UnknownAttemptError(f"{transaction}: committing {message.rows} rows, {staged} are staged")
        found = as_text(digest)
        if message.digest is not None and message.digest != found:
            raise ProtocolError(
                f"{transaction}: its digest is {message.digest}, but the staged rows have {found}; nothing was "
                "written. docs/protocol.md says how a digest is calculated; a sender may leave it out"
            )
        for attempt in others:
            assert filled is not None, "others are appended to a file"
            try:
                filled = self._staging.extend(filled, attempt)
            except DamagedChunkError as e:
                self._staging.remove([attempt])
                raise UnknownAttemptError(f"{transaction}: {e}") from e
            except DiskFaultError:
                return self._read(message)  # in memory, with which the sealing thread waits for the disk
        return _Rows(filled, batches, found, value_bytes)
