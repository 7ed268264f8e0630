"""Several receivers of one feed, each with a log of its own: the lines of docs/scaling.md."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql import DataFrame, SparkSession

from tests.support import Socket, bound, wait_for
from tests.support.pages import marked
from tests.support.streams import committed_rows, running, wait_until_released

pytestmark = pytest.mark.spark
LOGS = "ab"


def union(spark: SparkSession, endpoint: str, directory: Path) -> DataFrame:
    """The union that the page makes, with this endpoint and two logs in this directory."""
    lines = (
        marked("scaling.md", "union")
        .replace("tcp://feed:5557", endpoint)
        .replace("/data/wal", str(directory))
    )
    names: dict[str, Any] = {"spark": spark}
    exec(compile(lines.replace('"abcd"', f'"{LOGS}"'), "scaling.md", "exec"), names)
    feed: DataFrame = names["feed"]
    return feed


def test_a_union_of_receivers_has_each_message_once_across_a_restart(
    spark: SparkSession, context: zmq.Context[Socket], tmp_path: Path
) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    out, numbers, sent = tmp_path / "out", count(), 0

    def received() -> Counter[str]:
        rows = committed_rows(out)
        return Counter(rows.column("log").to_pylist() if rows.num_rows else ())

    for run in (1, 2):
        with running(union(spark, endpoint, tmp_path), out) as query:
            before = received()

            def shared(before: Counter[str] = before) -> bool:
                """Send until both receivers have had messages in this run."""
                nonlocal sent
                if (error := query.exception()) is not None:
                    raise error
                push.send(b"%d" % next(numbers))
                sent += 1
                now = received()
                return all(now[log] > before[log] for log in LOGS)

            wait_for(shared, f"messages in both logs in run {run}", 90)
            wait_for(lambda: received().total() == sent, f"{sent} messages", 60)
        for log in LOGS:
            wait_until_released(tmp_path / f"feed-{log}")
    rows = committed_rows(out)
    assert sorted(map(int, rows.column("value").to_pylist())) == list(range(sent))
    for log in LOGS:  # the key is log and id
        ids = [row["id"] for row in rows.to_pylist() if row["log"] == log]
        assert sorted(ids) == list(range(len(ids)))
