"""What ``peer.c`` does, in plain pyzmq: the "raw pyzmq" of the results, and every peer where there is no C compiler.

The arguments, the words it reads and the lines it prints are those of ``peer.c``.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import sys
import threading
import time

import zmq

_KINDS = {"push": zmq.PUSH, "pull": zmq.PULL, "pub": zmq.XPUB, "sub": zmq.SUB}
_PUBLISHERS = 8
_TICK, _LATE = 0.001, 0.004
_TIMEOUT_MS = 100


class _Peer:
    def __init__(self, kind: str, shape: str = "plain", **numbers: str) -> None:
        self.receives = kind in ("pull", "sub")
        self._shape = shape
        self._publishes = kind == "pub"
        self._payload = b"x" * int(numbers.get("size", 100))
        self._count, self._rate = int(numbers.get("count", 0)), int(numbers.get("rate", 0))
        self.messages, self.stopped, self.done = 0, False, False
        self.latencies: list[float] = []
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(_KINDS[kind])
        self.socket = socket
        socket.set_hwm(int(numbers.get("hwm", 1000)))
        for option, value in ((zmq.SNDTIMEO, _TIMEOUT_MS), (zmq.RCVTIMEO, _TIMEOUT_MS), (zmq.LINGER, 0)):
            socket.setsockopt(option, value)
        if kind == "pub":
            socket.setsockopt(zmq.XPUB_NODROP, int(numbers.get("nodrop", 1)))
        elif kind == "sub":
            socket.subscribe(b"")

    def work(self) -> None:
        (self._receive if self.receives else self._send)()
        self.done = True

    def _frames(self, number: int) -> list[bytes]:
        payload = self._payload
        match self._shape:
            case "plain":
                return [payload]
            case "numbered":
                return [number.to_bytes(8, "big") + payload[8:]]
            case "topic":
                return [b"topic", payload]
            case "stamped":
                return [b"topic", struct.pack("=Q", time.monotonic_ns()) + payload[8:]]
            case "vllm":
                return [b"topic", number.to_bytes(8, "big"), payload]
            case "bitcoin":
                return [b"topic", payload, (number % 2**32).to_bytes(4, "little")]
            case "sequenced":
                name = b"publisher-%d" % (number % _PUBLISHERS)
                return [b"topic", name, (number // _PUBLISHERS).to_bytes(8, "big"), payload]
        raise ValueError(f"no shape {self._shape}")

    def _send(self) -> None:
        send = self.socket.send
        while self._publishes and not self.stopped and not self.socket.poll(_TIMEOUT_MS):
            pass  # the first subscription
        due, burst = time.monotonic(), max(1, self._rate // 1000)
        step = 0.0 if not self._rate else max(_TICK, 1 / self._rate)
        while not self.stopped and (not self._count or self.messages < self._count):
            if step and self.messages % burst == 0:
                due += step
                time.sleep(max(0.0, due - time.monotonic()))
                now = time.monotonic()
                due = now if now > due + _LATE else due
            *frames, last = self._frames(self.messages)
            try:
                for frame in frames:
                    send(frame, zmq.SNDMORE)
                send(last)
            except zmq.Again:  # whole messages only: the first frame waits, and the others follow it
                continue
            self.messages += 1

    def _receive(self) -> None:
        receive, more, stamped = self.socket.recv, zmq.RCVMORE, self._shape == "stamped"
        plain = self._shape == "plain"
        while not self.stopped and (not self._count or self.messages < self._count):
            try:
                frame = receive()
                while not plain and self.socket.getsockopt(more):
                    frame = receive()
            except zmq.Again:
                continue
            if stamped:
                self.latencies.append((time.monotonic_ns() - struct.unpack("=Q", frame[:8])[0]) / 1e3)
            self.messages += 1

    def mark(self) -> dict[str, object]:
        used = os.times()
        return {
            "messages": self.messages,
            "time": time.time(),
            "cpu": used.user + used.system,
            "done": self.done,
        }

    def latency(self) -> dict[str, float]:
        values, self.latencies = self.latencies, []
        if len(values) < 2:
            return {"samples": len(values), "p50": 0.0, "p99": 0.0, "max": 0.0}
        percentiles = statistics.quantiles(values, n=100)
        return {
            "samples": len(values),
            "p50": percentiles[49],
            "p99": percentiles[98],
            "max": max(values),
        }


def _main() -> None:
    arguments = dict(argument.split("=", 1) for argument in sys.argv[1:])
    bind, connect = arguments.pop("bind", None), arguments.pop("connect", None)
    peer = _Peer(**arguments)
    if bind is not None:
        peer.socket.bind(bind)
    else:
        peer.socket.connect(connect or "")
    endpoint = peer.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    print(json.dumps({"endpoint": endpoint}), flush=True)
    worker = threading.Thread(target=peer.work, daemon=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "go":
            worker.start()
        elif word == "stop":
            peer.stopped = True
            worker.join(5)
        print(json.dumps(peer.latency() if word == "latency" else peer.mark()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
