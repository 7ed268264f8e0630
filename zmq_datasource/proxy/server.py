"""The server process: replays and durable subscribers, from the log's files.

Started by the live process, with the options as the first line of its standard input. Every further line says
how far the open chunk has come; the end of the input ends it. On its standard output it says once that it
is ready, or what prevents it, and from then on how far its subscribers are.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from zmq_datasource.errors import DiskFaultError, EndpointError, ZmqDataSourceError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.log import LogStorage, Retrier
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy.fetch_server import FetchServer
from zmq_datasource.proxy.fetch_wire import FetchWire
from zmq_datasource.proxy.pipes import Lines, Newest, read_start, say
from zmq_datasource.proxy.positions import Positions
from zmq_datasource.proxy.replays import ReplayWire
from zmq_datasource.proxy.view import LogView, Progress

__all__ = ["Server", "enter", "main", "serve"]

_WAIT_MS = 100
_STATUS_SECONDS = 0.25
# The server of a proxy that was killed notices that a moment later, and frees its ports then.
_BIND_SECONDS = 5.0


class Server:
    """Serves durable subscribers and replays; use it in a ``with`` block, in one thread.

    Args:
        options: What was asked for.
        progress: How far the log is.

    Attributes:
        positions: Of all durable subscribers; from the block's beginning on.
    """

    positions: Positions

    def __init__(self, options: ProxyOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._followed = True
        self._storage = LogStorage(options.wal_location)
        self._replays: ReplayWire | None = None
        self._durable: FetchServer | None = None
        self._servers: list[FetchServer] = []
        self._poller = zmq.Poller()
        self._busy = False
        self._faults = LimitedLog(__name__, "faults of files")

    def __enter__(self) -> Server:
        """Find who is known, and bind.

        Raises:
            LogError, OptionError, EndpointError: What prevents it.
        """
        with ExitStack() as stack:
            self._woken, self._wakes = os.pipe()
            for descriptor in (self._woken, self._wakes):
                stack.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            self._poller.register(self._woken, zmq.POLLIN)
            self._view = LogView(self._storage)
            stack.callback(self._view.close)
            self._view.follow(self._progress)  # before any position is compared with its end
            # Also of a proxy that serves none of them for now: what they need stays.
            options = self._options
            self.positions = Positions(
                self._storage,
                lambda: self._view.end,
                options.subscriber_expiry,
                self._wake,
            )
            stack.callback(self.positions.close)
            if options.durable:
                self._durable = self._serve(FetchWire(options), stack)
            if options.replay:
                self._replays = ReplayWire(options)
                self._serve(self._replays, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _serve(self, wire: FetchWire, stack: ExitStack) -> FetchServer:
        server = FetchServer(wire, self._view, self.positions)
        stack.callback(server.close)
        self._poller.register(wire.router.socket, zmq.POLLIN)
        self._servers.append(server)
        return server

    def _wake(self) -> None:
        with suppress(OSError):  # it is readable enough, or closed
            os.write(self._wakes, b"1")

    @property
    def view(self) -> LogView:
        """The log, as far as this server has followed it."""
        return self._view

    def register(self, descriptor: int) -> None:
        """Wait for this socket or descriptor too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def follow(self, progress: Progress) -> None:
        """The log has grown; ``step`` looks."""
        self._progress, self._followed = progress, False

    def _look_at_log(self) -> None:
        try:
            self._view.follow(self._progress)
        except DiskFaultError as e:  # too many open files: the next step may get one
            self._faults.warn("reading the log along: %s", e)
        else:
            self._followed = True

    def wait(self) -> None:
        """Until there is something to do."""
        wait = _WAIT_MS
        for server in self._servers:
            if server.is_held_up:
                wait = min(wait, server.wire.look_ms)
            if (due := server.waiting.due) is not None:
                wait = max(1, min(wait, round(1000 * (due - time.monotonic()))))
        self._poller.poll(0 if self._busy else wait)
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)

    def receive(self) -> None:
        """Take what clients ask for; ``step`` answers, after it was heard how far the log is."""
        for server in self._servers:
            server.wire.router.receive()

    def step(self) -> None:
        """Do what there is to do.

        Raises:
            LogError: Positions cannot be written, or the log cannot be read at all.
        """
        if not self._followed:
            self._look_at_log()
        self.positions.step()
        self._busy = False
        for server in self._servers:
            self._busy = server.step() or self._busy

    def status(self) -> dict[str, Any]:
        """The server's status, as plain data."""
        replays = self._replays
        clients = sum(len(server.waiting) for server in self._servers if server.wire is replays)
        return {
            "durable": [] if self._durable is None else self._durable.names.status(),
            "replays": {
                "clients": clients,
                "requests": 0 if replays is None else replays.requests,
                "sent": 0 if replays is None else replays.sent,
            },
        }


def main() -> None:
    """What runs in the process."""
    allow_many_files()
    lines = Lines(sys.stdin.fileno())
    options = parse(ProxyOptions, read_start(lines.wait()))
    try:
        with ExitStack() as stack:
            server = enter(options, Progress.of(json.loads(lines.wait())))
            stack.push(server)
            say({"ready": True})
            # A live process that is busy, or stopped, must not stop this one: of its lines only the newest matters.
            newest = Newest(sys.stdout.fileno())
            stack.callback(newest.finish)
            serve(server, lines, lambda status: newest.tell({"status": status}))
    except ZmqDataSourceError as e:
        say({"error": [type(e).__name__, str(e)]})
        sys.exit(1)
    except BrokenPipeError:  # the live process is gone
        return


def enter(options: ProxyOptions, progress: Progress) -> Server:
    """Enter a server; while the disk refuses, try again for ``walRetryTimeout``.

    Raises:
        LogError, OptionError, EndpointError: What prevents it.
    """
    return Retrier(options.wal_retry_timeout).retry(lambda: _bind(options, progress))


def _bind(options: ProxyOptions, progress: Progress) -> Server:
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return Server(options, progress).__enter__()
        except EndpointError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def serve(server: Server, lines: Lines, report: Callable[[dict[str, Any]], None]) -> None:
    """Serve until the lines, which say how far the log has come, end.

    Args:
        report: Told four times a second who is how far.

    Raises:
        LogError: Positions cannot be written, or the log cannot be read at all.
    """
    server.register(lines.descriptor)
    next_status = 0.0
    while True:
        server.wait()
        server.receive()
        newest = None
        for line in lines.read():
            newest = line
        if lines.ended:
            return
        if newest is not None:
            server.follow(Progress.of(json.loads(newest)))
        server.step()
        now = time.monotonic()
        if now >= next_status:
            next_status = now + _STATUS_SECONDS
            report(server.status())
