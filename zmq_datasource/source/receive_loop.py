"""The loop of a process that fills a log: it receives, pauses, and at the end drains the sockets.

Receiving never waits for the disk: the loop cuts chunks, and the log's own thread writes them. If the log is full, or
its disk refuses or is more than two chunks behind, the loop gives all received messages to the log and pauses. RCVHWM
fills, and the peer's high-water mark decides. A pause still uses the socket, so that connections stay alive.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.signals import StopFlag
from zmq_datasource.log import LogWriter
from zmq_datasource.source.filling import Filler
from zmq_datasource.source.sealing import LEAST_SECONDS, LastSeal, seal_time

Stopping: TypeAlias = threading.Event | StopFlag

_PAUSES = {
    "diskFault": "the disk refuses",
    "logFull": "the log has reached walMaxBytes",
    "slowDisk": "the disk is slower than the feed",
}
# For how long a round may gather messages: other duties of the thread wait.
_GATHER_SECONDS = 0.25
# How long, at the end, the filler waits for messages that are on their way.
_FINISH_SECONDS = 120.0


class ReceiveLoop:
    """Receives into a log that this process writes. One thread runs it.

    Args:
        filler: Receives, and appends to ``log``.
        flush_interval: Seconds after which received messages are sealed.
        tick: Called in each round.
        least_seal_seconds: How often a chunk is sealed for a durable subscriber, at most.
        gathers: Whether a round gathers messages until something is due. With False it ends with the messages that
            are there, because a query waits for them.

    Attributes:
        progress: Set when a message is received.
        last_received: When that was.
        cut_off: Whether messages still came when the time for draining was over.
        tick_seconds: How often a pause checks whether its cause is over.
        quiet_seconds: At the end, messages are received until none has come for this long, or
            the ``drain_seconds`` of the filler are over.
        refused_seconds: How long the end waits for a disk that refuses.
    """

    tick_seconds = 0.02
    quiet_seconds = 0.2
    refused_seconds = 5.0

    def __init__(
        self,
        log: LogWriter,
        filler: Filler,
        counters: SourceCounters,
        flush_interval: float,
        tick: Callable[[], None],
        least_seal_seconds: float = LEAST_SECONDS,
        gathers: bool = False,
    ) -> None:
        self._log, self._filler, self._counters = log, filler, counters
        self._flush_interval, self._tick = flush_interval, tick
        self._least_seal_seconds = least_seal_seconds
        self._gathers = gathers
        self._held_since = 0.0
        self._last_seal = LastSeal(0.0, 0.0, log.state_bytes)
        self._awaited = -1
        self._asked_to_seal: Future[int] | None = None
        self._pauses = LimitedLog(__name__, "lines about pauses")  # a small log pauses many times a second
        self.progress = threading.Event()
        self.last_received = time.monotonic()
        self.cut_off = False

    def ask_to_seal(self) -> Future[int]:
        """Ask for a chunk with all messages that were received before this call. For one other thread.

        Returns:
            Resolves to the durable end after that chunk.
        """
        if (asked := self._asked_to_seal) is None:  # else an earlier request is still open
            asked = self._asked_to_seal = Future()
        return asked

    def await_rows(self, end: int) -> None:
        """Seal what is received as soon as ``sealing`` allows: a durable subscriber has read to the end of the log.

        It holds until the next chunk is sealed. Any thread may call this.

        Args:
            end: The end to which the subscriber has read.
        """
        self._awaited = end
        self._filler.wake()

    def end_with(self, why: Exception) -> None:
        """Let an open request to seal fail, and end each wait for messages: the loop has ended."""
        self.progress.set()
        if (asked := self._asked_to_seal) is not None:
            self._asked_to_seal = None
            asked.set_exception(why)

    def receive(self, stopping: Stopping) -> None:
        """Receive until ``stopping`` is set.

        Raises:
            LogError, SocketError: Receiving must end. After a SocketError ``drain`` still works.
        """
        log, filler = self._log, self._filler
        self._held_since = time.monotonic()
        while not stopping.is_set():
            if self._obstacle() is not None:
                self._pause(stopping)
            if log.failure is not None:  # a log with nothing to write can fail, too
                raise log.failure
            if filler.receive(self._gather_seconds()):
                self.last_received = time.monotonic()
                self._counters.last_received = time.time()
                if not self.progress.is_set():
                    self.progress.set()
            self._tick()
            if self._asked_to_seal is not None:
                self._seal(self._asked_to_seal)
            elif time.monotonic() >= self._seal_time() and not log.busy:
                self._cut()

    def _gather_seconds(self) -> float:
        """For how long the next round may go on."""
        if not self._gathers:
            return 0.0
        return max(0.0, min(_GATHER_SECONDS, self._seal_time() - time.monotonic()))

    def _seal_time(self) -> float:
        """When to seal without a request, monotonic."""
        log = self._log
        at_latest = self._held_since + self._flush_interval
        if self._awaited < log.durable_end or log.writing:
            return at_latest
        size = log.unsealed_bytes + self._filler.facts().pending_bytes
        return min(at_latest, seal_time(size, self._last_seal, self._least_seal_seconds))

    def _cut(self) -> None:
        """Hand over what was received, if there is anything."""
        if self._filler.facts().pending or self._log.open_bytes:
            cut = self._filler.cut()
            cut.add_done_callback(partial(self._note_sealed, time.monotonic()))
        self._held_since = time.monotonic()

    def _note_sealed(self, began: float, _: Future[int]) -> None:
        """Called in the log's thread."""
        seconds = time.monotonic() - began
        self._last_seal = self._last_seal.followed_by(began, seconds, self._log.state_bytes)

    def _seal(self, asked: Future[int]) -> None:
        cut = self._filler.cut()  # if this fails, ``end_with`` answers the request
        self._asked_to_seal = None
        self._held_since = time.monotonic()
        cut.add_done_callback(lambda done: _copy(done, asked))

    def _pause(self, stopping: Stopping) -> None:
        """Receive nothing until the log can take more. Requests to seal are answered meanwhile."""
        began = counted = time.monotonic()
        counters = self._counters
        self._filler.cut()
        while (cause := self._obstacle()) is not None:
            if cause != counters.paused_by:
                self._pauses.warn("receiving paused: %s", _PAUSES[cause])
                counters.pauses[cause] += 1
                counters.paused_by = cause
            if stopping.wait(self.tick_seconds):
                break
            if self._log.failure is not None:
                raise self._log.failure
            self._filler.extend_timeouts()
            if self._asked_to_seal is not None:
                self._seal(self._asked_to_seal)
            self._tick()
            now = time.monotonic()
            counters.paused_seconds[cause] += now - counted
            counted = now
        counters.paused_by = None
        self._pauses.warn("receiving goes on after %.1f s", time.monotonic() - began)

    def _obstacle(self) -> str | None:
        """The cause for a pause; None if there is none."""
        log = self._log
        return "diskFault" if log.fault else "logFull" if log.full else "slowDisk" if log.slow else None

    def drain(self) -> None:
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
            if self._filler.receive():
                quiet_from = came_at = time.monotonic()
        self._filler.finish(_FINISH_SECONDS)


def _copy(done: Future[int], to: Future[int]) -> None:
    if (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())
