"""Peers that mean harm, at every socket that listens: the others are served, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

from tests.source.test_feed import querying
from tests.support import Offering, Socket, free_endpoint, keep_handlers, take_over, wait_for
from tests.support.hostile import Attacker, greeting, message, ready
from tests.support.proxies import ProxyThreads, endpoints
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options.socket import Endpoint

# Which socket a side talks to, and what its messages are made of.
SIDES = {
    "bind": (b"PUB", ["framing"]),
    "pull": (b"PUSH", ["framing"]),
    "publish": (b"SUB", []),
    "durable": (b"DEALER", ["durable"]),
}
SOURCES = {
    "PULL": (b"PUSH", ["framing"]),
    "SUB": (b"PUB", ["framing"]),
    "ROUTER": (b"DEALER", ["acknowledged"]),
}
GROWTH = 300 << 20


def _threads() -> list[str]:
    """Python's and libzmq's threads. Arrow starts some of its own when it first needs them, and keeps them."""
    names = []
    for entry in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((entry / "comm").read_text().strip())
    return [*(thread.name for thread in threading.enumerate()), *(name for name in names if "ZMQbg" in name)]


@contextmanager
def nothing_left() -> Iterator[zmq.Context[Socket]]:
    """Memory, descriptors and threads are as before, but for what is kept once; a context for what is opened."""
    zmq.Frame(bytes(1 << 20), copy=False)  # pyzmq keeps a thread and a context for frames that are not copied
    # A thread of libzmq gives itself its name, so on a busy machine it has none at first.
    wait_for(lambda: {"ZMQbg/Reaper", "ZMQbg/IO/0"} <= set(_threads()), "that context's threads")
    process = psutil.Process()
    memory, descriptors, threads = process.memory_info().rss, process.num_fds(), _threads()
    context = zmq.Context[Socket]()
    try:
        yield context
    finally:
        context.destroy(linger=0)
    try:
        wait_for(lambda: process.num_fds() <= descriptors + 5, "its descriptors back")
        wait_for(lambda: len(_threads()) <= len(threads), "its threads back")
    except AssertionError as e:
        left = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        raise AssertionError(f"{e}; {descriptors} and {threads} before, now {left} and {_threads()}") from e
    assert process.memory_info().rss < memory + GROWTH


def attack(endpoint: str, peer: bytes, kept: list[str], seed: int, times: int, messages: int) -> int:
    attacker = Attacker(endpoint, peer, kept, seed)
    attacker.attack(times, messages)
    return attacker.frames


@pytest.mark.parametrize(
    ("seed", "times", "messages"),
    [(1, 60, 20), pytest.param(2, 3500, 200, marks=pytest.mark.long)],
)
@pytest.mark.timeout(3600)
def test_no_side_of_a_proxy_fails_its_honest_peers(
    tmp_path: Path, seed: int, times: int, messages: int
) -> None:
    sides, frames = endpoints(*SIDES), 0
    with (
        nothing_left() as context,
        ProxyThreads(tmp_path / "log", sides, whenFull="wait") as proxy,
        DurableSubscriber(sides["durable"], "honest", topics=["honest"], timeout=60) as subscriber,
    ):
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        with Offering(push, 0.002, topic=b"honest") as sending:
            for side, (peer, kept) in SIDES.items():
                frames += attack(sides[side], peer, kept, seed, times, messages)
        push.close(linger=30_000)
        assert frames > times * messages
        print(f"a proxy: {frames:,} frames")
        got = [subscriber.receive(60) for _ in range(sending.sent)]
        assert [message.value for message in got if message] == [b"%d" % n for n in range(sending.sent)]
        proxy.receiver.check()


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(
    ("seed", "times", "messages"),
    [(1, 60, 20), pytest.param(2, 3500, 1000, marks=pytest.mark.long)],
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
    keep_handlers(monkeypatch)
    take_over(monkeypatch, standby=0.01)
    endpoint = free_endpoint()
    options = {"bind": endpoint, "socketType": kind, "maxMessagesPerTrigger": 20_000}
    with nothing_left() as context, querying(tmp_path, **options) as query:
        query.step()
        print(f"{kind}: {attack(endpoint, *SOURCES[kind], seed, times, messages):,} frames")
        peer: Socket | None = None
        if kind == "ROUTER":
            with Producer(endpoint, "honest") as producer:
                producer.send(b"honest")
                producer.flush()
        else:
            peer = context.socket(zmq.PUSH if kind == "PULL" else zmq.PUB)
            peer.connect(endpoint)

        def honest_row() -> bool:
            if peer is not None:
                peer.send(b"honest")
            query.step()
            values = [value for _, value in query.rows]
            query.rows.clear()  # millions of them would be the memory that is looked at
            return b"honest" in values

        wait_for(honest_row, "an honest row", 120)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_thousand_connections_cost_bounded_memory_and_nobody_a_message(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """Half of them say nothing, half of them shake hands, and later send one message each."""
    count, endpoint, log = 10_000, free_endpoint(), tmp_path / "log"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < count + 1000:
        pytest.skip(f"this user may open {limits[1]} files only")
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "PULL", "--bind", endpoint]
    program = subprocess.Popen([*command, "--wal-location", str(log)], stderr=subprocess.DEVNULL)
    receiver, peers = psutil.Process(program.pid), list[socket.socket]()

    def end() -> int:
        return read_index(LogStorage(str(log))).durable_end

    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    try:
        push = context.socket(zmq.PUSH)
        push.connect(endpoint)
        push.send_multipart([b"t", b"first"])
        wait_for(lambda: (log / "log.json").exists() and end() == 1, "the first message")
        before = receiver.memory_info().rss
        for number in range(count):
            peer = socket.create_connection(Endpoint.read(endpoint).host_port, timeout=30)
            peers.append(peer)
            peer.sendall(greeting() + ready(b"PUSH") if number % 2 else greeting()[: number % 64])
        wait_for(lambda: receiver.num_fds() > count, "all connections")
        for number in range(1000):
            push.send_multipart([b"t", b"%d" % number])
        wait_for(lambda: end() == 1001, "what the honest peer has sent", 60)
        for peer in peers[1::2]:
            peer.sendall(message([b"t", b"late"]))
        wait_for(lambda: end() == 1001 + count // 2, "a message of each that has shaken hands", 60)
        grown = receiver.memory_info().rss - before
        print(f"{grown / count:,.0f} bytes a connection")
        assert grown < count * 100_000
        for peer in peers:
            peer.close()
        wait_for(lambda: receiver.num_fds() < 200, "their descriptors back")
        program.terminate()
        assert program.wait(60) == 0
    finally:
        for peer in peers:
            peer.close()
        program.kill()
        program.wait(30)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
