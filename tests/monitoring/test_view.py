"""``top``, ``live_view`` and the monitor of a proxy: one renderer that fits each screen and trusts no name."""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from tests.support import Socket, wait_for
from tests.support.proxies import Client, ProxyThreads, endpoints
from zmq_datasource.cli import main
from zmq_datasource.counters import SinkCounters, figures, iso
from zmq_datasource.errors import MetricsError
from zmq_datasource.monitoring.accounts import Account
from zmq_datasource.monitoring.prometheus import PrometheusOutlet, shown_of_proxy
from zmq_datasource.monitoring.store import MetricsStore
from zmq_datasource.monitoring.tables import count, shortened
from zmq_datasource.monitoring.top import records_of_page
from zmq_datasource.monitoring.view import LiveView, Record, StatusLines, proxy_record, source_record
from zmq_datasource.options.types import Location
from zmq_datasource.spark.listener import QueryEvents

NOW = 1_795_000_000.0
EVIL = b"\x1b]0;owned\x07\x1b[2J"
SOURCE = {
    "source": "SUB tcp://feed.example.com:5556",
    "messagesReceived": 5000,
    "messagesReceivedPerSecond": 1234.5,
    "backlogMessages": 42,
    "backlogAgeMs": 1500,
    "messagesLost": 7,
    "messagesMalformed": 0,
    "receivePausedBy": "logFull",
    "receivePausedMsByCause": {"logFull": 2500},
    "connections": 2,
    "rcvhwm": 1000,
    "logBytes": 1 << 20,
}


