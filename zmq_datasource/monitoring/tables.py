"""Tables of figures. rich folds what is wider than the screen.

Names and topics come from other programs. They go through ``printed``, so that no control character reaches the
terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import humanfriendly
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.log_lines import printable

_UNLIMITED = 10_000  # columns of a file or pipe
_MOST_CHARACTERS = 500  # of a name
_ROUNDED_FROM = 100_000


class Cell(NamedTuple):
    """A figure as text.

    Attributes:
        fault: True for a fault, which is shown in red. False for a figure of faults that shows none: a column in which
            all are False is left out. None for a figure that is not about faults.
    """

    text: str
    fault: bool | None = None


class Row(NamedTuple):
    """A thing and its figures, by the names of their columns.

    Attributes:
        kind: What the thing is, as the title of the first column.
        name: Its name.
    """

    kind: str
    name: str
    cells: Mapping[str, Cell]


def stack(tables: Iterable[Sequence[Row]]) -> Table:
    """Put tables one below the other, without the empty ones."""
    parts = Table.grid()  # a Table, because a notebook can show one
    for rows in filter(None, tables):
        if parts.row_count:
            parts.add_row("")
        parts.add_row(_table(rows))
    return parts


def _table(rows: Sequence[Row]) -> Table:
    columns = [
        column for column in rows[0].cells if any(row.cells[column].fault is not False for row in rows)
    ]
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(rows[0].kind, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for row in rows:
        cells = (row.cells[column] for column in columns)
        table.add_row(Text(row.name), *(Text(cell.text, "bold red" if cell.fault else "") for cell in cells))
    return table


def print_table(table: Table) -> None:
    """Print a table. In a file or pipe, lines are as long as needed."""
    console = Console()
    (console if console.is_terminal else Console(width=_UNLIMITED)).print(table)


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
