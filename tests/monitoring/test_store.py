"""The files at metricsLocation: idempotent, whole, totals that go on, bounded, and clear when they cannot be."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import DATA
from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import MetricsError, OptionError
from zmq_datasource.host.locations import check_location
from zmq_datasource.monitoring import store as store_module
from zmq_datasource.monitoring.batches import BatchHistory, BatchWrite
from zmq_datasource.monitoring.patience import within
from zmq_datasource.monitoring.store import MetricsStore, iso
from zmq_datasource.options.types import Location
from zmq_datasource.spark import progress

NOW = 1_795_000_000.0
GOLDEN = DATA / "metrics-1"


def store(root: Path, retention: float = 3600) -> MetricsStore:
    return MetricsStore(Location(str(root)), retention)


def entry(
    batch: int, rows: int = 10, dropped: int = 0, execution: str = "e", sink: str = "PUSH tcp://a:1"
) -> BatchWrite:
    counters = SinkCounters(
        rows=rows, sent=rows - dropped, dropped=Counter(hwm=dropped) if dropped else Counter()
    )
    return BatchWrite("query", execution, batch, sink, counters)


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_each_batch_is_a_file_with_its_account_and_the_total(tmp_path: Path) -> None:
    for batch in range(3):
        store(tmp_path).write_batch(entry(batch, dropped=batch), NOW + batch)
    records = [json.loads(path.read_text()) for path in files(tmp_path)]
    assert [(r["batch"], r["sinkMetrics"]["rows"], r["sinkTotal"]["rows"]) for r in records] == [
        (0, 10, 10),
        (1, 10, 20),
        (2, 10, 30),
    ]
    assert records[2]["timestamp"] == iso(NOW + 2) == "2026-11-18T11:06:42.000Z"
    assert records[2]["sinkTotal"]["droppedByReason"] == {
        "hwm": 3,
        "no_peer": 0,
        "connection_lost": 0,
    }
    assert records[2]["sinkTotal"]["batches"] == 3


def test_the_format_is_that_of_the_golden_file(tmp_path: Path) -> None:
    written = entry(7, rows=10, dropped=3)._replace(name="orders")
    store(tmp_path).write_batch(written, NOW)
    (path,) = files(tmp_path)
    golden = GOLDEN / "sinks" / "query" / path.name
    assert path.read_bytes() == golden.read_bytes()
    assert path.relative_to(tmp_path) == golden.relative_to(GOLDEN)
    totals = store(GOLDEN).totals("query", [7])[7]["PUSH tcp://a:1"]
    assert (totals.batch, totals.total, totals.batches) == (written.counters, written.counters, 1)


def test_a_repeated_batch_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store(tmp_path).write_batch(entry(0), NOW)
    store(tmp_path).write_batch(entry(1, execution="killed"), NOW)
    store(tmp_path).write_batch(entry(1, dropped=3, execution="next"), NOW)
    totals = store(tmp_path).totals("query", [1])[1]["PUSH tcp://a:1"]
    assert (totals.batch.sent, totals.total.rows, totals.total.sent) == (7, 20, 17)
    assert len(files(tmp_path)) == 2


def test_a_second_write_of_the_same_execution_adds_to_the_file(tmp_path: Path) -> None:
    store(tmp_path).write_batch(entry(0), NOW)
    store(tmp_path).write_batch(entry(0, rows=5), NOW)
    totals = store(tmp_path).totals("query", [0])[0]["PUSH tcp://a:1"]
    assert (totals.batch.rows, totals.total.rows, totals.batches) == (15, 15, 1)


def test_totals_go_on_over_batches_that_were_not_written(tmp_path: Path) -> None:
    store(tmp_path).write_batch(entry(4), NOW)
    store(tmp_path).write_batch(entry(9), NOW)
    totals = store(tmp_path).totals("query", [3, 4, 7, 9])
    total = {batch: [a.total.rows for a in found.values()] for batch, found in totals.items()}
    assert total == {3: [], 4: [10], 7: [10], 9: [20]}
    assert next(iter(totals[7].values())).batch.rows == 0


def test_sinks_of_a_query_have_series_of_their_own(tmp_path: Path) -> None:
    store(tmp_path).write_batch(entry(0), NOW)
    store(tmp_path).write_batch(entry(0, rows=3, sink="PUB ipc:///tmp/b"), NOW)
    totals = store(tmp_path).totals("query", [0])[0]
    assert {name: a.total.rows for name, a in totals.items()} == {
        "PUSH tcp://a:1": 10,
        "PUB ipc:///tmp/b": 3,
    }


def test_sinks_of_which_only_one_has_files_are_shown_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two that ``foreachBatch`` writes to."""
    history, with_files, without = BatchHistory(), entry(0), entry(0, rows=7, sink="PUSH tcp://b:1")
    for each in (with_files, without):
        history.add(each)
    store(tmp_path).write_batch(with_files, NOW)
    monkeypatch.setattr(progress, "active_history", lambda: history)
    event: dict[str, Any] = {"id": "query", "batchId": 0, "durationMs": {"addBatch": 1}, "sink": {}}
    progress.fill_in_sinks([event], str(tmp_path))
    shown = event["sink"]["metrics"]
    assert set(shown["bySink"]) == {with_files.sink, without.sink}
    assert shown["sent"] == 17


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"format": 2}', b"null", b'{"format": 1, "kind": "sink"}', b"[" * 100_000),
        b'{"format": 1, "query": "\xff\xfe"}',
        b'{"format": 1, "kind": "sink", "timestamp": "soon", "sinkMetrics": {}, "sinkTotal": []}',
    ],
)
def test_a_file_that_is_none_of_ours_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    store(tmp_path).write_batch(entry(0), NOW)
    store(tmp_path).write_batch(entry(1), NOW)
    files(tmp_path)[-1].write_bytes(content)
    assert store(tmp_path).totals("query", [1])[1]["PUSH tcp://a:1"].total.rows == 10  # the one before counts
    assert [record["batch"] for record in store(tmp_path).newest()] == [0]
    store(tmp_path).write_batch(entry(2), NOW)
    totals = store(tmp_path).totals("query", [2])[2]["PUSH tcp://a:1"]
    assert totals.total.rows == 20  # of batches 0 and 2
    assert "it is left out" in caplog.text


