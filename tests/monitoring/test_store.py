"""The files at metricsLocation: idempotent, whole, added up by readers, bounded, and clear when they cannot be."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import DATA, at_failpoints
from zmq_datasource.counters import SinkCounters, figures, iso
from zmq_datasource.errors import MetricsError, OptionError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import check_location
from zmq_datasource.monitoring.accounts import Account, BatchHistory
from zmq_datasource.monitoring.files import within
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.options.types import Location
from zmq_datasource.spark.queries import fill_in_sinks

NOW = 1_795_000_000.0
GOLDEN = DATA / "metrics-2"
SINK = "PUSH tcp://a:1"


def store(root: Path, retention: float = 3600, apart: int = 2) -> MetricsStore:
    return MetricsStore(Location(str(root)), retention, tidying=100, apart=apart)


def account(batch: int, rows: int = 10, dropped: int = 0, at: float = NOW, **more: Any) -> Account:
    counters = SinkCounters(rows=rows, sent=rows - dropped, dropped=Counter(hwm=dropped))
    given = {"query": "query", "execution": "e", "sink": SINK, "writes": ("query",), "batch": batch}
    return Account(**given | {"figures": figures(counters), "timestamp": iso(at)} | more)


def total(root: Path, batch: int, sink: str = SINK) -> dict[str, Any]:
    return dict(store(root).totals("query", [batch])[batch][sink].total)


def age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        os.utime(path, (NOW - seconds, NOW - seconds))


def report(number: int) -> dict[str, Any]:
    return {"source": "SUB x", "log": "log", "sourceMetrics": {"rcvhwm": number}}


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_each_batch_is_a_file_with_its_account_alone(tmp_path: Path) -> None:
    for batch in range(3):
        store(tmp_path).write_batch(account(batch, dropped=batch, at=NOW + batch))
    records = [json.loads(path.read_text()) for path in files(tmp_path)]
    assert [(r["batch"], r["sinkMetrics"]["rows"]) for r in records] == [(0, 10), (1, 10), (2, 10)]
    assert records[2]["timestamp"] == "2026-11-18T11:06:42.000Z"
    assert records[2]["sinkMetrics"]["droppedByReason"] == {"hwm": 2, "no_peer": 0, "connection_lost": 0}
    whole = total(tmp_path, 2)
    assert [whole[name] for name in ("batches", "rows", "dropped")] == [3, 30, 3]


def test_the_format_is_that_of_the_golden_files(tmp_path: Path) -> None:
    to = store(tmp_path)
    for batch in range(7, 10):
        to.write_batch(account(batch, dropped=3, name="orders"))
    to.tidy_batches(account(9), NOW)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in files(tmp_path)}
    assert made == {path.relative_to(GOLDEN): path.read_bytes() for path in files(GOLDEN)}
    assert [path.parts[0] for path in made] == ["sinks"] * 3 + ["sums"]
    assert total(GOLDEN, 9)["sent"] == 21


def test_files_of_another_format_are_named_with_the_way_out(tmp_path: Path) -> None:
    store(tmp_path).write_report("log-0", report(0), NOW)
    (newer,) = files(tmp_path)
    newer.write_text(newer.read_text().replace('"format":2', '"format":1'))
    old = store(DATA / "metrics-1")
    reads: list[Callable[[], object]] = [
        store(tmp_path).newest,
        old.newest,
        lambda: old.totals("query", [7]),
        lambda: list(old.read(old.paths())),
    ]
    for read in reads:
        with pytest.raises(MetricsError, match=r"\.json: it is of format 1 .* name another metricsLocation"):
            read()


def test_a_repeated_batch_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store(tmp_path).write_batch(account(0))
    store(tmp_path).write_batch(account(1, execution="killed"))
    for _ in range(2):
        store(tmp_path).write_batch(account(1, dropped=3, execution="next"))
    whole = total(tmp_path, 1)
    assert (whole["batches"], whole["rows"], whole["sent"]) == (2, 20, 17)
    assert len(files(tmp_path)) == 2


def test_a_second_write_of_the_same_execution_adds_to_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        store(tmp_path).write_batch(account(0, writes=("one",)))
        store(tmp_path).write_batch(account(0, rows=5, writes=("two",)))
    whole = total(tmp_path, 0)
    assert (whole["rows"], whole["batches"]) == (15, 1)


def test_totals_go_on_over_batches_that_were_not_written(tmp_path: Path) -> None:
    store(tmp_path).write_batch(account(4))
    store(tmp_path).write_batch(account(9))
    found = store(tmp_path).totals("query", [3, 4, 7, 9])
    rows = {batch: [after.total["rows"] for after in sinks.values()] for batch, sinks in found.items()}
    assert rows == {3: [], 4: [10], 7: [10], 9: [20]}
    assert found[7][SINK].batch["rows"] == 0


def test_sinks_of_a_query_have_series_of_their_own(tmp_path: Path) -> None:
    store(tmp_path).write_batch(account(0))
    store(tmp_path).write_batch(account(0, rows=3, sink="PUB ipc:///tmp/b"))
    found = store(tmp_path).totals("query", [0])[0]
    assert {name: after.total["rows"] for name, after in found.items()} == {SINK: 10, "PUB ipc:///tmp/b": 3}


def test_sinks_of_which_only_one_has_files_are_shown_together(tmp_path: Path) -> None:
    """As two that ``foreachBatch`` writes to."""
    history, with_files, without = BatchHistory(), account(0), account(0, rows=7, sink="PUSH tcp://b:1")
    for each in (with_files, without):
        history.add(each)
    store(tmp_path).write_batch(with_files)
    event: dict[str, Any] = {"id": "query", "batchId": 0, "durationMs": {"addBatch": 1}, "sink": {}}
    fill_in_sinks([event], str(tmp_path), history)
    metrics = event["sink"]["metrics"]
    assert set(metrics["bySink"]) == {with_files.sink, without.sink}
    assert metrics["sent"] == metrics["total"]["sent"] == 17


# Sums.


def test_old_batches_are_summed_up_and_removed_and_no_total_changes(tmp_path: Path) -> None:
    for batch in range(30):
        to = store(tmp_path)
        to.write_batch(account(batch, dropped=batch % 2))
        age(files(tmp_path), 7200)
        to.tidy_batches(account(batch), NOW)
        whole = total(tmp_path, batch)
        expected = batch + 1, 10 * (batch + 1), (batch + 1) // 2
        assert (whole["batches"], whole["rows"], whole["dropped"]) == expected
    assert store(tmp_path).newest()[0]["sinkTotal"] == whole
    by_kind = Counter(path.relative_to(tmp_path).parts[0] for path in files(tmp_path))
    assert by_kind == {"sinks": 3, "sums": 2}  # what the sum before it lacks


def test_the_batches_that_spark_shows_have_totals_and_older_ones_none(tmp_path: Path) -> None:
    for batch in range(30):
        store(tmp_path).write_batch(account(batch))
        store(tmp_path, apart=10).tidy_batches(account(batch), NOW)
    found = store(tmp_path).totals("query", range(30))
    assert [batch for batch in found if found[batch]] == list(range(20, 30))
    for batch in range(20, 30):
        after = found[batch][SINK]
        assert (after.batch["rows"], after.total["rows"]) == (10, 10 * (batch + 1))


@pytest.mark.parametrize("step", ["before_write", "before_move", "after_move"])
def test_a_sum_that_is_interrupted_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for batch in range(9):
        store(tmp_path).write_batch(account(batch))

    def fail(name: str) -> None:
        if name == f"monitoring.metrics.{step}":
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as faulty:
        faulty.setattr(failpoints, "reach", fail)
        store(tmp_path).tidy_batches(account(8), NOW)
    assert total(tmp_path, 8)["rows"] == 90
    store(tmp_path).write_batch(account(9))
    store(tmp_path).tidy_batches(account(9), NOW)
    assert total(tmp_path, 9)["rows"] == 100


def test_a_batch_that_a_sum_has_is_not_added_to_it_again(tmp_path: Path) -> None:
    for batch in range(9):
        store(tmp_path).write_batch(account(batch))
    store(tmp_path).tidy_batches(account(8), NOW)
    store(tmp_path).write_batch(account(3, execution="late"))
    assert total(tmp_path, 8)["rows"] == 90


# Files that are not whole.


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"format": "2"}', b"null", b'{"format": 2, "kind": "sink"}', b"[" * 100_000),
        b'{"format": 2, "query": "\xff\xfe"}',
        *(
            json.dumps(
                {"format": 2, "kind": "sink", "query": "q", "execution": "e", "batch": 1, "sink": SINK}
                | {"writes": ["q"], "timestamp": at, "sinkMetrics": figures_in_it}
            ).encode()
            for at, figures_in_it in (("soon", {}), (iso(NOW), []))
        ),
    ],
)
def test_a_file_that_is_none_of_ours_is_said_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    for batch in range(2):
        store(tmp_path).write_batch(account(batch))
    files(tmp_path)[-1].write_bytes(content)
    assert total(tmp_path, 1)["rows"] == 10
    assert [record["batch"] for record in store(tmp_path).newest()] == [0]
    store(tmp_path).write_batch(account(2))
    assert total(tmp_path, 2)["rows"] == 20  # of batches 0 and 2
    assert "it is left out" in caplog.text


@pytest.mark.parametrize("cut", ["", "\udcff", '{"format": 2, "kind": "source"}'])
def test_a_report_that_is_not_whole_leaves_the_one_before_it(tmp_path: Path, cut: str) -> None:
    for number in range(2):
        store(tmp_path).write_report("log-0", report(number), NOW + number)
    files(tmp_path)[-1].write_bytes(cut.encode(errors="surrogateescape"))
    assert [record["sourceMetrics"] for record in store(tmp_path).newest()] == [{"rcvhwm": 0}]


def test_the_newest_report_is_the_newest_though_the_clock_has_stepped_back(tmp_path: Path) -> None:
    def write(to: MetricsStore, number: int, now: float) -> None:
        to.write_report("log-0", report(number), now)
        (newest,) = store(tmp_path).newest()
        assert newest["sourceMetrics"] == {"rcvhwm": number}
        assert newest["timestamp"] == iso(now)

    one = store(tmp_path)
    write(one, 1, NOW)
    write(one, 2, NOW - 3600)
    write(one, 3, NOW - 3598)
    write(store(tmp_path), 4, NOW - 3596)  # the process that goes on after a restart
    write(store(tmp_path), 5, NOW + 1)
    assert len(files(tmp_path)) == 5


def test_reports_of_a_source_expire_but_for_the_newest(tmp_path: Path) -> None:
    for number in range(5):
        store(tmp_path).write_report("log-0", report(number), NOW + number)
    age(files(tmp_path), 7200)
    store(tmp_path).write_report("log-0", report(5), NOW + 5)
    store(tmp_path).tidy_reports("log-0", NOW + 5)
    assert len(files(tmp_path)) == 2


def test_what_a_killed_writer_has_left_is_removed_when_nobody_can_be_writing_it(
    tmp_path: Path,
) -> None:
    store(tmp_path).write_batch(account(0))
    (whole,) = files(tmp_path)
    os.utime(whole, (NOW, NOW))
    for age in (3500, 3700, 7300):
        left = whole.with_name(f".{age:032x}-{whole.name}")
        left.write_text("{")
        os.utime(left, (NOW - age, NOW - age))

    def ages(retention: float) -> list[int]:
        store(tmp_path, retention).tidy_batches(account(0), NOW)
        return sorted(int(path.name[1:33], 16) for path in whole.parent.glob(".*"))

    assert ages(retention=7200) == [3500, 3700]
    assert ages(retention=60) == [3500]
    assert files(tmp_path)[-1] == whole


def test_a_retention_longer_than_any_calendar_removes_nothing(
    tmp_path: Path,
) -> None:
    store(tmp_path).write_batch(account(0))
    store(tmp_path, retention=4000 * 365 * 86_400.0).tidy_batches(account(0), NOW)
    assert len(files(tmp_path)) == 1


def test_a_location_that_refuses_is_named_without_its_secrets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MetricsError, match=r"writing the account of batch 0 in .*file/metrics: "):
        store(blocked / "metrics").write_batch(account(0))
    with pytest.raises(MetricsError) as raised:
        MetricsStore(Location("nosuch://user:password@host/x")).write_batch(account(0))
    assert "password" not in str(raised.value)
    assert not [path for path in files(tmp_path) if path != blocked]


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    at_failpoints(monkeypatch, full)
    with pytest.raises(MetricsError, match="No space left"):
        store(tmp_path).write_batch(account(0))
    assert files(tmp_path) == []


def test_batch_writes_of_their_own_expire_like_any_other_and_stay_inside(
    tmp_path: Path,
) -> None:
    root = tmp_path / "metrics"
    for number in range(20):
        own = account(0, query=f"write-../../../{number}", in_query=False)
        store(root).write_batch(own)
    assert len(files(tmp_path)) == 20
    assert all(path.parent == root / "sinks" / "writes" for path in files(tmp_path))
    age(files(tmp_path), 7200)
    store(root).tidy_batches(own, NOW)
    assert len(files(tmp_path)) == 2


def test_what_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    store(tmp_path).write_batch(account(0), given_up)
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


def test_each_file_of_a_history_is_read_once_in_order(tmp_path: Path) -> None:
    for number in range(100):
        store(tmp_path).write_report("log-0", report(number), NOW + number)
    records = [json.loads(text) for text in store(tmp_path).read(store(tmp_path).paths())]
    assert [record["sourceMetrics"]["rcvhwm"] for record in records] == list(range(100))


def test_a_history_lacks_what_is_gone_and_what_is_none_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for batch in range(4):
        store(tmp_path).write_batch(account(batch))
    listed = store(tmp_path).paths()
    paths = files(tmp_path)
    paths[0].unlink()
    paths[1].write_bytes(b"\xff")
    paths[2].write_bytes(b"")
    records = [json.loads(text) for text in store(tmp_path).read(listed)]
    assert [record["batch"] for record in records] == [3]
    assert caplog.text.count("it is left out") == 2


def test_tidying_that_is_not_due_does_nothing(tmp_path: Path) -> None:
    never = MetricsStore(Location(str(tmp_path)), tidying=0)
    never.tidy_reports("log-0", NOW)
    never.tidy_batches(account(0), NOW)
    assert files(tmp_path) == []
