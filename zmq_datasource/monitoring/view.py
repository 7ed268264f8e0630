"""The live view: rates, drops, backlog and high-water marks of sources, sinks and proxies.

``live_view``, ``zmq-datasource top``, ``zmq-datasource proxy --monitor`` and the demo show its tables. The log lines of
``zmq-datasource receive`` and ``zmq-datasource proxy`` have the same figures.

A *record* has the figures of one source, sink or proxy at one time. Records of the kinds ``source`` and ``sink`` are
those of ``metricsLocation`` (``MetricsStore.newest``). ``proxy_record`` makes a record of a proxy's status.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeAlias

import humanfriendly
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from zmq_datasource.monitoring.tables import (
    Cell,
    Row,
    alarm,
    alarms,
    count,
    printed,
    seconds,
    shortened,
    shown,
    size,
    stack,
)

__all__ = ["LiveView", "Record", "StatusLines", "fault_record", "proxy_record", "source_record", "watch"]

Record: TypeAlias = Mapping[str, Any]

_UUID_LENGTH = 36
# Limits for a proxy: rows of one table, topics in one row, characters of a topic.
_MOST_ROWS, _MOST_TOPICS, _MOST_CHARACTERS = 20, 5, 60
_LINE_SECONDS = 10.0
# The reader's name at the end of a source's name. It is not shown beside the query's name.
_READER = re.compile(r" \([^()]*\)$")


class LiveView:
    """Makes tables of records. Remembers the records of the previous call, for rates.

    Args:
        since: Leave out records that are older than this many seconds; None for no limit.
        width: Columns of the screen; None for as many as needed.
    """

    def __init__(self, since: float | None = None, width: int | None = None) -> None:
        self._since = since
        self._width = width
        self._rates = _Rates()

    def render(self, records: Iterable[Record], now: datetime | None = None) -> Table:
        """The tables of sources, of sinks, and of each proxy with its subscribers."""
        now = now or datetime.now(UTC)
        tables: dict[str, list[Row]] = {"source": [], "sink": []}
        remarks: list[Text] = []
        stale = 0
        for record in sorted(records, key=_order):
            age = (now - datetime.fromisoformat(record["timestamp"])).total_seconds()
            if self._since is not None and age > self._since:
                stale += 1
                continue
            for row in self._rows(record, age):
                tables.setdefault(row.kind, []).append(row)
            if fault := record.get("fault") or record.get("status", {}).get("diskFault"):
                remarks.append(Text(printed(fault), style="bold red"))
        if stale:
            assert self._since is not None
            silence = humanfriendly.format_timespan(self._since)
            remarks.append(Text(f"{stale} more sent no figures for {silence}.", style="dim"))
        elif not remarks and not any(tables.values()):
            remarks.append(Text("Nothing has reported yet."))
        return stack(tables.values(), self._width, remarks)

    def line(self, record: Record) -> str:
        """The figures of a record as one line, without unknown figures and without fault counts of 0."""
        row = next(self._rows(record, 0.0))
        figures = (
            f"{column} {cell.text}"
            for column, cell in row.cells.items()
            if cell.fault is not False and cell.text != "–" and column != "age"
        )
        return f"{row.name}: {', '.join(figures)}"

    def _rows(self, record: Record, age: float) -> Iterator[Row]:
        at = datetime.fromisoformat(record["timestamp"]).timestamp()
        if record["kind"] == "source":
            yield self._source(record, at, age)
        elif record["kind"] == "sink":
            yield self._sink(record, at, age)
        elif record["kind"] == "proxy":
            yield self._proxy(record, at, age)
            yield from _peers_of_proxy(record["status"])

    def _source(self, record: Record, at: float, age: float) -> Row:
        metrics, name = record["sourceMetrics"], record.get("name")
        rate = metrics.get("messagesReceivedPerSecond")
        if rate is None:
            key = (record.get("log"), record["source"], record.get("query"))
            rate = self._rates.of(key, at, metrics)("messagesReceived")
        source = printed(record["source"])
        if name:
            source = f"{printed(name)}: {_READER.sub('', source)}"
        cells = {
            "msg/s": shown(rate, count),
            "backlog": shown(metrics.get("backlogMessages"), count),
            "oldest": shown(metrics.get("backlogAgeMs"), lambda ms: seconds(ms / 1000)),
            "lost": alarm(metrics.get("messagesLost")),
            "duplicate": alarm(metrics.get("messagesDuplicate")),
            "malformed": alarm(metrics.get("messagesMalformed")),
            "paused": _paused(metrics.get("receivePausedBy"), metrics.get("receivePausedMsByCause")),
            "peers": shown(metrics.get("connections"), count),
            "rcvhwm": shown(metrics.get("rcvhwm"), count),
            "log": shown(metrics.get("logBytes"), size),
            "age": _age(age),
        }
        return Row("source", source, cells)

    def _sink(self, record: Record, at: float, age: float) -> Row:
        total, query = record["sinkTotal"], str(record.get("name") or record["query"])
        rate = self._rates.of((record["query"], record["sink"]), at, total)
        if not record.get("name") and len(query) == _UUID_LENGTH:
            query = query[:8]
        cells = {
            "batch": shown(record.get("batch"), str),
            "sent/s": shown(rate("sent"), count),
            "dropped/s": alarm(rate("dropped")),
            "sent": Cell(count(total["sent"])),
            "dropped": alarms(total["droppedByReason"]),
            "dead letters": alarms(total["deadLetteredByReason"]),
            "blocked": Cell(seconds(total["blockedMs"] / 1000)),
            "peers": Cell(count(total["peers"])),
            "sndhwm": Cell(count(total["sndhwm"]) if total["sndhwm"] else "–"),
            "age": _age(age),
        }
        return Row("sink", f"{printed(query)}: {printed(record['sink'])}", cells)

    def _proxy(self, record: Record, at: float, age: float) -> Row:
        status = record["status"]
        rate = self._rates.of(("proxy", record["proxy"]), at, status)
        first, end = status["earliestId"], status["nextId"]
        cells = {
            "msg/s": shown(rate("received"), count),
            "bytes/s": shown(rate("bytes"), size),
            "published/s": shown(rate("published"), count),
            "received": Cell(count(status["received"])),
            "paused": Cell("now", fault=True)
            if status["paused"]
            else Cell(seconds(status["pausedSeconds"]), fault=None if status["pausedSeconds"] else False),
            "subscribers": Cell(count(status["subscribers"])),
            "log": Cell(size(status["logBytes"])),
            "ids": Cell("none" if first == end else f"{first:,.0f} to {end - 1:,.0f}"),
            "age": _age(age),
        }
        return Row("proxy", printed(record["proxy"]), cells)


def _peers_of_proxy(status: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the peers of a proxy: durable subscribers, publishers, plain subscribers, and stalled connections."""
    for account in sorted(status["durable"], key=lambda account: -account["backlog"])[:_MOST_ROWS]:
        acknowledged = account.get("lastAckSeconds")
        yield Row(
            "durable subscriber",
            printed(account["name"]),
            {
                "backlog": Cell(count(account["backlog"])),
                "sent": Cell(count(account["sent"])),
                "lost": alarm(account["lost"]),
                "last ack": Cell("never") if acknowledged is None else _age(acknowledged),
                "away": Cell("–", fault=False)
                if account["connected"]
                else Cell(seconds(account["awaySeconds"])),
                "topics": Cell(_some(account["topics"]) if "topics" in account else "–"),
            },
        )
    for side in status.get("publishers", ()):
        yield Row("publishers at", printed(side["socket"]), {"connections": Cell(count(side["connections"]))})
    if topics := status.get("subscriptions"):
        yield Row("plain subscribers", count(status["subscribers"]), {"topics": Cell(_some(topics))})
    for stalled in status.get("stalled", ())[:_MOST_ROWS]:
        waiting = {
            "for": Cell(seconds(stalled["seconds"]), fault=True),
            "waiting for it": Cell(size(stalled["unsentBytes"])),
        }
        yield Row("takes nothing", printed(stalled["peer"]), waiting)


