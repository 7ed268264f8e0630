"""The thread that keeps a feed flowing into a log, whoever fills it.

The rules:

* Receiving never waits for the disk: chunks are cut here and written by the log's own thread.
* When the log is full, or its disk refuses or is two chunks behind, this thread stops receiving (and hands
  over what it holds). RCVHWM fills, and the peer's high-water mark decides. The socket is
  still touched, so that subscriptions and connections live on.
* An error ends receiving; it is raised to whoever calls next.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import Future

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log import Filler, LogWriter

__all__ = ["ReceivingThread"]

_log = logging.getLogger(__name__)

_PAUSES = {
    "diskFault": "the disk refuses",
    "logFull": "the log has reached walMaxBytes",
    "slowDisk": "the disk is slower than the feed",
}
_PAUSE_LINE_SECONDS = 10.0
# How long what is under way is waited for at the end.
_FINISH_SECONDS = 120.0


class ReceivingThread:
    """Runs a filler from ``start`` to ``stop``; those, and ``request_seal``, are for one calling thread.

    Args:
        filler: Not yet open.
        log: Open before ``start``.
        counters: Where to count pauses.
        flush_interval: Seconds after which what was received is sealed though nobody has asked for it.

    Attributes:
        failure: Why receiving has ended, if it has.
        last_received: When a message last came, monotonic.
        cut_off: Whether messages still came when the time to drain the sockets after a stop was over.
        heard: Set when a message has come, or receiving has ended; for the calling thread to clear and wait for.
        tick_seconds: How often a pause looks whether its cause is over.
        quiet_seconds: After a stop, what libzmq and the kernel hold is taken until nothing came for this long, or the
            filler's time is over.
        refused_seconds: How long the end waits for a disk that refuses.
    """

    tick_seconds = 0.02
    quiet_seconds = 0.2
    refused_seconds = 5.0

    def __init__(
        self,
        filler: Filler,
        log: LogWriter,
        counters: SourceCounters,
        flush_interval: float,
    ) -> None:
        self._filler = filler
        self._log = log
        self._counters = counters
        self._flush_interval = flush_interval
        self._thread = threading.Thread(target=self._run, name="zmq-receiver", daemon=True)
        self._stopping = threading.Event()
        self._opened: Future[None] = Future()
        self._seal_wanted = False
        self._sealed: Future[Future[int]] = Future()
        self._next_pause_line = 0.0
        self.failure: Exception | None = None
        self.last_received = time.monotonic()
        self.cut_off = False
        self.heard = threading.Event()

    def start(self) -> None:
        """Open the sockets and begin to receive.

        Raises:
            EndpointError, OptionError: See the message.
        """
        self._thread.start()
        try:
            self._opened.result()
        except Exception:
            self._thread.join()
            raise

    def stop(self) -> None:
        """Drain the sockets and end; also if ``start`` was cut short, or was not called."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def raise_failure(self) -> None:
        """Raise why receiving has ended, if it has.

        Raises:
            LogError, SocketError: See the message.
        """
        if self.failure is not None:
            raise self.failure

    def request_seal(self) -> Future[Future[int]]:
        """Have what was received before this call cut, and so sealed.

        Returns:
            Resolves to what ``LogWriter.cut`` has returned, or fails with why receiving has ended.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        if not self._seal_wanted:  # else what was asked for before is still to be answered
            self._sealed = Future()
            self._seal_wanted = True
        self.raise_failure()  # the thread may have ended just before it was asked
        return self._sealed

    # The thread.

    def _run(self) -> None:
        try:
            with self._filler:
                self._opened.set_result(None)
                self._receive_until_stopped()
                self._drain()
        except Exception as e:
            self._fail(e)

    def _fail(self, e: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(e)
            return
        _log.error("receiving ended: %s", e)
        self.failure = e
        self.heard.set()
        if self._seal_wanted:
            self._seal_wanted = False
            self._sealed.set_exception(e)

    def _receive_until_stopped(self) -> None:
        filler, log = self._filler, self._log
        held_since = time.monotonic()
        while not self._stopping.is_set():
            if self._obstacle() is not None:
                self._pause()
            if log.failure is not None:  # also of a log that has nothing to write
                raise log.failure
            if filler.receive():
                self.last_received = time.monotonic()
                self._counters.last_received = time.time()
                if not self.heard.is_set():
                    self.heard.set()
            now = time.monotonic()
            if self._seal_wanted:
                self._answer_seal()
                held_since = now
            elif now - held_since >= self._flush_interval and not log.busy:
                if filler.facts().pending or log.open_bytes:
                    self._filler.cut()
                held_since = now

    def _answer_seal(self) -> None:
        sealed = self._sealed
        done = self._filler.cut()  # if this fails, the request is still open and hears of it
        self._seal_wanted = False
        sealed.set_result(done)

    def _pause(self) -> None:
        """Hold still until the log has room, answering everybody but the feed.

        Raises:
            LogError: The disk has refused for too long.
        """
        began = counted = time.monotonic()
        counters = self._counters
        # A small log pauses many times a second; that is said now and then.
        level = logging.WARNING if began >= self._next_pause_line else logging.DEBUG
        if level == logging.WARNING:
            self._next_pause_line = began + _PAUSE_LINE_SECONDS
        self._filler.cut()
        while (cause := self._obstacle()) is not None:
            if cause != counters.paused_by:
                _log.log(
                    level, "receiving paused: %s (%d pauses before)", _PAUSES[cause], counters.pauses.total()
                )
                counters.pauses[cause] += 1
                counters.paused_by = cause
            if self._stopping.wait(self.tick_seconds):
                break
            if self._log.failure is not None:
                raise self._log.failure
            self._filler.postpone()
            if self._seal_wanted:
                self._answer_seal()
            now = time.monotonic()
            counters.paused_seconds[cause] += now - counted
            counted = now
        counters.paused_by = None
        _log.log(level, "receiving goes on after %.1f s", time.monotonic() - began)

    def _obstacle(self) -> str | None:
        """Why nothing should be received now."""
        log = self._log
        return "diskFault" if log.fault else "logFull" if log.full else "slowDisk" if log.slow else None

    def _drain(self) -> None:
        """Take what libzmq and the kernel still hold; time bounds it, not the log's size."""
        self._log.end_within(self.refused_seconds)
        quiet_from = time.monotonic()
        deadline = quiet_from + self._filler.drain_seconds  # a feed that goes on for ever is left after this
        came_at = -math.inf
        while time.monotonic() - quiet_from < self.quiet_seconds:
            if time.monotonic() >= deadline:
                self.cut_off = time.monotonic() - came_at < self.quiet_seconds
                break
            if self._log.slow or self._log.fault:
                time.sleep(self.tick_seconds)
                quiet_from = time.monotonic()
                continue
            if self._filler.receive():
                quiet_from = came_at = time.monotonic()
        self._filler.finish(_FINISH_SECONDS)
