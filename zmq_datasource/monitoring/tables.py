"""Tables of figures for a terminal or a notebook: a line each, or on a narrow screen a paragraph each.

Names and topics are of strangers: each text goes through ``words`` or ``printed``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import humanfriendly
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.printable import printable

__all__ = [
    "Cells",
    "Rates",
    "ago",
    "alarm",
    "alarms",
    "number",
    "printed",
    "seconds",
    "shown",
    "size",
    "stack",
    "words",
]

# Narrower screens show a paragraph for each row: nothing is left out.
_WIDE = 120
# Characters of a text in a cell.
_MOST_CHARACTERS = 500

# A row, by the names of its columns; the first one says what the row is about.
Cells: TypeAlias = dict[str, Text]


class Rates:
    """What figures grow by a second, between the two newest reports that differ."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, list[tuple[float, Mapping[str, Any]]]] = {}

    def take(self, key: Hashable, at: float, figures: Mapping[str, Any]) -> Callable[[str], float | None]:
        """The newest report of a thing, as of ``at`` in seconds.

        Returns:
            The rate of a figure by its name; None before there are two reports.
        """
        reports = self._reports.setdefault(key, [])
        if reports and at < reports[-1][0]:  # the clock has stepped back
            reports.clear()
        if not reports or at > reports[-1][0]:
            reports.append((at, figures))
            del reports[:-2]
        if len(reports) < 2:
            return lambda name: None
        (before, old), (after, new) = reports
        return lambda name: float((new[name] - old[name]) / (after - before))


def stack(tables: Iterable[Sequence[Cells]], width: int | None, remarks: Iterable[Text] = ()) -> Table:
    """Tables one below the other, without the empty ones, and remarks below.

    Args:
        width: Columns of the screen; None is wide enough.
    """
    parts = Table.grid()  # a table shows itself in a notebook too
    for rows in tables:
        if rows and parts.row_count:
            parts.add_row("")
        for part in _paragraphs(rows) if width is not None and width < _WIDE else _table(rows):
            parts.add_row(part)
    for remark in remarks:
        parts.add_row(remark)
    return parts


def _table(rows: Sequence[Cells]) -> list[Table]:
    if not rows:
        return []
    table = Table(box=None, header_style="bold", padding=(0, 1), pad_edge=False)
    for name, cell in rows[0].items():
        # Names of queries and endpoints give way first: they are folded, figures are not.
        folds = cell.overflow == "fold"
        table.add_column(name, justify="left" if folds else "right", overflow="fold", no_wrap=not folds)
    for cells in rows:
        table.add_row(*cells.values())
    return [table]


def _paragraphs(rows: Sequence[Cells]) -> list[Text]:
    paragraphs = []
    for cells in rows:
        (what, title), *others = cells.items()
        figures = [
            Text.assemble(
                (name.replace(" ", "\N{NO-BREAK SPACE}"), "dim"), "\N{NO-BREAK SPACE}", _unbroken(cell)
            )
            for name, cell in others
        ]
        paragraphs.append(
            Text.assemble((what, "dim"), " ", (title.plain, "bold"), "\n", Text("   ").join(figures))
        )
    return paragraphs


def _unbroken(cell: Text) -> Text:
    return Text(cell.plain.replace(" ", "\N{NO-BREAK SPACE}"), style=cell.style)


def words(value: Any) -> Text:
    """A text that is folded where there is no room. Rich would take brackets in a ``str`` for its markup."""
    return Text(printed(value), overflow="fold")


def printed(value: Any) -> str:
    """A text as one that steers no terminal."""
    return printable(str(value), _MOST_CHARACTERS)


def shown(value: Any, how: Callable[[Any], str]) -> Text:
    """A figure in words, or a dash if there is none."""
    return Text("–" if value is None else how(value))


def number(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes in words."""
    return str(humanfriendly.format_size(round(value), binary=True))


def seconds(value: float) -> str:
    """Seconds in words."""
    return f"{value:,.1f} s" if value < 100 else humanfriendly.format_timespan(round(value), max_units=2)


def ago(seconds: float) -> Text:
    """How long ago a report is."""
    if seconds < -1:
        return Text("in the future", style="bold red")
    text = (
        f"{max(0.0, seconds):.0f} s" if seconds < 100 else humanfriendly.format_timespan(seconds, max_units=1)
    )
    return Text(f"{text} ago")


def alarm(value: float | None) -> Text:
    """A number that should be 0."""
    if value is None:
        return Text("–")
    return Text(number(value), style="bold red") if value else Text("0")


def alarms(reasons: Mapping[str, int]) -> Text:
    """Numbers that should be 0, with their reasons."""
    shown = " ".join(f"{number(count)} {printed(reason)}" for reason, count in reasons.items() if count)
    return Text(shown, style="bold red") if shown else Text("0")
