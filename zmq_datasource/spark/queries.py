"""What a user's session shows of queries: their metrics, and why a query has failed (``reason``).

``metrics`` takes a query's progress, and fills in the figures of the Python source and sink, which Spark leaves out.
``live_view`` shows them as a table.
"""

from __future__ import annotations

import json
import pprint
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from zmq_datasource.counters import unknown
from zmq_datasource.monitoring.accounts import SINK, TOTAL, BatchHistory, SinkTotals
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.spark.registration import active_history

if TYPE_CHECKING:
    from pyspark.sql.connect.streaming.query import StreamingQuery as ConnectQuery
    from pyspark.sql.streaming.query import StreamingQuery

# The width of a printed event, in characters.
_COLUMNS = 110


class _Event(dict[str, Any]):
    """A dictionary that prints over several lines, because in one line an event has thousands of characters."""

    def __repr__(self) -> str:
        return pprint.pformat(dict(self), width=_COLUMNS, sort_dicts=False)


# A traceback ends with the error. Spark adds its own text after it.
_ERROR = re.compile(
    r"^(?:zmq_datasource\.errors\.)(\w+: .*?)(?=\n SQLSTATE|\n\n|\n\tat |\n=== |\Z)", re.MULTILINE | re.DOTALL
)


class QueryMetrics(NamedTuple):
    """A query's progress as plain dictionaries; see ``metrics``.

    Attributes:
        last: The newest event. Before the first event: a dictionary of the same shape with one source, in which
            ``timestamp`` is None.
        recent: The events that Spark keeps, oldest first.
    """

    last: dict[str, Any]
    recent: list[dict[str, Any]]


def metrics(query: StreamingQuery) -> QueryMetrics:
    """The progress of a query with the metrics of its ZeroMQ sources and sinks.

    The dictionaries have the shape of Spark's ``query.lastProgress.json``. ``sources[i]["metrics"]`` has the figures
    of each ZeroMQ source. ``sink["metrics"]`` has the figures of the event's batch, of all batches so far (``total``),
    and of both for each sink (``bySink``), because ``foreachBatch`` may write to several. docs/metrics.md has each
    field with its unit. Each field is always there, and is None while it is not known. After ``register``, the sink
    figures of a query without a ZeroMQ sink are 0.

    Args:
        query: A running or ended query.
    """
    events = [json.loads(progress.json) for progress in query.recentProgress]
    fill_in_sources(events)
    fill_in_sinks(events, active_history())
    recent: list[dict[str, Any]] = [_Event(complete(event)) for event in events]
    if not recent:
        return QueryMetrics(_Event(complete(_no_event(query))), recent)
    return QueryMetrics(recent[-1], recent)


def _no_event(query: StreamingQuery) -> dict[str, Any]:
    """An event with the facts that are known of a query before its first event."""
    return {
        "id": str(query.id),
        "runId": str(query.runId),
        "name": query.name,
        "timestamp": None,
        "batchId": None,
        "durationMs": {},
        "sources": [{"description": _PYTHON_SOURCE, "latestOffset": None}],
        "sink": {} if active_history() is None else {"metrics": _shown({})},
    }


_FIGURES = {metric.name for metric in SOURCE}

# How Spark describes, in a query's progress, a source that is written in Python.
_PYTHON_SOURCE = "PythonMicroBatchStream"


def complete(event: dict[str, Any]) -> dict[str, Any]:
    """Add the documented figures that an event lacks, as None, so that reading one never raises; in place. Returns the
    event."""
    for source in event["sources"]:
        if _PYTHON_SOURCE in source["description"]:
            source["metrics"] = {**unknown(SOURCE), **source.get("metrics", {})}
        source.setdefault("metrics", {})
    if "total" not in event["sink"].get("metrics", {}):
        figures = {**unknown(SINK), "total": unknown(TOTAL), "bySink": {}}
        event["sink"]["metrics"] = event["sink"].get("metrics", {}) | figures
    return event


