"""A standalone Spark cluster whose workers live in network namespaces of their own, and do not see some directory."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil

from tests.support import free_endpoint, wait_for

__all__ = ["Cluster", "why_not"]

_numbers = itertools.count()


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    name = f"zq{os.getpid()}t"
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done


class Cluster:
    """A master in this namespace, and workers of one core each; use it in a ``with`` block.

    Args:
        directory: For what Spark writes.
        hidden: A directory that the workers see empty.
        workers: How many.

    Attributes:
        host: This machine's address in the cluster.
        master: The master's URL.
    """

    def __init__(self, directory: Path, hidden: Path, workers: int = 2) -> None:
        self._directory, self._hidden, self._count = directory, hidden, workers
        number = (os.getpid() + next(_numbers)) % 250
        self._prefix = f"zq{os.getpid() % 100000}n{number}"[:11]
        self._net = f"10.77.{number}"
        self.host = f"{self._net}.1"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        bridge = f"{self._prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        self._stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{self.host}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        port = free_endpoint().rpartition(":")[2]
        self.master = f"spark://{self.host}:{port}"
        self._run(
            "master",
            [],
            [
                "org.apache.spark.deploy.master.Master",
                "--host",
                self.host,
                "--port",
                port,
                "--webui-port",
                "0",
            ],
        )
        wait_for(lambda: "I have been elected leader" in self.log("master"), "a master", 60)
        for worker in range(self._count):
            self._add_namespace(worker, bridge)
            self.workers.append(self.start_worker(worker))
        wait_for(lambda: self.log("master").count("Registering worker") >= self._count, "the workers", 60)

    def _add_namespace(self, worker: int, bridge: str) -> None:
        name, inside, outside = self._name(worker), f"{self._prefix}i{worker}", self._cable(worker)
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        self._stack.callback(_ip, "link", "del", outside)
        _ip("link", "set", outside, "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{self.address(worker)}/24", "dev", inside)
        _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def start_worker(self, worker: int) -> subprocess.Popen[bytes]:
        """Start a worker in its namespace, where the hidden directory is empty."""
        self._hidden.mkdir(parents=True, exist_ok=True)
        script = 'mount --make-rprivate / && mount -t tmpfs none "$0" && exec "$@"'
        words = ["ip", "netns", "exec", self._name(worker), "unshare", "-m", "sh", "-c", script]
        address = self.address(worker)
        return self._run(
            f"worker-{worker}",
            [*words, str(self._hidden)],
            [
                "org.apache.spark.deploy.worker.Worker",
                *("--host", address, "--cores", "1", "--memory", "1g", "--webui-port", "0"),
                *("--work-dir", str(self._directory / f"work-{worker}"), self.master),
            ],
            SPARK_LOCAL_IP=address,
        )

    def _run(
        self, name: str, before: Sequence[str], words: Sequence[str], **environment: str
    ) -> subprocess.Popen[bytes]:
        import pyspark  # noqa: PLC0415 - the fast tests do without

        spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*before, spark_class, *words],
                stdout=log,
                stderr=log,
                env=os.environ | {"SPARK_DAEMON_MEMORY": "256m"} | environment,
            )
        self._stack.callback(end_family, process)
        return process

    def _name(self, worker: int) -> str:
        return f"{self._prefix}w{worker}"

    def _cable(self, worker: int) -> str:
        return f"{self._prefix}o{worker}"

    def address(self, worker: int) -> str:
        """Its address in the cluster."""
        return f"{self._net}.{worker + 2}"

    def log(self, name: str) -> str:
        """What the master, or ``worker-N``, has said."""
        path = self._directory / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill_executors(self, worker: int) -> None:
        """SIGKILL to what a worker has started."""
        for child in psutil.Process(self.workers[worker].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                    child.kill()

    def cut(self, worker: int) -> None:
        """Take its cable out: packets are lost, and nobody is told."""
        _ip("link", "set", self._cable(worker), "down")

    def mend(self, worker: int) -> None:
        """Put it in again."""
        _ip("link", "set", self._cable(worker), "up")


def end_family(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
