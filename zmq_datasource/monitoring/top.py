"""``zmq-datasource top``: the newest figures of a ``metricsLocation``, or of what a program serves for Prometheus."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, TypeAlias

from rich.console import Console

from zmq_datasource.counters import MAP, Metric, iso
from zmq_datasource.errors import MetricsError, OptionError
from zmq_datasource.monitoring.accounts import TOTAL
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.monitoring.tables import print_fitted
from zmq_datasource.monitoring.view import LiveView, Record, fault_record, proxy_record, watch
from zmq_datasource.options.types import Location
from zmq_datasource.proxy.figures import PROXY, SUBSCRIBER

__all__ = ["records_of_page", "show"]

_TIMEOUT_SECONDS = 5.0
_MOST_BYTES = 64 << 20  # of a page


def show(places: Sequence[str], interval: float, since: float, *, once: bool = False) -> None:
    """Show the newest figures of some places. On a terminal, refresh them until Ctrl-C; otherwise print them once.

    Args:
        places: Each a ``metricsLocation``, or the URL at which a program serves its figures for Prometheus.
        interval: Seconds between two refreshes.
        since: Leave out sources, sinks and proxies that have sent no figures for this many seconds.
        once: Print once on a terminal, too.

    Raises:
        OptionError: A place is empty, or reading a URL needs ``prometheus_client``.
        MetricsError: When printing once: a place cannot be read, or has no figures.
    """
    if "" in places:
        raise OptionError(
            "a LOCATION is empty; name the metricsLocation of a source or sink, or a URL of metrics"
        )
    if once or not Console().is_terminal:
        records = list(chain(*map(_records, places)))
        print_fitted(lambda width: LiveView(since, width).render(records))
    else:
        watch(lambda: chain(*map(_readable_records, places)), interval, since=since)


def _records(place: str) -> list[Record]:
    if place.startswith(("http://", "https://")):
        return records_of_page(_page(place), str(Location(place)))
    return list(MetricsStore(Location(place)).newest(required=True))


def _readable_records(place: str) -> list[Record]:
    """The records of a place. If it cannot be read now, one record with the reason."""
    try:
        return _records(place)
    except MetricsError as e:
        return [fault_record(str(Location(place)), str(e))]


def _page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:
            return str(answer.read(_MOST_BYTES).decode())
    except (OSError, ValueError) as e:
        raise MetricsError(
            f"reading metrics from {Location(url)}: {getattr(e, 'reason', None) or e}; name the URL of a program that "
            "runs with --prometheus, as in http://localhost:9400/metrics"
        ) from e


_Labels: TypeAlias = frozenset[tuple[str, str]]
_Samples: TypeAlias = Mapping[str, Sequence[tuple[dict[str, str], float]]]


def records_of_page(page: str, url: str) -> list[Record]:
    """The records of a page of metrics that a program serves for Prometheus.

    Args:
        page: The page, in Prometheus' text format.
        url: The address of the page. It is the name of a proxy in its record.

    Raises:
        OptionError: ``prometheus_client`` is not installed.
        MetricsError: The page has another format.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415 - an extra
    except ImportError as e:
        raise OptionError(
            "reading metrics from a URL needs Prometheus' client; pip install 'zmq_datasource[prometheus]'"
        ) from e
    samples = defaultdict(list)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except ValueError as e:
        raise MetricsError(f"reading metrics from {url}: it is not in Prometheus' text format") from e
    progress = {labels.get("query_id"): at for labels, at in samples["zmq_query_progress_timestamp_seconds"]}
    ended = {labels.get("query_id") for labels, active in samples["zmq_query_active"] if not active}
    records: list[Record] = []
    for kind, metrics, name in (("source", SOURCE, "sourceMetrics"), ("sink", TOTAL, "sinkTotal")):
        for labels, figures in _figures(metrics, samples):
            query = labels.get("query_id", "")
            named = labels.get("query") not in (None, query)
            if query in ended or kind not in labels or (kind == "sink" and not _is_whole(figures, metrics)):
                continue
            head = {
                **labels,
                "kind": kind,
                "timestamp": iso(progress.get(query, time.time())),
                "query": query,
            }
            records.append(head | {"name": labels["query"] if named else None, name: figures})
    for _, status in _figures(PROXY, samples):
        durable = [
            {**labels, **account}
            for labels, account in _figures(SUBSCRIBER, samples)
            if "name" in labels and _is_whole(account, SUBSCRIBER)
        ]
        if _is_whole(status, PROXY):
            records.append(proxy_record(url, {**status, "durable": durable}))
    return records


def _is_whole(figures: Mapping[str, Any], metrics: Iterable[Metric]) -> bool:
    """Whether all of these metrics have a figure; a program of another release may serve fewer."""
    return all(metric.name in figures for metric in metrics if metric.series)


def _figures(metrics: Iterable[Metric], samples: _Samples) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """For each thing with these metrics (a source, a sink, a proxy), the labels that identify it and its figures."""
    found: dict[_Labels, dict[str, Any]] = defaultdict(dict)
    for metric in metrics:
        series = f"{metric.series}_total" if metric.counts else metric.series
        for labels, sample in samples.get(series or "", ()):
            thing = found[frozenset((name, text) for name, text in labels.items() if name != metric.label)]
            value = sample / metric.scale
            if metric.type == MAP:
                thing.setdefault(metric.name, {})[labels[metric.label]] = value
            elif metric.keys:  # a state: of the series of all possible states, the current one has 1
                thing[metric.name] = labels[metric.label] if sample else thing.get(metric.name)
            elif metric.type == "TIMESTAMP":
                thing[metric.name] = datetime.fromtimestamp(sample, UTC).isoformat()
            else:
                thing[metric.name] = value
    return ((dict(labels), figures) for labels, figures in found.items())