def source_record(figures: Mapping[str, Any]) -> Record:
    """The record of a source that has these figures now."""
    head = {"kind": "source", "timestamp": datetime.now(UTC).isoformat(), "source": figures["source"]}
    return head | {"sourceMetrics": figures}


def proxy_record(name: str, status: Mapping[str, Any]) -> Record:
    """The record of a proxy that has this status now."""
    return {"kind": "proxy", "timestamp": datetime.now(UTC).isoformat(), "proxy": name, "status": status}


def fault_record(name: str, fault: str) -> Record:
    """The record of a ``metricsLocation`` or URL that cannot be read now."""
    return {"kind": "fault", "timestamp": datetime.now(UTC).isoformat(), "name": name, "fault": fault}


def _order(record: Record) -> tuple[str, ...]:
    names = (record.get(key) for key in ("kind", "name", "source", "sink", "proxy", "query"))
    return tuple(str(name or "") for name in names)


def _paused(cause: str | None, milliseconds: Mapping[str, float | None] | None) -> Cell:
    if cause:
        return Cell(f"now: {printed(cause)}", fault=True)
    # Pauses are unknown in a query that only reads the log: another process receives.
    known = [of_cause for of_cause in (milliseconds or {}).values() if of_cause is not None]
    if not known:
        return Cell("–", fault=False)
    total = sum(known) / 1000
    return Cell(seconds(total), fault=False if not total else None)


