"""Executors that do not see the log: a cluster in network namespaces, with an empty directory where the log is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pyarrow.parquet as pq
import pytest
import zmq

from tests.support import Socket, bound, log_rows, offer, wait_for
from tests.support.namespaces import Cluster, end_family, need_namespaces
from tests.support.s3 import S3Server

pytestmark = [pytest.mark.spark, pytest.mark.long]
Context = zmq.Context[Socket]


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
        store: Where the log is kept, if that is object storage.

    Attributes:
        sent: How many numbers were sent.
        rows: What is in the output, once the job has ended.
    """

    def __init__(self, context: Context, directory: Path, cluster: Cluster, log: Path, *store: str) -> None:
        self._push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
        self._directory, self._out, self._stop = directory, directory / "out", directory / "stop"
        words = [cluster.master, cluster.host, endpoint, str(log), str(self._out), str(self._stop), *store]
        self._command = [sys.executable, "-m", "tests.support.cluster_driver", *words]
        self._ending = threading.Event()
        self._sender = threading.Thread(target=self._send)
        self.sent = 0

    def _send(self) -> None:
        while not self._ending.is_set():
            if offer(self._push, b"%d" % self.sent):
                self.sent += 1
            self._ending.wait(0.002)

    def __enter__(self) -> Self:
        self._start()
        self._sender.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._sender.join()
        end_family(self._driver)

    def _start(self) -> None:
        with (self._directory / "driver.log").open("ab") as file:
            self._driver = subprocess.Popen(self._command, stdout=file, stderr=file)

    def goes_on(self, what: str) -> None:
        before = len(rows_in(self._out))
        wait_for(lambda: len(rows_in(self._out)) > before + 100, f"rows after {what}", 150)

    def wait(self, seconds: float) -> None:
        self._ending.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the driver, and another one."""
        end_family(self._driver)
        self._start()

    def end(self) -> list[tuple[int, int]]:
        """Have it read all that there is, and end; its rows."""
        self._ending.set()
        self._sender.join()
        self._stop.touch()
        assert self._driver.wait(120) == 0
        return rows_in(self._out)


def test_whatever_is_cut_or_killed_the_output_is_the_log(
    context: Context, package_log: Callable[[], str], tmp_path: Path
) -> None:
    need_namespaces()
    log = tmp_path / "wal"
    with Cluster(tmp_path, log) as cluster, Job(context, tmp_path, cluster, log) as job:
        job.goes_on("the start")
        assert "its chunks are read from the driver" in package_log()
        assert log_rows(log).num_rows  # here it is, and there it is not

        cluster.cut(0)  # for 30 s, which is longer than an executor waits before it asks again
        job.wait(30)
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
    # What the killed driver had and not sealed is lost, and no more.
    assert job.sent - 1000 < len({number for _, number in rows}) == len(rows)


def test_workers_that_are_cut_off_from_the_storage_go_on(context: Context, tmp_path: Path) -> None:
    need_namespaces()
    log, storage = tmp_path / "wal", 2
    with Cluster(tmp_path, log) as cluster:
        cluster.add(storage)
        with S3Server(tmp_path / "s3", cluster.address(storage), cluster.inside(storage)) as server:
            store = server.location("log").replace("s3://", "s3://any:any@")
            with Job(context, tmp_path, cluster, log, store) as job:
                job.goes_on("the start")

                cluster.cut_off(storage, 0)  # one of two workers: what it asks for is never answered
                job.wait(30)
                cluster.let_through(storage, 0)
                job.goes_on("a cut")

                server.kill()
                job.wait(5)
                server.start()
                job.goes_on("the storage's death")

                job.kill()
                job.goes_on("the driver's death")
                rows = job.end()
            kept = log_rows(tmp_path / "nowhere", store=store)
    assert [i for i, _ in rows] == list(range(len(rows)))
    assert rows == list(zip(kept["id"].to_pylist(), map(int, kept["value"].to_pylist()), strict=True))
    assert job.sent - 1000 < len({number for _, number in rows}) == len(rows)
