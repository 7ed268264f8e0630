"""Peers that mean harm, at every socket that listens: the others are served, and nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from tests.source.test_feed import querying
from tests.support import Socket, free_endpoint, wait_for
from tests.support.hostile import Attacker
from tests.support.proxies import ProxyThreads, endpoints
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.source import feed as feed_module

# Which socket a side talks to, and what its messages are made of.
SIDES = {
    "bind": (b"PUB", ["framing"]),
    "pull": (b"PUSH", ["framing"]),
    "router": (b"DEALER", ["acknowledged"]),
    "publish": (b"SUB", []),
    "replay": (b"DEALER", ["replay"]),
    "durable": (b"DEALER", ["durable"]),
}
SOURCES = {
    "PULL": (b"PUSH", ["framing"]),
    "SUB": (b"PUB", ["framing"]),
    "ROUTER": (b"DEALER", ["acknowledged"]),
}
GROWTH = 300 << 20


@contextmanager
def nothing_left() -> Iterator[zmq.Context[Socket]]:
    """Memory, descriptors and threads are as before, but for what is kept once; a context for what is opened."""
    process = psutil.Process()
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    context = zmq.Context[Socket]()
    try:
        yield context
    finally:
        context.destroy(linger=0)
    try:
        wait_for(lambda: process.num_fds() <= before[1] + 5, "its descriptors back")
        wait_for(lambda: process.num_threads() <= before[2] + 2, "its threads back")
    except AssertionError as e:
        left = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        raise AssertionError(f"{e}; {before} before, now {process.num_threads()} threads, {left}") from e
    assert process.memory_info().rss < before[0] + GROWTH


@contextmanager
def honest(context: zmq.Context[Socket], endpoint: str, sent: list[bytes]) -> Iterator[None]:
    """A PUSH that goes on sending."""
    push = context.socket(zmq.PUSH)
    push.connect(endpoint)
    end = threading.Event()

    def send() -> None:
        while not end.wait(0.002):
            with suppress(zmq.Again):
                push.send_multipart([b"honest", b"%d" % len(sent)], zmq.NOBLOCK)
                sent.append(b"%d" % len(sent))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(30)
        push.close(linger=30_000)


def attack(endpoint: str, peer: bytes, kept: list[str], seed: int, times: int, messages: int) -> int:
    attacker = Attacker(endpoint, peer, kept, seed)
    attacker.attack(times, messages)
    return attacker.frames


@pytest.mark.parametrize(
    ("seed", "times", "messages"),
    [(1, 60, 20), pytest.param(2, 3000, 200, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_no_side_of_a_proxy_fails_its_honest_peers(
    tmp_path: Path, seed: int, times: int, messages: int
) -> None:
    sides, sent, frames = endpoints(*SIDES), list[bytes](), 0
    with (
        nothing_left() as context,
        ProxyThreads(tmp_path / "log", sides, whenFull="wait") as proxy,
        DurableSubscriber(sides["durable"], "honest", topics=["honest"], timeout=60) as subscriber,
    ):
        with honest(context, sides["pull"], sent):
            for side, (peer, kept) in SIDES.items():
                frames += attack(sides[side], peer, kept, seed, times, messages)
        assert frames > times * messages
        got = [subscriber.receive(60) for _ in sent]
        assert [message.value for message in got if message] == sent
        with Producer(sides["router"], "honest") as producer:
            producer.send(b"honest transaction", b"honest")
            producer.flush()
        last = subscriber.receive(60)
        assert last is not None
        assert last.value == b"honest transaction"
        assert proxy.failure is None


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    ("seed", "times", "messages"),
    [(1, 60, 20), pytest.param(2, 3000, 1000, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_no_source_fails_its_honest_peers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    seed: int,
    times: int,
    messages: int,
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(feed_module, "_STANDBY_SECONDS", 0.01)
    endpoint = free_endpoint()
    with nothing_left() as context, querying(tmp_path, bind=endpoint, socketType=kind) as query:
        query.step()
        attack(endpoint, *SOURCES[kind], seed, times, messages)
        if kind == "ROUTER":
            with Producer(endpoint, "honest") as producer:
                producer.send(b"honest")
                producer.flush()
        else:
            peer = context.socket(zmq.PUSH if kind == "PULL" else zmq.PUB)
            peer.connect(endpoint)
            wait_for(
                lambda: peer.send(b"honest") or honest_rows(query.rows) or query.step() < 0, "an honest row"
            )
        wait_for(lambda: query.step() and honest_rows(query.rows), "an honest row")


def honest_rows(rows: list[tuple[int, bytes]]) -> int:
    return sum(value == b"honest" for _, value in rows)