def _age(age: float) -> Cell:
    if age < -1:
        return Cell("in the future", fault=True)
    return Cell(f"{max(0.0, age):.0f} s" if age < 100 else humanfriendly.format_timespan(age, max_units=1))


def _some(topics: Sequence[str]) -> str:
    """The first topics, and how many more there are. ``(all)`` stands for the empty topic, and for no topic."""
    more = len(topics) - _MOST_TOPICS
    named = ", ".join(
        shortened(printed(topic), _MOST_CHARACTERS) or "(all)" for topic in topics[:_MOST_TOPICS]
    )
    return (named or "(all)") + (f" and {more} more" if more > 0 else "")


class _Rates:
    """How much figures grow in a second, from the two newest records of a thing that have different times."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[tuple[float, Mapping[str, Any]]]] = {}

    def of(self, key: Hashable, at: float, figures: Mapping[str, Any]) -> Callable[[str], float | None]:
        """Remember the figures that a thing had at the time ``at``, in seconds since the epoch.

        Returns:
            A function from a figure's name to its rate; None before the second record, or if the figure is not known.
        """
        known = self._known.setdefault(key, [])
        if known and at < known[-1][0]:  # the clock was set back
            known.clear()
        if not known or at > known[-1][0]:
            known.append((at, figures))
            del known[:-2]
        (before, old), (after, new) = known[0], known[-1]

        def rate(name: str) -> float | None:
            then, now = old.get(name), new.get(name)
            return None if before == after or then is None or now is None else (now - then) / (after - before)

        return rate


class StatusLines:
    """Logs the figures of a receiver or a proxy, at most once in ten seconds, and not while nothing is received."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._view = LiveView()
        self._next_line = clock() + _LINE_SECONDS
        self._next_id: int | None = None

    def show(self, read: Callable[[], Record], next_id: int) -> None:
        """Log the figures of the record that ``read`` returns, if a line is due."""
        now = self._clock()
        if now < self._next_line or next_id == self._next_id:
            return
        self._next_line, self._next_id = now + _LINE_SECONDS, next_id
        self._log.info("%s, next id %d", self._view.line(read()), next_id)


def watch(
    read: Callable[[], Iterable[Record]],
    interval: float,
    seconds: float | None = None,
    since: float | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Show tables of records and refresh them, on a terminal or in a notebook.

    Args:
        read: Returns the records; called for each refresh.
        interval: Seconds between two refreshes.
        seconds: End after this time; None goes on until Ctrl-C (in a notebook: interrupt).
        since: As in ``LiveView``.
        goes_on: Called after each refresh; if it returns False, ``watch`` ends.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    with _screen() as (show, width):
        view = LiveView(since, width)
        try:
            while True:
                show(view.render(read()))
                left = interval if deadline is None else min(interval, deadline - time.monotonic())
                if left <= 0 or not goes_on():
                    return
                time.sleep(left)
        except KeyboardInterrupt:
            return


@contextmanager
def _screen() -> Iterator[tuple[Callable[[Table], None], int]]:
    """Yield a function that shows a table instead of the one before, and the width of the screen in columns."""
    console = Console()
    if _in_notebook():
        from IPython.display import display  # noqa: PLC0415 - only where it is

        handle = display(Table(), display_id=True)  # type: ignore[no-untyped-call]
        yield handle.update, console.width  # rich cuts tables to this width: 115, or JUPYTER_COLUMNS
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True), console.width


def _in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython  # noqa: PLC0415 - may not be there
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
