"""Named sources: feeds are added to a query, removed from it and reordered on one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import Socket, bound, wait_for
from tests.support.pages import marked
from tests.support.streams import committed_rows, start, wait_until_released
from zmq_datasource import reason, register

pytestmark = pytest.mark.spark
FROM_4_3 = pytest.mark.skipif(
    pyspark.__version__.startswith("4.2."),
    reason="Spark 4.2 goes by the place of a source, also if it has a name",
)
Context = zmq.Context[Socket]


@pytest.fixture
def evolving(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, because in it every streaming source needs a name."""
    session, evolution = spark.newSession(), "spark.sql.streaming.queryEvolution.enableSourceEvolution"
    session.conf.set(evolution, "true")
    register(session)
    yield session
    session.conf.unset(evolution)


class Feeds:
    """PUSH sockets with one-letter names, and queries that read some of them into one table."""

    def __init__(self, session: SparkSession, context: Context, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self.out = directory / "out"
        self._sockets = {name: bound(context, zmq.PUSH) for name in "abc"}

    def read(self, name: str, source: str | None = None) -> DataFrame:
        """Read a feed as the source ``source``; under its own name by default."""
        reader = self._session.readStream.format("zmq").name(source or name).option("socketType", "PULL")
        reader = reader.option("connect", self._sockets[name][1])
        return reader.option("walLocation", str(self._log(name))).load().selectExpr("string(value) AS value")

    def start(self, names: str) -> StreamingQuery:
        """Start the query on these feeds, in this order."""
        rows = self.read(names[0])
        for name in names[1:]:
            rows = rows.union(self.read(name))
        return start(rows, self.out)

    def run(self, names: str, *messages: str) -> None:
        """Run the query on these feeds until it has read these messages, each sent to the feed of its first letter."""
        query = self.start(names)
        try:
            for message in messages:
                self._sockets[message[0]][0].send(message.encode())
                wait_for(lambda text=message: query.exception() or text in self.rows(), message, 60)
            wait_for(
                lambda: query.exception() or self._is_reported(query), "the report of the last batch", 60
            )
        finally:
            query.stop()
        for name in names:
            wait_until_released(self._log(name))

    def rows(self) -> list[str]:
        rows = committed_rows(self.out)
        return sorted(rows.column("value").to_pylist()) if rows.num_rows else []

    def _is_reported(self, query: StreamingQuery) -> bool:
        """Whether Spark has committed the newest batch whose rows are in the table."""
        newest = max(int(path.stem) for path in (self.out / "_spark_metadata").glob("[0-9]*"))
        return query.lastProgress is not None and query.lastProgress["batchId"] >= newest

    def _log(self, name: str) -> Path:
        return self._directory / f"wal-{name}"


@FROM_4_3
@pytest.mark.slow
def test_named_feeds_are_swapped_added_and_removed_on_one_checkpoint(
    evolving: SparkSession, context: Context, tmp_path: Path
) -> None:
    feeds = Feeds(evolving, context, tmp_path)
    feeds.run("ab", "a0", "b0")
    feeds.run("ba", "a1", "b1")
    feeds.run("abc", "c0", "a2")
    feeds.run("cb", "b2", "c1")
    assert feeds.rows() == ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1"]


def test_the_example_of_the_page_names_its_feeds(evolving: SparkSession) -> None:
    names: dict[str, Any] = {"spark": evolving}
    exec(compile(marked("spark.md", "named"), "spark.md", "exec"), names)
    assert names["both"].isStreaming


def test_another_feed_under_the_name_of_a_feed_is_refused(
    evolving: SparkSession, context: Context, tmp_path: Path
) -> None:
    feeds = Feeds(evolving, context, tmp_path)
    feeds.run("a", "a0")
    query = start(feeds.read("b", source="a"), feeds.out)
    try:
        with pytest.raises(PySparkException):
            query.awaitTermination(60)
    finally:
        query.stop()
    said = reason(query)
    assert said is not None
    assert said.startswith("DataLossError: reading: the offset is of log")
    assert "name()" in said
