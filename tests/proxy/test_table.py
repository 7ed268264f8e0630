"""What ``proxy --monitor`` shows: the topics and names of strangers, as text and nothing else."""

from __future__ import annotations

import io
from pathlib import Path

import zmq
from rich.console import Console

from tests.support import Socket, wait_for
from tests.support.proxies import Client, ProxyThreads, endpoints
from zmq_datasource.proxy.table import Rates, show

EVIL = b"\x1b]0;owned\x07\x1b[2J"


def shown(proxy: ProxyThreads) -> str:
    status = {**proxy.flow.status(), **proxy.next_status()}
    console = Console(file=io.StringIO(), width=200)
    console.print(show(status, Rates()))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


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
