"""What the demo counts: one account a query, from the log of the sink and Spark's progress."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from zmq_datasource.counters import SinkCounters

__all__ = ["Account", "SinkLog", "SourceTally", "parse_sink_line"]


@dataclass(frozen=True)
class Account:
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


class SourceTally:
    """Adds up one query's progress events; the same event may come again.

    Attributes:
        received: Messages that the source has received.
        as_of: When the newest trigger that has reported began; None before the first report.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self.received = 0
        self.as_of: datetime | None = None

    @property
    def rows(self) -> int:
        return sum(self._rows.values())

    def add(self, batch_id: int, rows: int, latest_offset: str | None, began: datetime) -> None:
        """Take in ``batchId``, ``numInputRows``, ``sources[0].latestOffset`` and ``timestamp`` of an event."""
        # An idle trigger reports the next batch, with 0 rows, until that batch has come.
        self._rows[batch_id] = max(rows, self._rows.get(batch_id, 0))
        try:
            offset: Any = json.loads(latest_offset or "null")
            self.received = max(self.received, int(offset["messagesReceived"]))
        except (ValueError, TypeError, KeyError):
            return  # no receiver yet
        self.as_of = began if self.as_of is None else max(began, self.as_of)


def parse_sink_line(line: str) -> tuple[str, int, SinkCounters] | None:
    """Read a sink's log line of one batch: its query, batch and counters; None for any other line.

    >>> parse_sink_line("...: sink query=q1 batch=3 rows=9 sent=7 bytes=70 dropped=2 dropped.hwm=2 tasks=1")
    ('q1', 3, SinkCounters(rows=9, sent=7, bytes=70, dropped=Counter({'hwm': 2}), unflushed_tasks=0, tasks=1))
    """
    fields = dict(word.split("=", 1) for word in line.partition(": sink ")[2].split() if "=" in word)
    try:
        counters = SinkCounters(
            rows=int(fields["rows"]),
            sent=int(fields["sent"]),
            bytes=int(fields["bytes"]),
            dropped=Counter(
                {
                    name.removeprefix("dropped."): int(n)
                    for name, n in fields.items()
                    if name.startswith("dropped.")
                }
            ),
            unflushed_tasks=int(fields.get("unflushedTasks", 0)),
            tasks=int(fields["tasks"]),
        )
        return fields["query"], int(fields["batch"]), counters
    except (KeyError, ValueError):
        return None


class SinkLog:
    """Follows the log file that the sinks write their batches to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read_to = 0
        self._batches: dict[tuple[str, int], SinkCounters] = {}

    def update(self) -> None:
        """Read the lines that have been written since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._read_to += whole
        self._add(text[:whole].decode(errors="replace").splitlines())

    def _add(self, lines: Iterable[str]) -> None:
        for line in lines:
            if parsed := parse_sink_line(line):
                query, batch, counters = parsed
                self._batches[query, batch] = counters  # a batch that was repeated counts once

    def total(self, query: str) -> SinkCounters:
        """All batches of one query so far."""
        return sum((c for (q, _), c in self._batches.items() if q == query), SinkCounters.none())
