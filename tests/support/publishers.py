"""Publishers of numbered messages, for tests: vLLM's KV events, and the format of this package's sink (sequenced).

Written from those formats' descriptions and not from this package, which it must not import.

``Publisher.ask`` takes these commands:

    wait-subscriber [N]   wait until N (1) subscriptions are active
    subscriptions         nothing but the answer
    requests              nothing but the answer
    send N [SIZE]         publish the next N messages, their values padded with spaces to SIZE bytes
    skip N                advance by N without publishing; vllm keeps them for a replay
    repeat N              publish the last message N more times
    raw HEX HEX ...       publish these frames as they are
    control               publish that it ends (sequenced)
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, deque
from typing import Any, Self

import zmq

from tests.support.ports import free_port

Socket = zmq.Socket[bytes]
# Ends a replay.
_END = b"\xff" * 8


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Publisher:
    """A publisher in a thread; use it in a ``with`` block, after which its messages are sent.

    Args:
        framing: ``vllm`` or ``sequenced``.
        replay: The endpoint at which it answers requests for replays.
        buffer: How many messages it keeps for them.
        values_from: What the first value says; the next one says one more.
        topic_in_replay: Whether replies have the topic, as those of newer vLLMs.
    """

    def __init__(
        self,
        framing: str,
        endpoint: str | None = None,
        *,
        replay: str = "",
        topic: str = "topic",
        publisher: str = "",
        buffer: int = 10_000,
        values_from: int = 0,
        topic_in_replay: bool = True,
        sndhwm: int = 1000,
    ) -> None:
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self._topic = topic.encode()
        # Between topic and number.
        self._publisher = [(publisher or uuid.uuid4().hex).encode()] if framing == "sequenced" else []
        self._topic_in_replay = topic_in_replay
        self._sequence, self._message = 0, values_from
        self._last: list[bytes] = []
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._starts: list[int] = []
        self._subscriptions: Counter[bytes] = Counter()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.XPUB_VERBOSER, 1)
        self._pub.setsockopt(zmq.SNDHWM, sndhwm)
        self._pub.bind(self.endpoint)
        self._replay: Socket | None = None
        if replay:
            self._replay = self._context.socket(zmq.ROUTER)  # high-water marks as vLLM leaves them
            self._replay.bind(replay)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, command: str) -> dict[str, Any]:
        """Obey a command.

        Returns:
            ``next``, the number of the next message; ``starts``, the first numbers of the replay requests so far,
            ``count`` of them; ``subscriptions``, in hexadecimal.
        """
        name, *arguments = command.split()
        with self._lock:
            self._serve()
            getattr(self, f"_do_{name.replace('-', '_')}")(*arguments)
            return {
                "next": self._sequence,
                "count": len(self._starts),
                "starts": list(self._starts),
                "subscriptions": sorted(topic.hex() for topic in self._subscriptions.elements()),
            }

    def _do_wait_subscriber(self, count: str = "1") -> None:
        deadline = time.monotonic() + 20
        while self._subscriptions.total() < int(count):
            assert time.monotonic() < deadline, "no subscriber within 20 s"
            self._pub.poll(100)
            self._serve()

    def _do_subscriptions(self) -> None: ...

    def _do_requests(self) -> None: ...

    def _do_send(self, count: str, size: str = "0") -> None:
        for _ in range(int(count)):
            self._serve()
            sequence, value = self._next(int(size))
            self._last = [self._topic, *self._publisher, _u64(sequence), value]
            self._pub.send_multipart(self._last)

    def _do_skip(self, count: str) -> None:
        for _ in range(int(count)):
            self._next()

    def _do_repeat(self, count: str) -> None:
        for _ in range(int(count)):
            self._pub.send_multipart(self._last)

    def _do_raw(self, *frames: str) -> None:
        self._pub.send_multipart([bytes.fromhex(frame) for frame in frames])

    def _do_control(self) -> None:
        if self._publisher:
            self._pub.send_multipart([b"", *self._publisher, _u64(self._sequence)])

    def _next(self, size: int = 0) -> tuple[int, bytes]:
        sequence, value = self._sequence, str(self._message).encode().ljust(size)
        self._message += 1
        self._sequence += 1
        if self._replay is not None:
            self._buffer.append((sequence, value))
        return sequence, value

    def _run(self) -> None:
        while not self._ended.wait(0.002):
            with self._lock:
                self._serve()

    def _serve(self) -> None:
        """Take subscriptions, and answer a request for a replay."""
        while self._pub.poll(0):
            kind, topic = (received := self._pub.recv())[:1], received[1:]
            self._subscriptions[topic] += 1 if kind == b"\x01" else -1
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

    def kill(self) -> None:
        """End it as a kill does: what its sockets still hold is lost."""
        self._close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close(5000)

    def _close(self, linger: int) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(30)
            self._context.destroy(linger=linger)
