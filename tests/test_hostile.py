"""Peers that mean harm, at every socket that listens: the others are served, and nothing is left behind."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import zmq

from tests.support import Offering, Socket, free_endpoint, wait_for
from tests.support.hostile import attack, greeting, message, ready
from tests.support.programs import program, receiving
from tests.support.proxies import publisher
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options.socket import Endpoint

# For each program its sides that are attacked: the socket that such a side talks to, and what its messages are made of.
SIDES = {
    "receive --socket-type PULL": {"bind": (b"PUSH", "framing")},
    "receive --socket-type SUB": {"bind": (b"PUB", "framing")},
    "receive --socket-type ROUTER": {"bind": (b"DEALER", "acknowledged")},
    "proxy": {
        "bind": (b"PUB", "framing"),
        "pull": (b"PUSH", "framing"),
        "publish": (b"SUB", ""),
        "durable": (b"DEALER", "durable"),
    },
}
GROWTH = 300 << 20


@pytest.mark.parametrize("words", SIDES)
@pytest.mark.parametrize(
    ("seed", "times", "messages"),
    [(1, 60, 20), pytest.param(2, 3500, 1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])],
)
def test_no_program_fails_its_honest_peers(
    context: zmq.Context[Socket], tmp_path: Path, words: str, seed: int, times: int, messages: int
) -> None:
    """What an honest peer sends beside the attack reaches an honest subscriber, once and in order."""
    sides = {side: free_endpoint() for side in ({**SIDES[words], "durable": ()})}
    flags = [word for side, endpoint in sides.items() for word in (f"--{side}", endpoint)]
    with (
        program(*words.split(), *flags, "--wal-location", str(tmp_path / "log")) as running,
        DurableSubscriber(sides["durable"], "honest", topics=["honest"], timeout=60) as subscriber,
        ExitStack() as stack,
    ):
        if words.endswith("ROUTER"):
            producer = stack.enter_context(Producer(sides["bind"], "honest"))
            producer.send(b"0", topic="honest")
            producer.flush()
        elif words.endswith("SUB"):
            sock = publisher(context, sides["bind"])
        else:
            sock = context.socket(zmq.PUSH)
            sock.connect(sides.get("pull", sides["bind"]))
        sending = (
            None if words.endswith("ROUTER") else stack.enter_context(Offering(sock, 0.002, topic=b"honest"))
        )
        assert (first := subscriber.receive(60)) is not None
        assert first.value == b"0"
        process = psutil.Process(running.pid)
        memory, descriptors = process.memory_info().rss, process.num_fds()
        frames = sum(attack(sides[side], *made, seed, times, messages) for side, made in SIDES[words].items())
        assert frames > times * messages // 4
        print(f"{words}: {frames:,} frames")
        if sending is None:
            for number in range(1, 10):
                producer.send(b"%d" % number, topic="honest")
            producer.flush()
            sent = 10
        else:
            sending.end()
            sent = sending.sent
        got = [subscriber.receive(60) for _ in range(sent - 1)]
        assert [message.value for message in got if message] == [b"%d" % n for n in range(1, sent)]
        wait_for(lambda: process.num_fds() <= descriptors + 5, "its descriptors back")
        assert process.memory_info().rss < memory + GROWTH


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_connections_cost_bounded_memory_and_nobody_a_message(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    """Half of them say nothing, half of them shake hands, and later send one message each.

    On a busy machine each step takes its time. Only that of the whole test is bounded.
    """
    count, endpoint, log, long = 10_000, free_endpoint(), tmp_path / "log", 3600.0
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < count + 1000:
        pytest.skip(f"this user may open {limits[1]} files only")

    def has(end: int) -> bool:
        return read_index(LogStorage(str(log))).durable_end == end

    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        # No handshake is too late.
        program = receiving(log, socketType="PULL", bind=endpoint, **{"zmq.handshake_ivl": "0"})
        receiver = psutil.Process(stack.enter_context(program).pid)
        push = context.socket(zmq.PUSH)
        push.connect(endpoint)
        push.send_multipart([b"t", b"first"])
        wait_for(lambda: has(1), "the first message", long)
        before = receiver.memory_info().rss
        peers = []
        for number in range(count):
            peer = stack.enter_context(socket.create_connection(Endpoint.read(endpoint).host_port))
            peers.append(peer)
            peer.sendall(greeting() + ready(b"PUSH") if number % 2 else greeting()[: number % 64])
        wait_for(lambda: receiver.num_fds() > count, "all connections", long)
        for number in range(1000):
            push.send_multipart([b"t", b"%d" % number])
        wait_for(lambda: has(1001), "what the honest peer has sent", long)
        for peer in peers[1::2]:
            peer.sendall(message([b"t", b"late"]))
        wait_for(lambda: has(1001 + count // 2), "a message of each that has shaken hands", long)
        grown = receiver.memory_info().rss - before
        print(f"{grown / count:,.0f} bytes a connection")
        assert grown < count * 100_000
        for peer in peers:
            peer.close()
        wait_for(lambda: receiver.num_fds() < 200, "their descriptors back", long)
