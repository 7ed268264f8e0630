"""One line when a sink begins to drop rows or keep them as dead letters, one with the total when that is over."""

from __future__ import annotations

import logging

from zmq_datasource.counters import SinkCounters

__all__ = ["SinkState"]

_log = logging.getLogger(__name__)


class SinkState:
    """What one sink was doing, as of its last committed batch."""

    def __init__(self) -> None:
        self._since = 0
        self._counters: SinkCounters | None = None  # since then; None while all is sent

    def note(self, sink: str, batch: int, counters: SinkCounters) -> None:
        """Take in a committed batch of ``sink``, whose name this is."""
        if counters.dropped or counters.dead_lettered:
            if self._counters is None:
                self._since = batch
                _log.warning(
                    "%s: rows are not being sent since batch %d: %s", sink, batch, _described(counters)
                )
            self._counters = (self._counters or SinkCounters.none()) + counters
        elif self._counters is not None:
            before, self._counters = self._counters, None
            _log.warning(
                "%s: rows are sent again since batch %d; from batch %d on %d of %d were not: %s",
                sink,
                batch,
                self._since,
                before.rows - before.sent,
                before.rows,
                _described(before),
            )


def _described(counters: SinkCounters) -> str:
    return ", ".join(
        f"{count} {what} ({reason})"
        for what, reasons in (("dropped", counters.dropped), ("kept as dead letters", counters.dead_lettered))
        for reason, count in sorted(reasons.items())
    )
