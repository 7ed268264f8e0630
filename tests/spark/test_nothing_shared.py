"""Executors that do not see the log: a cluster in network namespaces, with an empty directory where the log is."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zmq

from tests.support import Socket, bound, log_rows, offer, wait_for
from tests.support.namespaces import Cluster, end_family, need_namespaces

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


def test_whatever_is_cut_or_killed_the_output_is_the_log(
    context: Context, package_log: Callable[[], str], tmp_path: Path
) -> None:
    need_namespaces()
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10)
    log, out, stop = tmp_path / "wal", tmp_path / "out", tmp_path / "stop"
    end, sent = threading.Event(), 0

    def send() -> None:
        nonlocal sent
        while not end.is_set():
            if offer(push, b"%d" % sent):
                sent += 1
            end.wait(0.002)

    with Cluster(tmp_path, log) as cluster:
        words = [cluster.master, cluster.host, endpoint, str(log), str(out), str(stop)]

        def start() -> subprocess.Popen[bytes]:
            with (tmp_path / "driver.log").open("ab") as file:
                return subprocess.Popen(
                    [sys.executable, "-m", "tests.support.cluster_driver", *words], stdout=file, stderr=file
                )

        def goes_on(what: str) -> None:
            before = len(rows_in(out))
            wait_for(lambda: len(rows_in(out)) > before + 100, f"rows after {what}", 150)

        driver = start()
        sender = threading.Thread(target=send)
        sender.start()
        try:
            goes_on("the start")
            assert "its chunks are read from the driver" in package_log()
            assert log_rows(log).num_rows  # here it is, and there it is not

            cluster.cut(0)  # for 30 s, which is longer than an executor waits before it asks again
            end.wait(30)
            cluster.mend(0)
            goes_on("a cut")

            cluster.kill_executors(0)
            goes_on("an executor's death")

            end_family(cluster.workers[1])
            goes_on("a worker's death")
            cluster.workers[1] = cluster.start_worker(1)

            end_family(driver)
            driver = start()
            goes_on("the driver's death")
            end.set()
            sender.join()
            stop.touch()
            assert driver.wait(120) == 0
        finally:
            end.set()
            sender.join()
            end_family(driver)
    rows = rows_in(out)
    assert [i for i, _ in rows] == list(range(len(rows)))
    kept = log_rows(log)
    assert rows == list(zip(kept["id"].to_pylist(), map(int, kept["value"].to_pylist()), strict=True))
    # What the killed driver had and not sealed is lost, and no more.
    assert sent - 1000 < len({number for _, number in rows}) == len(rows)
