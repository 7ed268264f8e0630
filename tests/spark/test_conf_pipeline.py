"""conf/: the services of Compose and Kubernetes, run as processes where there are no containers."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with jupyterlab

from tests.support import REPOSITORY, wait_for
from tests.support.namespaces import Network, end_family, need_namespaces

CONF = REPOSITORY / "conf"
SERVICES: dict[str, Any] = yaml.safe_load((CONF / "compose.yaml").read_text())["services"]


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


class Services(Network):
    """The services of Compose, each in a namespace, with its volumes below /mnt and all names in /etc/hosts."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._numbers = dict(zip(SERVICES, itertools.count(), strict=False))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        hosts = [f"{self.address(number)} {name}\n" for name, number in self._numbers.items()]
        (self._directory / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        for name, number in self._numbers.items():
            self.add(number)
            self.begin(name)

    def begin(self, name: str) -> None:
        """As ``restart: unless-stopped`` does."""
        service = SERVICES[name]
        mounts = [
            f"mount --bind {shlex.quote(str(self._directory / 'hosts'))} /etc/hosts",
            "mount -t tmpfs none /mnt",
        ]
        for volume in service.get("volumes", ()):
            source, _, target = volume.partition(":")
            (self._directory / source).mkdir(exist_ok=True)
            mounts += [
                f"mkdir {target}",
                f"mount --bind {shlex.quote(str(self._directory / source))} {target}",
            ]
        words = [word.replace("/pipeline/", f"{CONF}/pipeline/") for word in service["command"]]
        programs = Path(sys.executable).parent
        words[0] = sys.executable if words[0] == "python" else str(programs / words[0])
        self.processes[name] = self.run(
            self._numbers[name],
            " && ".join(mounts),
            words,
            self.log(name),
            SPARK_LOCAL_IP=self.address(self._numbers[name]),
        )

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def again(self) -> None:
        """Start those that have ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.begin(name)

    def counted(self) -> dict[str, int]:
        """The consumer's newest line."""
        found = re.findall(r"received=(\d+) different=(\d+) missing=(\d+)", self.log("consumer").read_text())
        return (
            dict(zip(("received", "different", "missing"), map(int, found[-1]), strict=True)) if found else {}
        )


@pytest.mark.spark
@pytest.mark.long
def test_the_services_lose_nothing_when_sparks_container_is_killed(tmp_path: Path) -> None:
    need_namespaces()
    with Services(tmp_path) as services:
        services.up()

        def whole(least: int) -> bool:
            services.again()
            counted = services.counted()
            return bool(counted) and counted["different"] >= least and not counted["missing"]

        wait_for(lambda: whole(1000), "a thousand readings", 120)
        end_family(services.processes["query"])
        before = services.counted()["different"]
        wait_for(lambda: whole(before + 3000), "all of what came meanwhile", 120)
        services.processes["receive"].terminate()  # an orderly stop, as of a new version
        assert services.processes["receive"].wait(30) == 0
        before = services.counted()["different"]
        wait_for(lambda: whole(before + 3000), "all of what came around a stop of the receiver", 120)
