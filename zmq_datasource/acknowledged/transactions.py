"""Which transactions are in the log: for each producer, its last one. Pure.

A producer's transactions are numbered and committed in that order, so one number says of all below
that they are done. It is kept with the rows (``log.carried``): a chunk that holds a
transaction's rows says that it does.

Only the last one may be asked for again, and only with the same rows: whoever comes with an older number,
or with other rows under the last one, is not who has committed it.
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
    "A sender that goes on from an older or a copied state does that: a restored checkpoint, a copy of a query "
    "beside the query, a driver that was taken for dead. End the one that is not meant to be, or begin anew under "
    "another name: a new checkpoint, transactionId or name of the Producer"
)


class ConflictError(TransactionError):
    """A number under which something else is committed."""


class Transaction(NamedTuple):
    """A committed transaction.

    Attributes:
        attempt: One of its attempts.
        rows, digest: Its content (see ``digests``); a sender may leave the digest out.
    """

    number: int
    attempt: str
    rows: int
    digest: str | None = None

    def check_is(self, producer: str, number: int, rows: int, digest: str | None) -> None:
        """Whether something that is asked for under this number, or an older one, is this.

        Raises:
            ConflictError: It is something else. Says what happened, and the way out.
        """
        if number < self.number:
            raise conflict_with_later(producer, number, self.number)
        if rows == self.rows and (self.digest is None or digest is None or digest == self.digest):
            return
        theirs = f"{self.rows} rows (digest {self.digest})"
        raise ConflictError(
            f"transaction {number} of {producer}: it is in the log already with {theirs}, not with these {rows} rows "
            f"(digest {digest}). {_WAY_OUT}. A batch that is not the same when it is computed again does that too: "
            "random numbers, the time of day, a source that cannot be read again"
        )


def conflict_with_later(producer: str, number: int, last: int) -> ConflictError:
    """The error for a transaction whose number is below the last committed one."""
    return ConflictError(
        f"transaction {number} of {producer}: the log has its transaction {last} already, and only the last one can be "
        f"repeated; nothing of this one was taken. {_WAY_OUT}"
    )


class CommittedTransactions(CarriedState):
    """Remembers committed transactions; the producer not heard for longest is forgotten first.

    What goes into the log (``commit``) counts as committed only once it is there (``confirm``): nothing is
    answered from what a crash could still undo.

    Args:
        counters: Kept beside.
        limit: Most producers.
    """

    def __init__(self, counters: SourceCounters, limit: int) -> None:
        super().__init__(counters)
        self._limit = limit
        self._last: dict[str, Transaction] = {}
        self._durable: dict[str, Transaction] = {}

    def last(self, producer: str) -> Transaction | None:
        """The producer's last committed transaction."""
        return self._durable.get(producer)

    def newest(self, producer: str) -> Transaction | None:
        """Its last one that was given to the log, on disk or not yet."""
        return self._last.get(producer)

    def is_committed(self, producer: str, number: int) -> bool:
        """Whether the transaction, or a later one, is in the log, on disk."""
        last = self.last(producer)
        return last is not None and number <= last.number

    def commit(self, producer: str, transaction: Transaction) -> None:
        """The transaction's rows go into the log now, and this with them."""
        self._last.pop(producer, None)
        self._last[producer] = transaction
        while len(self._last) > self._limit:
            oldest = next(iter(self._last))
            del self._last[oldest]
            self._durable.pop(oldest, None)

    def confirm(self, producer: str, transaction: Transaction) -> None:
        """Note that a transaction's rows are durable."""
        if producer in self._last:
            self._durable[producer] = transaction

    # log.carried

    def _sections(self) -> Mapping[str, Any]:
        return {"transactions": self._last}

    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> bool:
        if "transactions" not in sections:
            return False
        self._last = msgspec.json.decode(sections["transactions"], type=dict[str, Transaction])
        self._durable = dict(self._last)
        return True
