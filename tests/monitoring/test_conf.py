"""conf/: what is exported is what Prometheus and Grafana ask for; systemd and Kubernetes start receivers rightly."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml  # comes with jupyterlab
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import REPOSITORY
from zmq_datasource import receive as receive_module
from zmq_datasource.cli import main
from zmq_datasource.counters import Metric, SinkCounters, figures
from zmq_datasource.monitoring.accounts import SinkTotals
from zmq_datasource.monitoring.http import HttpAddress
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, Shown
from zmq_datasource.monitoring.source import SOURCE
from zmq_datasource.serving.figures import PROXY, SUBSCRIBER
from zmq_datasource.spark.listener import QueryEvents

CONF = REPOSITORY / "conf"
SERVICES: dict[str, Any] = yaml.safe_load((CONF / "compose.yaml").read_text())["services"]
ALERTS = [
    rule
    for group in yaml.safe_load((CONF / "prometheus-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERT_TESTS = yaml.safe_load((CONF / "prometheus-alerts-test.yml").read_text())
PANELS = json.loads((CONF / "grafana-dashboard.json").read_text())["panels"]


def value_of(metric: Metric) -> object:
    """Any value of its type."""
    if metric.type == "map":
        return dict.fromkeys(metric.keys, 1)
    if metric.type == "time":
        return "2026-01-01T00:00:00.000Z"
    return next(iter(metric.keys), "SUB tcp://feed:5556") if metric.type == "text" else 1


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
    "sources": [{"latestOffset": {"log": "l1", "next": 30}, "metrics": SOURCE_METRICS}],
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


KUBERNETES = {
    file.name: [part for part in yaml.safe_load_all(file.read_text()) if part]
    for file in sorted(CONF.glob("kubernetes*.yaml"))
}
PODS = [
    pytest.param(part, id=f"{file}-{part['metadata']['name']}")
    for file, parts in KUBERNETES.items()
    for part in parts
    if part["kind"] in ("Deployment", "StatefulSet")
]


@pytest.mark.parametrize("part", PODS)
def test_a_pod_runs_as_the_images_user_within_limits(part: dict[str, Any]) -> None:
    pod = part["spec"]["template"]["spec"]
    (user,) = re.findall(r"^USER (\d+)$", (CONF / "Dockerfile").read_text(), re.MULTILINE)
    security = pod["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] == security["fsGroup"] == int(user)
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("file", KUBERNETES)
def test_a_receiver_in_a_pod_is_started_probed_and_scraped(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line takes its flags, all the ports are that of ``--prometheus``, and each has a log of its own."""
    started: list[tuple[dict[str, str], HttpAddress]] = []
    monkeypatch.setattr(receive_module, "receive_until_stopped", lambda *given: started.append(given[:2]))
    (receiver,) = [
        p for p in KUBERNETES[file] if "receive" in p["metadata"]["name"] and "template" in p["spec"]
    ]
    (container,) = receiver["spec"]["template"]["spec"]["containers"]
    command = [word for given in container["command"] for word in shlex.split(given)]
    arguments = command[command.index("receive") :]
    for pod in "01":
        result = CliRunner().invoke(main, [word.replace("$(POD)", f"pod-{pod}") for word in arguments])
        assert result.exit_code == 0, result.output
    logs = [options.get("walStore", options.get("walLocation", "")) for options, _ in started]
    assert (len(set(logs)) == 2) == (receiver["kind"] == "StatefulSet")
    for variable in container.get("env", ()):
        assert variable["valueFrom"].get("fieldRef") in (None, {"fieldPath": "metadata.name"})
    port, host = started[0][1]
    assert host == "0.0.0.0"
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
    services = [part["spec"] for part in KUBERNETES[file] if part["kind"] == "Service"]
    labels = receiver["spec"]["template"]["metadata"]["labels"]
    (ports,) = [service["ports"] for service in services if service["selector"] == labels]
    assert ports == [{"name": "metrics", "port": port}]
    # Of two with one log, one is never ready, for which a rolling update would wait.
    assert receiver["kind"] == "StatefulSet" or receiver["spec"]["strategy"] == {"type": "Recreate"}


