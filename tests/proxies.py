"""A proxy in threads of the test's own process: real sockets and files, and quick to start."""

from __future__ import annotations

import itertools
import os
import select
import socket as stdlib_socket
import struct
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq

from tests.support import Socket, free_endpoint, wait_for
from zmq_datasource.option_parser import parse
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.flow import Flow
from zmq_datasource.proxy.pipes import Lines, Newest
from zmq_datasource.proxy.server import Server, serve


def endpoints(*sides: str) -> dict[str, str]:
    """A free endpoint for each side."""
    return {side: free_endpoint() for side in sides}


_MARKERS = itertools.count()


class ProxyThreads:
    """What the two processes of a proxy do, in two threads."""

    def __init__(self, location: Path, sides: dict[str, str], **options: Any) -> None:
        self.sides = sides
        text = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in options.items()
        }
        self.options = parse(
            ProxyOptions, {"walLocation": str(location), "walSync": "false", "linger": "0", **sides, **text}
        )
        self.status: dict[str, Any] = {}
        self.failure: Exception | None = None
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._flow)
        if self.options.durable or self.options.replay:
            self._start(self._serve)
        return self

    def _start(self, target: Any) -> None:
        self._ready.clear()
        thread = threading.Thread(target=self._guard, args=(target,))
        self._threads.append(thread)
        thread.start()
        assert self._ready.wait(30)
        if self.failure is not None:
            thread.join()
            raise self.failure

    def _guard(self, target: Any) -> None:
        try:
            target()
        except Exception as e:
            self.failure = e
            self._ready.set()

    def _flow(self) -> None:
        reads, writes = os.pipe()
        try:
            with Flow(self.options) as self.flow:
                self._lines, newest = Lines(reads), Newest(writes)
                self.flow.on_written = lambda: newest.tell(self.flow.journal.progress)
                self._ready.set()
                while not self._stop.is_set():
                    self.flow.step()
                    newest.tell(self.flow.journal.progress)
                self.flow.drain()
        finally:
            os.close(writes)  # which ends the server
            for thread in self._threads[1:]:
                thread.join()
            os.close(reads)

    def _serve(self) -> None:
        def report(status: dict[str, Any]) -> None:
            self.status = status
            self.flow.hold = status["hold"]

        with ExitStack() as stack:
            self.server = stack.enter_context(Server(self.options, self.flow.journal.progress))
            self._ready.set()
            serve(self.server, self._lines, report)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        if kind is None and self.failure is not None:
            raise self.failure


def publisher(context: zmq.Context[Socket], endpoint: str, topics: tuple[bytes, ...] = (b"",)) -> Socket:
    """A PUB at the proxy that hears its subscriptions; it has heard these."""
    sock = context.socket(zmq.XPUB)
    sock.setsockopt(zmq.XPUB_NODROP, 1)
    sock.setsockopt(zmq.SNDHWM, 100_000)
    sock.connect(endpoint)
    heard = set()
    while heard != {b"\x01" + topic for topic in topics}:
        assert sock.poll(30_000), heard
        heard.add(sock.recv())
    return sock


def subscriber(
    context: zmq.Context[Socket], proxy: ProxyThreads, *topics: bytes, kind: int = zmq.SUB, **options: int
) -> Socket:
    """A plain subscriber that the proxy knows of."""
    marker = b"marker %d" % next(_MARKERS)
    sock = context.socket(kind)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name.upper()), value)
    sock.connect(proxy.sides["publish"])
    for topic in (*topics, marker):  # they arrive in this order
        sock.setsockopt(zmq.SUBSCRIBE, topic)
    wait_for(lambda: marker.decode() in proxy.flow.status()["subscriptions"], f"subscription to {topics}")
    return sock


def receive(sock: Socket, count: int, milliseconds: int = 30_000) -> list[list[bytes]]:
    """So many messages, or fail."""
    got: list[list[bytes]] = []
    while len(got) < count:
        assert sock.poll(milliseconds), f"{len(got)} of {count} messages came"
        got.append(sock.recv_multipart())
    return got


def drain(sock: Socket, quiet_ms: int) -> list[list[bytes]]:
    """What comes until nothing has come for so long: for what must not come, or not all of it."""
    got = []
    while sock.poll(quiet_ms):
        got.append(sock.recv_multipart())
    return got


