"""Programs in network namespaces of their own, as on machines or in containers; and a Spark cluster of such."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.support import free_endpoint, wait_for

__all__ = ["Cluster", "Network", "end_family", "need_namespaces"]

_numbers = itertools.count()


def need_namespaces() -> None:
    """Skip the test where namespaces cannot be made."""
    if why := _why_not():
        pytest.skip(why)


def _why_not() -> str:
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


class Network:
    """A bridge of this machine, and network namespaces on it; use it in a ``with`` block.

    Attributes:
        host: This machine's address there.
    """

    def __init__(self) -> None:
        number = (os.getpid() + next(_numbers)) % 250
        self._prefix = f"zq{os.getpid() % 100000}n{number}"[:11]
        self._net = f"10.77.{number}"
        self.host = f"{self._net}.1"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._bridge = f"{self._prefix}b"
            _ip("link", "add", self._bridge, "type", "bridge")
            self._stack.callback(_ip, "link", "del", self._bridge)
            _ip("addr", "add", f"{self.host}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, number: int) -> None:
        """Make a namespace, counted from 0."""
        name, inside, outside = self._name(number), f"{self._prefix}i{number}", self._cable(number)
        _ip("netns", "add", name)
        self._stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        self._stack.callback(_ip, "link", "del", outside)
        _ip("link", "set", outside, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", inside)
        _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def run(
        self, number: int, mounts: str, words: Sequence[str], log: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Start a program in a namespace, and with a private view of the file system.

        Args:
            mounts: What a shell does first there, to make that view.
            log: What it says is added to this file.
        """
        script = f'mount --make-rprivate / && {mounts} && exec "$@"'
        before = ["ip", "netns", "exec", self._name(number), "unshare", "-m", "sh", "-c", script, "sh"]
        return self.start([*before, *words], log, **environment)

    def start(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program here; it ends with the network, with all that it has started."""
        with log.open("ab") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=os.environ | environment)
        self._stack.callback(end_family, process)
        return process

    def _name(self, number: int) -> str:
        return f"{self._prefix}w{number}"

    def _cable(self, number: int) -> str:
        return f"{self._prefix}o{number}"

    def address(self, number: int) -> str:
        """Of a namespace."""
        return f"{self._net}.{number + 2}"

    def cut(self, number: int) -> None:
        """Take the cable of a namespace out: packets are lost, and nobody is told."""
        _ip("link", "set", self._cable(number), "down")

    def mend(self, number: int) -> None:
        """Put it in again."""
        _ip("link", "set", self._cable(number), "up")


class Cluster(Network):
    """A master in this namespace, and workers of one core each; use it in a ``with`` block.

    Args:
        directory: For what Spark writes.
        hidden: A directory that the workers see empty.
        count: How many workers.

    Attributes:
        master: The master's URL.
    """

    def __init__(self, directory: Path, hidden: Path, count: int = 2) -> None:
        super().__init__()
        self._directory, self._hidden, self._count = directory, hidden, count
        self.workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        port = free_endpoint().rpartition(":")[2]
        self.master = f"spark://{self.host}:{port}"
        words = ["--host", self.host, "--port", port, "--webui-port", "0"]
        self.start(
            [_spark_class(), "org.apache.spark.deploy.master.Master", *words],
            self._directory / "master.log",
            SPARK_DAEMON_MEMORY="256m",
        )
        wait_for(lambda: "I have been elected leader" in self._said(), "a master", 60)
        for worker in range(self._count):
            self.add(worker)
            self.workers.append(self.start_worker(worker))
        wait_for(lambda: self._said().count("Registering worker") >= self._count, "the workers", 60)

    def start_worker(self, worker: int) -> subprocess.Popen[bytes]:
        """Start a worker in its namespace, where the hidden directory is empty."""
        self._hidden.mkdir(parents=True, exist_ok=True)
        address = self.address(worker)
        words = ["--host", address, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
        words += ["--work-dir", str(self._directory / f"work-{worker}"), self.master]
        return self.run(
            worker,
            f"mount -t tmpfs none {shlex.quote(str(self._hidden))}",
            [_spark_class(), "org.apache.spark.deploy.worker.Worker", *words],
            self._directory / f"worker-{worker}.log",
            SPARK_LOCAL_IP=address,
            SPARK_DAEMON_MEMORY="256m",
        )

    def _said(self) -> str:
        return (self._directory / "master.log").read_text(errors="replace")

    def kill_executors(self, worker: int) -> None:
        """SIGKILL to what a worker has started."""
        for child in psutil.Process(self.workers[worker].pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "CoarseGrainedExecutorBackend" in " ".join(child.cmdline()):
                    child.kill()


def _spark_class() -> str:
    import pyspark  # noqa: PLC0415 - the fast tests do without

    return str(Path(pyspark.__file__).parent / "bin" / "spark-class")


def end_family(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
