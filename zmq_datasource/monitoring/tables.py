"""Tables of figures that fit the screen. No line is wrapped. A line below a table names the columns that are left out.

Names and topics come from other programs. They go through ``printed``, so that no control character reaches the
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import humanfriendly
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.log_lines import printable

__all__ = [
    "Cell",
    "Row",
    "alarm",
    "alarms",
    "count",
    "print_fitted",
    "printed",
    "seconds",
    "shortened",
    "shown",
    "size",
    "stack",
]

_UNLIMITED = 10_000  # columns of a file or pipe
_GAP = 2  # spaces between two columns
_LEAST_NAME = 20
_MOST_CHARACTERS = 500  # of a name
_ROUNDED_FROM = 100_000


class Cell(NamedTuple):
    """A figure as text.

    Attributes:
        fault: True for a fault, which is shown in red. False for a figure of faults that shows none; a narrow screen
            leaves out a column in which all are False. None for a figure that is not about faults.
    """

    text: str
    fault: bool | None = None


class Row(NamedTuple):
    """A thing and its figures, by the names of their columns.

    Attributes:
        kind: What the thing is, as the title of the first column.
        name: Its name; shortened where there is no room.
    """

    kind: str
    name: str
    cells: Mapping[str, Cell]


def stack(tables: Iterable[Sequence[Row]], width: int | None, remarks: Iterable[Text] = ()) -> Table:
    """Put tables one below the other, without the empty ones, and remarks below them.

    Args:
        width: Columns of the screen; None for as many as needed.
    """
    parts = Table.grid()  # a Table, because a notebook can show one
    for rows in filter(None, tables):
        if parts.row_count:
            parts.add_row("")
        for part in _fitted(rows, width):
            parts.add_row(part)
    for remark in remarks:
        parts.add_row(remark)
    return parts


def print_fitted(make: Callable[[int | None], Table]) -> None:
    """Print what ``make`` returns for the width of the terminal. In a file or pipe, lines are as long as needed."""
    console = Console()
    if console.is_terminal:
        console.print(make(console.width))
    else:
        Console(width=_UNLIMITED).print(make(None))


def _fitted(rows: Sequence[Row], width: int | None) -> Iterator[RenderableType]:
    """One table, or several with the same rows if the columns need more than ``width``."""
    kind = rows[0].kind
    columns = {
        column: max(cell_len(text) for text in (column, *(row.cells[column].text for row in rows)))
        for column in rows[0].cells
    }
    name = max(cell_len(text) for text in (kind, *(row.name for row in rows)))
    if width is None or name + _width(columns) <= width:
        yield _table(rows, list(columns), name, None)
        return
    states = {column: {row.cells[column].fault for row in rows} for column in columns}
    quiet = [column for column in columns if states[column] == {False}]
    figures = [column for column in columns if states[column] == {None}]
    faults = [column for column in columns if column not in (*quiet, *figures)]
    room = width - max(_width({column: columns[column] for column in group}) for group in (figures, faults))
    # With too little room for the name, the figures need several tables anyway. Then the name may take two fifths.
    name = min(name, room if room >= _LEAST_NAME else max(_LEAST_NAME, width * 2 // 5))
    for group in (figures, faults):
        part: list[str] = []
        for column in group:
            if part and name + _width({one: columns[one] for one in (*part, column)}) > width:
                yield _table(rows, part, name, width)
                part = []
            part.append(column)
        if part:
            yield _table(rows, part, name, width)
    for what, unknown in (("0 everywhere", False), ("Not known", True)):
        named = [column for column in quiet if all(row.cells[column].text == "–" for row in rows) == unknown]
        if named:
            yield Text(f"{what}: {', '.join(named)}", style="dim")


def _width(columns: Mapping[str, int]) -> int:
    return sum(width + _GAP for width in columns.values())


def _table(rows: Sequence[Row], columns: Sequence[str], name: int, width: int | None) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column(shortened(rows[0].kind, name), no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    # A cell that is wider than the screen, such as a list of topics, is alone in its table, and is shortened.
    most = None if width is None else max(width - name - _GAP, 1)
    for row in rows:
        cells = (row.cells[column] for column in columns)
        texts = (
            Text(cell.text if most is None else shortened(cell.text, most), "bold red" if cell.fault else "")
            for cell in cells
        )
        table.add_row(*chain([Text(shortened(row.name, name))], texts))
    return table


def shortened(text: str, width: int) -> str:
    """The text in at most ``width`` columns: ``…`` stands for the middle of a longer one."""
    if cell_len(text) <= width:
        return text
    tail = (width - 1) // 3
    end = set_cell_size(text[::-1], tail)[::-1]
    return f"{set_cell_size(text, width - 1 - tail)}…{end}"


def printed(value: Any) -> str:
    """The value as text, without the characters that control a terminal."""
    return printable(str(value), _MOST_CHARACTERS)


def shown(value: Any, how: Callable[[Any], str]) -> Cell:
    """The text that ``how`` makes of a figure; a dash if the figure is not known."""
    return Cell("–" if value is None else how(value))


def count(value: float) -> str:
    """A number of things in 6 characters: exact below 100,000, and otherwise as in ``1.2M``."""
    if value < _ROUNDED_FROM:
        return f"{value:,.0f}"
    for unit in "kMG":
        value /= 1000
        if value < 1000 or unit == "G":
            break
    return f"{value:.1f}{unit}" if value < 100 else f"{value:,.0f}{unit}"


def size(value: float) -> str:
    """Bytes in words."""
    return str(humanfriendly.format_size(round(value), binary=True))


def seconds(value: float) -> str:
    """Seconds in words."""
    return f"{value:,.1f} s" if value < 100 else humanfriendly.format_timespan(round(value), max_units=1)


def alarm(value: float | None) -> Cell:
    """A number that should be 0: a fault if it is not."""
    if not value:
        return Cell("–" if value is None else "0", fault=False)
    return Cell(count(value), fault=True)


def alarms(reasons: Mapping[str, int]) -> Cell:
    """Numbers that should be 0, each with its reason: a fault if one of them is not."""
    text = " ".join(f"{count(number)} {printed(reason)}" for reason, number in reasons.items() if number)
    return Cell(text, fault=True) if text else Cell("0", fault=False)
