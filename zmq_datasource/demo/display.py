"""What the demo shows: a live view, then a table and what it says in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from zmq_datasource.demo.counts import QueryCounts
from zmq_datasource.demo.job import TopicTable
from zmq_datasource.demo.verdict import Finding

__all__ = ["Screen", "print_result"]

_MOST_TOPICS = 6


def _number(value: int | None, missing: str = "·") -> str:
    return missing if value is None else f"{value:,}"


def accounts_table(accounts: Sequence[QueryCounts]) -> Table:
    """One row a query, from published to arrived."""
    reasons = sorted({r for a in accounts if a.sink for r in a.sink.dropped} | {"hwm"})
    table = Table(box=box.ROUNDED, header_style="bold")
    table.add_column("query", no_wrap=True)
    for heading in ("published", "received", "rows", "sent", *(f"dropped:\n{r}" for r in reasons), "arrived"):
        table.add_column(heading, justify="right", no_wrap=True)
    for account in accounts:
        sink = account.sink
        dropped = [sink.dropped[reason] if sink else None for reason in reasons]
        table.add_row(
            account.name,
            _number(account.published, "unknown"),
            _number(account.received),
            _number(account.rows),
            _number(sink.sent if sink else None),
            *(Text(_number(n), style="yellow" if n else "") for n in dropped),
            _number(account.arrived),
        )
    return table


def topics_table(topics: TopicTable) -> RenderableType:
    """The aggregation's newest result, the largest topics only."""
    if not topics.rows:
        return Text("")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("topic")
    table.add_column("messages", justify="right")
    table.add_column(topics.measure, justify="right")
    for topic, messages, average in topics.rows[:_MOST_TOPICS]:
        shown = Text(topic, overflow="ellipsis") if topic else Text("(no topic frame)", style="dim")
        table.add_row(shown, f"{messages:,}", "·" if average is None else f"{average:,.1f}")
    more = len(topics.rows) - _MOST_TOPICS
    return Group(table, Text(f"and {more:,} more topics", style="dim")) if more > 0 else table


class Screen:
    """What is seen while the demo runs: a live view, or on a pipe one line for each stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, refresh_per_second=8)
        self._spinner = Spinner("dots")
        self._stage = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(
        self, stage: str, done: float | None, accounts: Sequence[QueryCounts], topics: TopicTable | None
    ) -> None:
        """Show the newest numbers.

        Args:
            stage: What is going on.
            done: How much of it has gone by, 0 to 1; None where that is not known.
            accounts: The account of each query that has been started.
            topics: The aggregation's newest result.
        """
        if self._live.is_started:
            sign = self._spinner if done is None else ProgressBar(total=1.0, completed=done, width=30)
            head = Table.grid(padding=(0, 1))
            head.add_row(sign, Text(stage, style="bold"))
            parts: list[RenderableType] = [head]
            if accounts:
                parts.append(accounts_table(accounts))
            if topics is not None:
                parts.append(topics_table(topics))
            self._live.update(Group(*parts))
        elif stage != self._stage:
            self._console.print(stage, style="dim")
        self._stage = stage


def print_result(
    console: Console, accounts: Sequence[QueryCounts], topics: TopicTable, findings: Iterable[Finding]
) -> None:
    """The last tables, and below them what they say."""
    console.print(topics_table(topics))
    console.print(accounts_table(accounts))
    sentences = Table.grid(padding=(0, 1))
    for finding in findings:
        mark = {True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[finding.good]
        sentences.add_row(mark, Text(finding.text))
    console.print(sentences)
