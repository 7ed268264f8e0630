"""The live process: the flow, and the server process beside it.

``run`` is the whole proxy, in the foreground; ``main`` is what ``Proxy`` starts, with the options as the first
line of its standard input, the end of which ends it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from zmq_datasource.errors import SocketError, ZmqDataSourceError
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import StopFlag, forget_signal
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.proxy.child import Child
from zmq_datasource.proxy.flow import LiveFlow
from zmq_datasource.proxy.pipes import Lines, Newest, read_start, say, set_up_logging
from zmq_datasource.proxy.view import Progress

__all__ = ["Companion", "main", "run", "run_until_stopped"]

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_END_SECONDS = 30.0
# How long the sealing thread may keep the interpreter while messages wait: Python's own 5 ms are what they would take.
_SWITCH_SECONDS = 0.0005
# How often a server that nobody reads through hears how far the log has come.
_IDLE_SECONDS = 0.1
_STATUS_SECONDS = 0.5
# The status while a server process has said nothing yet.
_NO_SERVER: dict[str, Any] = {
    "durable": [],
    "replays": {"clients": 0, "requests": 0, "sent": 0},
}
_LEAST_LIFE_SECONDS = 2.0


def run(
    given: Mapping[str, str],
    stop: Callable[[], bool],
    report: Callable[[dict[str, Any]], None],
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Be a proxy until ``stop``; then take what is on its way, and end.

    Args:
        given: The options, as text.
        report: Told twice a second how things are.
        ready: Called when all endpoints are bound.

    Raises:
        ZmqDataSourceError: The options, a socket or the log.
    """
    options = parse(ProxyOptions, given)
    sys.setswitchinterval(_SWITCH_SECONDS)
    with ExitStack() as stack:
        companion = Companion(given, serves=bool(options.durable or options.replay))
        flow = stack.enter_context(LiveFlow(options, companion.tell))
        forget_signal()  # from here on it is stopped between two steps
        companion.start(flow)
        stack.callback(companion.end)
        # Its endpoints take a moment; what comes meanwhile is received.
        deadline = time.monotonic() + _START_SECONDS
        while not companion.ready and not stop():
            flow.step()
            companion.step(flow)
            if time.monotonic() >= deadline:
                raise SocketError(f"starting the proxy's server process: not within {_START_SECONDS:.0f} s")
        ready()
        next_report = 0.0
        while not stop():
            flow.step()
            companion.step(flow)
            now = time.monotonic()
            if now >= next_report:
                next_report = now + _STATUS_SECONDS
                report({**_NO_SERVER, **flow.status(), **companion.status})
        flow.drain()
        companion.step(flow)
        _log.info("ended, next id %d", flow.journal.log.next_id)


class Companion:
    """The server process, and another one if it is killed.

    Args:
        given: Its options, as text.
        serves: Whether anybody reads the log through it. If not, it is not woken for every group of messages: all it
            does is to say what Spark queries still need.
        least_life: Seconds from one start of the process to the next.
    """

    def __init__(
        self, given: Mapping[str, str], serves: bool, least_life: float = _LEAST_LIFE_SECONDS
    ) -> None:
        self._given = given
        self._least_life = least_life
        self._serves = serves
        self._next_line = 0.0

    def start(self, flow: LiveFlow) -> None:
        """Start the process; ``flow`` listens to it from now on.

        Raises:
            SocketError: The system has no room for it.
        """
        try:
            self._server = Child("zmq_datasource.proxy.server", self._given)
        except OSError as e:
            raise SocketError(f"starting the proxy's server process: {e.strerror or e}") from e
        self._server.tell(flow.journal.progress)
        self._started = time.monotonic()
        self._gone = False
        self._again_at: float | None = None
        flow.watch(self._server.descriptor, self._listen)

    @property
    def ready(self) -> bool:
        """Whether its endpoints are bound.

        Raises:
            SocketError: It has ended without a word.
        """
        if self._gone or self._again_at is not None:
            raise SocketError(
                "the proxy's server process ends as soon as it is started; its own lines say why"
            )
        return self._server.ready

    def _listen(self) -> None:
        self._gone = not self._server.hear()
        if self._server.error is not None:
            raise self._server.error

    def step(self, flow: LiveFlow) -> None:
        """Tell it how far the log has come; start another one if it has ended.

        Raises:
            ZmqDataSourceError: Why it cannot go on.
        """
        if self._gone:
            self._gone = False
            flow.unwatch()
            self._end()
            self._again_at = self._started + self._least_life
            _log.error("the proxy's server process has ended; it is started again")
        if self._again_at is not None:
            if time.monotonic() < self._again_at:
                return
            try:
                self.start(flow)
            except SocketError as e:  # the flow goes on without it
                self._again_at = time.monotonic() + self._least_life
                _log.error("%s; it is tried again", e)
                return
        self.tell(flow.journal.progress)

    def tell(self, progress: Progress) -> None:
        """How far the log has come."""
        if self._again_at is not None:
            return
        if not self._serves:
            now = time.monotonic()
            if now < self._next_line:
                return
            self._next_line = now + _IDLE_SECONDS
        self._server.tell(progress)

    @property
    def status(self) -> Mapping[str, Any]:
        return self._server.status

    def end(self) -> None:
        if self._again_at is None:
            self._end()

    def _end(self) -> None:
        self._server.close_input()
        self._server.close_output()  # or it might wait for us to read
        self._server.wait(_END_SECONDS)


def run_until_stopped(
    given: Mapping[str, str], observe: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """Be a proxy until SIGTERM or SIGINT.

    Args:
        observe: Called with the status twice a second.

    Raises:
        ZmqDataSourceError: The options, a socket or the log.
    """
    set_up_logging()
    allow_many_files()
    stopped = StopFlag()
    with stopped.on_signals():
        run(given, stopped.is_set, observe, lambda: _log.info("ready"))


def main() -> None:
    """What runs in the process that ``Proxy`` starts."""
    allow_many_files()
    lines = Lines(sys.stdin.fileno())
    given = read_start(lines.wait())
    # Whoever has started this process may be busy, or stopped: nothing here waits for it to read.
    newest = Newest(sys.stdout.fileno())
    stopped = StopFlag()
    # The end of the input may come while the flow waits for the disk; a thread of its own sees it.
    threading.Thread(target=_stop_at_end, args=(lines, stopped), daemon=True).start()
    try:
        with stopped.on_signals():
            run(
                given,
                stopped.is_set,
                lambda status: _tell(newest, {"status": status}),
                lambda: say({"ready": True}),
            )
    except ZmqDataSourceError as e:
        newest.finish()
        say({"error": [type(e).__name__, str(e)]})
        sys.exit(1)


def _tell(newest: Newest, status: Any) -> None:
    with suppress(BrokenPipeError):  # the end of the input ends this process
        newest.tell(status)


def _stop_at_end(lines: Lines, stopped: StopFlag) -> None:
    try:
        lines.wait()
    except EOFError:
        stopped.set()
