"""The thread that runs a filler, which receives a feed into a log; and the record of the messages that its stops have
lost.

The rules:

* Receiving never waits for the disk: this thread cuts chunks, and the log's own thread writes them.
* If the log is full, or its disk refuses or is more than two chunks behind, this thread gives all received messages to
  the log and pauses. RCVHWM fills, and the peer's high-water mark decides. The thread still uses the socket, so that
  subscriptions and connections stay alive.
* An error ends receiving. The next call of another thread raises it.
* A stop adds the messages that it loses to a small file of the log (``StopLosses``)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import RESTORE, LogError, LogFormatError, SocketError
from zmq_datasource.log import STOPS_NAME, Filler, LogStorage, LogWriter

__all__ = ["ReceivingThread", "StopLoss", "StopLosses", "StopRecord", "loss_at_stop", "read_record"]

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
            if self._filler.receive():
                quiet_from = came_at = time.monotonic()
        self._filler.finish(_FINISH_SECONDS)


# So short that the file of ``StopLosses`` fits into one sector, and can be overwritten even on a full disk.
_REASON_CHARACTERS = 200


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
    """What this stop has lost; None if nothing. Call it when the thread has ended, and again when the log is closed.

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


class StopRecord(NamedTuple):
    """What the stops of a log partition's receivers have lost: a small JSON file in the log::

        {"messages": 12, "stops": 2, "told": true,
         "last": {"at": "2026-01-01T00:00:00Z", "messages": null, "reason": "..."}}

    Attributes:
        messages: The messages that all stops have lost, as far as their number is known.
        stops: The number of stops that have lost messages.
        told: Whether a run has logged the last stop.
        last: The last stop that lost something; None if there was none.
    """

    messages: int = 0
    stops: int = 0
    told: bool = True
    last: Mapping[str, object] | None = None


def read_record(storage: LogStorage) -> StopRecord:
    """Read the record of a log partition. Another process may write it at the same time.

    Raises:
        LogError: The record cannot be read.
    """
    match storage.read_json(storage.key(STOPS_NAME)):
        case None:
            return StopRecord()
        case {
            "messages": int(messages),
            "stops": int(stops),
            "told": bool(told),
            "last": (None | {}) as last,
        }:
            return StopRecord(messages, stops, told, last)
    raise LogFormatError(
        f"reading {storage.path_of(STOPS_NAME)}: it is not the record of losses at stops. {RESTORE}"
    )


class StopLosses:
    """Writes the record of one log partition; for the partition's writer.

    The next run logs the last loss, and the metrics count all of them. Opening the log writes the file, so a stop only
    overwrites it, which needs no room on a full disk. The stop writes it while the writer still has the partition's
    lock.

    Args:
        storage: The partition.
        counters: The counters that get the sums.
    """

    def __init__(self, storage: LogStorage, counters: SourceCounters) -> None:
        self._storage = storage
        self._counters = counters
        self._last: Mapping[str, object] | None = None

    def report_last_stop(self) -> None:
        """Add the recorded sums to the counters, and log the last stop with a loss, unless a run has logged it.

        Call it with the partition's lock.

        Raises:
            LogError: The record cannot be read or written.
        """
        counters = self._counters
        record = read_record(self._storage)
        counters.lost_at_stop, counters.lossy_stops = record.messages, record.stops
        last = self._last = record.last
        if last is not None and not record.told:
            messages = last.get("messages")
            _log.warning(
                "the previous run of %s was stopped at %s and lost %s messages: %s (so far, %d stops have lost %d "
                "messages that were counted, besides losses of unknown number)",
                self._storage,
                last.get("at"),
                "an unknown number of" if messages is None else messages,
                last.get("reason"),
                counters.lossy_stops,
                counters.lost_at_stop,
            )
        self._write(told=True)

    def record(self, loss: StopLoss) -> None:
        """Add the loss at this stop to the record. A failure is only logged. Call it with the partition's lock."""
        counters = self._counters
        counters.lost_at_stop += loss.messages
        counters.lossy_stops += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        messages = None if loss.more else loss.messages
        self._last = {"at": at, "messages": messages, "reason": loss.reason[:_REASON_CHARACTERS]}
        try:
            self._write(told=False)
        except LogError as e:
            _log.error(
                "recording the messages that this stop has lost: %s. The next run will not report them", e
            )

    def _write(self, told: bool) -> None:
        counters = self._counters
        record = StopRecord(counters.lost_at_stop, counters.lossy_stops, told, self._last)
        self._storage.write_json(self._storage.key(STOPS_NAME), record._asdict())
