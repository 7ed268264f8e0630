"""The thread that runs a filler, which receives a feed into a log; and what its stop has lost.

The rules:

* Receiving never waits for the disk: this thread cuts chunks, and the log's own thread writes them.
* If the log is full, or its disk refuses or is more than two chunks behind, this thread gives all received messages to
  the log and pauses. RCVHWM fills, and the peer's high-water mark decides. The thread still uses the socket, so that
  subscriptions and connections stay alive.
* An error ends receiving. The next call of another thread raises it."""

from __future__ import annotations

import logging
import math
import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import SocketError
from zmq_datasource.log import Filler, LogWriter

_log = logging.getLogger(__name__)

_PAUSES = {
    "diskFault": "the disk refuses",
    "logFull": "the log has reached walMaxBytes",
    "slowDisk": "the disk is slower than the feed",
}
_PAUSE_LINE_SECONDS = 10.0
# How long, at the end, the filler waits for messages that are on their way.
_FINISH_SECONDS = 120.0


class ReceivingThread:
    """Runs a filler from ``start`` to ``stop``. One thread calls these two, and ``request_seal``.

    Args:
        filler: The filler, which is not open yet.
        log: The log, which must be open before ``start``.
        counters: The counters of pauses.
        flush_interval: Seconds after which received messages are sealed without a request.

    Attributes:
        failure: Why receiving has ended, if it has.
        last_received: When the last message was received, on the monotonic clock.
        cut_off: Whether messages still came when the time for draining the sockets was over.
        progress: An event that is set when a message is received, or receiving ends. The calling thread clears it.
        tick_seconds: How often a pause checks whether its cause is over.
        quiet_seconds: After a stop, messages are received until none has come for this long, or
            ``Filler.drain_seconds`` are over.
        refused_seconds: How long a stop waits for a disk that refuses.
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
        self.progress = threading.Event()

    def start(self) -> None:
        """Open the sockets, and begin to receive.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked.
        """
        self._thread.start()
        try:
            self._opened.result()
        except Exception:
            self._thread.join()
            raise

    @property
    def has_started(self) -> bool:
        """Whether ``start`` was called."""
        return self._thread.ident is not None

    def stop(self) -> None:
        """Drain the sockets, and end the thread. It may be called if ``start`` has failed, or was not called."""
        self._stopping.set()
        if self.has_started:
            self._thread.join()

    def raise_failure(self) -> None:
        """Raise the error that has ended receiving, if there is one.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        if self.failure is not None:
            raise self.failure

    def request_seal(self) -> Future[Future[int]]:
        """Ask the thread to cut a chunk with all messages that were received before this call.

        Returns:
            Resolves, once the chunk is cut, to the future that ``LogWriter.cut`` returns; fails with the error that
            ends receiving.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        if not self._seal_wanted:  # else an earlier request is still open
            self._sealed = Future()
            self._seal_wanted = True
        self.raise_failure()  # the thread may have ended just before the request
        return self._sealed

    # The thread.

    def _run(self) -> None:
        try:
            with self._filler:
                self._opened.set_result(None)
                try:
                    self._receive_until_stopped()
                except SocketError:  # the log still takes what the sockets have
                    self._drain()
                    raise
                self._drain()
        except Exception as e:
            self._fail(e)

    def _fail(self, e: Exception) -> None:
        if not self._opened.done():
            self._opened.set_exception(e)
            return
        _log.error("receiving ended: %s", e)
        self.failure = e
        self.progress.set()
        if self._seal_wanted:
            self._seal_wanted = False
            self._sealed.set_exception(e)

    def _receive_until_stopped(self) -> None:
        filler, log = self._filler, self._log
        held_since = time.monotonic()
        while not self._stopping.is_set():
            if self._obstacle() is not None:
                self._pause()
            if log.failure is not None:  # a log with nothing to write can fail, too
                raise log.failure
            if filler.receive():
                self.last_received = time.monotonic()
                self._counters.last_received = time.time()
                if not self.progress.is_set():
                    self.progress.set()
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
        done = self._filler.cut()  # if this fails, _fail answers the request
        self._seal_wanted = False
        sealed.set_result(done)

    def _pause(self) -> None:
        """Receive nothing until the log can take more. Requests to seal are answered meanwhile.

        Raises:
            LogError: The disk has refused for too long.
        """
        began = counted = time.monotonic()
        counters = self._counters
        # A small log pauses many times a second, so only some pauses are logged as warnings.
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
            self._filler.extend_timeouts()
            if self._seal_wanted:
                self._answer_seal()
            now = time.monotonic()
            counters.paused_seconds[cause] += now - counted
            counted = now
        counters.paused_by = None
        _log.log(level, "receiving goes on after %.1f s", time.monotonic() - began)

    def _obstacle(self) -> str | None:
        """The cause for a pause; None if there is none."""
        log = self._log
        return "diskFault" if log.fault else "logFull" if log.full else "slowDisk" if log.slow else None

    def _drain(self) -> None:
        """Receive the messages that libzmq and the kernel still have, even if the log then exceeds its limit."""
        self._log.end_within(self.refused_seconds)
        quiet_from = time.monotonic()
        deadline = quiet_from + self._filler.drain_seconds  # for a feed that does not end
        came_at = -math.inf
        while time.monotonic() - quiet_from < self.quiet_seconds:
            if time.monotonic() >= deadline:
                self.cut_off = time.monotonic() - came_at < self.quiet_seconds
                break
            if self._log.slow or self._log.fault:
                time.sleep(self.tick_seconds)
                quiet_from = time.monotonic()
                continue
            connected = self._filler.is_connected()
            if self._filler.receive():
                quiet_from = came_at = time.monotonic()
            elif not connected:  # nothing can come any more, so another query may have the port at once
                break
        self._filler.finish(_FINISH_SECONDS)


class StopLoss(NamedTuple):
    """The loss at one stop.

    Attributes:
        messages: The number of messages that were received and could not be sealed.
        more: Whether messages were left in the socket when it was closed. Their number cannot be known.
        reason: Why the messages were lost.
    """

    messages: int
    more: bool
    reason: str

    def __str__(self) -> str:
        counted = f"{self.messages} received messages could not be sealed and are lost"
        unknown = "the messages that the socket had taken are lost, and their number is unknown"
        text = " and ".join([counted] * bool(self.messages) + [unknown] * self.more)
        return f"{text}: {self.reason}"


def loss_at_stop(
    socket_type: str, log: LogWriter, filler: Filler, receiving: ReceivingThread
) -> StopLoss | None:
    """What this stop has lost; None if nothing. Call it when the thread has ended and the log is closed.

    Transactions lose nothing: their senders repeat what was not acknowledged.
    """
    if socket_type == "ROUTER":
        return None
    facts = filler.facts()
    still_sent = receiving.cut_off and socket_type == "PULL"
    lost, left = log.unsealed + facts.pending + facts.refused, still_sent or facts.left
    if not (lost or left):
        return None
    why = log.failure or log.fault or (None if still_sent else receiving.failure)
    if why is None:
        after = f"{filler.drain_seconds:.0f} s after the stop" if still_sent else "at the end of the stop"
        why = f"messages still came {after}; stop a PUSH before its reader"
    return StopLoss(lost, left, str(why))
