"""Chunks that the log's writer deletes between the planning of a batch and its reading. No JVM."""

from __future__ import annotations

import logging
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import batch_of, bind_when_free, free_endpoint, keep_handlers, stream_options, wait_for
from zmq_datasource.errors import DataLossError, DiskFaultError
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.verification import verify_log
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.batch_reader import ZmqLogReader
from zmq_datasource.spark.partition_reader import LogInputPartition
from zmq_datasource.spark.stream_reader import ZmqStreamReader

ALL = ReadMaxRows(1)  # any limit: ours are options
Offset = dict[str, Any]
VALUE = b"v" * 1000


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)


class Discarding:
    """A log whose writer discards the oldest chunks when it is full, as a proxy does with ``whenFull=discard``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = LogStorage(str(path))
        self._writer = LogWriter(self.storage, chunk_bytes=1000, max_bytes=40_000, discards=True)
        self._writer.open()

    def add(self, chunks: int) -> None:
        """Chunks of two messages each."""
        for _ in range(chunks):
            self._writer.append(batch_of([VALUE, VALUE]))
            self._writer.cut().result(30)
            self._writer.retention.tidy()  # otherwise a thread does, some chunks later

    def discard(self, end: int) -> int:
        """Append until the ids below ``end`` are discarded. Returns the first id in the log."""
        while read_index(self.storage).earliest < end:
            self.add(1)
        return read_index(self.storage).earliest

    def is_listed_by(self, query: ZmqStreamReader) -> None:
        """Wait until a query knows the first id, which the thread of its metrics refreshes now and then."""
        end = read_index(self.storage).durable_end
        wait_for(lambda: (query.reportLatestOffset() or {})["next"] == end, f"id {end}")

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Discarding]:
    made = Discarding(tmp_path / "log")
    made.add(5)
    yield made
    made.close()


@contextmanager
def querying(log: Discarding, fails: bool = False, **options: Any) -> Iterator[ZmqStreamReader]:
    made = ZmqStreamReader(
        stream_options(
            walLocation=log.path, failOnDataLoss=fails, **{"reader": "desk", "serveLog": "never", **options}
        )
    )
    try:
        yield made
    finally:
        made.stop()


def planned(query: ZmqStreamReader) -> tuple[Offset, Offset, Callable[[], list[int]]]:
    """Run the next batch. Returns its offsets, and the rows that its tasks read."""
    start = query.initialOffset()
    end = query.latestOffset(start, ALL)
    return start, end, tasks(query, start, end)


def tasks(query: ZmqStreamReader, start: Offset, end: Offset) -> Callable[[], list[int]]:
    shares = pickle.loads(pickle.dumps(query.partitions(start, end)))
    return lambda: ids(query, shares)


def ids(reader: DataSourceReader | DataSourceStreamReader, shares: Any) -> list[int]:
    return [i for share in shares for batch in reader.read(share) for i in batch.column("id").to_pylist()]


def losses(query: ZmqStreamReader) -> tuple[int, int]:
    shown = query.reportLatestOffset() or {}
    return shown["dataLosses"], shown["messagesExpired"]


def counted(query: ZmqStreamReader, start: Offset, expired: int) -> Offset:
    """Wait until so many ids are counted as lost (the query lists the log now and then).

    Returns the end of the next batch.
    """

    def asked() -> Offset | None:
        end = query.latestOffset(start, ALL)
        return end if losses(query)[1] >= expired else None

    end = wait_for(asked, f"{expired} lost ids")
    assert end is not None
    assert losses(query)[1] == expired
    return end


def test_a_batch_goes_on_after_ids_that_are_discarded_before_they_are_read(
    log: Discarding, caplog: pytest.LogCaptureFixture
) -> None:
    with querying(log, minPartitions=3) as query:
        _, end, read = planned(query)
        assert log.discard(3) == 4
        assert read() == [4, 5, 6, 7, 8, 9]
        assert "deleted the ids 0 to 2 between the planning of the batch and the reading" in caplog.text
        counted(query, end, 4)
        log.is_listed_by(query)
        last = query.latestOffset(end, ALL)
        assert losses(query) == (1, 4)
        assert "data loss: the ids 0 to 3 were not kept" in caplog.text
        query.commit(end)
        assert tasks(query, end, last)()[0] == 10
        query.latestOffset(last, ALL)
        assert losses(query) == (1, 4)


WRITER = (
    r"the writer of log .* deleted the ids 0 to 3 between the planning of the batch and the reading, because the "
    r"log was full \(whenFull=discard\) or their retention had passed\. Raise walMaxBytes or walRetention .* "
    "failOnDataLoss=false"
)


def test_a_task_with_failOnDataLoss_fails_because_the_writer_deleted_the_ids(log: Discarding) -> None:
    with querying(log, fails=True) as query:
        _, _, read = planned(query)
        log.discard(3)
        with pytest.raises(DataLossError, match=WRITER):
            read()


def test_a_batch_read_goes_on_after_ids_that_are_discarded(
    log: Discarding, caplog: pytest.LogCaptureFixture
) -> None:
    def planned(fails: bool) -> tuple[ZmqLogReader, Any]:
        options = {"walLocation": str(log.path), "failOnDataLoss": str(fails).lower()}
        reader = ZmqLogReader(parse(BatchReadOptions, options))
        return reader, pickle.loads(pickle.dumps(reader.partitions()))

    (going_on, shares), (failing, others) = planned(False), planned(True)
    log.discard(3)
    caplog.set_level(logging.WARNING)
    assert ids(going_on, shares) == [4, 5, 6, 7, 8, 9]
    assert "deleted the ids 0 to 3 between the planning" in caplog.text
    with pytest.raises(DataLossError, match=WRITER):
        ids(failing, others)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("batch_reader", "partition_reader"):
        monkeypatch.setattr(f"zmq_datasource.spark.{module}.RETRY_SECONDS", 0.5)


@pytest.mark.usefixtures("hasty")
def test_a_machine_that_does_not_see_the_log_skips_ids_like_one_that_does(log: Discarding) -> None:
    def elsewhere(query: ZmqStreamReader, start: Offset, end: Offset) -> list[LogInputPartition]:
        return [
            LogInputPartition(
                DirectoryStore("/not/on/this/machine"),
                share.pieces,
                share.rows,
                share.log_id,
                share.fail_on_data_loss,
                access=share.access,
            )
            for share in query.partitions(start, end)
            if isinstance(share, LogInputPartition)
        ]

    endpoint = free_endpoint()
    with querying(log, serveLog=endpoint) as query:
        start = query.initialOffset()
        end = query.latestOffset(start, ALL)
        shares = elsewhere(query, start, end)
        (access,) = {share.access for share in shares}
        assert access is not None
        assert access.endpoints == (endpoint,)
        # Nothing that is shown of a task has the secret.
        assert repr(access.secret) not in repr(shares) + repr(access)
        log.discard(3)
        assert ids(query, shares) == [4, 5, 6, 7, 8, 9]
        counted(query, end, 4)
        log.is_listed_by(query)
        last = query.latestOffset(end, ALL)
        shares = elsewhere(query, end, last)
        unmounted(log.path)
        with pytest.raises(DiskFaultError, match="It was there before"):
            ids(query, shares)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        bind_when_free(sock, endpoint)  # the query's end has freed it


def unmounted(path: Path) -> None:
    path.rename(path.with_name("away"))
    path.mkdir()


def without_chunks(path: Path) -> None:
    for file in path.glob("chunks/*.arrow"):
        file.unlink()


def without_the_first_chunk(path: Path) -> None:
    (path / "chunks" / chunk_name(0)).unlink()


def without_a_chunk_in_the_middle(path: Path) -> None:
    (path / "chunks" / chunk_name(2)).unlink()


def another_log(path: Path) -> None:
    sorted(path.glob("chunks/*.arrow"))[0].unlink()
    shutil.copy(path / "log.json", path.with_name("log.json"))
    (path / "log.json").write_text('{"format": 3, "log": "another"}')


@pytest.mark.parametrize(
    ("damage", "fails"),
    [
        *((damage, fails) for damage in (without_chunks, another_log) for fails in (False, True)),
        *((damage, True) for damage in (without_a_chunk_in_the_middle, without_the_first_chunk)),
    ],
)
def test_ids_that_the_writer_has_not_deleted_are_never_skipped(
    log: Discarding, tmp_path: Path, damage: Callable[[Path], None], fails: bool
) -> None:
    options = {"walLocation": str(log.path), "failOnDataLoss": str(fails).lower()}
    reader = ZmqLogReader(parse(BatchReadOptions, options))
    shares = reader.partitions()
    damage(log.path)
    with pytest.raises(DataLossError, match=r"opening chunk .*\.arrow: it does not exist"):
        ids(reader, shares)


@pytest.mark.parametrize("deleted", [0, 4])
def test_a_first_chunk_that_was_lost_before_is_not_taken_for_deleted(
    log: Discarding, deleted: int, caplog: pytest.LogCaptureFixture
) -> None:
    earliest = log.discard(deleted)
    chunks = read_index(log.storage).all
    Path(log.storage.path_of(chunks[0].name)).unlink()
    options = {"walLocation": str(log.path)}
    lost = rf"it does not exist \(ids {earliest} to {earliest + 1}\)"
    reader = ZmqLogReader(parse(BatchReadOptions, options))
    with pytest.raises(DataLossError, match=lost):
        ids(reader, reader.partitions())
    reader = ZmqLogReader(parse(BatchReadOptions, options | {"failOnDataLoss": "false"}))
    assert ids(reader, reader.partitions()) == list(range(earliest + 2, chunks[-1].end))
    assert re.search(f"data loss: .*{lost}", caplog.text)
    (damage,) = verify_log(log.storage)
    assert re.search(lost, damage.what)


def test_a_query_without_failOnDataLoss_continues_after_a_missing_chunk(
    log: Discarding, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a later batch, if the first chunk of the log still exists."""
    with querying(log) as query:
        _, end, read = planned(query)
        without_a_chunk_in_the_middle(log.path)
        assert read() == [0, 1, 4, 5, 6, 7, 8, 9]
        last = counted(query, end, 2)
        log.add(3)
        log.is_listed_by(query)
        last = query.latestOffset(end, ALL)
        read = tasks(query, end, last)
        (log.path / "chunks" / chunk_name(12)).unlink()
        assert read() == [10, 11, 14, 15]
        counted(query, last, 4)
        assert losses(query) == (2, 4)
    assert "data loss: the ids 12 to 13 were not kept" in caplog.text
