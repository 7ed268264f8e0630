"""conf/: receivers under systemd and Kubernetes are started as the command line wants it."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml  # comes with jupyterlab
from click.testing import CliRunner

from tests.support import REPOSITORY
from zmq_datasource import receive as receive_module
from zmq_datasource.cli import main

CONF = REPOSITORY / "conf"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, str], int | None]]:
    """The options that the receiver got."""
    taken: list[tuple[dict[str, str], int | None]] = []
    monkeypatch.setattr(
        receive_module, "receive_until_stopped", lambda given, number, *_: taken.append((given, number))
    )
    return taken


def given_to_the_command(shell: list[str], directory: Path, **environment: str) -> list[str]:
    """The arguments that a shell passes on to the program."""
    program = directory / "zmq-datasource"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    done = subprocess.run(shell, env=environment | {"PATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def words_of(line: str, instance: str, environment: dict[str, str]) -> list[str]:
    """A command line as systemd takes it apart (systemd.service(5), "Command lines")."""

    def specifier(found: re.Match[str]) -> str:
        return {"%": "%", "i": instance}[found[1]]

    def variable(found: re.Match[str]) -> str:
        # All that is in the braces is the name. A $ that is followed by neither stays, unless it begins the word.
        return "$" if found[0] == "$$" else environment.get(found[1], "")

    words = [re.sub("%(.)", specifier, word) for word in shlex.split(line)]
    assert not any(re.match(r"\$[^${]", word) for word in words), "systemd would divide the value into words"
    return [re.sub(r"\$\$|\$\{([^}]*)\}", variable, word) for word in words]


@pytest.mark.parametrize(("instance", "partition", "receivers"), [("0of4", 0, "4"), ("11of12", 11, "12")])
def test_a_unit_of_systemd_is_one_receiver(
    tmp_path: Path,
    received: list[tuple[dict[str, str], int | None]],
    instance: str,
    partition: int,
    receivers: str,
) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(CONF / "zmq-datasource-receive@.service")
    service = unit["Service"]
    # A unit that is started has the log. One that stands by waits for it, for as long as it takes.
    assert (service["Type"], service["TimeoutStartSec"]) == ("notify", "infinity")
    assert service["ReadWritePaths"] == unit["Unit"]["RequiresMountsFor"]
    environment = {
        "SHARE": service["Environment"].removeprefix("SHARE=").replace("%i", instance),
        "OPTIONS": "--socket-type PULL --connect tcp://feed:5557 --wal-location /shared/wal/feed",
    }
    command = service["ExecStart"].replace("/opt/zmq-datasource/bin/", "")
    arguments = given_to_the_command(words_of(command, instance, environment), tmp_path, **environment)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    ((told, number),) = received
    assert (number, told["receivers"], told["connect"]) == (partition, receivers, "tcp://feed:5557")


def test_a_pod_of_kubernetes_is_one_receiver(
    tmp_path: Path, received: list[tuple[dict[str, str], int | None]]
) -> None:
    claim, service, pods = yaml.safe_load_all((CONF / "kubernetes-receive.yaml").read_text())
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    name, replicas = pods["metadata"]["name"], pods["spec"]["replicas"]
    for ordinal in range(replicas):
        arguments = given_to_the_command(container["command"], tmp_path, HOSTNAME=f"{name}-{ordinal}")
        assert CliRunner().invoke(main, arguments).exit_code == 0
    assert [number for _, number in received] == list(range(replicas))
    assert {told["receivers"] for told, _ in received} == {str(replicas)}
    mount, volume = container["volumeMounts"][0], pods["spec"]["template"]["spec"]["volumes"][0]
    assert received[0][0]["walLocation"].startswith(mount["mountPath"] + "/")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]  # which gives each pod its name
    assert service["spec"]["clusterIP"] == "None"
