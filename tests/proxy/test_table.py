"""What ``proxy --monitor`` shows: the topics and names of strangers, as text and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

import zmq
from rich.console import Console
from rich.table import Table

from tests.support import Socket, wait_for
from tests.support.proxies import Client, ProxyThreads, endpoints
from zmq_datasource.monitoring.view import ProxyView

EVIL = b"\x1b]0;owned\x07\x1b[2J"


def printed(content: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(content)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def shown(proxy: ProxyThreads) -> str:
    return printed(ProxyView(200).render({**proxy.flow.status(), **proxy.next_status()}, 0.0), 200)


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
        text = shown(proxy)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count(r"\x1b]0;owned\x07\x1b[2J") == 2
    assert "two[/b]" in text
    assert "[/red]" in text


def test_rates_backlogs_and_what_holds_receiving_up_are_shown_on_any_screen(tmp_path: Path) -> None:
    with ProxyThreads(tmp_path, endpoints("bind", "publish", "durable")) as proxy:
        status = {**proxy.flow.status(), **proxy.next_status()}
    account = {"name": "me", "topics": [], "backlog": 12_345, "sent": 9, "lost": 3, "lastAckSeconds": None}
    account |= {"connected": False, "awaySeconds": 7200.0}
    later = {**status, "received": 2000, "durable": [account], "diskFault": "no space left"}
    for width in (160, 60):
        view = ProxyView(width)
        assert "The proxy is starting." in printed(view.render({}, 0.0), width)
        assert "msg/s" in printed(view.render(status, 0.0), width)
        text = " ".join(printed(view.render(later, 2.0), width).replace("\N{NO-BREAK SPACE}", " ").split())
        for part in ("paused: no space left", "1,000", "12,345", "2 hours", "(all)", "never"):
            assert part in text, (width, part)
