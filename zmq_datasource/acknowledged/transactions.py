"""The transactions that are in the log: the last one of each producer. Pure.

A producer's transactions are committed in the order of their numbers, so the last number shows that all before it are
done. The number is stored with the rows (``log.state``): the chunk with a transaction's rows also has its number.

Only the last transaction may be repeated, and only with the same rows. A sender with an older number, or with other
rows under the last one, is not the sender that has committed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import TransactionError
from zmq_datasource.log import CarriedState

__all__ = ["CommittedTransactions", "ConflictError", "Transaction", "conflict_with_later"]

_WAY_OUT = (
    "The cause is a sender that continues from an older or a copied state: a restored checkpoint, a copy of a query "
    "beside the query, a driver that was wrongly taken for dead. End the wrong one, or start it under another name: "
    "with a new checkpoint, transactionId or name of the Producer"
)


class ConflictError(TransactionError):
    """Another transaction is committed under this number, or a later number is."""


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
