"""The live view of queries (``LiveView``), and the lines of figures of ``receive`` and ``proxy`` (``FigureLines``).

A *record* has the figures of one source or sink of a query at one time (``spark.queries.records``).
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeAlias

import humanfriendly
from rich.live import Live
from rich.table import Table

from zmq_datasource.counters import iso
from zmq_datasource.monitoring.tables import (
    Cell,
    Row,
    alarm,
    alarms,
    count,
    printed,
    seconds,
    shown,
    size,
    stack,
)

Record: TypeAlias = Mapping[str, Any]

_UUID_LENGTH = 36
# The reader's name at the end of a source's name. It is not shown beside the query's name.
_READER = re.compile(r" \([^()]*\)$")


class LiveView:
    """Makes tables of records. Remembers the sinks' records of the previous call, for rates."""

    def __init__(self) -> None:
        self._rates: dict[tuple[str, str], _Rates] = {}

    def render(self, records: Iterable[Record], now: datetime | None = None) -> Table:
        """The tables of sources and of sinks."""
        now = now or datetime.now(UTC)
        sources: list[Row] = []
        sinks: list[Row] = []
        for record in records:
            at = datetime.fromisoformat(record["timestamp"])
            age = {"age": _age((now - at).total_seconds())}
            if record["kind"] == "source":
                sources.append(Row("source", _name_of_source(record), _source(record["sourceMetrics"]) | age))
            else:
                rates = self._rates.setdefault((record["query"], record["sink"]), _Rates())
                rate = rates.of(at.timestamp(), record["sinkTotal"])
                sinks.append(Row("sink", _name_of_sink(record), _sink(record, rate) | age))
        table = stack((sources, sinks))
        if not table.row_count:
            table.add_row("Nothing has reported yet.")
        return table


def _name_of_source(record: Record) -> str:
    source, name = printed(record["source"]), record.get("name")
    return f"{printed(name)}: {_READER.sub('', source)}" if name else source


def _name_of_sink(record: Record) -> str:
    query = str(record.get("name") or record["query"])
    if not record.get("name") and len(query) == _UUID_LENGTH:
        query = query[:8]
    return f"{printed(query)}: {printed(record['sink'])}"


def _source(metrics: Mapping[str, Any]) -> dict[str, Cell]:
    return {
        "msg/s": shown(metrics.get("messagesReceivedPerSecond"), count),
        "backlog": shown(metrics.get("backlogMessages"), count),
        "oldest": shown(metrics.get("backlogAgeMs"), lambda ms: seconds(ms / 1000)),
        "lost": alarm(metrics.get("messagesLost")),
        "duplicate": alarm(metrics.get("messagesDuplicate")),
        "malformed": alarm(metrics.get("messagesMalformed")),
        "paused": _paused(metrics.get("receivePausedBy"), metrics.get("receivePausedMsByCause")),
        "peers": shown(metrics.get("connections"), count),
        "rcvhwm": shown(metrics.get("rcvhwm"), count),
        "log": shown(metrics.get("logBytes"), size),
    }


def _sink(record: Record, rate: _Rate) -> dict[str, Cell]:
    total = record["sinkTotal"]
    return {
        "sent/s": shown(rate("sent"), count),
        "sent": Cell(count(total["sent"])),
        "dropped": alarms(total["droppedByReason"]),
        "dead letters": alarms(total["deadLetteredByReason"]),
        "blocked": Cell(seconds(total["blockedMs"] / 1000)),
        "peers": Cell(count(total["peers"])),
        "sndhwm": Cell(count(total["sndhwm"]) if total["sndhwm"] else "–"),
    }


def _paused(cause: str | None, milliseconds: Mapping[str, float | None] | None) -> Cell:
    if cause:
        return Cell(f"now: {printed(cause)}", fault=True)
    # Pauses are unknown in a query that only reads the log: another process receives.
    total = sum(of_cause or 0 for of_cause in (milliseconds or {}).values()) / 1000
    return Cell(seconds(total), fault=None if total else False)


def _age(age: float) -> Cell:
    if age < -1:
        return Cell("in the future", fault=True)
    return Cell(f"{max(0.0, age):.0f} s" if age < 100 else humanfriendly.format_timespan(age, max_units=1))


_Rate: TypeAlias = Callable[[str], float | None]


