"""A live table of sources and sinks, for a terminal or a notebook: rates, drops, backlog, high-water marks in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

import humanfriendly
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.printable import printable

__all__ = ["LiveView"]

# Narrower screens show a paragraph for each source and sink instead of a line: nothing is left out.
_WIDE = 120
_WORDS = {"source", "sink", "query"}
_UUID_LENGTH = 36
# Characters of a name in a cell.
_MOST_NAME = 500

# What a table shows of a source or sink, by the names of its columns.
_Cells: TypeAlias = dict[str, Text]


class LiveView:
    """Makes tables of records (``store``'s newest); remembers the last ones, for rates.

    Args:
        since: Leave out what has said nothing for so many seconds; None shows all.
        width: Columns of the screen; None is wide enough.
    """

    def __init__(self, since: float | None = None, width: int | None = None) -> None:
        self._since = since
        self._narrow = width is not None and width < _WIDE
        self._sinks: dict[tuple[str, str], list[tuple[datetime, Mapping[str, Any]]]] = {}

    def render(self, records: Iterable[Mapping[str, Any]], now: datetime | None = None) -> Table:
        """The table of sources and the table of sinks."""
        now = now or datetime.now(UTC)
        sources, sinks = [], []
        silent = 0
        for record in sorted(records, key=_order):
            age = (now - datetime.fromisoformat(record["timestamp"])).total_seconds()
            if self._since is not None and age > self._since:
                silent += 1
            elif record["kind"] == "source":
                sources.append({**_source_cells(record), "as of": _ago(age)})
            else:
                sinks.append({**self._sink_cells(record), "as of": _ago(age)})
        parts = Table.grid()  # a table shows itself in a notebook too
        for rows in (sources, sinks):
            if rows and parts.row_count:
                parts.add_row("")
            for part in _paragraphs(rows) if self._narrow else _table(rows):
                parts.add_row(part)
        if not parts.row_count and not silent:
            parts.add_row(Text("Nothing has reported yet."))
        if silent and self._since is not None:
            span = humanfriendly.format_timespan(self._since)
            parts.add_row(Text(f"{silent} sources and sinks have said nothing for {span}.", style="dim"))
        return parts

    def _sink_cells(self, record: Mapping[str, Any]) -> _Cells:
        total = record["sinkTotal"]
        sent, dropped = self._rates(record, total)
        query = str(record.get("name") or record["query"])
        return {
            "sink": _name(record["sink"]),
            "query": _name(query if record.get("name") or len(query) != _UUID_LENGTH else query[:8]),
            "batch": _name(record["batch"]),
            "sent/s": _shown(sent, _number),
            "dropped/s": _alarm(dropped),
            "sent": Text(_number(total["sent"])),
            "dropped": _alarms(total["droppedByReason"]),
            "dead letters": _alarms(total["deadLetteredByReason"]),
            "blocked": Text(_seconds(total["blockedMs"] / 1000)),
            "peers": Text(str(total["peers"])),
            "sndhwm": Text(str(total["sndhwm"] or "–")),
        }

    def _rates(
        self, record: Mapping[str, Any], total: Mapping[str, Any]
    ) -> tuple[float | None, float | None]:
        """Sent and dropped a second, between the two newest records that differ; None before there are two."""
        seen = self._sinks.setdefault((record["query"], record["sink"]), [])
        at = datetime.fromisoformat(record["timestamp"])
        if seen and at < seen[-1][0]:  # the clock has stepped back
            seen.clear()
        if not seen or at > seen[-1][0]:
            seen.append((at, total))
            del seen[:-2]
        if len(seen) < 2:
            return None, None
        (before, old), (after, new) = seen
        seconds = (after - before).total_seconds()
        return (new["sent"] - old["sent"]) / seconds, (new["dropped"] - old["dropped"]) / seconds


def _order(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(record["kind"]), str(record.get("source", record.get("sink"))), str(record.get("query", ""))


def _source_cells(record: Mapping[str, Any]) -> _Cells:
    metrics = record["sourceMetrics"]
    paused = metrics.get("receivePausedBy")
    paused_for = _shown(metrics.get("receivePausedMs"), lambda ms: _seconds(ms / 1000))
    return {
        "source": _name(record["source"]),
        "msg/s": _shown(metrics.get("messagesReceivedPerSecond"), _number),
        "backlog": _shown(metrics.get("backlogMessages"), _number),
        "oldest": _shown(metrics.get("backlogAgeMs"), lambda ms: _seconds(ms / 1000)),
        "lost": _alarm(metrics.get("messagesLost")),
        "malformed": _alarm(metrics.get("messagesMalformed")),
        "paused": Text(f"now: {printable(str(paused), _MOST_NAME)}", style="bold red")
        if paused
        else paused_for,
        "peers": _shown(metrics.get("connections"), str),
        "rcvhwm": _shown(metrics.get("rcvhwm"), str),
        "log": _shown(metrics.get("logBytes"), lambda size: humanfriendly.format_size(size, binary=True)),
    }


def _table(rows: Sequence[_Cells]) -> list[Table]:
    if not rows:
        return []
    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name in rows[0]:
        # Names of queries and endpoints give way first: they are folded, figures are not.
        words = name in _WORDS
        table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for cells in rows:
        table.add_row(*cells.values())
    return [table]


def _paragraphs(rows: Sequence[_Cells]) -> list[Text]:
    paragraphs = []
    for cells in rows:
        title, *others = cells.items()
        figures = [
            Text.assemble(
                (name.replace(" ", "\N{NO-BREAK SPACE}"), "dim"), "\N{NO-BREAK SPACE}", _unbroken(cell)
            )
            for name, cell in others
        ]
        paragraphs.append(Text.assemble((title[1].plain, "bold"), "\n", Text("   ").join(figures)))
    return paragraphs


def _unbroken(cell: Text) -> Text:
    return Text(cell.plain.replace(" ", "\N{NO-BREAK SPACE}"), style=cell.style)


def _name(value: Any) -> Text:
    return Text(printable(str(value), _MOST_NAME))


def _shown(value: Any, how: Callable[[Any], str]) -> Text:
    return Text("–" if value is None else how(value))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value < 100 else humanfriendly.format_timespan(round(value), max_units=2)


def _ago(seconds: float) -> Text:
    if seconds < -1:
        return Text("in the future", style="bold red")
    text = (
        f"{max(0.0, seconds):.0f} s" if seconds < 100 else humanfriendly.format_timespan(seconds, max_units=1)
    )
    return Text(f"{text} ago")


def _alarm(value: float | None) -> Text:
    """A number that should be 0."""
    if value is None:
        return Text("–")
    return Text(_number(value), style="bold red") if value else Text("0")


def _alarms(reasons: Mapping[str, int]) -> Text:
    """Numbers that should be 0, with their reasons."""
    shown = " ".join(
        f"{_number(count)} {printable(reason, _MOST_NAME)}" for reason, count in reasons.items() if count
    )
    return Text(shown, style="bold red") if shown else Text("0")
