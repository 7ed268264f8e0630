"""Executors that do not see the log: a cluster in network namespaces, with an empty directory where the log is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest
import zmq

from tests.support import Offering, Socket, log_rows, wait_for
from tests.support.driver import Driver
from tests.support.namespaces import Cluster, end_family, need_namespaces
from tests.support.ports import free_port
from tests.support.streams import committed_rows, ids_and_numbers

pytestmark = [pytest.mark.spark, pytest.mark.long]
# How long a cable is out.
_LONG = 30
# What a driver that is killed may have and not have sealed, and a connection that is lost.
_HELD = 2000


class Job:
    """A query on the cluster, and a PUSH that sends it numbers; use it in a ``with`` block.

    Args:
        log: The query's ``walLocation``.
    """

    def __init__(self, context: zmq.Context[Socket], directory: Path, cluster: Cluster, log: Path) -> None:
        endpoint = f"tcp://{cluster.host}:{free_port()}"
        self._directory, self._out, self._stop = directory, directory / "out", directory / "stop"
        source = {
            "walLocation": str(log),
            "socketType": "PULL",
            "connect": endpoint,
            "walRetention": "1h",
        }
        self._settings = {
            "master": cluster.master,
            "conf": {
                "spark.driver.host": cluster.host,
                "spark.driver.bindAddress": cluster.host,
                "spark.executor.memory": "512m",
                "spark.executor.extraJavaOptions": os.environ["EXECUTOR_OPTS"],  # ``conftest`` sets it
                "spark.executor.heartbeatInterval": "5s",
                "spark.network.timeout": "60s",
                "spark.task.maxFailures": "8",
            },
            "source": {**source, "walFlushInterval": "50ms", "minPartitions": "2"},
            "sink": {
                "format": "parquet",
                "path": str(self._out),
                "checkpointLocation": f"{self._out}.checkpoint",
            },
            "stop": str(self._stop),
        }
        # What a connection holds when it is lost is lost.
        push = context.socket(zmq.PUSH)
        push.sndhwm, push.sndbuf = 10, 4096
        push.bind(endpoint)
        self._sending = Offering(push, 0.002)

    def __enter__(self) -> Self:
        self._sending.__enter__()
        self._driver = Driver(self._directory / "driver.log", **self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._sending.end()
        self._driver.kill()

    @property
    def sent(self) -> int:
        return self._sending.sent

    def goes_on(self, what: str) -> None:
        before = committed_rows(self._out).num_rows
        wait_for(lambda: committed_rows(self._out).num_rows > before + 100, f"rows after {what}", 150)

    def kill(self) -> None:
        """SIGKILL to the driver, and another one."""
        self._driver.kill()
        self._driver.start()

    def end(self) -> list[tuple[int, int]]:
        """Have it read all that there is, and end; its rows."""
        self._sending.end()
        self._stop.touch()
        assert self._driver.process.wait(120) == 0
        return ids_and_numbers(self._out)


def test_the_output_is_the_log_after_cuts_and_kills(
    context: zmq.Context[Socket], package_log: Callable[[], str], tmp_path: Path
) -> None:
    need_namespaces()
    log = tmp_path / "wal"
    with Cluster(tmp_path, log) as cluster, Job(context, tmp_path, cluster, log) as job:
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