class _Rates:
    """How much figures grow in a second, from the two newest that have different times."""

    def __init__(self) -> None:
        self._known: list[tuple[float, Mapping[str, Any]]] = []

    def of(self, at: float, figures: Mapping[str, Any]) -> _Rate:
        """Remember the figures of the time ``at``, in seconds.

        Returns:
            A function from a figure's name to its rate; None before the second call.
        """
        known = self._known
        if known and at < known[-1][0]:  # the clock was set back
            known.clear()
        if not known or at > known[-1][0]:
            known.append((at, figures))
            del known[:-2]
        (before, old), (after, new) = known[0], known[-1]
        return lambda name: None if before == after else (new[name] - old[name]) / (after - before)


# Lines of figures.


class Figures(NamedTuple):
    """How a program prints its figures.

    Attributes:
        form: ``text`` is a line in the log output, while messages come. ``json`` is an object on standard output.
        seconds: From one line to the next.
    """

    form: Literal["text", "json", "none"] = "text"
    seconds: float = 10.0


class FigureLines:
    """Prints the figures of a receiver or a proxy.

    Args:
        log: Where text goes.
        line: Makes text of figures; gets a function for rates, too.
    """

    def __init__(
        self,
        log: logging.Logger,
        line: Callable[[Mapping[str, Any], _Rate], str],
        figures: Figures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._line = log, line
        self._form, self._seconds = figures
        self._clock = clock
        self._rates = _Rates()
        self._next_line = clock() + self._seconds
        self._next_id: int | None = None

    def show(self, read: Callable[[], Mapping[str, Any]], next_id: int) -> None:
        """Print the figures that ``read`` returns, if a line is due.

        Args:
            next_id: The end of the log. While it stays the same, there is no text.
        """
        now = self._clock()
        if self._form == "none" or now < self._next_line:
            return
        if self._form == "json":
            self._print(read())
        elif next_id != self._next_id:
            figures = read()
            self._log.info("%s, next id %d", self._line(figures, self._rates.of(now, figures)), next_id)
        else:
            return
        self._next_line, self._next_id = now + self._seconds, next_id

    def _print(self, figures: Mapping[str, Any]) -> None:
        try:
            print(json.dumps({"timestamp": iso(time.time()), **figures}), flush=True)
        except OSError as e:  # the reader of a pipe has ended
            self._form = "none"
            self._log.warning("printing figures: %s; no more are printed", e.strerror)


def source_line(metrics: Mapping[str, Any], rate: _Rate) -> str:
    """The figures of a source as text, and those of the subscribers that it serves."""
    cells = _source(metrics)
    if "published" in metrics:
        cells |= {
            "published/s": shown(rate("published"), count),
            "subscribers": Cell(count(metrics["subscribers"])),
        }
    if "durable" in metrics:
        cells["durable"] = Cell(count(len(metrics["durable"])))
    return _text(printed(metrics["source"]), cells)


def _text(name: str, cells: Mapping[str, Cell]) -> str:
    """Figures as text, without unknown figures and without fault counts of 0."""
    known = (
        f"{column} {cell.text}"
        for column, cell in cells.items()
        if cell.fault is not False and cell.text != "–"
    )
    return f"{name}: {', '.join(known)}"


# Showing the live view.


def watch(
    read: Callable[[], Iterable[Record]],
    interval: float,
    seconds: float | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> None:
    """Show tables of records and refresh them, on a terminal or in a notebook.

    Args:
        read: Returns the records; called for each refresh.
        interval: Seconds between two refreshes.
        seconds: End after this time; None goes on until Ctrl-C (in a notebook: interrupt).
        goes_on: Called after each refresh; if it returns False, ``watch`` ends.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    view = LiveView()
    with _screen() as show:
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
def _screen() -> Iterator[Callable[[Table], None]]:
    """Yield a function that shows a table instead of the one before."""
    if _in_notebook():
        from IPython.display import display  # noqa: PLC0415 - only where it is

        yield display(Table(), display_id=True).update  # type: ignore[no-untyped-call]
        return
    with Live(auto_refresh=False) as live:
        yield lambda table: live.update(table, refresh=True)


def _in_notebook() -> bool:
    try:
        from IPython.core.getipython import get_ipython  # noqa: PLC0415 - may not be there
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
