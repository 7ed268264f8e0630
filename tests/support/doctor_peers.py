"""Senders with faults, as processes of their own: what ``zmq-datasource doctor`` has to find.

    python -m tests.support.doctor_peers '{"kind": "PUB", "rate": 1000, ...}'

prints its endpoint and sends until its stdin ends. It imports nothing of the package, so that it starts fast and shares
none of its faults.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import zmq

from tests.support import REPOSITORY


@dataclass
class Sender:
    """What it is.

    Attributes:
        kind: ``PUB`` or ``PUSH``.
        framing: ``sequenced``, ``vllm`` or ``plain``.
        rate: Messages a second.
        burst: Sends so many in a row, at that rate on average.
        curve: Public and secret key of a CURVE server.
        sndbuf: Bytes; 0 leaves it to the system.
    """

    kind: str = "PUB"
    framing: str = "sequenced"
    rate: float = 1000.0
    burst: int = 1
    size: int = 1000
    sndhwm: int = 1000
    bind: str = "tcp://127.0.0.1:*"
    connect: str = ""
    curve: tuple[str, str] | None = None
    sndbuf: int = 0


def _frames(sender: Sender, number: int) -> list[bytes]:
    value, count = b"x" * sender.size, struct.pack(">Q", number)
    names = {"sequenced": [b"station", count], "vllm": [count]}
    return [b"weather", *names.get(sender.framing, []), value]


def _open(context: zmq.Context[Any], sender: Sender) -> zmq.Socket[bytes]:
    sock = context.socket({"PUB": zmq.PUB, "PUSH": zmq.PUSH}[sender.kind])
    sock.setsockopt(zmq.SNDHWM, sender.sndhwm)
    if sender.sndbuf:
        sock.setsockopt(zmq.SNDBUF, sender.sndbuf)
    if sender.curve is not None:
        sock.curve_server = True
        sock.curve_secretkey = sender.curve[1].encode()
    if sender.connect:
        sock.connect(sender.connect)
    else:
        sock.bind(sender.bind)
    return sock


def main() -> None:
    sender = Sender(**json.loads(sys.argv[1]))

    def end() -> None:
        sys.stdin.read()
        os._exit(0)  # a send may block for ever: nothing is to be flushed

    threading.Thread(target=end, daemon=True).start()
    sock = _open(zmq.Context(), sender)
    print(sender.connect or sock.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    number, began = 0, time.monotonic()
    while True:
        due = int((time.monotonic() - began) * sender.rate)
        while number < due - due % sender.burst:
            before = time.monotonic()
            sock.send_multipart(_frames(sender, number))
            if (late := time.monotonic() - before) > 0.005:  # it was blocked, and does not catch up
                began += late
                due = number
            number += 1
        time.sleep(0.001)


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

    def freeze(self) -> None:
        """Stop the process, as a debugger does."""
        self._process.send_signal(signal.SIGSTOP)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


if __name__ == "__main__":
    main()
