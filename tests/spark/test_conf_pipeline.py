"""conf/: the services of Compose, as processes on this machine."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml  # comes with jupyterlab

from tests.support import REPOSITORY, wait_for
from tests.support.ports import free_port
from tests.support.programs import end_family

CONF = REPOSITORY / "conf"
SERVICES: dict[str, Any] = yaml.safe_load((CONF / "compose.yaml").read_text())["services"]


class Services:
    """The services of Compose, on free ports of this machine, with their volumes in a directory."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._places = {"/mnt": str(directory), "/pipeline": str(directory), "0.0.0.0": "127.0.0.1"}
        self._places |= {f"tcp://{name}:": "tcp://127.0.0.1:" for name in (*SERVICES, "*")}
        self._places |= {f":{port}": f":{free_port()}" for port in (5557, 5558, 9400)}
        for script in (CONF / "pipeline").iterdir():
            (directory / script.name).write_text(self._here(script.read_text()))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in SERVICES:
            self.start(name)

    def _here(self, text: str) -> str:
        for there, here in self._places.items():
            text = text.replace(there, here)
        return text

    def start(self, name: str) -> None:
        """As ``restart: unless-stopped`` does."""
        words = [self._here(word) for word in SERVICES[name]["command"]]
        words[0] = sys.executable if words[0] == "python" else str(Path(sys.executable).parent / words[0])
        with (self._directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(words, stdout=log, stderr=log)
        self._stack.callback(end_family, self.processes[name])

    def counted(self) -> dict[str, int]:
        """The consumer's newest line; what has ended is started again."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                self.start(name)
        found = re.findall(r"(\w+)=(\d+)", (self._directory / "consumer.log").read_text())
        return {key: int(value) for key, value in found}


@pytest.mark.spark
@pytest.mark.long
def test_the_services_lose_nothing_when_sparks_container_is_killed(tmp_path: Path) -> None:
    with ExitStack() as stack:
        services = Services(tmp_path, stack)

        def wait_for_more(count: int, what: str) -> None:
            goal = services.counted().get("different", 0) + count

            def whole() -> bool:
                counted = services.counted()
                return bool(counted) and counted["different"] >= goal and not counted["missing"]

            wait_for(whole, what, 120)

        wait_for_more(1000, "a thousand readings")
        end_family(services.processes["query"])
        wait_for_more(3000, "all of what came meanwhile")
        services.processes["receive"].terminate()  # an orderly stop, as of a new version
        assert services.processes["receive"].wait(30) == 0
        wait_for_more(3000, "all of what came around a stop of the receiver")
