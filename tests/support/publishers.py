"""Publishers of numbered messages, for tests: vLLM's KV events, and the format of this package's sink (sequenced).

Written from those formats' descriptions and not from this package, which it must not import.

Usage: python -m tests.support.publishers FORMAT --endpoint ENDPOINT [--replay ENDPOINT] [--topic T] [...]

It binds, prints ``ready`` and then obeys commands on stdin, one a line, with one line of JSON each:

    wait-subscriber [N]   wait until N (1) subscriptions are active
    subscriptions         the active subscriptions in hex
    send N [SIZE]         publish the next N messages, their values padded with spaces to SIZE bytes
    skip N                advance by N without publishing; vllm keeps them for a replay
    repeat N              publish the last message N more times
    set N                 the next sequence is N, as after a restart
    topic T               publish under another topic
    raw HEX HEX ...       publish these frames as they are, "-" for an empty one
    control               publish that it ends (sequenced)
    requests              the starting sequences of the replay requests so far (vllm)
    quit
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections import Counter, deque
from typing import Any

import zmq

from tests.support import REPOSITORY
from tests.support.ports import free_port

Frames = list[bytes]
Socket = zmq.Socket[bytes]
# Ends a replay.
_END = b"\xff" * 8


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Server:
    """The process: sockets, counters, and the commands as methods named ``do_*``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._topic: bytes = options.topic.encode()
        # Between topic and number, with framing=sequenced.
        self._publisher = [options.publisher.encode()] if options.format == "sequenced" else []
        self._sequence = 0
        self._message: int = options.values_from
        self._last: Frames = []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=options.buffer)
        self._topic_in_replay: bool = options.topic_in_replay
        self._starts: list[int] = []
        self._subscriptions: Counter[bytes] = Counter()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        if options.sndhwm is not None:
            self._pub.setsockopt(zmq.SNDHWM, options.sndhwm)
        self._pub.bind(options.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._pub, zmq.POLLIN)
        self._replay: Socket | None = None
        if options.replay:
            self._replay = self._context.socket(zmq.ROUTER)  # high-water marks as vLLM leaves them
            self._replay.bind(options.replay)
            self._poller.register(self._replay, zmq.POLLIN)

    def run(self) -> None:
        """Obey stdin until ``quit`` or its end, and answer the sockets meanwhile."""
        print("ready", flush=True)
        stdin = sys.stdin.fileno()
        self._poller.register(stdin, zmq.POLLIN)
        pending = b""
        while True:
            if stdin not in self._serve(None):
                continue
            if not (received := os.read(stdin, 65536)):
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                name, *arguments = line.decode().split() or [""]
                answer = {"ok": True} if name == "quit" else self._obey(name, arguments)
                print(json.dumps(answer), flush=True)
                if name == "quit":
                    return

    def close(self) -> None:
        self._context.destroy(linger=5000)

    def _obey(self, name: str, arguments: list[str]) -> dict[str, Any]:
        command = getattr(self, "do_" + name.replace("-", "_"), None)
        if command is None:
            return {"error": f"no such command: {name}"}
        try:
            answer: dict[str, Any] | None = command(*arguments)
        except (TypeError, ValueError, IndexError, zmq.ZMQError) as error:
            return {"error": f"{name}: {error}"}
        return {"ok": True} if answer is None else answer

    def do_wait_subscriber(self, count: str = "1") -> dict[str, Any] | None:
        deadline = time.monotonic() + 20
        self._poller.unregister(sys.stdin.fileno())  # it waits its turn
        try:
            while self._subscriptions.total() < int(count):
                if (left := deadline - time.monotonic()) <= 0:
                    return {"error": "no subscriber within 20 s"}
                self._serve(left)
        finally:
            self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        return None

    def do_subscriptions(self) -> dict[str, Any]:
        self._serve(0)
        return {"subscriptions": sorted(topic.hex() for topic in self._subscriptions.elements())}

    def do_send(self, count: str, size: str = "0") -> dict[str, Any]:
        for _ in range(int(count)):
            self._serve_replay()
            sequence, value = self._next(int(size))
            self._publish([self._topic, *self._publisher, _u64(sequence), value])
        return {"next": self._sequence}

    def do_skip(self, count: str) -> dict[str, Any]:
        for _ in range(int(count)):
            self._next()
        return {"next": self._sequence}

    def do_repeat(self, count: str) -> dict[str, Any]:
        for _ in range(int(count)):
            self._publish(self._last)
        return {"next": self._sequence}

    def do_set(self, sequence: str) -> dict[str, Any]:
        self._sequence = int(sequence)
        self._buffer.clear()  # a publisher that was restarted has nothing to replay
        return {"next": self._sequence}

    def do_topic(self, topic: str = "") -> dict[str, Any]:
        self._topic = topic.encode()
        return {"next": self._sequence}

    def do_raw(self, *frames: str) -> None:
        self._pub.send_multipart([b"" if frame == "-" else bytes.fromhex(frame) for frame in frames])

    def do_control(self) -> dict[str, Any]:
        messages = [[b"", *self._publisher, _u64(self._sequence)]] if self._publisher else []
        for frames in messages:
            self._pub.send_multipart(frames)
        return {"sent": [[frame.hex() for frame in frames] for frames in messages]}

    def do_requests(self) -> dict[str, Any]:
        self._serve_replay()
        return {"count": len(self._starts), "starts": self._starts}

    def _next(self, size: int = 0) -> tuple[int, bytes]:
        sequence, value = self._sequence, str(self._message).encode().ljust(size)
        self._message += 1
        self._sequence = sequence + 1
        if self._replay is not None:
            self._buffer.append((sequence, value))
        return sequence, value

    def _publish(self, frames: Frames) -> None:
        self._pub.send_multipart(frames)
        self._last = frames

    def _serve(self, seconds: float | None) -> dict[Any, int]:
        """Wait for events and handle those of the sockets."""
        events = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
        while self._pub.poll(0):
            kind, topic = (received := self._pub.recv())[:1], received[1:]
            self._subscriptions[topic] += 1 if kind == b"\x01" else -1
        if self._replay in events:
            self._serve_replay()
        return events

    def _serve_replay(self) -> None:
        if self._replay is None or not self._replay.poll(0):
            return
        request = self._replay.recv_multipart()
        if len(request) != 3:
            return  # vLLM logs a warning and does not answer
        client, _, start = request
        self._starts.append(int.from_bytes(start, "big"))
        for sequence, value in self._buffer:
            if sequence >= self._starts[-1]:
                self._reply(client, self._topic, _u64(sequence), value)
        self._reply(client, b"", _END, b"")

    def _reply(self, client: bytes, topic: bytes, *rest: bytes) -> None:
        assert self._replay is not None
        self._replay.send_multipart([client, b"", *([topic] if self._topic_in_replay else []), *rest])


