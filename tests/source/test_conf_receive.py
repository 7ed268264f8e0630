"""conf/: receivers under systemd and Kubernetes are started as the command line wants it."""

from __future__ import annotations

import configparser

import pytest
import yaml  # comes with jupyterlab
from click.testing import CliRunner

from tests.support import REPOSITORY
from zmq_datasource import receive as receive_module
from zmq_datasource.cli import main

CONF = REPOSITORY / "conf"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The options that the receiver got."""
    taken: list[dict[str, str]] = []
    monkeypatch.setattr(receive_module, "receive_until_stopped", lambda given, *_: taken.append(given))
    return taken


def words_of(line: str, instance: str, environment: dict[str, str]) -> list[str]:
    """A command line as systemd takes it apart (systemd.service(5), "Command lines"): ``$OPTIONS`` is many words."""
    words: list[str] = []
    for word in line.replace("%i", instance).split():
        words += environment[word[1:]].split() if word.startswith("$") else [word]
    return words


def test_a_unit_of_systemd_is_one_receiver_with_a_log_of_its_own(received: list[dict[str, str]]) -> None:
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


def test_a_pod_of_kubernetes_is_one_receiver_with_a_log_of_its_own(received: list[dict[str, str]]) -> None:
    claim, service, pods = yaml.safe_load_all((CONF / "kubernetes-receive.yaml").read_text())
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    name, replicas = pods["metadata"]["name"], pods["spec"]["replicas"]
    for ordinal in range(replicas):
        # Kubernetes puts the variables of the container into its arguments.
        (variable,) = container["env"]
        assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
        words = [word.replace(f"$({variable['name']})", f"{name}-{ordinal}") for word in container["command"]]
        assert CliRunner().invoke(main, words[1:]).exit_code == 0
    mount, volume = container["volumeMounts"][0], pods["spec"]["template"]["spec"]["volumes"][0]
    logs = [told["walLocation"] for told in received]
    assert logs == [f"{mount['mountPath']}/{name}-{ordinal}" for ordinal in range(replicas)]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]  # which gives each pod its name
    assert service["spec"]["clusterIP"] == "None"
