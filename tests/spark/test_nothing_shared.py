"""Executors that do not see the log: a cluster whose Python workers find an empty directory where the log is."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support import Offering, Socket, bound, log_rows, need_mounts, wait_for
from tests.support.driver import Driver
from tests.support.streams import committed_rows, ids_and_numbers

pytestmark = [pytest.mark.spark, pytest.mark.long]

# Spark starts all its Python processes with this. The daemon is the parent of an executor's workers.
PYTHON = """#!/bin/sh
case "$*" in
*pyspark.daemon*) exec unshare --mount sh -c 'mount -t tmpfs none {log} && exec "$@"' sh {python} "$@" ;;
*) exec {python} "$@" ;;
esac
"""
# What a driver that is killed may have and not have sealed, and a connection that is lost.
HELD = 2000


def settings(directory: Path, endpoint: str) -> dict[str, Any]:
    """A query on two executors, from a PULL to Parquet; it ends when there is a file ``stop``."""
    log, out, python = directory / "wal", directory / "out", directory / "python"
    log.mkdir()
    python.write_text(PYTHON.format(log=shlex.quote(str(log)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    source = {"walLocation": str(log), "socketType": "PULL", "connect": endpoint, "walRetention": "1h"}
    return {
        "master": "local-cluster[2,1,1024]",
        "conf": {
            "spark.pyspark.python": str(python),
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": os.environ["EXECUTOR_OPTS"],  # ``conftest`` sets it
            "spark.task.maxFailures": "8",
        },
        "source": {**source, "walFlushInterval": "50ms", "minPartitions": "2"},
        "sink": {"format": "parquet", "path": str(out), "checkpointLocation": f"{out}.checkpoint"},
        "stop": str(directory / "stop"),
    }


def test_the_output_is_the_log_after_kills(
    context: zmq.Context[Socket],
    package_log: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_mounts()
    push, endpoint = bound(context, zmq.PUSH, sndhwm=10, sndbuf=4096)
    given = settings(tmp_path, endpoint)
    monkeypatch.setenv("PYSPARK_PYTHON", given["conf"]["spark.pyspark.python"])
    out = tmp_path / "out"

    def goes_on(what: str) -> None:
        before = committed_rows(out).num_rows
        wait_for(lambda: committed_rows(out).num_rows > before + 100, f"rows after {what}", 150)

    with Offering(push, 0.002) as sending:
        driver = Driver(tmp_path / "driver.log", **given)
        try:
            goes_on("the start")
            assert "its chunks are read from the driver" in package_log()
            driver.find("CoarseGrainedExecutorBackend").kill()
            goes_on("an executor's death")
            driver.kill()
            driver.start()
            goes_on("the driver's death")
            sending.end()
            (tmp_path / "stop").touch()
            assert driver.process.wait(120) == 0
        finally:
            driver.kill()
    rows, kept = ids_and_numbers(out), log_rows(tmp_path / "wal")
    assert rows == list(zip(kept["id"].to_pylist(), map(int, kept["value"].to_pylist()), strict=True))
    assert [i for i, _ in rows] == list(range(len(rows)))
    assert sending.sent - HELD < len({number for _, number in rows}) == len(rows)
