"""Named sources: feeds are added to a query, removed from it and reordered on one checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
import zmq
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import REPOSITORY, Socket, batch_of, bound, wait_for
from tests.support.pages import marked
from tests.support.streams import committed_rows, running, start, wait_until_released
from zmq_datasource import reason, register
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

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


# A query of two named logs, killed with all its processes when a task reads rows of the old one: in its first batch,
# which is the first one of the log that joins.
_KILLED = """
import json, os, signal, sys
from pathlib import Path
from tests.spark.test_query_evolution import of_logs
from tests.support.streams import new_session, start

directory, options, group = Path(sys.argv[1]), json.loads(sys.argv[2]), os.getpid()


def kill(batches):
    for batch in batches:
        if batch.num_rows:
            os.killpg(group, signal.SIGKILL)
        yield batch


evolution = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
old, new = of_logs(new_session(directory, conf={evolution: "true"}), directory, options)
start(old.mapInArrow(kill, old.schema).union(new), directory / "out").awaitTermination()
"""


def of_logs(session: SparkSession, directory: Path, options: dict[str, str]) -> list[DataFrame]:
    """The sources ``old`` and ``new``, each of a log; the options are those of ``new``."""
    read = {"old": {"startingOffsets": "earliest"}, "new": options}
    return [
        session.readStream.format("zmq")
        .options(walLocation=f"{directory}/{name}", **given)
        .name(name)
        .load()
        .selectExpr("id", f"concat('{name} ', string(value)) AS value")
        for name, given in read.items()
    ]


@FROM_4_3
@pytest.mark.slow
@pytest.mark.parametrize(("begins", "first"), [("earliest", 0), ("latest", 3)])
def test_a_source_that_joins_and_is_killed_in_its_first_batch_has_each_message_once(
    evolving: SparkSession, tmp_path: Path, begins: str, first: int
) -> None:
    logs = {}
    for name in ("old", "new"):
        logs[name] = LogWriter(LogStorage(str(tmp_path / name)), chunk_bytes=1 << 20, max_bytes=1 << 30)
        logs[name].merge_seconds = 1e6
        logs[name].open()

    def fill(name: str) -> None:
        """Add a chunk of three messages."""
        end = logs[name].durable_end
        logs[name].append(batch_of([b"%d" % number for number in range(end, end + 3)]))
        logs[name].cut().result(30)

    fill("old"), fill("new")
    options, out = {"startingOffsets": begins}, tmp_path / "out"
    with running(of_logs(evolving, tmp_path, options)[0], out) as query:
        wait_for(
            lambda: query.exception() or committed_rows(out).num_rows == 3, "the rows of the old log", 60
        )
    fill("old")
    command = [sys.executable, "-c", _KILLED, str(tmp_path), json.dumps(options)]
    killed = subprocess.run(command, cwd=REPOSITORY, start_new_session=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    planned, done = (
        sorted(Path(f"{out}.checkpoint").glob(f"{kind}/[0-9]*"), key=lambda path: int(path.name))
        for kind in ("offsets", "commits")
    )
    assert [path.name for path in planned[:-1]] == [path.name for path in done]
    assert ["\nnew:" in path.read_text() for path in planned[-2:]] == [False, True], (
        "it is the source's first batch"
    )
    fill("new"), fill("old")
    expected = sorted([f"old {n}" for n in range(9)] + [f"new {n}" for n in range(first, 6)])
    old, new = of_logs(evolving, tmp_path, options)
    with running(old.union(new), out) as query:
        wait_for(lambda: query.exception() or committed_rows(out).num_rows >= len(expected), "all rows", 60)
        assert query.exception() is None
    assert sorted(committed_rows(out).column("value").to_pylist()) == expected
    for log in logs.values():
        log.close()


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
