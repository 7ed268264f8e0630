"""conf/: what Prometheus and Grafana are told to ask for is what the exporter shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with jupyterlab
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import REPOSITORY
from zmq_datasource.counters import MAP, Metric, SinkCounters, figures
from zmq_datasource.monitoring.accounts import TOTAL, SinkTotals
from zmq_datasource.monitoring.prometheus import PrometheusOutlet
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.spark.listener import QueryEvents

CONF = REPOSITORY / "conf"
CONFIG = yaml.safe_load((CONF / "prometheus.yml").read_text())
ALERTS = [
    rule
    for group in yaml.safe_load((CONF / "prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERT_TESTS = yaml.safe_load((CONF / "prometheus-alerts-test.yml").read_text())
DASHBOARD = json.loads((CONF / "grafana-dashboard.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
PROMETHEUS = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


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

# A series in an expression (not a label's value), with its matchers if it has some.
_SERIES = re.compile(r'(?<!")\b(zmq_\w+)(?:\{([^}]*)\})?')
_MATCHED = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPED = re.compile(r"\b(?:on|by)\s*\(([^)]*)\)")
# What an alert is only told together with, and does not take labels from.
_CONDITION = re.compile(r"\band on \([^)]*\) \w+")
# Prometheus puts these on every series.
_ADDED = {"job", "instance"}

Exported = dict[str, set[str]]


@pytest.fixture(scope="module")
def exposition() -> Iterator[str]:
    """What a scrape gets."""
    events = QueryEvents()
    events.observe(EVENT)
    outlet = PrometheusOutlet(events.shown)
    registry = CollectorRegistry()
    registry.register(outlet)
    yield generate_latest(registry).decode()
    outlet.close()


@pytest.fixture(scope="module")
def exported(exposition: str) -> Exported:
    """Series that are exported, each with its labels."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def check(expression: str, exported: Exported) -> None:
    """An expression asks for nothing that is not exported."""
    asked = _SERIES.findall(expression)
    for name, matchers in asked:
        assert name in exported, expression
        assert set(_MATCHED.findall(matchers)) <= exported[name], expression
        for labels in _GROUPED.findall(expression):
            assert set(re.findall(r"\w+", labels)) <= exported[name], expression


def check_shown(labels: list[str], expression: str, exported: Exported) -> None:
    """A text about an expression's result names only labels that the result has."""
    for name, _ in _SERIES.findall(_CONDITION.sub("", expression)):
        assert set(labels) <= exported[name] | _ADDED, expression


def test_every_declared_series_is_exported_with_its_label(exported: Exported) -> None:
    for metric in (*SOURCE, *TOTAL):
        if metric.series is not None:
            series = f"{metric.series}_total" if metric.counts else metric.series
            assert series in exported
            assert not metric.label or metric.label in exported[series]


# Prometheus.


def test_the_rules_are_beside_the_configuration_and_beside_their_tests() -> None:
    assert CONFIG["rule_files"] == ALERT_TESTS["rule_files"] == ["prometheus-alerts.yml"]


def test_alerts_ask_for_the_job_that_is_scraped() -> None:
    asked = {job for rule in ALERTS for job in re.findall(r'job="(\w+)"', rule["expr"])}
    assert asked
    assert asked <= {job["job_name"] for job in CONFIG["scrape_configs"]}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_is_exported_and_says_what_to_do(
    rule: dict[str, Any], exported: Exported
) -> None:
    check(rule["expr"], exported)
    assert rule["for"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    for text in rule["annotations"].values():
        check_shown(re.findall(r"\$labels\.(\w+)", text), rule["expr"], exported)


def test_alerts_are_tested_with_series_as_they_are_exported(exported: Exported) -> None:
    for test in ALERT_TESTS["tests"]:
        for given in test["input_series"]:
            for name, labels in _SERIES.findall(given["series"]):
                assert set(_MATCHED.findall(labels)) == exported[name], given["series"]


def test_every_alert_is_seen_to_fire() -> None:
    fired = {
        name
        for test in ALERT_TESTS["tests"]
        for asked in test["promql_expr_test"]
        if 'alertstate="firing"' in asked["expr"]
        for sample in asked["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == {rule["alert"] for rule in ALERTS}


def test_every_alert_is_seen_to_be_silent_when_all_is_well() -> None:
    well = ALERT_TESTS["tests"][0]
    assert well["name"] == "all is well"
    assert all(asked["exp_samples"] == [] for asked in well["promql_expr_test"])
    given = {given["series"].partition("{")[0] for given in well["input_series"]}
    asked = {name for rule in ALERTS for name, _ in _SERIES.findall(rule["expr"])}
    assert asked | {"up"} == given


# Grafana.


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_what_is_exported_and_says_what_it_shows(
    panel: dict[str, Any], exported: Exported
) -> None:
    assert panel["datasource"] == PROMETHEUS
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    for target in panel["targets"]:
        assert _SERIES.search(target["expr"])
        check(target["expr"], exported)
        check_shown(re.findall(r"{{(\w+)}}", target["legendFormat"]), target["expr"], exported)
        # A series that belongs to a query is shown for the queries that are chosen.
        for name, matchers in _SERIES.findall(target["expr"]):
            assert ('query=~"$query"' in matchers) == ("query" in exported[name])


def test_the_variables_of_the_dashboard_are_asked_for_in_the_chosen_prometheus(exported: Exported) -> None:
    assert set(VARIABLES) == {"DS_PROMETHEUS", "query"}
    assert (VARIABLES["DS_PROMETHEUS"]["type"], VARIABLES["DS_PROMETHEUS"]["query"]) == (
        "datasource",
        "prometheus",
    )
    assert VARIABLES["query"]["datasource"] == PROMETHEUS
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES["query"]["query"])
    assert asked
    assert asked[2] in exported[asked[1]]


def test_panels_and_their_targets_have_ids_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_no_panel_covers_another_or_leaves_the_grid() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)


# Prometheus' own judgement.


def test_promtool_accepts_it_all(exposition: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool, which is part of Prometheus, is not on PATH")
    # Of Grafana's expressions it can judge the syntax, if they look like rules.
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"panel:{n}", "expr": expression.replace("$__rate_interval", "1m")}
        for n, expression in enumerate(expressions)
    ]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for command, file, text in (
        ("check config", CONF / "prometheus.yml", None),
        ("check rules", CONF / "prometheus-alerts.yml", None),
        ("check rules", panels, None),
        ("test rules", CONF / "prometheus-alerts-test.yml", None),
        ("check metrics", None, exposition),
    ):
        arguments = [promtool, *command.split(), *([] if file is None else [str(file)])]
        done = subprocess.run(arguments, input=text, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