def printed(content: Table, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(content)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def shown(records: Iterable[Record], width: int = 160, at: float = NOW, view: LiveView | None = None) -> str:
    return printed((view or LiveView(width=width)).render(records, datetime.fromtimestamp(at, UTC)), width)


def cells(text: str, name: str) -> list[str]:
    """The cells of the first line that has this name."""
    return next(re.split(r"  +", line.strip()) for line in text.splitlines() if name in line)


def source(at: float = NOW, **more: Any) -> Record:
    return {
        "kind": "source",
        "timestamp": iso(at),
        "source": SOURCE["source"],
        "sourceMetrics": SOURCE | more,
    }


def sink(at: float = NOW, sink: str = "PUSH tcp://a:1", **counters: Any) -> dict[str, Any]:
    total = {**figures(SinkCounters(**counters)), "batches": 1}
    record = {"kind": "sink", "timestamp": iso(at), "query": "query", "batch": 1, "sink": sink}
    return record | {"sinkMetrics": total, "sinkTotal": total}


def test_a_wide_screen_has_all_figures_in_one_table_for_each_kind() -> None:
    view = LiveView()
    shown([sink(rows=10, sent=10)], view=view)
    dropped = sink(NOW + 2, rows=110, sent=70, dropped=Counter(hwm=40))
    text = shown([source(), dropped], at=NOW + 3, view=view)
    titles, figures = cells(text, "backlog"), cells(text, "SUB")
    found = dict(zip(titles, figures, strict=True))
    assert found == {
        "source": "SUB tcp://feed.example.com:5556",
        "msg/s": "1,234",
        "backlog": "42",
        "oldest": "1.5 s",
        "lost": "7",
        "duplicate": "–",
        "malformed": "0",
        "paused": "now: logFull",
        "peers": "2",
        "rcvhwm": "1,000",
        "log": "1 MiB",
        "age": "3 s",
    }
    assert cells(text, "PUSH")[:6] == ["query: PUSH tcp://a:1", "1", "30", "20", "70", "40 hwm"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_screen_wraps_no_line_and_leaves_no_figure_out(width: int) -> None:
    records = [source(), sink(rows=1000, sent=900, dropped=Counter(hwm=100))]
    text = shown(records, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert not any(
        line.startswith(" ") for line in text.splitlines() if line.strip()
    )  # the rest of a wrapped one
    for title in ("msg/s", "lost", "paused", "rcvhwm", "sent", "dropped", "blocked"):
        assert re.search(rf"\b{title}\b", text), title
    for figure in ("1,234", "42", "now: logFull", "100 hwm", "900"):
        assert figure in text, figure
    assert "0 everywhere: malformed" in text
    assert "Not known: duplicate" in text


def test_a_healthy_source_and_its_sink_are_a_line_each_on_80_columns() -> None:
    healthy = source(
        messagesLost=0, messagesDuplicate=0, receivePausedBy=None, receivePausedMsByCause={"logFull": 0}
    )
    text = shown([healthy, sink(rows=10, sent=10)], 80)
    assert sum("SUB" in line for line in text.splitlines()) == 1
    assert sum("PUSH" in line for line in text.splitlines()) == 1
    assert "0 everywhere: lost, duplicate, malformed, paused" in text


def test_a_name_that_is_too_long_is_shortened_in_the_middle() -> None:
    assert shortened("SUB tcp://feed.example.com:5556", 20) == "SUB tcp://fee…m:5556"
    assert shortened("short", 5) == "short"
    assert cell_len(shortened("データ" * 10, 21)) <= 21
    assert shortened("abc", 1) == "…"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (99_999, "99,999"), (123_456, "123k"), (1_234_567, "1.2M"), (2.5e12, "2,500G")],
)
def test_a_count_takes_six_characters(value: float, text: str) -> None:
    assert count(value) == text


def test_the_name_that_spark_has_for_a_query_comes_first() -> None:
    named = {"query": "3f8a3f8a-0000-0000-0000-000000000000", "name": "orders"}
    mine = dict(source()) | named | {"source": "SUB tcp://feed:1 (orders-reader)"}
    text = shown([mine, sink() | named])
    assert "orders: SUB tcp://feed:1 " in text
    assert "orders: PUSH tcp://a:1" in text
    assert "3f8a3f8a: PUSH" in shown([sink() | named | {"name": None}])


def test_what_has_stopped_sending_figures_is_left_out_and_counted() -> None:
    text = shown([source(NOW - 61), sink()], view=LiveView(since=60))
    assert "SUB" not in text
    assert "PUSH" in text
    assert "1 more sent no figures for 1 minute." in text
    assert "Nothing has reported yet." in shown([])


def test_rates_go_on_after_the_clock_has_stepped_back() -> None:
    view = LiveView()
    for sent, now in ((100, NOW), (200, NOW - 3600), (300, NOW - 3590)):
        text = shown([sink(now, rows=sent, sent=sent)], at=now, view=view)
    assert cells(text, "PUSH")[2] == "10"


def test_names_are_shown_as_they_are_whatever_is_in_them() -> None:
    text = shown([sink(sink="PUSH tcp://[fe80::1]:5557") | {"name": "etl[/prod]"}])
    assert "etl[/prod]: PUSH tcp://[fe80::1]:5557" in text


def test_no_name_steers_the_terminal_that_shows_it() -> None:
    for width in (160, 60):
        text = shown([sink(sink="PUSH \x1b[2J") | {"name": "e\x1b]0;o\x07"}], width)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert r"e\x1b]0;o\x07" in text


def test_a_status_line_has_the_figures_of_the_view_without_what_is_0() -> None:
    line = LiveView().line(source_record(SOURCE | {"receivePausedBy": None}))
    assert line.startswith(
        "SUB tcp://feed.example.com:5556: msg/s 1,234, backlog 42, oldest 1.5 s, lost 7, paused 2.5 s"
    )
    assert "malformed" not in line


def test_a_status_line_is_logged_only_while_something_is_received(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = iter((0.0, 1.0, 10.0, 15.0, 30.0, 31.0))
    lines = StatusLines(logging.getLogger("a receiver"), clock=lambda: next(times))
    for next_id in (5, 6, 7, 6, 8):
        lines.show(lambda: source_record(SOURCE), next_id)
    assert [line.rpartition("next id ")[2] for line in caplog.messages] == ["6", "8"]


# A proxy.


def test_no_topic_steers_the_terminal_of_the_monitor(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints("bind", "publish", "durable")
    with ProxyThreads(tmp_path, sides) as proxy:
        plain = context.socket(zmq.SUB)
        plain.subscribe(EVIL)
        plain.connect(sides["publish"])
        # Rich would fail at the second topic and the name, which close what was never opened in its markup.
        for name, topic in (("one", EVIL), ("two[/b]", b"[/red]")):
            Client(context, sides["durable"]).open(name, topics=[topic])
        wait_for(
            lambda: len(proxy.next_status()["durable"]) == 2 and proxy.flow.status()["subscriptions"],
            "all to be subscribed",
        )
        text = shown([proxy_record("proxy", {**proxy.flow.status(), **proxy.next_status()})], 200)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count(r"\x1b]0;owned\x07\x1b[2J") == 2
    assert "two[/b]" in text
    assert "[/red]" in text


@pytest.fixture
def statuses(tmp_path: Path) -> list[dict[str, Any]]:
    """Of a proxy: one from its start, and one two seconds later."""
    with ProxyThreads(tmp_path, endpoints("bind", "publish", "durable")) as proxy:
        status = {**proxy.flow.status(), **proxy.next_status()}
    account = {"name": "me", "topics": [], "backlog": 12_345, "sent": 9, "lost": 3, "lastAckSeconds": None}
    account |= {"connected": False, "awaySeconds": 7200.0, "nextId": 7}
    later = {**status, "received": 2000, "durable": [account], "diskFault": "no space left", "paused": True}
    return [status, later]


@pytest.mark.parametrize("width", [160, 80, 60])
def test_rates_backlogs_and_what_holds_receiving_up_are_shown_on_any_screen(
    width: int, statuses: list[dict[str, Any]]
) -> None:
    view = LiveView(width=width)
    for seconds, status in zip((0, 2), statuses, strict=True):
        record = {**proxy_record("tcp://*:5557", status), "timestamp": iso(NOW + seconds)}
        text = shown([record], width, NOW + seconds, view)
    assert all(cell_len(line) <= width for line in text.splitlines())
    for part in ("tcp://*:5557", "no space left", "now", "1,000", "12,345", "2 hours", "(all)", "never"):
        assert part in text, part


# top.


def test_top_shows_a_location_once_and_names_what_is_wrong(tmp_path: Path) -> None:
    counters = SinkCounters(rows=10, sent=6, dropped=Counter(hwm=4))
    account = Account(
        query="query",
        name="orders",
        execution="e",
        batch=3,
        sink="PUSH tcp://a:1",
        writes=("query",),
        figures=figures(counters),
        timestamp=iso(NOW),
    )
    MetricsStore(Location(str(tmp_path)), 3600).write_batch(account)
    result = CliRunner().invoke(main, ["top", str(tmp_path), "--since", "36500d", "--once"])
    assert result.exit_code == 0, result.output
    assert cells(result.stdout, "PUSH")[:6] == ["orders: PUSH tcp://a:1", "3", "–", "–", "6", "4 hwm"]
    for arguments, word in (
        ([str(tmp_path / "missing")], "there are none"),
        ([""], "a LOCATION is empty"),
        ([], "Missing argument 'LOCATION...'"),
        (
            ["http://127.0.0.1:1/metrics"],
            "Connection refused; name the URL of a program that runs with --prometheus",
        ),
        ([str(tmp_path), "--interval", "5"], "a number and a unit"),
    ):
        result = CliRunner().invoke(main, ["top", *arguments])
        assert result.exit_code != 0
        assert word in result.stderr


def test_top_shows_a_proxy_by_its_url(statuses: list[dict[str, Any]]) -> None:
    served = PrometheusOutlet(lambda: shown_of_proxy(statuses[1]))
    served.serve(0, "127.0.0.1")
    try:
        url = f"http://127.0.0.1:{served.port}/metrics"
        result = CliRunner().invoke(main, ["top", url])
    finally:
        served.close()
    assert result.exit_code == 0, result.output
    proxy = dict(zip(cells(result.stdout, "published/s"), cells(result.stdout, url), strict=True))
    assert (proxy["received"], proxy["paused"]) == ("2,000", "now")
    assert cells(result.stdout, "me ")[:6] == ["me", "12,345", "9", "3", "never", "2 hours"]


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("<html>no metrics</html>", None),
        ("up 1\n", []),
        ('zmq_proxy_next_id 5\nzmq_sink_batches_total{query="q",query_id="q",sink="PUSH x"} 3\n', []),
        ("zmq_query_active 0\nzmq_source_rcvhwm 5\n", []),
    ],
)
def test_a_page_of_another_program_or_release_is_no_traceback(page: str, shown: list[Record] | None) -> None:
    if shown is None:
        with pytest.raises(MetricsError, match="not in Prometheus' text format"):
            records_of_page(page, "http://a/metrics")
    else:
        assert records_of_page(page, "http://a/metrics") == shown


def test_top_shows_the_queries_of_a_spark_application_by_its_url() -> None:
    event = {
        "id": "3f8a",
        "name": "orders",
        "timestamp": iso(NOW),
        "sources": [{"latestOffset": {"log": "l"}, "metrics": SOURCE}],
        "sink": {"metrics": {"bySink": {"PUSH tcp://a:1": {"total": sink(rows=9, sent=9)["sinkTotal"]}}}},
    }
    events = QueryEvents()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusOutlet(events.shown))
    events.observe(event)
    events.observe(event | {"id": "4a4a", "name": "ended"})
    events.ended("4a4a")
    text = shown(records_of_page(generate_latest(registry).decode(), "http://driver:9400/metrics"))
    assert cells(text, "SUB")[0] == "orders: SUB tcp://feed.example.com:5556"
    assert cells(text, "SUB")[2:5] == ["42", "1.5 s", "7"]
    assert cells(text, "SUB")[7] == "now: logFull"
    assert cells(text, "PUSH")[:5] == ["orders: PUSH tcp://a:1", "–", "–", "–", "9"]
    assert "ended" not in text
