"""Named sources: feeds are added to a query, removed from it and reordered on one checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import REPOSITORY, Socket, bound, wait_for
from tests.support.streams import committed_rows, session_with, start, wait_until_released
from zmq_datasource import reason

pytestmark = pytest.mark.spark
FROM_4_3 = pytest.mark.skipif(
    pyspark.__version__.startswith("4.2."),
    reason="Spark 4.2 goes by the place of a source, also if it has a name",
)
Context = zmq.Context[Socket]


@pytest.fixture
def evolving(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, because in it every streaming source needs a name."""
    with session_with(spark, streaming__queryEvolution__enableSourceEvolution="true") as session:
        yield session


class Feeds:
    """PUSH sockets with one-letter names, and queries that read some of them into one table."""

    def __init__(self, session: SparkSession, context: Context, directory: Path) -> None:
        self._session = session
        self._directory = directory
        self.out = directory / "out"
        self._sockets = {name: bound(context, zmq.PUSH) for name in "abc"}

    def read(self, name: str, source: str | None = None, **options: Any) -> DataFrame:
        """Read a feed as the source ``source``; under its own name by default."""
        reader = self._session.readStream.format("zmq").name(source or name).option("socketType", "PULL")
        reader = reader.option("connect", self._sockets[name][1])
        for option, value in options.items():
            reader = reader.option(option, value)
        return reader.option("walLocation", str(self._log(name))).load().selectExpr("string(value) AS value")

    def start(self, names: str, **options: Any) -> StreamingQuery:
        """Start the query on these feeds, in this order."""
        rows = self.read(names[0], **options)
        for name in names[1:]:
            rows = rows.union(self.read(name, **options))
        return start(rows, self.out)

    def run(self, names: str, *messages: str, **options: Any) -> str:
        """Run the query on these feeds until it has read these messages, each sent to the feed of its first letter.

        Returns:
            The end of its last batch in the first feed.
        """
        query = self.start(names, **options)
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
        return str(query.lastProgress["sources"][0]["endOffset"])

    def receive(self, message: str) -> None:
        """Receive a message with a query of its own, which reads the same log."""
        query = start(self.read(message[0]), self._directory / "beside")
        try:
            self._sockets[message[0]][0].send(message.encode())
            beside = self._directory / "beside"
            wait_for(lambda: message in self.rows(beside), message, 60)
        finally:
            query.stop()
        wait_until_released(self._log(message[0]))

    def rows(self, out: Path | None = None) -> list[str]:
        rows = committed_rows(out or self.out)
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


@FROM_4_3
@pytest.mark.slow
def test_a_feed_that_returns_after_other_batches_begins_at_starting_offsets(
    evolving: SparkSession, context: Context, tmp_path: Path
) -> None:
    feeds = Feeds(evolving, context, tmp_path)
    feeds.run("ab", "a0", "b0")
    feeds.run("b", "b1", "b2")
    feeds.receive("a1")
    feeds.run("ab", "a2", "b3")  # startingOffsets=latest
    assert feeds.rows() == ["a0", "a2", "b0", "b1", "b2", "b3"]
    feeds.run("b", "b4", "b5")
    end = feeds.run("ab", "a3", startingOffsets="earliest")
    assert feeds.rows() == ["a0", "a0", "a1", "a2", "a2", "a3", *(f"b{n}" for n in range(6))]
    feeds.run("b", "b6", "b7")
    feeds.receive("a4")
    feeds.run("a", "a5", startingOffsets=end)
    assert [row for row in feeds.rows() if row > "a2"][:3] == ["a3", "a4", "a5"]


def test_the_example_of_the_page_names_its_feeds(evolving: SparkSession) -> None:
    page = (REPOSITORY / "docs" / "spark.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- test: named -->\n```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {"spark": evolving}
    exec(compile(example[1], "spark.md", "exec"), names)
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


def test_spark_refuses_feeds_without_names_and_feeds_of_one_name(
    evolving: SparkSession, spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    feeds = Feeds(evolving, context, tmp_path)
    with pytest.raises(PySparkException, match="UNNAMED_STREAMING_SOURCES_WITH_ENFORCEMENT"):
        evolving.readStream.format("zmq").option("connect", "tcp://127.0.0.1:5556").load()
    with pytest.raises(PySparkException, match="DUPLICATE_SOURCE_NAMES"):
        feeds.start("aa")
    with pytest.raises(PySparkException, match="SOURCE_NAMING_NOT_SUPPORTED"):
        Feeds(spark, context, tmp_path).read("a")


@FROM_4_3
def test_spark_refuses_names_on_a_checkpoint_that_began_without_them(
    spark: SparkSession, evolving: SparkSession, context: Context, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for session in (spark, evolving):
        reader = session.readStream.format("rate")
        rows = (reader.name("numbers") if session is evolving else reader).load()
        query = start(rows, out)
        try:
            wait_for(lambda query=query: query.exception() or query.lastProgress, "a batch", 60)
        finally:
            query.stop()
    assert "CANNOT_ENABLE_ON_EXISTING_CHECKPOINT" in str(query.exception())
