"""What is shown live of sources, sinks and a proxy: rates, drops, backlog, high-water marks in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import humanfriendly
from rich.table import Table
from rich.text import Text

from zmq_datasource.host.printable import printable
from zmq_datasource.monitoring.tables import (
    Cells,
    Rates,
    ago,
    alarm,
    alarms,
    number,
    printed,
    seconds,
    shown,
    size,
    stack,
    words,
)

__all__ = ["LiveView", "ProxyView"]

_UUID_LENGTH = 36
# Of a proxy: durable subscribers, topics of one, and characters of a topic.
_MOST_ROWS, _MOST_TOPICS, _MOST_CHARACTERS = 20, 5, 60


class LiveView:
    """Makes tables of records (``store``'s newest); remembers the last ones, for rates.

    Args:
        since: Leave out what has said nothing for so many seconds; None shows all.
        width: Columns of the screen; None is wide enough.
    """

    def __init__(self, since: float | None = None, width: int | None = None) -> None:
        self._since = since
        self._width = width
        self._rates = Rates()

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
                sources.append({**_source_cells(record), "as of": ago(age)})
            else:
                sinks.append({**self._sink_cells(record), "as of": ago(age)})
        remarks = []
        if not sources and not sinks and not silent:
            remarks.append(Text("Nothing has reported yet."))
        if silent and self._since is not None:
            span = humanfriendly.format_timespan(self._since)
            remarks.append(Text(f"{silent} sources and sinks have said nothing for {span}.", style="dim"))
        return stack((sources, sinks), self._width, remarks)

    def _sink_cells(self, record: Mapping[str, Any]) -> Cells:
        total = record["sinkTotal"]
        at = datetime.fromisoformat(record["timestamp"]).timestamp()
        rate = self._rates.take((record["query"], record["sink"]), at, total)
        query = str(record.get("name") or record["query"])
        return {
            "sink": words(record["sink"]),
            "query": words(query if record.get("name") or len(query) != _UUID_LENGTH else query[:8]),
            "batch": Text(printed(record["batch"])),
            "sent/s": shown(rate("sent"), number),
            "dropped/s": alarm(rate("dropped")),
            "sent": Text(number(total["sent"])),
            "dropped": alarms(total["droppedByReason"]),
            "dead letters": alarms(total["deadLetteredByReason"]),
            "blocked": Text(seconds(total["blockedMs"] / 1000)),
            "peers": Text(str(total["peers"])),
            "sndhwm": Text(str(total["sndhwm"] or "–")),
        }


def _order(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(record["kind"]), str(record.get("source", record.get("sink"))), str(record.get("query", ""))


def _source_cells(record: Mapping[str, Any]) -> Cells:
    metrics = record["sourceMetrics"]
    paused = metrics.get("receivePausedBy")
    paused_for = shown(metrics.get("receivePausedMs"), lambda ms: seconds(ms / 1000))
    return {
        "source": words(record["source"]),
        "msg/s": shown(metrics.get("messagesReceivedPerSecond"), number),
        "backlog": shown(metrics.get("backlogMessages"), number),
        "oldest": shown(metrics.get("backlogAgeMs"), lambda ms: seconds(ms / 1000)),
        "lost": alarm(metrics.get("messagesLost")),
        "duplicate": alarm(metrics.get("messagesDuplicate")),
        "malformed": alarm(metrics.get("messagesMalformed")),
        "paused": Text(f"now: {printed(paused)}", style="bold red") if paused else paused_for,
        "peers": shown(metrics.get("connections"), str),
        "rcvhwm": shown(metrics.get("rcvhwm"), str),
        "log": shown(metrics.get("logBytes"), size),
    }


class ProxyView:
    """Makes tables of statuses; remembers the last ones, for rates.

    Args:
        width: Columns of the screen; None is wide enough.
    """

    def __init__(self, width: int | None = None) -> None:
        self._width = width
        self._rates = Rates()

    def render(self, status: Mapping[str, Any], now: float) -> Table:
        """The proxy, its publishers and its subscribers, as of ``now`` in seconds."""
        if not status:
            return stack((), self._width, [Text("The proxy is starting.")])
        durable = sorted(status["durable"], key=lambda account: -account["backlog"])
        tables = (
            [self._proxy_cells(status, now)],
            [_durable_cells(account) for account in durable[:_MOST_ROWS]],
            [
                {"publishers": words(side["socket"]), "connections": Text(number(side["connections"]))}
                for side in status["publishers"]
            ],
            [_plain_cells(status)],
            [_stalled_cells(stalled) for stalled in status["stalled"][:_MOST_ROWS]],
        )
        return stack(tables, self._width)

    def _proxy_cells(self, status: Mapping[str, Any], now: float) -> Cells:
        rate = self._rates.take("proxy", now, status)
        paused = status["diskFault"]
        if not paused and status["paused"]:
            paused = "the log is full of messages that a reader still needs"
        first, end = status["earliestId"], status["nextId"]
        state = words(f"paused: {paused}" if paused else "receives")
        state.style = "bold red" if paused else ""
        return {
            "proxy": state,
            "msg/s": shown(rate("received"), number),
            "bytes/s": shown(rate("bytes"), size),
            "published/s": shown(rate("published"), number),
            "received": Text(number(status["received"])),
            "log": Text(size(status["logBytes"])),
            "ids": Text("none" if first == end else f"{number(first)} to {number(end - 1)}"),
        }


def _durable_cells(account: Mapping[str, Any]) -> Cells:
    last = account["lastAckSeconds"]
    return {
        "durable subscriber": words(account["name"]),
        "topics": words(_some(account["topics"])),
        "backlog": Text(number(account["backlog"])),
        "sent": Text(number(account["sent"])),
        "lost": alarm(account["lost"]),
        "last ack": Text("never") if last is None else ago(last),
        "away": Text("" if account["connected"] else seconds(account["awaySeconds"])),
    }


def _plain_cells(status: Mapping[str, Any]) -> Cells:
    topics = _some(status["subscriptions"]) if status["subscriptions"] else ""
    return {
        "plain subscribers": words(number(status["subscribers"])),
        "topics": words(topics),
    }


def _stalled_cells(stalled: Mapping[str, Any]) -> Cells:
    return {
        "takes nothing": words(stalled["peer"]),
        "for": Text(seconds(stalled["seconds"]), style="bold red"),
        "waits in the system": Text(size(stalled["unsentBytes"])),
    }


def _some(topics: Sequence[str]) -> str:
    """Some of these topics; an empty one, or none, stands for all messages."""
    more = len(topics) - _MOST_TOPICS
    named = ", ".join(printable(topic, _MOST_CHARACTERS) or "(all)" for topic in topics[:_MOST_TOPICS])
    return (named or "(all)") + (f" and {more} more" if more > 0 else "")
