"""Dead letters: whole, readable, and never delaying the feed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import zmq_datasource.source.incidents as dead_letters_module
from tests.support import fill_disk, log_at, stream_options, tiny_disk, wait_for
from tests.support.bucket_server import BucketServer
from tests.support.publishers import Publisher
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import OptionError
from zmq_datasource.host.locations import check_location
from zmq_datasource.options.types import Location
from zmq_datasource.source.incidents import DEAD_LETTER_SCHEMA, DeadLetters, LetterLimits
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.intake import MalformedMessage


def letter(number: int, size: int = 1) -> MalformedMessage:
    return MalformedMessage("it does not fit", [b"%d" % number, b"x" * size], number, "tcp://feed:1")


def letters(location: Path) -> list[dict[str, Any]]:
    rows = [
        row
        for path in sorted(location.glob("[0-9]*.parquet"))
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]
    return sorted(rows, key=lambda row: row["timestamp"])


@pytest.fixture
def counters() -> SourceCounters:
    return SourceCounters()


@pytest.fixture
def no_losses() -> Iterator[SourceCounters]:
    """Counters of a test in which no letter may be lost."""
    counters = SourceCounters()
    yield counters
    assert counters.dead_letters_lost == 0


@pytest.mark.parametrize("uri", [False, True])
def test_letters_are_kept_whole_with_their_reason(
    uri: bool, tmp_path: Path, no_losses: SourceCounters
) -> None:
    location = tmp_path / "letters"
    with DeadLetters(Location(location.as_uri() if uri else location), "vllm", no_losses) as box:
        for number in range(3):
            box.add([letter(number)])
    kept = letters(location)
    assert [row["frames"] for row in kept] == [[b"%d" % n, b"x"] for n in range(3)]
    assert {(row["reason"], row["framing"], row["endpoint"]) for row in kept} == {
        ("it does not fit", "vllm", "tcp://feed:1")
    }
    (path,) = location.iterdir()
    assert pyarrow.parquet.read_schema(path).names == DEAD_LETTER_SCHEMA.names


def test_letters_of_a_moment_share_a_file(tmp_path: Path, no_losses: SourceCounters) -> None:
    limits = LetterLimits(file_messages=100)
    with DeadLetters(Location(tmp_path), "vllm", no_losses, limits=limits) as box:
        box.add([letter(n) for n in range(150)])
        box.add([letter(n) for n in range(50)])
    assert len(letters(tmp_path)) == 200
    assert len(list(tmp_path.iterdir())) <= 2


def test_letters_for_a_location_that_cannot_be_written_are_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counters: SourceCounters
) -> None:
    (tmp_path / "file").write_text("no directory")
    with DeadLetters(Location(tmp_path / "file"), "vllm", counters) as box:
        box.add([letter(1), letter(2)])
    assert counters.dead_letters_lost == 2
    assert "2 dead letters could not be kept" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a tmpfs needs root")
def test_letters_wait_for_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counters: SourceCounters
) -> None:
    limits = LetterLimits(file_seconds=0.0, retry_pause=0.02)
    with tiny_disk(tmp_path / "tiny", "256k") as disk:
        blocker = fill_disk(disk)
        with DeadLetters(Location(disk), "custom", counters, limits=limits) as box:
            box.add([letter(1)])
            wait_for(lambda: "trying again" in caplog.text, "a refusal")
            blocker.unlink()
            wait_for(lambda: list(disk.glob("*.parquet")), "the letter")
        assert not counters.dead_letters_lost
        assert len(list(disk.iterdir())) == 1


def test_a_file_system_that_hangs_delays_nothing_and_the_waiting_letters_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counters: SourceCounters
) -> None:
    hanging = threading.Event()
    limits = LetterLimits(waiting_bytes=10_000, close_seconds=0.05)
    make_directory = dead_letters_module.make_directory

    def hang(*arguments: Any) -> None:
        hanging.wait(30)
        make_directory(*arguments)

    monkeypatch.setattr(dead_letters_module, "make_directory", hang)
    with DeadLetters(Location(tmp_path), "vllm", counters, limits=limits) as box:
        for number in range(30):
            box.add([letter(number, 1000)])
        assert counters.dead_letters_lost >= 20, "at the bound"
    assert counters.dead_letters_lost == 30, "and at the end the letters that still waited"
    hanging.set()
    wait_for(lambda: letters(tmp_path), "the thread to end")


def test_a_letter_of_any_size_is_kept_by_a_disk_that_keeps_up(
    tmp_path: Path, no_losses: SourceCounters
) -> None:
    limits = LetterLimits(waiting_bytes=10_000)
    with DeadLetters(Location(tmp_path), "vllm", no_losses, limits=limits) as box:
        box.add([letter(0)])
        box.add([letter(1), letter(2, 100_000)])
    assert [len(kept["frames"][-1]) for kept in letters(tmp_path)][-1] == 100_000


def test_a_bound_counts_files_of_earlier_runs_and_the_error_says_the_way_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, counters: SourceCounters
) -> None:
    bound = 20_000
    with DeadLetters(Location(tmp_path), "vllm", counters, bound) as box:
        box.add([letter(1)])
    (tmp_path / "other.parquet").write_bytes(b"x" * bound)
    assert counters.dead_letters_lost == 0
    with DeadLetters(Location(tmp_path), "vllm", counters, bound) as box:
        box.add([letter(2), letter(3)])
    assert counters.dead_letters_lost == 2
    assert "or set deadLetterLocation" in caplog.text
    assert len(letters(tmp_path)) == 1


def test_a_thread_that_cannot_start_loses_only_letters(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    counters: SourceCounters,
) -> None:
    with DeadLetters(Location(tmp_path), "vllm", counters) as box:
        with monkeypatch.context() as patch:

            def refuse(_self: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", refuse)
            box.add([letter(1)])
        box.add([letter(2)])
    assert counters.dead_letters_lost == 1
    assert "can't start new thread" in caplog.text
    assert len(letters(tmp_path)) == 1


def test_a_bound_holds_while_letters_come(tmp_path: Path, counters: SourceCounters) -> None:
    limits = LetterLimits(file_seconds=0.0)
    with DeadLetters(Location(tmp_path), "vllm", counters, 40_000, limits) as box:
        for number in range(100):
            box.add([letter(number, 1000)])
    assert len(letters(tmp_path)) + counters.dead_letters_lost == 100
    assert counters.dead_letters_lost
    assert len(letters(tmp_path)) > 10
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 40_000


@pytest.mark.parametrize("end", ["", "/"])
def test_a_new_location_can_be_read_only_by_its_user(
    end: str, tmp_path: Path, no_losses: SourceCounters
) -> None:
    with DeadLetters(Location(f"{tmp_path}/new/letters{end}"), "vllm", no_losses) as box:
        box.add([letter(1)])
    assert (tmp_path / "new" / "letters").stat().st_mode & 0o077 == 0
    assert len(letters(tmp_path / "new" / "letters")) == 1


@pytest.mark.parametrize("location", ["nosuch://bucket/x", "hdfs2://x", "mock://x"])
def test_a_location_on_an_unknown_file_system_is_refused(location: str) -> None:
    with pytest.raises(OptionError, match="deadLetterLocation"):
        check_location("deadLetterLocation", Location(location))


def test_credentials_in_a_location_never_show() -> None:
    location = Location("nosuch://KEY:SECRET@bucket/x")
    assert "SECRET" not in f"{location} {location!r} {location!s}"
    with pytest.raises(OptionError) as refused:
        check_location("deadLetterLocation", location)
    assert "SECRET" not in str(refused.value)
    options = stream_options(connect="tcp://a:1", framing="vllm", deadLetterLocation="s3://KEY:SECRET@b/x")
    assert "SECRET" not in repr(options)


def receive_a_malformed_message(publisher: Publisher, **options: Any) -> None:
    """Receive a message that does not fit, and one that does, and stop."""
    ingest = Ingest(stream_options(connect=publisher.endpoint, framing="vllm", **options))
    ingest.start()
    try:
        publisher.ask("wait-subscriber")
        publisher.ask("raw 00 - 0102")
        publisher.ask("send 1")
        wait_for(lambda: ingest.seal() == 1, "the good message")
    finally:
        ingest.stop()
    assert ingest.counters.malformed == 1


@pytest.mark.parametrize("named", [True, False], ids=["deadLetterLocation", "beside the log"])
def test_malformed_messages_of_a_feed_become_dead_letters(named: bool, tmp_path: Path) -> None:
    location = tmp_path / "letters" if named else tmp_path / "log" / "0" / "dead-letters"
    options = {"deadLetterLocation": location} if named else {}
    with Publisher("vllm") as publisher:
        receive_a_malformed_message(publisher, walLocation=tmp_path / "log", **options)
    (kept,) = letters(location)
    assert kept["frames"] == [b"\0", b"", b"\1\2"]
    assert kept["reason"] == "the sequence has 0 bytes, 8 expected"
    assert kept["endpoint"] == publisher.endpoint


def test_dead_letters_of_a_log_in_a_bucket_are_beside_its_chunks() -> None:
    with BucketServer() as server, Publisher("vllm") as publisher:
        place = server.location("log")
        receive_a_malformed_message(publisher, walStore=place)
        bucket = log_at(place).store
        (name,) = [it.name for it in bucket.list("0/dead-letters") if it.name.endswith(".parquet")]
        with bucket.open(f"0/dead-letters/{name}") as file:
            (kept,) = pyarrow.parquet.read_table(file).to_pylist()
    assert kept["frames"] == [b"\0", b"", b"\1\2"]
