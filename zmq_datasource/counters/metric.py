"""How a figure is declared, and what is made from its declaration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, NamedTuple

_Type = Literal["number", "text", "time", "map"]
_Since = Literal["log", "reader", "process", "batch", "now"]


class Metric(NamedTuple):
    """The declaration of one figure.

    Attributes:
        name: In dictionaries and files.
        unit: Of the value; empty for text.
        meaning: As the documentation has it.
        since: From when on it is counted: ``log`` (since the log began, over restarts), ``process`` (since the process
            that receives, or the proxy, started), ``reader`` (as ``process``, and a query that only reads the log
            counts it, too), ``batch`` (in the batch, or all batches, that an account is about), ``now`` (a state).
        type: Of the value. A map is from ``keys`` to numbers. A time is UTC in ISO 8601.
        series: Its name for Prometheus, without ``_total``; None if it is not shown there.
        label: What the keys of a map, or the states of a text, are called there.
        keys: Those keys or states.
        numbered: Whether it is only known where messages are numbered.
        highest: Whether of several tasks the highest value counts, and not the sum.
        attribute: The field that counts it.
    """

    name: str
    unit: str
    meaning: str
    since: _Since
    type: _Type = "number"
    series: str | None = ""
    label: str = ""
    keys: tuple[str, ...] = ()
    numbered: bool = False
    highest: bool = False
    attribute: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is a counter, which only grows."""
        return self.since != "now"

    @property
    def scale(self) -> float:
        """The factor to Prometheus' base units."""
        return 0.001 if self.unit == "ms" else 1.0

    def of(self, value: Any) -> Any:
        """The figure that a counter of this value shows. Counters have seconds where a figure has milliseconds."""
        if self.type == "map":
            return {key: self._in_unit(value[key]) for key in self.keys}
        if isinstance(value, Mapping):  # counted by reason; this is the sum
            return sum(self._in_unit(part) for part in value.values())
        if self.type == "time":
            return iso(value) if value else None
        return self._in_unit(value)

    def _in_unit(self, value: Any) -> Any:
        return round(value * 1000) if self.unit == "ms" and value is not None else value


def counted(
    name: str,
    unit: str,
    meaning: str,
    since: _Since,
    *,
    by: str = "",
    initial: Any = 0,
    **more: Any,
) -> Any:
    """A dataclass's field that is a counter, with the declaration of its figure.

    Args:
        by: What it is counted by, as ``reason``. The field is a mapping from ``keys``, and there are two figures:
            ``name`` is the sum, and ``name`` with ``ByReason`` has the parts, which Prometheus shows.
        initial: The value to begin with, or a function that makes it.
        more: As ``Metric``; ``series`` only where it is not the name (see ``declared``).
    """
    metrics = [Metric(name, unit, meaning, since, **more)]
    if by:
        parts = metrics[0]._replace(name=f"{name}By{by.capitalize()}", type="map", label=by)
        metrics = [metrics[0]._replace(series=None, keys=()), parts]
    given = {"default_factory": initial} if callable(initial) else {"default": initial}
    return field(**given, metadata={"metrics": tuple(metrics)})


def state(name: str, unit: str, meaning: str, **more: Any) -> Any:
    """A dataclass's field that says how something is at the moment, with the declaration of its figure.

    Args:
        more: As of ``counted``.
    """
    return counted(name, unit, meaning, "now", **more)


@cache
def declared(prefix: str, *accounts: type) -> tuple[Metric, ...]:
    """The figures of these dataclasses, those of numbered messages last.

    Args:
        prefix: How the names of their series begin. A series has the figure's name in Prometheus' spelling:
            ``messagesLost`` is ``<prefix>_messages_lost``. A name in ``Ms`` ends in ``_seconds``. ``ByReason`` is left
            out, because the label says it. A declaration may set another name (``series``).
    """
    metrics = [metric for account in accounts for metric in _metrics_of(account)]
    named = [
        metric
        if metric.series is None
        else metric._replace(series=f"{prefix}_{metric.series or _series_name(metric)}")
        for metric in metrics
    ]
    return tuple(sorted(named, key=lambda metric: metric.numbered))


def _series_name(metric: Metric) -> str:
    name = metric.name
    if metric.label:
        name = re.sub("By.*", "", name)
    name = re.sub("Ms$", "Seconds", name)
    return re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", name)


@cache
def _metrics_of(account: type) -> tuple[Metric, ...]:
    return tuple(
        metric._replace(attribute=counter.name)
        for counter in fields(account)
        for metric in counter.metadata.get("metrics", ())
    )


def figures(account: Any, wanted: Callable[[Metric], bool] = lambda metric: True) -> dict[str, Any]:
    """The figures of an account under their names. Safe to call while another thread goes on counting.

    Args:
        wanted: Returns whether to include a figure.
    """
    return {
        metric.name: metric.of(getattr(account, metric.attribute))
        for metric in _metrics_of(account.__class__)
        if wanted(metric)
    }


def unknown(metrics: Sequence[Metric]) -> dict[str, Any]:
    """The figures of these metrics with None for each value, for when no value is known."""
    return {metric.name: dict.fromkeys(metric.keys) if metric.type == "map" else None for metric in metrics}


def added(metrics: Sequence[Metric], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of several tasks or batches together; a figure that no part has is left out."""
    whole: dict[str, Any] = {}
    for metric in metrics:
        values = [part[metric.name] for part in parts if metric.name in part]
        known = [value for value in values if value is not None]
        if not values:
            continue
        if not known:
            whole[metric.name] = None
        elif metric.type == "map":
            # A part that was written by an older version may lack a key.
            whole[metric.name] = {key: sum(value.get(key, 0) for value in known) for key in metric.keys}
        elif metric.highest or metric.type in ("text", "time"):
            whole[metric.name] = max(known)
        else:
            whole[metric.name] = sum(known)
    return whole


def iso(seconds: float) -> str:
    """A time as Spark's progress has it: UTC, ISO 8601, milliseconds."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
