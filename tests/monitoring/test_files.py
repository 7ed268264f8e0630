"""The files at metricsLocation: an account each, whole, and dropped by whole days; clear when they cannot be."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import at_failpoints
from zmq_datasource.counters import SinkCounters, figures
from zmq_datasource.errors import MetricsError, OptionError
from zmq_datasource.host.locations import check_location
from zmq_datasource.monitoring.accounts import Account
from zmq_datasource.monitoring.files import keep, remove_old_days
from zmq_datasource.options.types import Location

DAY = 86_400.0
NOW = datetime(2026, 11, 18, 11, 6, 40, tzinfo=UTC).timestamp()


def account(batch: int = 0, at: float = NOW, **more: Any) -> Account:
    counted = figures(SinkCounters(rows=10, sent=10, bytes=70, peers=1, sndhwm=1000))
    given = {"query": "3f8a", "name": "orders", "execution": "local-1-4", "write": "local-1-4"}
    given |= {"sink": "PUSH tcp://a:1"}
    return Account(**{**given, "batch": batch, "seconds": at, "figures": counted, **more})


def write(root: Path, batch: int = 0, at: float = NOW, **more: Any) -> None:
    keep(Location(str(root)), account(batch, at, **more), 36_500 * DAY, 30.0)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def days(root: Path) -> list[str]:
    return sorted(path.name.removeprefix("date=") for path in root.iterdir())


def test_an_account_is_one_object_in_the_folder_of_its_day(tmp_path: Path) -> None:
    write(tmp_path, batch=7)
    (name,) = files(tmp_path)
    assert name == "date=2026-11-18/batch-3f8a-7-local-1-4.json"
    assert json.loads((tmp_path / name).read_bytes()) == {
        "timestamp": "2026-11-18T11:06:40.000Z",
        "query": "3f8a",
        "name": "orders",
        "batch": 7,
        "execution": "local-1-4",
        "sink": "PUSH tcp://a:1",
        "rows": 10,
        "sent": 10,
        "bytes": 70,
        "dropped": 0,
        "droppedByReason": {"hwm": 0, "no_peer": 0, "null": 0},
        "deadLettered": 0,
        "deadLetteredByReason": {"no_peer": 0, "timeout": 0, "null": 0},
        "retries": 0,
        "resent": 0,
        "blockedMs": 0,
        "peers": 1,
        "sndhwm": 1000,
        "tasks": 1,
        "unflushedTasks": 0,
        "metricsFailures": 0,
    }


def test_a_repeated_batch_and_each_write_of_one_have_files_of_their_own(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, execution="local-2-0", write="local-2-0")
    write(tmp_path, execution="local-2-0", write="local-2-1")
    assert len(files(tmp_path)) == 3


def test_the_name_of_a_write_stays_in_the_folder(tmp_path: Path) -> None:
    write(tmp_path / "metrics", query="write-../../../x", write="../y")
    assert files(tmp_path) == ["metrics/date=2026-11-18/batch-write-..%2F..%2F..%2Fx-0-..%2Fy.json"]


# Old days.


def test_the_first_account_of_a_day_removes_old_days(tmp_path: Path) -> None:
    for day in range(4):
        keep(Location(str(tmp_path)), account(at=NOW + day * DAY), DAY, 30.0)
    assert days(tmp_path) == ["2026-11-20", "2026-11-21"]


@pytest.mark.parametrize(("retention", "kept"), [(2 * DAY, 3), (4000 * 365 * DAY, 4)])
def test_a_clock_that_is_set_forward_does_not_empty_the_location(
    tmp_path: Path, retention: float, kept: int
) -> None:
    for day in (0, 1, 2, 1000):
        write(tmp_path, at=NOW + day * DAY)
    remove_old_days(Location(str(tmp_path)), retention, NOW + 1000 * DAY)
    assert days(tmp_path) == ["2026-11-18", "2026-11-19", "2026-11-20", "2029-08-14"][-kept:]


def test_what_this_package_has_not_written_stays(tmp_path: Path) -> None:
    for day in range(6):
        write(tmp_path, at=NOW + day * DAY)
    (tmp_path / "date=2026-11-18" / "part-0.parquet").write_bytes(b"x")
    (tmp_path / "date=2026-11-19" / "hour=1").mkdir()
    (tmp_path / "date=2026-11-20" / f".{0:032x}-batch-q-0-e.json").write_text("{")  # of a killed writer
    others = {"date=2026-1-1", "date=2026-13-01", "mine", "date=2026-11-18.bak"}
    for name in others:
        (tmp_path / name).mkdir()
    remove_old_days(Location(str(tmp_path)), DAY, NOW + 5 * DAY)
    left = {f"date=2026-11-{day}" for day in (18, 19, 22, 23)}
    assert {path.name for path in tmp_path.iterdir()} == left | others


def test_days_that_cannot_be_removed_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    remove_old_days(Location(str(tmp_path / "file")), DAY, NOW)
    assert f"removing old days from {tmp_path}/file: " in caplog.text


# A file system that refuses or hangs.


def test_a_location_that_refuses_is_named_without_its_secrets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MetricsError, match=r"writing the account of batch 0 in .*file/metrics: "):
        write(blocked / "metrics")
    with pytest.raises(MetricsError) as raised:
        keep(Location("nosuch://user:password@host/x"), account(), DAY, 30.0)
    assert "password" not in str(raised.value)
    assert files(tmp_path) == ["file"]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    at_failpoints(monkeypatch, full)
    with pytest.raises(MetricsError, match="No space left"):
        write(tmp_path)
    assert files(tmp_path) == []


def test_a_location_that_does_not_answer_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    at_failpoints(monkeypatch, lambda _: let_go.wait(10))
    with pytest.raises(MetricsError, match=r"the file system has not answered for 0\.05 s"):
        keep(Location(str(tmp_path)), account(), DAY, 0.05)
    let_go.set()


@pytest.mark.parametrize(
    "location", ["s3://bucket-that-is-away/x", "hdfs://nowhere/x", "/made/or/not", "file:///x"]
)
def test_a_location_is_judged_without_asking_it(location: str) -> None:
    check_location("metricsLocation", Location(location), reach=False)


@pytest.mark.parametrize(
    "location",
    [
        "",
        "file:/x",
        "nosuch://user:pa/ss@word@host/x",
        "metrics",
        "dbfs:/mnt/x",
        "nosuch://host/x?client_secret=word",
    ],
)
def test_a_location_that_means_nothing_is_refused_without_its_secrets(location: str) -> None:
    with pytest.raises(OptionError, match="metricsLocation") as raised:
        check_location("metricsLocation", Location(location), reach=False)
    assert "word" not in str(raised.value)
    assert raised.value.__cause__ is None