def fill_in_sources(events: Sequence[dict[str, Any]]) -> None:
    """Copy the sources' figures from their offsets to their metrics; in place."""
    for event in events:
        for described in event["sources"]:
            offset = _parsed(described.get("latestOffset"))
            if "log" in offset and "metricsFailures" in offset:
                described["latestOffset"] = offset
                described["metrics"] = {name: value for name, value in offset.items() if name in _FIGURES}


def fill_in_sinks(events: Sequence[dict[str, Any]], history: BatchHistory | None) -> None:
    """Fill the sinks' figures into events of one query, in place; none where they are not known.

    Args:
        history: The accounts that the sinks have sent to this process; None if they send none.
    """
    if not events:
        return
    query = events[0]["id"]
    wanted = [_batch(event) for event in events]
    counted = {} if history is None else history.totals(query, wanted)
    for event, batch in zip(events, wanted, strict=True):
        sinks = counted.get(batch, {})
        if not has_batch(event):
            sinks = {name: totals.idle() for name, totals in sinks.items()}
        # ``history`` counts all sinks, so a query that is not in it has sent nothing.
        if history is not None:
            event["sink"]["metrics"] = event["sink"].get("metrics", {}) | _shown(sinks)


def _parsed(offset: object) -> dict[str, Any]:
    """A source's offset as a dictionary; empty if it is no JSON object. Spark Connect gives it as text."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    return offset if isinstance(offset, dict) else {}


def has_batch(event: Mapping[str, Any]) -> bool:
    """Whether the event is about a batch, not about a trigger that found nothing to do."""
    return "addBatch" in event["durationMs"]


def _batch(event: Mapping[str, Any]) -> int:
    """The newest batch that had run at the event. The event of an idle trigger names the next batch."""
    batch = int(event["batchId"])
    return batch if has_batch(event) else batch - 1


def _shown(sinks: Mapping[str, SinkTotals]) -> dict[str, Any]:
    whole = sum(sinks.values(), SinkTotals.none())
    return {
        **_totals_of(whole),
        "bySink": {name: _totals_of(totals) for name, totals in sorted(sinks.items())},
    }


def _totals_of(totals: SinkTotals) -> dict[str, Any]:
    return {**totals.batch, "total": dict(totals.total)}


def live_view(query: StreamingQuery, seconds: float | None = None, interval: float = 1.0) -> None:
    """Show rates, drops, backlog and high-water marks of a query until it ends.

    Args:
        seconds: How long to show them; None until the query ends or Ctrl-C (in a notebook: interrupt).
        interval: Seconds between two updates.
    """
    # Imported here, because every worker of Spark imports this package, and shows no tables.
    from zmq_datasource.monitoring.view import watch  # noqa: PLC0415

    def read() -> Iterator[dict[str, Any]]:
        return records(metrics(query).last)

    watch(read, interval, seconds, goes_on=lambda: query.isActive)


def records(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of an event's ZeroMQ sources and sinks, for ``LiveView``."""
    common = {"timestamp": event["timestamp"], "query": event["id"], "name": event["name"]}
    for source in event["sources"]:
        shown = source["metrics"]
        if shown.get("source") is not None:
            yield common | {"kind": "source", "source": shown["source"], "sourceMetrics": shown}
    for name, totals in event["sink"]["metrics"]["bySink"].items():
        yield common | {"kind": "sink", "sink": name, "sinkTotal": totals["total"]}


def reason(failed: StreamingQuery | ConnectQuery | BaseException) -> str | None:
    """Say why a query, a read or a write has failed, without Spark's stack of Python and Java frames.

    >>> query.awaitTermination()  # doctest: +SKIP
    >>> reason(query)  # doctest: +SKIP
    'EndpointError: binding tcp://*:5556: Address already in use; ...'

    Args:
        failed: A query, or the error that ``load``, ``save``, ``collect`` or ``awaitTermination`` has raised.

    Returns:
        This package's error with its way out (docs/errors.md). For an error that is not this package's, the first line
        of its text. None if the query has not failed.
    """
    error = failed if isinstance(failed, BaseException) else failed.exception()
    if error is None:
        return None
    text = str(error).strip()
    found = _ERROR.findall(text)
    # In a chain of errors the last one is the result of the others.
    return str(found[-1]).strip() if found else text.partition("\n")[0]
