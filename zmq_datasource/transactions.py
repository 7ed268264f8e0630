"""Which transactions are in the log: for each producer, the number of its last one. Pure.

A producer's transactions are numbered and committed in that order, so one number says of all below
that they are done. It is kept with the rows (``wal.state.Carried``): a chunk that holds a
transaction's rows says that it does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from zmq_datasource.counters import SourceCounters

__all__ = ["Ledger"]

_LARGE_DELTA = 4096


class Ledger:
    """Remembers committed transactions; the producer not heard for longest is forgotten first.

    What goes into the log (``commit``) counts as committed only once it is there (``confirm``): nothing is
    answered from what a crash could still undo.

    Args:
        counters: Kept beside.
        limit: Most producers.
    """

    def __init__(self, counters: SourceCounters, limit: int) -> None:
        self._counters = counters
        self._limit = limit
        self._last: dict[str, tuple[int, str]] = {}
        self._durable: dict[str, tuple[int, str]] = {}
        self._touched: dict[str, None] = {}
        self._foreign = False
        self._changed = False

    def last(self, producer: str) -> tuple[int, str] | tuple[None, None]:
        """The number of the producer's last committed transaction, and one of its attempts."""
        return self._durable.get(producer, (None, None))

    def is_committed(self, producer: str, number: int) -> bool:
        """Whether the transaction is in the log, on disk."""
        last, _ = self.last(producer)
        return last is not None and number <= last

    def commit(self, producer: str, number: int, attempt: str) -> None:
        """The transaction's rows go into the log now, and this with them."""
        self._last.pop(producer, None)
        self._last[producer] = number, attempt
        self._touched.pop(producer, None)
        self._touched[producer] = None
        self._changed = True
        while len(self._last) > self._limit:
            oldest = next(iter(self._last))
            del self._last[oldest]
            self._durable.pop(oldest, None)
            self._touched[oldest] = None

    def confirm(self, producer: str, number: int, attempt: str) -> None:
        """They are there."""
        if producer in self._last:
            self._durable[producer] = number, attempt

    # wal.state.Carried

    @property
    def changed(self) -> bool:
        return self._changed

    @property
    def large(self) -> bool:
        return self._foreign or len(self._touched) > max(_LARGE_DELTA, len(self._last) // 4)

    def full(self) -> bytes:
        self._touched.clear()
        self._foreign = False
        return self._saved(self._last)

    def delta(self) -> bytes:
        return self._saved({producer: self._last.get(producer) for producer in self._touched})

    def _saved(self, transactions: dict[str, Any]) -> bytes:
        self._changed = False
        return msgspec.json.encode(
            {"counters": self._counters.to_json(), "sequences": None, "transactions": transactions}
        )

    def restore(self, full: bytes | None, delta: bytes | None) -> bool:
        """Go on from what was kept; False if it is about something else."""
        base, changes = (None if text is None else msgspec.json.decode(text) for text in (full, delta))
        latest = changes or base
        if latest is None:
            return True
        self._counters.restore(latest["counters"])
        if "transactions" not in latest:
            self._foreign = True
            return False
        self._foreign = base is not None and "transactions" not in base
        for producer, last in (base or {}).get("transactions", {}).items():
            self._last[producer] = tuple(last)
        for producer, last in (changes or {}).get("transactions", {}).items():
            self._last.pop(producer, None)
            self._touched[producer] = None
            if last is not None:
                self._last[producer] = tuple(last)
        self._durable = dict(self._last)
        return True
