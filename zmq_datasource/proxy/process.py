"""The live process: the flow of messages, and beside it the server process.

``run_until_stopped`` is the proxy in the foreground. ``main`` runs in the process that ``Proxy`` starts.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from zmq_datasource.errors import SocketError, ZmqDataSourceError
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import StopFlag, forget_signal
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy.child import Child, Parent, set_up_logging
from zmq_datasource.proxy.figures import NO_CLIENTS
from zmq_datasource.proxy.flow import LiveFlow
from zmq_datasource.proxy.view import Progress

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_END_SECONDS = 30.0
# How long the sealing thread may keep the interpreter while messages wait. Python's default is 5 ms, which would delay
# each message by as much.
_SWITCH_SECONDS = 0.0005
_STATUS_SECONDS = 0.5
_RESTART_SECONDS = 2.0


class ServerProcess:
    """The server process. If it is killed, another one is started.

    Args:
        given: The options, as text.
        restart_seconds: From one start of the process to the next, at least.
        child: Starts the process.

    Attributes:
        status: Its newest status; empty until its endpoints are bound for the first time.
        asked_end: A durable subscriber has asked for what follows this id, and found nothing.
    """

    def __init__(
        self,
        given: Mapping[str, str],
        restart_seconds: float = _RESTART_SECONDS,
        child: Callable[[str, Mapping[str, str]], Child] = Child,
    ) -> None:
        self._given = given
        self._start_child = child
        self._restart_seconds = restart_seconds
        self._child: Child | None = None
        self._next_start = 0.0
        self.status: Mapping[str, Any] = {}
        self.asked_end = -1

    def start(self, progress: Progress) -> None:
        """Start the process.

        Raises:
            SocketError: The system has no room for it.
        """
        self._next_start = time.monotonic() + self._restart_seconds
        try:
            self._child = self._start_child("zmq_datasource.proxy.server", self._given)
        except OSError as e:
            raise SocketError(f"starting the proxy's server process: {e.strerror or e}") from e
        self._child.send(progress)

    def step(self, progress: Progress) -> None:
        """Send the progress, read the status, and start the process again if it was killed. Called in each round.

        Raises:
            ZmqDataSourceError: The error that has ended the process.
            SocketError: It has ended before its endpoints were bound for the first time.
        """
        child = self._child
        if child is None:
            self._start_again(progress)
            return
        self.status, self.asked_end = child.status or self.status, child.asked_end
        if child.ended:
            self.end()
            if child.error is not None:
                raise child.error
            if not self.status:
                raise SocketError(
                    "the proxy's server process has ended before it was ready; its own log lines say why"
                )
            _log.error("the proxy's server process has ended; starting it again")
        child.send(progress)

    def _start_again(self, progress: Progress) -> None:
        if time.monotonic() < self._next_start:
            return
        try:
            self.start(progress)
        except SocketError as e:  # the flow goes on without it
            _log.error("%s; trying again in %g s", e, self._restart_seconds)

    def end(self) -> None:
        """End the process, if it runs."""
        if self._child is not None:
            self._child.end(_END_SECONDS)
            self._child = None


class NoServer(ServerProcess):
    """Takes the place of the server process in a proxy without durable subscribers."""

    def __init__(self) -> None:
        super().__init__({})
        self.status = NO_CLIENTS

    def start(self, progress: Progress) -> None:
        """Start nothing."""

    def step(self, progress: Progress) -> None:
        """Do nothing."""


def run(given: Mapping[str, str], stop: Callable[[], bool], report: Callable[[dict[str, Any]], None]) -> None:
    """Run a proxy until ``stop()`` is true; then receive, publish and write the messages on their way, and return.

    Args:
        given: The options, as text.
        report: Called with the status twice a second, first when all endpoints are bound.

    Raises:
        ZmqDataSourceError: The options, a socket or the log.
    """
    options = parse(ProxyOptions, given)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with ExitStack() as stack:
        flow = stack.enter_context(LiveFlow(options))
        # Without this side a server process has nothing to do: the log itself keeps the messages of its readers.
        server = (
            ServerProcess(given, child=partial(Child, notify=flow.wake)) if options.durable else NoServer()
        )
        forget_signal()  # from here on a signal only sets the flag that ``stop`` reads
        server.start(flow.journal.progress)
        stack.callback(server.end)
        next_report, deadline = 0.0, time.monotonic() + _START_SECONDS
        while not stop():
            now = time.monotonic()
            if server.status and now >= next_report:
                if not next_report:
                    _log.info("ready")
                next_report = now + _STATUS_SECONDS
                report({**flow.status(), **server.status})
            elif not server.status and now >= deadline:
                raise SocketError(
                    f"starting the proxy's server process: not ready within {_START_SECONDS:.0f} s"
                )
            flow.asked_end = server.asked_end
            flow.step()  # messages are received also while the server process starts
            server.step(flow.journal.progress)
        flow.drain()
        server.step(flow.journal.progress)
        _log.info("ended, next id %d", flow.journal.next_id)


def run_until_stopped(
    given: Mapping[str, str], observe: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """Run a proxy until SIGTERM or SIGINT.

    Args:
        observe: Called with the status twice a second.

    Raises:
        ZmqDataSourceError: The options, a socket or the log.
    """
    set_up_logging()
    allow_many_files()
    stopped = StopFlag()
    with stopped.on_signals():
        run(given, stopped.is_set, observe)


def main() -> None:
    """Run the live process that ``Proxy`` has started, until the pipe from ``Proxy`` closes or a signal comes."""
    allow_many_files()
    parent = Parent()
    stopped = StopFlag()

    def stop_at_end() -> None:  # in a thread, because the flow may wait for the disk when the pipe closes
        parent.values.wait_until_closed()
        stopped.set()

    threading.Thread(target=stop_at_end, daemon=True).start()
    try:
        with stopped.on_signals():
            run(parent.options, stopped.is_set, parent.report)
    except ZmqDataSourceError as e:
        parent.exit_with(e)