class Publisher:
    """One of these publishers as a process of its own, ended with the ``with`` block.

    Options are those of the command line: ``Publisher("vllm", replay=free, topic_in_replay=False)``.
    """

    def __init__(self, name: str, endpoint: str | None = None, **options: str | int | bool) -> None:
        self.endpoint = endpoint or free_endpoint()
        arguments = ["--endpoint", self.endpoint]
        for option, value in options.items():
            flag = option.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                arguments.append(f"--{flag}={value}")
        self._received = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.publishers", name, *arguments],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        try:
            if (line := self._line(20)) != "ready":
                raise AssertionError(f"publisher {name} said {line!r}, not ready")
        except BaseException:
            self.kill()
            raise

    def ask(self, command: str, seconds: float = 30) -> dict[str, Any]:
        """Give a command, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._line(seconds))
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer

    def kill(self) -> None:
        """End it with SIGKILL; what its sockets still hold is lost."""
        self._process.kill()
        self._close(10)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the end of its input ends it, its messages sent
        try:
            self._close(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def _close(self, seconds: float) -> None:
        self._process.wait(seconds)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self, seconds: float) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise AssertionError(f"publisher did not answer within {seconds:.0f} s")
            if not (received := os.read(self._process.stdout.fileno(), 65536)):
                raise AssertionError("publisher has ended")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()


def free_endpoint() -> str:
    """An endpoint that nobody is bound to; not the one of ``support``, which imports the package."""
    return f"tcp://127.0.0.1:{free_port()}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.support.publishers")
    parser.add_argument("format", choices=("sequenced", "vllm"))
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--replay", default="")
    parser.add_argument("--topic", default="topic")
    parser.add_argument("--publisher", default=uuid.uuid4().hex.upper())
    parser.add_argument("--buffer", type=int, default=10_000)
    parser.add_argument("--values-from", type=int, default=0, help="what the first value says")
    parser.add_argument("--topic-in-replay", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sndhwm", type=int)
    server = Server(parser.parse_args())
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
