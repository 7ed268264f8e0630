"""Transactions into the log: all rows of one in one chunk, with the note that it is committed.

The rules:

* Nothing counts as committed, and nothing is answered, before the chunk is on disk.
* First everything is read and checked; then rows and note change together. If writing them fails, receiving
  ends, and the log's next writer finds neither.
* Transactions that are committed in the same moment share a chunk.
* The last transaction of a producer may be asked for again, with the same rows; anything else under its
  number or an older one is refused, at whatever moment it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.acknowledged.digests import as_text, digest_of_rows
from zmq_datasource.acknowledged.protocol import Commit
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, DiskFaultError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.log.staging import Staging

__all__ = ["Committer", "Done", "TransactionLog", "UnknownAttemptError"]


class TransactionLog(Protocol):
    """What a committer needs of a log (``log.writer.LogWriter``)."""

    @property
    def full(self) -> bool:
        """Whether nothing more is to come for now."""

    def append_whole(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Append all or, raising an error, nothing."""

    def cut(self) -> Future[int]:
        """Resolves when all that was appended is durable."""


class UnknownAttemptError(ProtocolError):
    """About an attempt that is not here (any more): a new one may do."""


class Done(NamedTuple):
    """A transaction that is in the log, now or since before it was asked for, and who asks."""

    message: Commit
    peers: list[bytes]
    again: bool


@dataclass
class _Running:
    """A transaction whose chunk is being written; everybody who asks is answered then."""

    message: Commit
    transaction: Transaction
    peers: list[bytes]
    done: Future[int] = field(default_factory=Future)

    def is_for(self, producer: str, number: int) -> bool:
        return (self.message.producer, self.message.number) == (producer, number)


class Committer:
    """Belongs to the receiving thread.

    Args:
        counters: Where to count.
        staging: Where the attempts are.
        transactions: What is committed.
        log: Where transactions go.
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
        self._uncut: list[_Running] = []  # those of this moment
        self._deferred: list[tuple[bytes, Commit]] = []

    @property
    def busy(self) -> bool:
        """Whether a chunk is being written."""
        return bool(self._running)

    def is_at(self, producer: str, number: int) -> bool:
        """Whether this transaction's chunk is being written."""
        return any(running.is_for(producer, number) for running in (*self._running, *self._uncut))

    def commit(self, peer: bytes, message: Commit) -> bool:
        """Have a transaction written, once the log has room.

        Returns:
            Whether it is in the log already. If not, ``done`` tells when it is.

        Raises:
            UnknownAttemptError: Not all of it is here.
            ConflictError: Something else is committed under this number, or a later number is.
            ProtocolError: The rows do not have the digest that the sender tells.
            LogError: The log can take nothing any more.
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
            return self._defer(peer, message)
        try:
            batches, digest = self._read(message)
        except DiskFaultError:  # no file can be opened now
            return self._defer(peer, message)
        size = sum(pc.sum(pc.binary_length(b.column("value"))).as_py() or 0 for b in batches)
        transaction = Transaction(message.number, message.attempts[0], message.rows, digest)
        failpoints.reach("acknowledged.commit.before_append")
        self._log.append_whole(batches)
        # Nothing from here on can fail: rows and note are one.
        self._transactions.commit(message.producer, transaction)
        self._counters.received += message.rows
        self._counters.bytes += size
        self._uncut.append(_Running(message, transaction, [peer]))
        return False

    def _defer(self, peer: bytes, message: Commit) -> bool:
        """Put a commit off: it is tried again later."""
        self._deferred = [d for d in self._deferred if d[1].producer != message.producer]
        self._deferred.append((peer, message))
        return False

    def cut(self) -> None:
        """Have what was committed in this moment written, as one chunk."""
        if self._uncut:
            failpoints.reach("acknowledged.commit.after_append")
            done = self._log.cut()
            for running in self._uncut:
                running.done = done
            self._running += self._uncut
            self._uncut = []

    def done(self) -> Iterator[Done]:
        """What has got into the log since the last call.

        Raises:
            LogError: The log has failed.
        """
        while self._running and self._running[0].done.done():
            running = self._running.pop(0)
            running.done.result()
            self._transactions.confirm(running.message.producer, running.transaction)
            yield Done(running.message, running.peers, again=False)

    def take_deferred(self) -> list[tuple[bytes, Commit]]:
        """What had to wait for room in the log, once there is some; it is to be asked for again."""
        if not self._deferred or self._log.full:
            return []
        deferred, self._deferred = self._deferred, []
        return deferred

    def _read(self, message: Commit) -> tuple[list[pa.RecordBatch], str]:
        """All rows of a transaction in the order of its parts, checked, and their digest.

        Raises:
            UnknownAttemptError: Not all of it is here.
            ProtocolError: The rows do not have the digest that the sender tells.
        """
        transaction = f"committing transaction {message.number} of {message.producer}"
        wanted = len(message.attempts)
        if not wanted or len(set(message.attempts)) < wanted:
            raise UnknownAttemptError(f"{transaction}: it names {wanted} attempts, none or one twice")
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
        batches: list[pa.RecordBatch] = []
        digest = 0
        for attempt in sorted(ours, key=lambda attempt: ours[attempt].partition):
            try:
                read = self._staging.read(attempt)
            except DamagedChunkError as e:
                self._staging.remove([attempt])
                raise UnknownAttemptError(f"{transaction}: {e}") from e
            known = ours[attempt].digest
            digest += sum(map(digest_of_rows, read)) if known is None else known
            batches += read
        staged = sum(batch.num_rows for batch in batches)
        if staged != message.rows:
            raise UnknownAttemptError(f"{transaction}: committing {message.rows} rows, {staged} are staged")
        found = as_text(digest)
        if message.digest is not None and message.digest != found:
            raise ProtocolError(
                f"{transaction}: its digest is {message.digest}, but the rows that are staged have {found}; nothing "
                "was written. docs/protocol.md says how a digest is calculated; a sender may leave it out"
            )
        return batches, found
