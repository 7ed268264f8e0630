"""conf/: what Prometheus and Grafana are told to ask for is what the exporter shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
import yaml  # comes with jupyterlab
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import REPOSITORY
from zmq_datasource.counters import MAP, Metric, SinkCounters, figures
from zmq_datasource.monitoring.accounts import SinkTotals
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.proxy.figures import PROXY, SUBSCRIBER
from zmq_datasource.spark.listener import QueryEvents

CONF = REPOSITORY / "conf"
ALERTS = [
    rule
    for group in yaml.safe_load((CONF / "prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERT_TESTS = yaml.safe_load((CONF / "prometheus-alerts-test.yml").read_text())
PANELS = json.loads((CONF / "grafana-dashboard.json").read_text())["panels"]


def value_of(metric: Metric) -> object:
    """Any value of its type."""
    if metric.type == MAP:
        return dict.fromkeys(metric.keys, 1)
    if metric.type == "TIMESTAMP":
        return "2026-01-01T00:00:00.000Z"
    return next(iter(metric.keys), "SUB tcp://feed:5556") if metric.type == "STRING" else 1


# A progress event as Spark writes it, with everything that can be filled in.
SOURCE_METRICS = {metric.name: value_of(metric) for metric in SOURCE}
SINK_TOTALS = SinkTotals.none().then(figures(SinkCounters()))
SINK_ACCOUNT = {**SINK_TOTALS.batch, "total": SINK_TOTALS.total}
EVENT = {
    "id": "q1",
    "runId": "r1",
    "name": "weather",
    "timestamp": "2026-01-01T00:00:00.000Z",
    "batchId": 1,
    "durationMs": {"addBatch": 100},
    "sources": [{"latestOffset": {"log": "l1", "next": {"0": 30}}, "metrics": SOURCE_METRICS}],
    "sink": {"metrics": {**SINK_ACCOUNT, "bySink": {"PUSH tcp://a:1": SINK_ACCOUNT}}},
}

# A series in an expression, not a label's value.
_SERIES = re.compile(r'(?<!")\b(zmq_\w+)')


@pytest.fixture(scope="module")
def exposition() -> Iterator[str]:
    """What a scrape gets."""
    events = QueryEvents()
    events.observe(EVENT)
    proxy = [
        Shown(PROXY, (), [((), {metric.name: 1 for metric in PROXY})]),
        Shown(SUBSCRIBER, ("name",), [(("me",), {metric.name: 1 for metric in SUBSCRIBER})]),
    ]
    outlet = PrometheusOutlet(lambda: [*events.shown(), *proxy])
    registry = CollectorRegistry()
    registry.register(outlet)
    yield generate_latest(registry).decode()
    outlet.close()


def test_alerts_and_panels_ask_for_series_that_are_exported(exposition: str) -> None:
    exported = {
        sample.name for family in text_string_to_metric_families(exposition) for sample in family.samples
    }
    asked = [rule["expr"] for rule in ALERTS]
    asked += [target["expr"] for panel in PANELS for target in panel["targets"]]
    for expression in asked:
        assert set(_SERIES.findall(expression)) <= exported, expression


def test_every_alert_is_seen_to_fire_and_to_be_silent() -> None:
    fired = {
        name
        for test in ALERT_TESTS["tests"]
        for asked in test["promql_expr_test"]
        if 'alertstate="firing"' in asked["expr"]
        for sample in asked["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in ALERTS}
    well = ALERT_TESTS["tests"][0]
    assert well["name"] == "all is well"
    assert all(asked["exp_samples"] == [] for asked in well["promql_expr_test"])


def test_promtool_accepts_the_configuration_and_what_is_exported(exposition: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which is part of Prometheus, is not on PATH")
    for command, file, text in (
        ("check config", CONF / "prometheus.yml", None),
        ("check metrics", None, exposition),
    ):
        arguments = [promtool, *command.split(), *([] if file is None else [str(file)])]
        done = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
