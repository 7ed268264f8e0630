"""A TCP middlebox: what a network does to connections between two programs that both live on."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Self

from tests.support import wait_for

__all__ = ["Middlebox"]

_TICK_SECONDS = 0.005
_RESET = struct.pack("ii", 1, 0)


class _Way:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.parts: deque[tuple[float, memoryview]] = deque()  # when due, and what
        self.bytes = 0
        self.passed: deque[bytes] = deque()  # what was handed on last, if that is remembered
        self.ended = False
        self.allowance = 0.0


class _Link:
    """A connection through the box: two sockets, two ways."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.ways = (_Way(near, far), _Way(far, near))
        self.near, self.far = near, far
        self.half_open = False

    @property
    def over(self) -> bool:
        """Whether both sides have ended it in good order, and all has passed."""
        return all(way.ended and not way.parts for way in self.ways)

    def reset(self) -> None:
        for sock in (self.near, self.far):
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sock.close()


class Middlebox:
    """Forwards tcp connections to an endpoint, as a load balancer, a tunnel or a long line does.

    The weather is in attributes, and may change at any time.

    Args:
        holds: Most bytes that it takes of one way of a connection and has not forwarded yet.
        reset_after: See the attribute.
        remembers: Whether to keep what has passed, for ``discarded``; not for much.
        kernel_holds: Size of its kernel's buffers, rather than what the system thinks best.

    Attributes:
        delay: Seconds that each part is held.
        bytes_per_second: Of each way; 0 for no bound.
        black_hole: Whether nothing passes and nobody is told; connections are made all the same.
        forwarding: While false it takes from those who connect, and hands nothing on.
        reset_after: Bytes after which every connection is reset, once; None for never.
        taken: Bytes that it has taken from those who connect.
        bytes: What has passed so far, both ways.
        resets: How often it has reset what there was.
        connections: How many it has made.
        discarded: Of each connection that the box has lost after its sender had ended it in good order, what came from
            there: the receiver need not have read it, and nobody tells the sender.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        holds: int = 256 << 10,
        reset_after: int | None = None,
        remembers: bool = False,
        kernel_holds: int | None = None,
    ) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self._holds, self._kernel_holds, self._remembers = holds, kernel_holds, remembers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        if kernel_holds is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, kernel_holds)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.delay = 0.0
        self.bytes_per_second = 0
        self.black_hole = False
        self.forwarding = True
        self.reset_after = reset_after
        self.taken = self.bytes = self.resets = self.connections = 0
        self.discarded: list[bytes] = []
        self._links: list[_Link] = []
        self._commands: deque[str] = deque()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="middlebox", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def reset(self) -> None:
        """End every connection at once, with what the box holds of it."""
        before = self.resets
        self._commands.append("reset")
        wait_for(lambda: self.resets > before, "the reset")

    def half_open(self) -> None:
        """The far side of every connection loses it; the near side is not told."""
        self._commands.append("half_open")

    def clear(self) -> None:
        """Fair weather. Connections that were half open are reset: such a thing ends some day."""
        self.delay, self.bytes_per_second, self.black_hole, self.reset_after = 0.0, 0, False, None
        self.forwarding = True
        self._commands.append("clear")

    # The box's own thread.

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._obey()
                self._accept()
                self._wait()
                for link in list(self._links):
                    self._serve(link)
        finally:
            for link in self._links:
                link.reset()
            self._listener.close()

    def _obey(self) -> None:
        while self._commands:
            match self._commands.popleft():
                case "reset":
                    self._reset()
                case "clear":
                    for link in [link for link in self._links if link.half_open]:
                        self._lose(link)
                case "half_open":
                    for link in self._links:
                        link.half_open = True
                        with suppress(OSError):
                            link.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        link.far.close()

    def _reset(self) -> None:
        for link in list(self._links):
            self._lose(link)
        self.resets += 1

    def _lose(self, link: _Link) -> None:
        """Drop a link of the box's own accord."""
        way = link.ways[0]
        with suppress(OSError):  # the sender has reset it
            while not way.ended and (part := link.near.recv(1 << 16)):
                way.parts.append((0.0, memoryview(part)))
            way.ended = True
        if way.ended and not link.over:
            self.discarded.append(b"".join((*way.passed, *(part for _, part in way.parts))))
        self._drop(link)

    def _drop(self, link: _Link) -> None:
        link.reset()
        self._links.remove(link)

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._to, 1)
                except OSError:
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    near.close()
                    continue
                near.setblocking(False)
                far.setblocking(False)
                if self._kernel_holds is not None:
                    far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._kernel_holds)
                self._links.append(_Link(near, far))
                self.connections += 1

    def _wait(self) -> None:
        with selectors.PollSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for link in self._links:
                if link.half_open or self.black_hole:
                    continue
                for way in link.ways:
                    if not way.ended and way.bytes < self._holds:
                        with suppress(KeyError, ValueError):
                            selector.register(way.source, selectors.EVENT_READ)
            selector.select(_TICK_SECONDS)

    def _serve(self, link: _Link) -> None:
        if link.half_open or self.black_hole or link not in self._links:  # lost a moment ago, with another
            return
        try:
            for way in link.ways:
                self._take(link, way)
                if self.forwarding or way.source is not link.near:
                    self._give(way)
        except (OSError, ValueError):
            self._drop(link)
            return
        if self.reset_after is not None and self.reset_after <= 0:
            self.reset_after = None
            self._reset()
        elif link.over:
            self._drop(link)

    def _take(self, link: _Link, way: _Way) -> None:
        while not way.ended and way.bytes < self._holds:
            try:
                part = way.source.recv(1 << 16)
            except BlockingIOError:
                return
            if not part:
                way.ended = True
                if not way.parts:
                    way.target.shutdown(socket.SHUT_WR)
                return
            way.parts.append((time.monotonic() + self.delay, memoryview(part)))
            way.bytes += len(part)
            if way.source is link.near:
                self.taken += len(part)
            if self.reset_after is not None:
                self.reset_after -= len(part)

    def _give(self, way: _Way) -> None:
        now = time.monotonic()
        if self.bytes_per_second:
            way.allowance = min(
                way.allowance + self.bytes_per_second * _TICK_SECONDS, self.bytes_per_second / 10
            )
        while way.parts and way.parts[0][0] <= now:
            due, part = way.parts.popleft()
            most = len(part)
            if self.bytes_per_second:
                most = min(most, int(way.allowance))
            try:
                sent = way.target.send(part[:most]) if most else 0
            except BlockingIOError:
                sent = 0
            if self._remembers:
                way.passed.append(bytes(part[:sent]))
            way.bytes -= sent
            self.bytes += sent
            way.allowance -= sent
            if sent < len(part):
                way.parts.appendleft((due, part[sent:]))
                return
        if way.ended and not way.parts:
            way.target.shutdown(socket.SHUT_WR)