class Cutting:
    """Forwards tcp connections to an endpoint, and cuts them when told to."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to = host, int(port)
        self._listener = stdlib_socket.create_server(("127.0.0.1", 0))
        self._socks: list[stdlib_socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def _run(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                ours, _ = self._listener.accept()
                theirs = stdlib_socket.create_connection(self._to)
                self._socks += [ours, theirs]
                self.connections += 1
                self._run(self._copy, ours, theirs)
                self._run(self._copy, theirs, ours)

    def _copy(self, source: stdlib_socket.socket, target: stdlib_socket.socket) -> None:
        with suppress(OSError):  # cut
            while content := source.recv(1 << 14):
                target.sendall(content)

    def cut(self) -> None:
        """End all connections, with what is on its way."""
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(stdlib_socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(stdlib_socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(30)
        for sock in self._socks:
            sock.close()


class Middlebox:
    """Forwards tcp connections to an endpoint as a load balancer or a tunnel does, with a memory of its own.

    Args:
        holds: Most bytes that it takes of a connection and has not forwarded yet.
        reset_after: It resets both ends once, when it has taken so many bytes in all.
        kernel_holds: Size of its kernel's buffers, rather than what the system thinks best.

    Attributes:
        taken: Bytes that it has taken from those who connect.
        forwarding: While false it takes, and hands nothing on.
        resets: How often it has reset what there was.
    """

    def __init__(
        self,
        endpoint: str,
        holds: int = 1 << 18,
        reset_after: int | None = None,
        kernel_holds: int | None = None,
    ) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._to = host, int(port)
        self._holds = holds
        self._reset_after = reset_after
        self._listener = stdlib_socket.create_server(("127.0.0.1", 0))
        self._kernel_holds = kernel_holds
        if kernel_holds is not None:
            self._listener.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_RCVBUF, kernel_holds)
        self._pipes: dict[stdlib_socket.socket, tuple[stdlib_socket.socket, bytearray]] = {}
        self._near: set[stdlib_socket.socket] = set()
        self._over: set[stdlib_socket.socket] = set()  # those whose stream has ended
        self._ask, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.taken = self.resets = 0
        self.forwarding = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def reset(self) -> None:
        """End every connection at both ends with a reset, and forget what is held."""
        before = self.resets
        self._ask.set()
        wait_for(lambda: self.resets > before, "the reset")

    def _run(self) -> None:
        while not self._end.is_set():
            self._step()
            if self._reset_after is not None and self.taken >= self._reset_after:
                self._reset_after = None
                self._ask.set()
            if self._ask.is_set():
                self._ask.clear()
                for sock in list(self._pipes):
                    self._close(sock)
                self.resets += 1
        for sock in list(self._pipes):
            self._close(sock)
        self._listener.close()

    def _step(self) -> None:
        for sock in [sock for sock in self._over if not self._pipes[sock][1]]:
            self._close(sock, in_order=True)
        reads = [
            sock
            for sock, (_, held) in self._pipes.items()
            if len(held) < self._holds and sock not in self._over
        ]
        writes = [to for sock, (to, held) in self._pipes.items() if held and self._forwards(sock)]
        readable, writable, _ = select.select([self._listener, *reads], writes, [], 0.005)
        for sock in readable:
            if sock is self._listener:
                self._accept()
            elif sock in self._pipes:
                self._guarded(sock, self._take)
        for sock in writable:
            if sock in self._pipes:
                self._guarded(sock, self._hand_on)

    def _forwards(self, source: stdlib_socket.socket) -> bool:
        return self.forwarding or source not in self._near

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = stdlib_socket.create_connection(self._to)
        except OSError:  # nobody there at the moment
            near.close()
            return
        if self._kernel_holds is not None:
            far.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_SNDBUF, self._kernel_holds)
        for sock, to in ((near, far), (far, near)):
            sock.setblocking(False)
            self._pipes[sock] = to, bytearray()
        self._near.add(near)

    def _guarded(self, sock: stdlib_socket.socket, act: Any) -> None:
        try:
            act(sock)
        except OSError:
            self._close(sock)

    def _take(self, sock: stdlib_socket.socket) -> None:
        _, held = self._pipes[sock]
        content = sock.recv(1 << 16)
        if not content:
            self._over.add(sock)
        held += content
        if sock in self._near:
            self.taken += len(content)

    def _hand_on(self, sock: stdlib_socket.socket) -> None:
        source, _ = self._pipes[sock]
        _, held = self._pipes[source]
        del held[: sock.send(held[: 1 << 16])]

    def _close(self, sock: stdlib_socket.socket, in_order: bool = False) -> None:
        """End a connection and the one behind it, in order or with a reset."""
        if sock not in self._pipes:
            return
        for end in (self._pipes.pop(sock)[0], sock):
            self._pipes.pop(end, None)
            self._near.discard(end)
            self._over.discard(end)
            if not in_order:
                end.setsockopt(stdlib_socket.SOL_SOCKET, stdlib_socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