@pytest.mark.parametrize("cut", ["", "\udcff", '{"format": 1, "kind": "source"}'])
def test_a_report_that_is_not_whole_leaves_the_one_before_it(tmp_path: Path, cut: str) -> None:
    for number in range(2):
        record = {"source": "SUB x", "log": "log", "sourceMetrics": {"rcvhwm": number}}
        store(tmp_path).write_report("log-0", record, NOW + number)
    files(tmp_path)[-1].write_bytes(cut.encode(errors="surrogateescape"))
    assert [record["sourceMetrics"] for record in store(tmp_path).newest()] == [{"rcvhwm": 0}]


def test_the_newest_report_is_the_newest_though_the_clock_has_stepped_back(tmp_path: Path) -> None:
    def report(to: MetricsStore, number: int, now: float) -> None:
        to.write_report("log-0", {"source": "SUB x", "sourceMetrics": {"rcvhwm": number}}, now)
        (newest,) = store(tmp_path).newest()
        assert newest["sourceMetrics"] == {"rcvhwm": number}
        assert newest["timestamp"] == iso(now)

    one = store(tmp_path)
    report(one, 1, NOW)
    report(one, 2, NOW - 3600)
    report(one, 3, NOW - 3598)
    report(store(tmp_path), 4, NOW - 3596)  # the process that goes on after a restart
    report(store(tmp_path), 5, NOW + 1)
    assert len(files(tmp_path)) == 5


def test_what_is_older_than_the_retention_is_removed_but_for_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.random, "randrange", lambda _: 0)  # each time
    for batch in range(95, 100):
        store(tmp_path).write_batch(entry(batch), NOW)
    for path in files(tmp_path):
        os.utime(path, (NOW - 7200, NOW - 7200))
    store(tmp_path).write_batch(entry(100), NOW)
    store(tmp_path).expire_batches(entry(100), NOW)
    kept = [json.loads(path.read_text())["batch"] for path in files(tmp_path)]
    assert kept == [99, 100]
    assert store(tmp_path).totals("query", [100])[100]["PUSH tcp://a:1"].total.rows == 60


def test_reports_of_a_source_are_expired_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.random, "randrange", lambda _: 0)
    for number in range(5):
        store(tmp_path).write_report("log-0", {"source": "SUB x"}, NOW + number)
    for path in files(tmp_path):
        os.utime(path, (NOW - 7200, NOW - 7200))
    store(tmp_path).write_report("log-0", {"source": "SUB x"}, NOW + 5)
    store(tmp_path).expire_reports("log-0", NOW + 5)
    assert len(files(tmp_path)) == 2


