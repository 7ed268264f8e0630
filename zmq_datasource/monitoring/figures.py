"""From what was counted to the figures of the catalogue, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zmq_datasource.counters import SinkCounters, SourceCounters
from zmq_datasource.monitoring.catalogue import SINK, SOURCE
from zmq_datasource.monitoring.metric import MAP, Metric
from zmq_datasource.sequences import Totals

__all__ = [
    "added_metrics",
    "kept_metrics",
    "reader_metrics",
    "receiver_metrics",
    "sequence_metrics",
    "sink_counters",
    "sink_metrics",
]


def kept_metrics(counters: SourceCounters) -> dict[str, int]:
    """What the log keeps of a receiver's counters."""
    return _figures(log=counters)


def reader_metrics(counters: SourceCounters) -> dict[str, int]:
    """What is counted by whoever reads a log, also one that another process fills."""
    return _figures(reader=counters)


def receiver_metrics(counters: SourceCounters) -> dict[str, Any]:
    """What a receiver counted. Safe to call while it goes on counting."""
    return _figures(log=counters, reader=counters, receiver=counters)


def sequence_metrics(counters: SourceCounters, totals: Totals) -> dict[str, int]:
    """What the publishers' numbers tell."""
    return _figures(replays=counters, sequences=totals)


def added_metrics(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several receivers, or log partitions, come to together; a figure that none of them has is left out."""
    added: dict[str, Any] = {}
    for metric in SOURCE:
        values = [part[metric.name] for part in parts if metric.name in part]
        known = [value for value in values if value is not None]
        if metric.name == "source" or not values:
            continue
        if not known:
            added[metric.name] = None
        elif metric.type == MAP:
            added[metric.name] = {key: sum(value[key] for value in known) for key in metric.keys}
        elif metric.highest or metric.type in ("STRING", "TIMESTAMP"):
            added[metric.name] = max(known)
        else:
            added[metric.name] = sum(known)
    return added


def sink_metrics(counters: SinkCounters) -> dict[str, Any]:
    """An account under the names that a query's progress shows; each reason is there, also with 0."""
    return {metric.name: _figure(metric, counters) for metric in SINK}


def _figures(**counted: SourceCounters | Totals) -> dict[str, Any]:
    return {
        metric.name: _figure(metric, counted[metric.counted])
        for metric in SOURCE
        if metric.counted in counted
    }


def _figure(metric: Metric, counters: object) -> Any:
    value = getattr(counters, metric.attribute)
    if metric.type == MAP:
        return {key: _shown(metric, value[key]) for key in metric.keys}
    if isinstance(value, Mapping):  # by reason, of which this is the sum
        return sum(_shown(metric, part) for part in value.values())
    return _shown(metric, value)


def _shown(metric: Metric, value: Any) -> Any:
    return round(value * 1000) if metric.unit == "ms" else value


def sink_counters(metrics: Mapping[str, Any]) -> SinkCounters:
    """The counters that ``sink_metrics`` was made from.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    counted: dict[str, Any] = {}
    # Of what is counted by reason there are two figures; the second, by reason, has all of it.
    for attribute, metric in {metric.attribute: metric for metric in SINK}.items():
        value = metrics[metric.name]
        if metric.type == MAP:
            counted[attribute] = Counter({reason: int(n) for reason, n in value.items() if n})
        else:
            counted[attribute] = value / 1000 if metric.unit == "ms" else int(value)
    return SinkCounters(**counted)
