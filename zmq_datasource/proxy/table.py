"""A proxy's status as tables, for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import humanfriendly
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.printable import printable

__all__ = ["Rates", "show"]

_MOST_ROWS, _MOST_TOPICS = 20, 5
# Characters of a topic, and of any cell.
_MOST_CHARACTERS, _MOST_LENGTH = 60, 500


class Rates:
    """What has changed from one status to the next, by the second."""

    def __init__(self) -> None:
        self._before: tuple[float, Mapping[str, Any]] | None = None
        self.received = self.bytes = self.published = 0.0

    def take(self, now: float, status: Mapping[str, Any]) -> None:
        """The newest status, as of ``now`` in seconds."""
        if self._before is not None and now > self._before[0]:
            seconds, before = now - self._before[0], self._before[1]
            self.received = (status["received"] - before["received"]) / seconds
            self.bytes = (status["bytes"] - before["bytes"]) / seconds
            self.published = (status["published"] - before["published"]) / seconds
        self._before = now, status


def show(status: Mapping[str, Any], rates: Rates) -> RenderableType:
    """Publishers, subscriptions, the log, and who is how far."""
    if not status:
        return Text("starting")
    flow = Table(title="flow", title_justify="left")
    for name in ("received/s", "bytes/s", "published/s", "messages", "log", "ids"):
        flow.add_column(name, justify="right")
    flow.add_row(
        f"{rates.received:,.0f}",
        _size(rates.bytes),
        f"{rates.published:,.0f}",
        f"{status['received']:,}",
        _size(status["logBytes"]),
        "none"
        if status["nextId"] == status["earliestId"]
        else f"{status['earliestId']:,} to {status['nextId'] - 1:,}",
    )
    parts: list[RenderableType] = [flow]
    if status["durable"]:
        parts.append(_durable(status))
    parts += [_publishers(status), _subscriptions(status)]
    if status["diskFault"]:
        parts.append(Text(f"receiving is paused: {status['diskFault']}", style="red"))
    elif status["paused"]:
        parts.append(Text("receiving is paused: the log is full of what somebody still needs", style="red"))
    if status["stalled"]:
        parts.append(_stalled(status))
    return Group(*parts)


def _publishers(status: Mapping[str, Any]) -> Table:
    table = Table(title="publishers", title_justify="left")
    table.add_column("socket", overflow="fold")
    table.add_column("connections", justify="right")
    for side in status["publishers"]:
        table.add_row(_text(side["socket"]), str(side["connections"]))
    return table


def _subscriptions(status: Mapping[str, Any]) -> RenderableType:
    topics = _some([printable(topic, _MOST_CHARACTERS) or "(all)" for topic in status["subscriptions"]])
    return Text(f"\nplain subscribers: {status['subscribers']:,}{f', to {topics}' if topics else ''}\n")


def _some(topics: Sequence[str]) -> str:
    more = len(topics) - _MOST_TOPICS
    return ", ".join(topics[:_MOST_TOPICS]) + (f" and {more} more" if more > 0 else "")


def _durable(status: Mapping[str, Any]) -> Table:
    table = Table(title="durable subscribers", title_justify="left")
    table.add_column("name", overflow="fold", min_width=12)
    table.add_column("topics", overflow="fold")
    for name in ("backlog", "sent", "lost", "last ack", "away"):
        table.add_column(name, justify="right")
    for account in sorted(status["durable"], key=lambda a: -a["backlog"])[:_MOST_ROWS]:
        last = account["lastAckSeconds"]
        table.add_row(
            _text(account["name"]),
            _text(_some([printable(topic, _MOST_CHARACTERS) for topic in account["topics"]]) or "(all)"),
            f"{account['backlog']:,}",
            f"{account['sent']:,}",
            Text(f"{account['lost']:,}", style="red" if account["lost"] else ""),
            "never" if last is None else f"{_time(last)} ago",
            "" if account["connected"] else _time(account["awaySeconds"]),
        )
    return table


def _stalled(status: Mapping[str, Any]) -> Table:
    table = Table(title="plain subscribers that take nothing", title_justify="left", title_style="yellow")
    table.add_column("peer")
    table.add_column("for", justify="right")
    table.add_column("waits for it in the system", justify="right")
    for stalled in status["stalled"][:_MOST_ROWS]:
        table.add_row(_text(stalled["peer"]), _time(stalled["seconds"]), _size(stalled["unsentBytes"]))
    return table


def _text(text: str) -> Text:
    """A cell. Rich would take brackets in a ``str`` for its markup."""
    return Text(printable(text, _MOST_LENGTH))


def _size(size: float) -> str:
    return str(humanfriendly.format_size(round(size), binary=True))


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
