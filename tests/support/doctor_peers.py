"""Senders with faults, as processes of their own: what ``zmq-datasource doctor`` has to find.

    python -m tests.support.doctor_peers '{"kind": "PUB", "rate": 1000, ...}'

prints its endpoint and sends until its stdin ends. It imports nothing of the package, so that it
starts fast and shares none of its faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from tests.support import REPOSITORY


@dataclass
class Sender:
    """What it is.

    Attributes:
        kind: ``PUB``, ``PUSH``; ``proxy`` and ``store`` pass on what comes from ``upstream``.
        framing: ``sequenced``, ``vllm`` or ``plain``.
        rate: Messages a second.
        burst: Sends so many in a row, at that rate on average.
        sndhwm: And when it is set: ``before`` bind, ``after`` it, or as RCVHWM (``wrong``).
        nodrop: XPUB_NODROP, and a send that blocks.
        catch_up: Whether it makes up for the time in which it was blocked.
        first: The number of its first message: who sees that one first has joined late.
        curve: Public and secret key of a CURVE server.
        sndbuf: Bytes; 0 leaves it to the system.
    """

    kind: str = "PUB"
    framing: str = "sequenced"
    topic: str = "weather"
    rate: float = 1000.0
    burst: int = 1
    size: int = 1000
    sndhwm: int = 1000
    when: str = "before"
    nodrop: bool = False
    catch_up: bool = False
    first: int = 0
    bind: str = "tcp://127.0.0.1:*"
    connect: str = ""
    upstream: str = ""
    curve: tuple[str, str] | None = None
    sndbuf: int = 0


def _frames(sender: Sender, number: int) -> list[bytes]:
    value = b"x" * sender.size
    topic, count = sender.topic.encode(), struct.pack(">Q", number)
    match sender.framing:
        case "sequenced":
            return [topic, b"station", count, value]
        case "vllm":
            return [topic, count, value]
    return [topic, value]


def _open(context: zmq.Context[Any], sender: Sender) -> zmq.Socket[bytes]:
    kind = {"PUB": zmq.PUB, "PUSH": zmq.PUSH, "proxy": zmq.XPUB, "store": zmq.XPUB}[sender.kind]
    sock = context.socket(kind)
    if sender.when == "before":
        sock.setsockopt(zmq.SNDHWM, sender.sndhwm)
    elif sender.when == "wrong":
        sock.setsockopt(zmq.RCVHWM, sender.sndhwm)
    if sender.nodrop:
        sock.setsockopt(zmq.XPUB_NODROP, 1)
    if sender.sndbuf:
        sock.setsockopt(zmq.SNDBUF, sender.sndbuf)
    if sender.curve is not None:
        sock.curve_server = True
        sock.curve_secretkey = sender.curve[1].encode()
    if sender.connect:
        sock.connect(sender.connect)
    else:
        sock.bind(sender.bind)
    if sender.when == "after":
        sock.setsockopt(zmq.SNDHWM, sender.sndhwm)
    return sock


def _say(sock: zmq.Socket[bytes], sender: Sender) -> None:
    print(sender.connect or sock.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)


def _send(sock: zmq.Socket[bytes], sender: Sender) -> None:
    number = sender.first
    began = time.monotonic() - number / sender.rate
    while True:
        due = int((time.monotonic() - began) * sender.rate)
        while number < due - due % sender.burst:
            before = time.monotonic()
            sock.send_multipart(_frames(sender, number))
            if not sender.catch_up and (late := time.monotonic() - before) > 0.005:
                began += late
                due = number
            number += 1
        time.sleep(0.001)


def _pass_on(context: zmq.Context[Any], out: zmq.Socket[bytes], sender: Sender) -> None:
    """Everything from upstream; a ``store`` keeps in memory what cannot be sent."""
    source = context.socket(zmq.XSUB)
    source.connect(sender.upstream)
    source.send(b"\x01")
    source.poll()
    _say(out, sender)  # once there is a flow to look at
    stored: deque[list[bytes]] = deque()
    while True:
        while out.poll(0):
            out.recv()  # a subscription: all is subscribed upstream already
        while source.poll(1 if stored else 10):
            stored.append(source.recv_multipart())
            if not source.poll(0):
                break
        with contextlib.suppress(zmq.Again):
            while stored:
                out.send_multipart(stored[0], zmq.NOBLOCK)
                stored.popleft()


def main() -> None:
    sender = Sender(**json.loads(sys.argv[1]))

    def end() -> None:
        sys.stdin.read()
        os._exit(0)  # a send may block for ever: nothing is to be flushed

    threading.Thread(target=end, daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    sock = _open(context, sender)
    if sender.kind in ("proxy", "store"):
        _pass_on(context, sock, sender)
    else:
        _say(sock, sender)
        _send(sock, sender)


class Running:
    """A sender that runs while the ``with`` block does."""

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.doctor_peers", json.dumps(asdict(Sender(**options)))],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], 30)[0]:
            self._process.kill()
            raise AssertionError("the sender did not start within 30 s")
        self.endpoint = self._process.stdout.readline().strip()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
