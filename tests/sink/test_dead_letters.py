"""A sink's retries and dead letters: real sockets, real files, no Spark."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import pytest
import zmq

from tests.support import Socket, binary, bound, free_endpoint, take, write_options
from zmq_datasource.errors import DeadLetterError, SendTimeoutError
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options.types import Location
from zmq_datasource.sink.dead_letters import StagedDeadLetters, commit_dead_letters
from zmq_datasource.sink.sender import Sender

Context = zmq.Context[Socket]
VALUE = b"x" * 1000


def letters(location: Path) -> list[dict[str, Any]]:
    """The committed dead letters, in the order of partitions and values."""
    table = pyarrow.dataset.dataset(location, format="parquet", partitioning="hive").to_table()
    return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["value"] or b""))


def stage(
    location: Path, values: list[bytes], query: str = "q", batch: int = 7, partition: int = 0
) -> list[str]:
    with StagedDeadLetters(Location(location), query, batch, partition) as staged:
        for value in values:
            staged.add("hwm", b"t", value)
    return staged.names


def stalled(context: Context) -> str:
    """An endpoint whose consumer never receives."""
    return bound(context, zmq.PULL, rcvhwm=10, rcvbuf=4096)[1]


SMALL = {"sndhwm": 10, "zmq_sndbuf": 4096, "linger": "20ms"}


def test_rows_that_find_a_full_queue_become_dead_letters(context: Context, tmp_path: Path) -> None:
    options = write_options(connect=stalled(context), sendTimeout="0s", deadLetterLocation=tmp_path, **SMALL)
    with StagedDeadLetters(Location(tmp_path), "q", 0, 3) as staged, Sender(options, staged) as sender:
        sender.send(binary([b"%05d" % i + VALUE for i in range(500)]), binary([b"t"] * 500))
        counters = sender.counters
    assert counters.dropped.total() == 0
    assert counters.rows == 500 == counters.sent + counters.dead_lettered["timeout"]
    assert counters.balanced
    commit_dead_letters(Location(tmp_path), "q", 0, staged.names)
    kept = letters(tmp_path)
    assert len({int(row["value"][:5]) for row in kept}) == 500 - counters.sent
    assert {(row["topic"], row["reason"], row["query"], row["batch"], row["partition"]) for row in kept} == {
        (b"t", "timeout", "q", 0, 3)
    }


def test_a_blocking_sink_waits_once_and_then_keeps_the_rows(context: Context, tmp_path: Path) -> None:
    options = write_options(
        connect=stalled(context), sendTimeout="200ms", deadLetterLocation=tmp_path, **SMALL
    )
    began = time.monotonic()
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as staged, Sender(options, staged) as sender:
        sender.send(binary([VALUE] * 300))
        counters = sender.counters
    assert counters.dead_lettered["timeout"] > 100
    assert counters.balanced
    assert 0.1 < counters.blocked_seconds < time.monotonic() - began < 10  # not 200 ms for each


def test_a_row_without_a_value_becomes_a_dead_letter(context: Context, tmp_path: Path) -> None:
    pull, endpoint = bound(context, zmq.PULL)
    options = write_options(connect=endpoint, deadLetterLocation=tmp_path)
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as staged, Sender(options, staged) as sender:
        sender.send(binary([b"a", None, b"b"]), binary([b"t"] * 3))
        counters = sender.finish()
    assert take(pull, 2) == [[b"t", b"a"], [b"t", b"b"]]
    assert (counters.rows, counters.sent, dict(counters.dead_lettered)) == (3, 2, {"null": 1})
    commit_dead_letters(Location(tmp_path), "q", 0, staged.names)
    assert [(row["topic"], row["value"], row["reason"]) for row in letters(tmp_path)] == [
        (b"t", None, "null")
    ]


def test_without_peers_all_rows_become_dead_letters(tmp_path: Path) -> None:
    options = write_options(connect=free_endpoint(), connectTimeout="50ms", deadLetterLocation=tmp_path)
    with StagedDeadLetters(Location(tmp_path), "q", 0, 0) as staged, Sender(options, staged) as sender:
        sender.send(frames=pa.array([[b"a", b"b"], [b"c"]], FRAMES))
        counters = sender.finish()
    assert (counters.rows, dict(counters.dead_lettered)) == (2, {"no_peer": 2})
    commit_dead_letters(Location(tmp_path), "q", 0, staged.names)
    assert sorted(row["frames"] for row in letters(tmp_path)) == [[b"a", b"b"], [b"c"]]


@pytest.mark.spark  # slow
@pytest.mark.parametrize("noblock", [False, True])
def test_a_retry_helps_where_the_consumer_comes_back(context: Context, noblock: bool) -> None:
    pull, endpoint = bound(context, zmq.PULL, rcvhwm=10, rcvbuf=4096)
    options = write_options(
        connect=endpoint,
        noblock=noblock,
        sendTimeout="50ms",
        maxRetries=8,
        retryInterval="20ms",
        **{**SMALL, "linger": "20s"},
    )
    got: list[list[bytes]] = []
    consuming = threading.Timer(0.3, lambda: got.extend(take(pull, 500)))
    consuming.start()
    with Sender(options) as sender:
        sender.send(binary([VALUE] * 500))
        counters = sender.finish()
    consuming.join(30)
    assert counters.retries > 0
    assert counters.dropped.total() == 0
    assert len(got) == counters.sent == counters.rows == 500


def test_a_blocking_sink_without_dead_letters_fails_after_its_retries(context: Context) -> None:
    options = write_options(
        connect=stalled(context), sendTimeout="50ms", maxRetries=2, retryInterval="10ms", **SMALL
    )
    said = r"1 peers up, sndhwm=10.*deadLetterLocation.*noblock=true"
    with Sender(options) as sender, pytest.raises(SendTimeoutError, match=said):
        sender.send(binary([VALUE] * 1000))
    assert sender.counters.retries >= 2


# The commit of a batch.


def test_a_repeated_task_leaves_its_dead_letters_once(tmp_path: Path) -> None:
    stage(tmp_path, [b"a", b"b"])  # an attempt that failed
    winner = stage(tmp_path, [b"b", b"c"])
    other = stage(tmp_path, [b"z"], partition=1)
    commit_dead_letters(Location(tmp_path), "q", 7, [*winner, *other])
    assert [row["value"] for row in letters(tmp_path)] == [b"b", b"c", b"z"]
    assert [path.name for path in tmp_path.iterdir()].count("_staging") <= 1
    assert not any((tmp_path / "_staging").iterdir())


def test_a_repeated_batch_leaves_the_dead_letters_of_its_last_run(tmp_path: Path) -> None:
    for values in ([b"a", b"b"], [b"c"], []):
        names = stage(tmp_path, values)
        commit_dead_letters(Location(tmp_path), "q", 7, names)
        assert (
            [row["value"] for row in letters(tmp_path)] == values
            if values
            else not any(tmp_path.glob("query=*/batch=*"))
        )


def test_a_commit_leaves_other_batches_alone(tmp_path: Path) -> None:
    for batch in (1, 11):
        names = stage(tmp_path, [b"%d" % batch], batch=batch)
        commit_dead_letters(Location(tmp_path), "q", batch, names)
    commit_dead_letters(Location(tmp_path), "q", 1, [])
    assert [row["value"] for row in letters(tmp_path)] == [b"11"]


def test_what_a_failed_task_has_staged_is_seen_by_no_reader_and_goes_with_the_repeated_batch(
    tmp_path: Path,
) -> None:
    def fail() -> None:
        with StagedDeadLetters(Location(tmp_path), "q", 7, 0) as staged:
            staged.add("hwm", b"t", b"x" * (8 << 20))
            raise ValueError("the real error")

    with pytest.raises(ValueError, match="the real error"):
        fail()
    assert [path.parent.parent.name for path in tmp_path.rglob("*.parquet")] == ["_staging"]
    commit_dead_letters(Location(tmp_path), "q", 7, stage(tmp_path, [b"a"]))
    assert [row["value"] for row in letters(tmp_path)] == [b"a"]
    assert len(list(tmp_path.rglob("*.parquet"))) == 1


def test_a_file_that_cannot_be_written_fails_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = pyarrow.parquet.ParquetWriter.close

    def refuse(writer: Any) -> None:
        close(writer)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "close", refuse)
    with pytest.raises(DeadLetterError, match="staging dead letters"):
        stage(tmp_path, [b"a"])


def test_a_location_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DeadLetterError, match=r"staging dead letters in .*file"):
        stage(tmp_path / "file", [b"a"])


def test_many_dead_letters_are_written_to_several_files(tmp_path: Path) -> None:
    names = stage(tmp_path, [b"%06d" % n + b"x" * 10_000 for n in range(3000)])
    assert len(names) > 1
    commit_dead_letters(Location(tmp_path), "q", 7, names)
    assert len(letters(tmp_path)) == 3000
