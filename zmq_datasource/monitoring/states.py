"""One line when a sink begins to drop rows or to set them aside, and one with the total when that is over."""

from __future__ import annotations

import logging

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.ledger import Entry

__all__ = ["SinkStates"]

_log = logging.getLogger(__name__)

_MOST_SINKS = 1000


class SinkStates:
    """What the sinks were doing, as of their last committed batch.

    It is as good as the memory of the process that commits, which Spark ends after a minute without work: then the
    first line may come once more.
    """

    def __init__(self) -> None:
        self._sinks: dict[tuple[str, str], tuple[int, SinkCounters]] = {}

    def note(self, entry: Entry) -> None:
        """Take in a committed batch."""
        key, counters = (entry.query, entry.sink), entry.counters
        unsent = counters.dropped + counters.dead_lettered
        known = self._sinks.pop(key, None)
        if unsent:
            since, before = known or (entry.batch, SinkCounters.none())
            self._sinks[key] = since, before + counters
            if known is None:
                _log.warning(
                    "sink %s of query %s: rows are not being sent since batch %d: %s",
                    entry.sink,
                    entry.query,
                    since,
                    _told(counters),
                )
        elif known is not None:
            since, before = known
            _log.warning(
                "sink %s of query %s: rows are sent again since batch %d; from batch %d on %d of %d were not: %s",
                entry.sink,
                entry.query,
                entry.batch,
                since,
                before.rows - before.sent,
                before.rows,
                _told(before),
            )
        while len(self._sinks) > _MOST_SINKS:
            self._sinks.pop(next(iter(self._sinks)))


def _told(counters: SinkCounters) -> str:
    return ", ".join(
        f"{count} {what} ({reason})"
        for what, reasons in (("dropped", counters.dropped), ("set aside", counters.dead_lettered))
        for reason, count in sorted(reasons.items())
    )
