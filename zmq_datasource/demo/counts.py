"""What the demo counts: one account a query, from its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from zmq_datasource.counters import SinkCounters
from zmq_datasource.monitoring.figures import sink_counters

__all__ = ["QueryCounts", "Tally"]


@dataclass(frozen=True)
class QueryCounts:
    """The way of the messages through one query; None where there is nothing to count.

    Attributes:
        published: Messages that the publisher sent; None for a feed that is not ours.
        received: Messages that the source took from its socket into its log.
        rows: Rows that Spark read from the log.
        sink: What the sink did with them.
        arrived: Messages that the consumer got.
    """

    name: str
    published: int | None
    received: int
    rows: int
    sink: SinkCounters | None = None
    arrived: int | None = None


class Tally:
    """Adds up one query's progress; the same event may come again.

    Attributes:
        received: Messages that the source has received.
        sink: What the sink has done so far.
        as_of: When the newest trigger that has reported began; None before the first report.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self.received = 0
        self.sink = SinkCounters.none()
        self.as_of: datetime | None = None

    @property
    def rows(self) -> int:
        return sum(self._rows.values())

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in an event of ``metrics(query).recent``."""
        # An idle trigger reports the next batch, with 0 rows, until that batch has come.
        batch = event["batchId"]
        self._rows[batch] = max(event["numInputRows"], self._rows.get(batch, 0))
        if "metrics" in event["sink"]:
            self.sink = sink_counters(event["sink"]["metrics"]["total"])
        source = event["sources"][0].get("metrics")
        if source is None:
            return  # no receiver yet
        self.received = max(self.received, source["messagesReceived"])
        began = datetime.fromisoformat(event["timestamp"])
        self.as_of = began if self.as_of is None else max(began, self.as_of)