def test_what_a_killed_writer_has_left_is_removed_when_nobody_can_be_writing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.random, "randrange", lambda _: 0)
    store(tmp_path).write_batch(entry(0), NOW)
    (whole,) = files(tmp_path)
    os.utime(whole, (NOW, NOW))
    for age in (3500, 3700, 7300):
        left = whole.with_name(f".{age:032x}-{whole.name}")
        left.write_text("{")
        os.utime(left, (NOW - age, NOW - age))

    def ages(retention: float) -> list[int]:
        store(tmp_path, retention).expire_batches(entry(0), NOW)
        return sorted(int(path.name[1:33], 16) for path in whole.parent.glob(".*"))

    assert ages(retention=7200) == [3500, 3700]
    assert ages(retention=60) == [3500]
    assert files(tmp_path)[-1] == whole


def test_a_retention_longer_than_any_calendar_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.random, "randrange", lambda _: 0)
    store(tmp_path).write_batch(entry(0), NOW)
    store(tmp_path, retention=4000 * 365 * 86_400.0).expire_batches(entry(0), NOW)
    assert len(files(tmp_path)) == 1


def test_a_location_that_refuses_is_named_without_its_secrets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MetricsError, match=r"writing the account of batch 0 in .*file/metrics: "):
        store(blocked / "metrics").write_batch(entry(0), NOW)
    with pytest.raises(MetricsError) as raised:
        MetricsStore(Location("nosuch://user:password@host/x")).write_batch(entry(0), NOW)
    assert "password" not in str(raised.value)
    assert not [path for path in files(tmp_path) if path != blocked]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bytes:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module.msgspec.json, "encode", full)
    with pytest.raises(MetricsError, match="No space left"):
        store(tmp_path).write_batch(entry(0), NOW)
    assert files(tmp_path) == []


def test_batch_writes_of_their_own_expire_like_any_other_and_stay_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.random, "randrange", lambda _: 0)
    root = tmp_path / "metrics"
    for number in range(20):
        own = entry(0)._replace(query=f"write-../../../{number}", in_query=False)
        store(root).write_batch(own, NOW)
    assert len(files(tmp_path)) == 20
    assert all(path.parent == root / "sinks" / "writes" for path in files(tmp_path))
    for path in files(tmp_path):
        os.utime(path, (NOW - 7200, NOW - 7200))
    store(root).expire_batches(own, NOW)
    assert len(files(tmp_path)) == 2


def test_what_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    store(tmp_path).write_batch(entry(0), NOW, given_up)
    assert files(tmp_path) == []


def test_a_location_that_does_not_answer_is_given_up_in_time() -> None:
    let_go = threading.Event()
    with pytest.raises(MetricsError, match=r"writing: the file system has not answered for 0\.05 s"):
        within(0.05, "writing", lambda given_up: let_go.wait(10))
    let_go.set()
    assert within(10, "writing", lambda given_up: given_up.is_set()) is False
    with pytest.raises(MetricsError, match="ZeroDivisionError"):
        within(10, "writing", lambda given_up: 1 // 0)


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


def test_a_location_without_metrics_is_an_error_that_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="there are none; name the metricsLocation"):
        store(tmp_path).newest(required=True)


def test_each_file_of_a_history_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Counter[str] = Counter()
    load = store_module._load

    def counted(system: object, path: str) -> bytes | None:
        opened[path] += 1
        return load(system, path)

    for number in range(100):
        record = {"source": "SUB x", "sourceMetrics": {"rcvhwm": number}}
        store(tmp_path).write_report("log-0", record, NOW + number)
    monkeypatch.setattr(store_module, "_load", counted)
    listed = store(tmp_path).files()
    assert not opened
    records = [json.loads(text) for text in store(tmp_path).read(listed)]
    assert sorted(record["sourceMetrics"]["rcvhwm"] for record in records) == list(range(100))
    assert opened == dict.fromkeys(listed, 1)


def test_a_history_lacks_what_is_gone_and_what_is_none_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for batch in range(4):
        store(tmp_path).write_batch(entry(batch), NOW)
    listed = store(tmp_path).files()
    paths = files(tmp_path)
    paths[0].unlink()
    paths[1].write_bytes(b"\xff")
    paths[2].write_bytes(b"")
    records = [json.loads(text) for text in store(tmp_path).read(listed)]
    assert [record["batch"] for record in records] == [3]
    assert caplog.text.count("it is left out") == 2
