"""The tables of ``live_view``, and the lines of ``receive`` and ``proxy``. No name is trusted."""

from __future__ import annotations

import io
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from zmq_datasource.counters import SinkCounters, figures, iso
from zmq_datasource.monitoring.tables import count
from zmq_datasource.monitoring.view import FigureLines, Figures, LiveView, Record, source_line

NOW = 1_795_000_000.0
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
    return printed((view or LiveView()).render(records, datetime.fromtimestamp(at, UTC)), width)


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
    record = {"kind": "sink", "timestamp": iso(at), "query": "query", "sink": sink}
    return record | {"sinkTotal": total}


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
        "paused": "now: logFull",
        "peers": "2",
        "rcvhwm": "1,000",
        "log": "1 MiB",
        "age": "3 s",
    }
    assert cells(text, "PUSH")[:4] == ["query: PUSH tcp://a:1", "30", "70", "40 hwm"]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_a_narrow_screen_folds_and_leaves_no_figure_out(width: int) -> None:
    text = shown([source(), sink(rows=1000, sent=900, dropped=Counter(hwm=100))], width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert "…" not in text


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


def test_a_query_without_a_first_event_says_so() -> None:
    assert "Nothing has reported yet." in shown([])


def test_rates_go_on_after_the_clock_has_stepped_back() -> None:
    view = LiveView()
    for sent, now in ((100, NOW), (200, NOW - 3600), (300, NOW - 3590)):
        text = shown([sink(now, rows=sent, sent=sent)], at=now, view=view)
    assert cells(text, "PUSH")[1] == "10"


def test_names_are_shown_as_they_are_and_steer_no_terminal() -> None:
    text = shown([sink(sink="PUSH tcp://[fe80::1]:5557") | {"name": "etl[/prod]"}])
    assert "etl[/prod]: PUSH tcp://[fe80::1]:5557" in text
    for width in (160, 60):
        text = shown([sink(sink="PUSH \x1b[2J") | {"name": "e\x1b]0;o\x07"}], width)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert r"e\x1b]0;o\x07" in text


def test_a_line_has_the_figures_of_the_view_without_what_is_0() -> None:
    line = source_line(SOURCE | {"receivePausedBy": None}, lambda name: None)
    assert line == (
        "SUB tcp://feed.example.com:5556: msg/s 1,234, backlog 42, oldest 1.5 s, lost 7, paused 2.5 s, peers 2, "
        "rcvhwm 1,000, log 1 MiB"
    )


def test_text_is_logged_only_while_something_is_received(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    times = iter((0.0, 1.0, 10.0, 15.0, 30.0, 31.0))
    lines = FigureLines(logging.getLogger("a receiver"), source_line, Figures(), lambda: next(times))
    for next_id in (5, 6, 7, 6, 8):
        lines.show(lambda: SOURCE, next_id)
    assert [line.rpartition("next id ")[2] for line in caplog.messages] == ["6", "8"]


def test_json_is_printed_at_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, 2.0, 3.0, 4.0))
    log = logging.getLogger("a receiver")
    lines = FigureLines(log, source_line, Figures("json", 2.0), lambda: next(times))
    for _ in range(4):
        lines.show(lambda: SOURCE, 5)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [figures["backlogMessages"] for figures in printed] == [42, 42]
    assert all(datetime.fromisoformat(figures["timestamp"]) for figures in printed)


def test_a_line_of_a_receiver_has_the_subscribers_that_it_serves() -> None:
    figures = {**SOURCE, "published": 2000, "subscribers": 3, "durable": [{}, {}]}
    line = source_line(figures, {"published": 1000.0}.get)
    assert line.endswith("published/s 1,000, subscribers 3, durable 2")
