"""What is counted at the source and the sink, and how a figure is declared. Pure data that adds up.

A figure is declared once, at the field that counts it, with its name, its unit and its meaning (``counted``,
``state``). The dictionaries of a query's progress, the files of accounts, the series for Prometheus and the tables in
``docs/metrics.md`` are made from these declarations (``declared``, ``figures``, ``added``). Publishers' numbers are
counted in ``sequences.Totals``. The momentary figures of a source are declared in ``monitoring.source``, and the
figures of a proxy in ``serving.figures``.
"""

from zmq_datasource.counters.metric import (
    Metric,
    added,
    counted,
    declared,
    figures,
    iso,
    state,
    unknown,
)
from zmq_datasource.counters.sink import SinkCounters
from zmq_datasource.counters.source import SourceCounters

__all__ = [
    "Metric",
    "SinkCounters",
    "SourceCounters",
    "added",
    "counted",
    "declared",
    "figures",
    "iso",
    "state",
    "unknown",
]