def test_a_receiver_with_a_bucket_shares_no_volume() -> None:
    pod = KUBERNETES["kubernetes-bucket.yaml"][-1]["spec"]["template"]["spec"]
    assert [volume.keys() - {"name"} for volume in pod["volumes"]] == [{"emptyDir"}]


def test_the_services_of_compose_are_bounded_and_the_receiver_is_scraped() -> None:
    for service in SERVICES.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["mem_limit"]
    assert "http://127.0.0.1:9400/ready" in SERVICES["receive"]["healthcheck"]["test"][-1]
    (job,) = yaml.safe_load((CONF / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for group in job["static_configs"] for target in group["targets"]]
    assert "receive:9400" in targets


def words_of(line: str, instance: str, environment: dict[str, str]) -> list[str]:
    """A command line as systemd takes it apart (systemd.service(5), "Command lines"): ``$OPTIONS`` is many words."""
    words: list[str] = []
    for word in line.replace("%i", instance).split():
        words += environment[word[1:]].split() if word.startswith("$") else [word]
    return words


def test_a_unit_of_systemd_is_one_receiver_with_a_log_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[dict[str, str]] = []
    monkeypatch.setattr(receive_module, "receive_until_stopped", lambda given, *_: received.append(given))
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(CONF / "zmq-datasource-receive@.service")
    service = unit["Service"]
    # A unit that is started has the log. One that stands by waits for it, for as long as it takes.
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")
    assert service["ReadWritePaths"] == unit["Unit"]["RequiresMountsFor"]
    environment = {"OPTIONS": "--socket-type PULL --connect tcp://feed:5557"}
    for instance in ("feed-0", "feed-1"):
        _, *arguments = words_of(service["ExecStart"], instance, environment)
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
    assert [told["connect"] for told in received] == ["tcp://feed:5557"] * 2
    assert [told["walLocation"] for told in received] == ["/shared/wal/feed-0", "/shared/wal/feed-1"]


def test_kubernetes_runs_what_compose_runs() -> None:
    parts = list(yaml.safe_load_all((CONF / "kubernetes.yaml").read_text()))
    deployments = {p["metadata"]["name"]: p["spec"] for p in parts if p["kind"] == "Deployment"}
    claims = {p["metadata"]["name"] for p in parts if p["kind"] == "PersistentVolumeClaim"}
    assert deployments.keys() == SERVICES.keys()
    for name, spec in deployments.items():
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["command"] == SERVICES[name]["command"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"] == {"app": name}
        mounts = {f"{m['name']}:{m['mountPath']}" for m in container.get("volumeMounts", ())}
        assert mounts == set(SERVICES[name].get("volumes", ()))
        assert {v["persistentVolumeClaim"]["claimName"] for v in pod.get("volumes", ())} <= claims
    # Each listener has a name. Prometheus asks the receiver by its own.
    ports = {p["metadata"]["name"]: p["spec"]["ports"][0]["port"] for p in parts if p["kind"] == "Service"}
    for name, port in ports.items():
        if name == "receive":
            assert f"--prometheus=0.0.0.0:{port}" in SERVICES[name]["command"]
            continue
        assert f"tcp://*:{port}" in (CONF / "pipeline" / f"{name}.py").read_text()


def test_the_image_has_what_the_services_run() -> None:
    dockerfile = (CONF / "Dockerfile").read_text()
    for words in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for path in words.split():
            assert (REPOSITORY / path).exists(), path
    for service in SERVICES.values():
        for word in service["command"]:
            if word.startswith("/pipeline/"):
                assert (CONF / "pipeline" / word.removeprefix("/pipeline/")).exists()
