"""Executors that do not see the log: a cluster in network namespaces, with an empty directory where the log is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pyarrow.parquet as pq
import pytest

from tests.support import driver, log_rows, wait_for
from tests.support.bucket_server import BucketServer
from tests.support.namespaces import Cluster, end_family, need_namespaces
from tests.support.ports import free_port

pytestmark = [pytest.mark.spark, pytest.mark.long]
# How long a cable is out, and a server away.
_LONG, _SHORT = 30, 5
# What a driver that is killed may have and not have sealed, and a connection that is lost.
_HELD = 2000


def rows_in(out: Path) -> list[tuple[int, int]]:
    """Id and number of each row of the batches that were committed, in order."""
    if not (out / "_spark_metadata").exists():
        return []
    names: list[str] = []
    for path in (out / "_spark_metadata").glob("[0-9]*"):
        if not path.name.endswith(".compact"):
            names += [json.loads(line)["path"] for line in path.read_text().splitlines()[1:]]
    rows = []
    for name in dict.fromkeys(names):
        table = pq.read_table(name.removeprefix("file://"), columns=["id", "value"])
        rows += list(zip(table["id"].to_pylist(), map(int, table["value"].to_pylist()), strict=True))
    return sorted(rows)


class Job:
    """A query on the cluster, and a PUSH that sends it numbers; use it in a ``with`` block.

    Args:
        log: The query's ``walLocation``.
        store: Its ``walStore``, if any.
        sender: The namespace that the PUSH is in; None for this one.

    Attributes:
        sent: How many numbers were sent, once the job has ended.
    """

    def __init__(
        self, directory: Path, cluster: Cluster, log: Path, *store: str, sender: int | None = None
    ) -> None:
        where = cluster.host if sender is None else cluster.address(sender)
        endpoint = f"tcp://{where}:{free_port()}"
        self._directory, self._out, self._stop = directory, directory / "out", directory / "stop"
        source = {"walStore": store[0]} if store else {"walLocation": str(log)}
        source |= {"socketType": "PULL", "connect": endpoint, "walRetention": "1h"}
        self._command = driver.command(
            cluster.master,
            conf={
                "spark.driver.host": cluster.host,
                "spark.driver.bindAddress": cluster.host,
                "spark.executor.memory": "512m",
                "spark.executor.extraJavaOptions": os.environ["EXECUTOR_OPTS"],  # ``conftest`` sets it
                "spark.executor.heartbeatInterval": "5s",
                "spark.network.timeout": "60s",
                "spark.task.maxFailures": "8",
            },
            source={**source, "walFlushInterval": "50ms", "minPartitions": "2"},
            sink={
                "format": "parquet",
                "path": str(self._out),
                "checkpointLocation": f"{self._out}.checkpoint",
            },
            stop=str(self._stop),
        )
        before = [] if sender is None else cluster.inside(sender)
        self._sending = [*before, sys.executable, "-m", "tests.support.number_sender", endpoint]
        self.sent = 0

    def __enter__(self) -> Self:
        self._sender = subprocess.Popen(
            self._sending, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        end_family(self._sender)
        end_family(self._driver)

    def _start(self) -> None:
        with (self._directory / "driver.log").open("ab") as file:
            self._driver = subprocess.Popen(self._command, stdout=file, stderr=file)

    def goes_on(self, what: str) -> None:
        before = len(rows_in(self._out))
        wait_for(lambda: len(rows_in(self._out)) > before + 100, f"rows after {what}", 150)

    def kill(self) -> None:
        """SIGKILL to the driver, and another one."""
        end_family(self._driver)
        self._start()

    def end(self) -> list[tuple[int, int]]:
        """Have it read all that there is, and end; its rows."""
        said, _ = self._sender.communicate(timeout=60)
        self.sent = int(said)
        self._stop.touch()
        assert self._driver.wait(120) == 0
        return rows_in(self._out)


def test_the_output_is_the_log_after_cuts_and_kills(package_log: Callable[[], str], tmp_path: Path) -> None:
    need_namespaces()
    log = tmp_path / "wal"
    with Cluster(tmp_path, log) as cluster, Job(tmp_path, cluster, log) as job:
        job.goes_on("the start")
        wait_for(lambda: "its chunks are read from the driver" in package_log(), "the warning in the log")
        assert log_rows(log).num_rows  # here it is, and there it is not

        cluster.cut(0)  # for longer than an executor waits before it asks again
        time.sleep(_LONG)
        cluster.mend(0)
        job.goes_on("a cut")

        cluster.kill_executors(0)
        job.goes_on("an executor's death")

        end_family(cluster.workers[1])
        job.goes_on("a worker's death")
        cluster.workers[1] = cluster.start_worker(1)

        job.kill()
        job.goes_on("the driver's death")
        rows = job.end()
    assert [i for i, _ in rows] == list(range(len(rows)))
    kept = log_rows(log)
    assert rows == list(zip(kept["id"].to_pylist(), map(int, kept["value"].to_pylist()), strict=True))
    assert job.sent - _HELD < len({number for _, number in rows}) == len(rows)


def test_the_output_is_the_log_in_object_storage_after_cuts_and_kills(tmp_path: Path) -> None:
    need_namespaces()
    log, storage, publisher = tmp_path / "wal", 2, 3
    with Cluster(tmp_path, log) as cluster:
        cluster.add(storage)
        cluster.add(publisher)
        place = BucketServer(cluster.address(storage))
        command = [*cluster.inside(storage), sys.executable, "-m", "tests.support.bucket_server"]
        server = subprocess.Popen([*command, *place.endpoint.removeprefix("tcp://").split(":")])
        try:
            store = place.location("log")
            wait_for(lambda: place.answers, "the storage answers")
            with Job(tmp_path, cluster, log, store, sender=publisher) as job:
                job.goes_on("the start")

                cluster.cut_off(storage, 0)  # one of two workers: what it asks for is never answered
                time.sleep(_LONG)
                cluster.let_through(storage, 0)
                job.goes_on("a cut between a worker and the storage")

                cluster.cut(publisher)
                time.sleep(_LONG)
                cluster.mend(publisher)
                job.goes_on("a cut between the publisher and the receiver")

                server.send_signal(signal.SIGSTOP)
                time.sleep(_SHORT)
                server.send_signal(signal.SIGCONT)
                job.goes_on("a pause of the storage")

                job.kill()
                job.goes_on("the driver's death")
                rows = job.end()
            kept = log_rows(store)
        finally:
            end_family(server)
    assert [i for i, _ in rows] == list(range(len(rows)))
    assert rows == list(zip(kept["id"].to_pylist(), map(int, kept["value"].to_pylist()), strict=True))
    assert job.sent - _HELD < len({number for _, number in rows}) == len(rows)
