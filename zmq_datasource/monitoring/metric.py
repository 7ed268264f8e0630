"""What a metric is: a declaration from which everything else about it is made."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["MAP", "Metric"]

_Type = Literal["BIGINT", "DOUBLE", "STRING", "TIMESTAMP", "MAP<STRING, BIGINT>"]
MAP: _Type = "MAP<STRING, BIGINT>"
_Counted = Literal["log", "reader", "receiver", "sequences", "replays", "sink"]


class Metric(NamedTuple):
    """One metric: its names, its unit, and what counts it.

    Attributes:
        name: In dictionaries, and as a column.
        type: Spark's. A map's keys are reasons; a timestamp is UTC in ISO 8601.
        unit: Of the value; empty for text.
        since: Since when it is counted: ``log`` (across restarts), ``receiver`` (since the process that
            receives started), or ``now`` for what is not counted but is so at the moment.
        doc: Its meaning.
        series: For Prometheus, without ``_total``; None if another series has it.
        label: What the keys of a map, or the states of a text, are called there.
        keys: Those keys or states.
        series_doc: The meaning there, where the series is not what the field is.
        counted: Where it is counted: in ``SourceCounters``, those that the ``log`` keeps, those that whoever reads the
            log counts (``reader``), those of the ``receiver`` alone, and those of ``replays``; in ``Totals`` of
            ``sequences``; or in ``SinkCounters`` (``sink``). None for what is put together when it is asked for.
        attribute: Its name there. The value of a counter by reason is the sum where ``type`` is no map; seconds become
            milliseconds where ``unit`` is.
        highest: Whether of several receivers the highest counts, and not the sum.
    """

    name: str
    type: _Type
    unit: str
    since: str
    doc: str
    series: str | None = None
    label: str = ""
    keys: tuple[str, ...] = ()
    series_doc: str = ""
    counted: _Counted | None = None
    attribute: str = ""
    highest: bool = False

    @property
    def counts(self) -> bool:
        """Whether the metric is a counter, which only grows."""
        return self.since != "now"

    @property
    def scale(self) -> float:
        """By what to multiply for Prometheus' base units."""
        return 0.001 if self.unit == "ms" else 1.0
