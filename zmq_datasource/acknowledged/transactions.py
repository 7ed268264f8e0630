"""The last transaction of each producer, which the log keeps with the rows: it says what is committed.

* A producer's transactions are committed in the order of their numbers, so the last number shows that all before it are
  done. The number is stored with the rows (``log.state``): the chunk with a transaction's rows also has its number.
* Only the last transaction may be repeated, and only with the same rows. An older number, or other rows under the last
  one, are refused (``ConflictError``).
* There is room for so many producers. For another one, the receiver forgets the *anonymous* one, whose name no later
  program uses, that was silent longest; then a named one that was silent for seven days. If there is none, the other
  one is refused. So no producer is forgotten that may repeat its transaction.
* Silence is measured in seconds of receiving, which the log keeps too. So no clock that jumps makes a producer silent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.acknowledged.protocol import is_anonymous
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import ConflictError, RefusedError
from zmq_datasource.host.log_lines import printable
from zmq_datasource.log import CarriedState

_log = logging.getLogger(__name__)

SILENT_SECONDS = 7 * 86_400.0
_WAY_OUT = (
    "The cause is a sender that continues from an older or a copied state: a restored checkpoint, a copy of a query "
    "beside the query, a driver that was wrongly taken for dead. End the wrong one, or start it under another name: "
    "with a new checkpoint, transactionId or name of the Producer"
)


class Transaction(NamedTuple):
    """A committed transaction.

    Attributes:
        attempt: One of its attempts.
        rows, digest: The number of its rows and their digest, as its commit has named them; None for no digest.
        heard: When its producer was last heard, in seconds of receiving.
    """

    number: int
    attempt: str
    rows: int
    digest: str | None
    heard: float = 0.0

    def check_is(self, producer: str, number: int, rows: int, digest: str | None) -> None:
        """Check a transaction that a sender repeats.

        Raises:
            ConflictError: It has an older number, or other rows.
        """
        if number < self.number:
            raise conflict_with_later(producer, number, self.number)
        if rows == self.rows and (digest is None or self.digest in (None, digest)):
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
        limit: The most producers.
    """

    def __init__(self, counters: SourceCounters, limit: int) -> None:
        super().__init__(counters)
        self._limit = limit
        self._last: dict[str, Transaction] = {}  # the one that was committed last is the last one
        self._durable: dict[str, Transaction] = {}
        self._seconds = 0.0

    def last(self, producer: str) -> Transaction | None:
        """The producer's last transaction that is on disk."""
        return self._durable.get(producer)

    def newest(self, producer: str) -> Transaction | None:
        """The producer's last transaction that was appended to the log, on disk or not."""
        return self._last.get(producer)

    def pass_time(self, seconds: float) -> None:
        """Note so many more seconds of receiving."""
        self._seconds += seconds

    def mark_heard(self, producer: str) -> None:
        """Note that a message of a producer has come."""
        if (last := self._last.get(producer)) is not None:
            self._last[producer] = last._replace(heard=self._seconds)

    def check_room(self, producer: str) -> None:
        """Check that a transaction of this producer can be remembered.

        Raises:
            RefusedError: It would be one producer too many, and none can be forgotten.
        """
        if producer not in self._last and len(self._last) >= self._limit and self._dispensable() is None:
            raise RefusedError(
                f"the log remembers {len(self._last)} producers with a name, and maxPublishers={self._limit} allows no "
                "more. Raise it at the receiver. A producer that was silent for 7 days gives its place to another one"
            )

    def _dispensable(self) -> str | None:
        """The producer to forget first; None if each may still repeat its transaction."""
        producers = [*filter(is_anonymous, self._last)]
        silent = min(producers or self._last, key=lambda producer: self._last[producer].heard, default=None)
        if producers:
            return silent
        if silent is None or self._seconds - self._last[silent].heard < SILENT_SECONDS:
            return None
        return silent

    def commit(self, producer: str, transaction: Transaction) -> None:
        """Note that a transaction's rows were appended to the log; after ``check_room``."""
        if self._last.pop(producer, None) is None:
            while len(self._last) >= self._limit and (forgotten := self._dispensable()) is not None:
                if not is_anonymous(forgotten):
                    _log.warning(
                        "forgetting the last transaction of producer %s, which was silent for 7 days, because there "
                        "are more producers than maxPublishers=%d",
                        printable(forgotten, 64),
                        self._limit,
                    )
                del self._last[forgotten]
                self._durable.pop(forgotten, None)
        self._last[producer] = transaction._replace(heard=self._seconds)

    def confirm(self, producer: str, transaction: Transaction) -> None:
        """Note that a transaction's rows are on disk."""
        if producer in self._last:
            self._durable[producer] = transaction

    # log.state

    def _sections(self) -> Mapping[str, Any]:
        return {"transactions": (self._seconds, self._last)}

    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> None:
        if "transactions" not in sections:
            return
        kept = msgspec.json.decode(sections["transactions"], type=tuple[float, dict[str, Transaction]])
        self._seconds, self._last = kept
        self._durable = dict(self._last)
