"""A live table of sources and sinks, for a terminal or a notebook: rates, drops, backlog, high-water marks in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import humanfriendly
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["View"]

_WIDE = 120
# What a narrow screen has no room for.
_LESS = {"malformed", "log", "as of", "batch", "set aside", "blocked"}
_SOURCE = (
    "source",
    "msg/s",
    "backlog",
    "oldest",
    "lost",
    "malformed",
    "paused",
    "peers",
    "rcvhwm",
    "log",
    "as of",
)
_SINK = (
    *("sink", "query", "batch", "sent/s", "dropped/s", "sent", "dropped", "set aside", "blocked"),
    *("peers", "sndhwm", "as of"),
)


class View:
    """Makes tables of records (``store``'s newest); remembers the last ones, for rates.

    Args:
        since: Leave out what has said nothing for so many seconds; None shows all.
        width: Columns of the screen; on a narrow one some figures are left out.
    """

    def __init__(self, since: float | None = None, width: int | None = None) -> None:
        self._since = since
        self._narrow = width is not None and width < _WIDE
        self._sinks: dict[tuple[str, str], list[tuple[datetime, Mapping[str, Any]]]] = {}

    def render(self, records: Iterable[Mapping[str, Any]], now: datetime | None = None) -> Table:
        """Two tables, of sources and of sinks; those that are empty are left out."""
        now = now or datetime.now(UTC)
        sources, sinks = self._table(_SOURCE), self._table(_SINK)
        silent = 0
        for record in sorted(records, key=_order):
            age = (now - datetime.fromisoformat(record["timestamp"])).total_seconds()
            if self._since is not None and age > self._since:
                silent += 1
            elif record["kind"] == "source":
                self._add(sources, _SOURCE, [*_source_cells(record), _ago(age)])
            else:
                self._add(sinks, _SINK, [*self._sink_cells(record), _ago(age)])
        # A table shows itself in a notebook too.
        parts = Table.grid(padding=(0, 0, 1, 0))
        for table in (sources, sinks):
            if table.row_count:
                parts.add_row(table)
        if not parts.row_count:
            parts.add_row("Nothing has reported yet." if not silent else "Nothing reports at present.")
        if silent and self._since is not None:
            span = humanfriendly.format_timespan(self._since)
            parts.add_row(Text(f"{silent} more have said nothing for {span}.", style="dim"))
        return parts

    def _table(self, columns: Sequence[str]) -> Table:
        table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
        for name in columns:
            if self._shows(name):
                # Names of queries and endpoints give way first: they are folded, figures are not.
                words = name in ("source", "sink", "query")
                table.add_column(
                    name, justify="left" if words else "right", overflow="fold", no_wrap=not words
                )
        return table

    def _add(self, table: Table, columns: Sequence[str], cells: Sequence[RenderableType]) -> None:
        table.add_row(*(cell for name, cell in zip(columns, cells, strict=True) if self._shows(name)))

    def _shows(self, column: str) -> bool:
        return not (self._narrow and column in _LESS)

    def _sink_cells(self, record: Mapping[str, Any]) -> list[RenderableType]:
        total, metrics = record["sinkTotal"], record["sinkMetrics"]
        sent, dropped = self._rates(record, total)
        return [
            str(record["sink"]),
            str(record.get("name") or str(record["query"])[:8]),
            str(record["batch"]),
            _number(sent),
            _alarm(dropped),
            _number(total["sent"]),
            _alarms(total["droppedByReason"]),
            _alarms(total["deadLetteredByReason"]),
            _seconds(total["blockedMs"] / 1000),
            str(metrics["peers"]),
            str(metrics["sndhwm"]),
        ]

    def _rates(self, record: Mapping[str, Any], total: Mapping[str, Any]) -> tuple[float, float]:
        """Sent and dropped a second, between the two newest records that differ."""
        seen = self._sinks.setdefault((record["query"], record["sink"]), [])
        at = datetime.fromisoformat(record["timestamp"])
        if not seen or at > seen[-1][0]:
            seen.append((at, total))
            del seen[:-2]
        if len(seen) < 2:
            return 0.0, 0.0
        (before, old), (after, new) = seen
        seconds = (after - before).total_seconds()
        return (new["sent"] - old["sent"]) / seconds, (new["dropped"] - old["dropped"]) / seconds


def _order(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(record["kind"]), str(record.get("source", record.get("sink"))), str(record.get("query", ""))


def _source_cells(record: Mapping[str, Any]) -> list[RenderableType]:
    metrics = record["sourceMetrics"]
    paused = metrics.get("receivePausedBy")
    return [
        str(record["source"]),
        _number(metrics["messagesReceivedPerSecond"]),
        _number(metrics["backlogMessages"]),
        _seconds(metrics["backlogAgeMs"] / 1000),
        _alarm(metrics.get("messagesLost")),
        _alarm(metrics.get("messagesMalformed")),
        Text(f"now: {paused}", style="bold red")
        if paused
        else _seconds(metrics.get("receivePausedMs", 0) / 1000),
        _shown(metrics.get("connections")),
        _shown(metrics.get("rcvhwm")),
        humanfriendly.format_size(metrics["logBytes"], binary=True),
    ]


def _shown(value: object) -> str:
    return "–" if value is None else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 100 else humanfriendly.format_timespan(round(value), max_units=2)


def _ago(seconds: float) -> str:
    return (
        f"{max(0.0, seconds):.0f} s ago"
        if seconds < 100
        else humanfriendly.format_timespan(seconds, max_units=1)
    )


def _alarm(value: float | None) -> RenderableType:
    """A number that should be 0."""
    if value is None:
        return "–"
    return Text(_number(value), style="bold red") if value else "0"


def _alarms(reasons: Mapping[str, int]) -> RenderableType:
    """Numbers that should be 0, with their reasons."""
    shown = " ".join(f"{_number(count)} {reason}" for reason, count in reasons.items() if count)
    return Text(shown, style="bold red") if shown else "0"
