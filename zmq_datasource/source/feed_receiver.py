"""Receives a feed into its log, in one loop.

| State | What the receiver does | What ends the state |
| --- | --- | --- |
| waiting | stands by for another process that receives the same into the log | The log's lock is free. |
| receiving | receives rounds, cuts chunks, pauses while the log can take nothing | ``stop``, or an error |
| draining | receives what libzmq and the kernel still have | silence, or ``Filler.drain_seconds`` |
| ended | nothing; the sockets and the lock are free | |

The rules:

* ``receive`` runs the loop in its main thread, a query in the thread ``zmq-receiver``.
* All that concerns receiving is the same in processes that wait for each other (``location``).
* The log is opened before the sockets, so that a query can compare its checkpoint with the log's end in between.
* Receiving never waits for the disk: the loop cuts chunks, and the log's own thread writes them. If the log is full, or
  its disk refuses or is more than two chunks behind, the loop gives all received messages to the log and pauses. RCVHWM
  fills, and the peer's high-water mark decides. A pause still uses the socket, so that connections stay alive.
* An error ends the loop. The next call of another thread raises it. Only an attempt to receive in place of another
  process is repeated, for a while: its port may become free a moment later than the log.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal, Protocol

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DataLossError, DiskFaultError, LogError, LogLockedError, SocketError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import check_signals, forget_signal, is_signalled
from zmq_datasource.log import LOCK_WAIT_SECONDS, STORE_RETRY_SECONDS, Filler, LogWriter
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.channel import WAIT_MS
from zmq_datasource.source.facts import SourceFacts
from zmq_datasource.source.filling import Filling, filling_of
from zmq_datasource.source.location import log_storage
from zmq_datasource.source.receiver import REPLAY_SECONDS
from zmq_datasource.source.receives import differences, refused, take_up

_log = logging.getLogger(__name__)

State = Literal["waiting", "receiving", "draining", "ended"]

_PAUSES = {
    "diskFault": "the disk refuses",
    "logFull": "the log has reached walMaxBytes",
    "slowDisk": "the disk is slower than the feed",
}
_PAUSE_LINE_SECONDS = 10.0
# How long, at the end, the filler waits for messages that are on their way.
_FINISH_SECONDS = 120.0
# How long to wait for a disk that gives no answer, not even an error.
_SEAL_SECONDS = 120.0
_SEAL_TICK = 0.1
_LOCK_TICK = _JOIN_TICK = 0.05
_TICK_SECONDS = 0.5
_BUCKET_STANDBY_SECONDS = 2.0
# A process that has had the log's lock for this long counts as receiving without errors.
_STABLE_SECONDS = 2.0


class Stopping(Protocol):
    """A flag that another thread, or a signal handler, sets: ``threading.Event``, or ``signals.StopFlag``."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, seconds: float, /) -> bool: ...


class FeedReceiver:
    """Receives a feed into its log. ``run``, or ``start`` in a thread of its own, is the loop.

    One other thread calls ``open``, ``start``, ``seal``, ``receive_for``, ``wait_for_more``, ``check`` and ``stop``.
    Any thread may call the rest.

    Args:
        options: The options of the feed.
        counters: The counters to increase.
        replay_timeout: Seconds without a reply after which a request for missing messages is repeated.
        retry_seconds: How long to wait for a disk or a bucket that refuses.
        tick: Called by the loop about twice a second, and whenever ``state`` changes.
        fill: Makes log and filler for one attempt to receive.

    Attributes:
        state: See the table above.
        failure: Why receiving has ended; None if it was stopped, or goes on.
        receives: Whether this process fills the log, or has filled it until receiving ended.
        log: The log; from the first time on that this process has the lock.
        filler: Receives, and appends to ``log``.
        resumed_at: The id of the first message that this process receives.
        lock_wait_seconds: How long ``open`` waits for the lock, because another writer may be stopping.
        warn_seconds: After how long such a wait is logged.
        standby_seconds: How often the loop checks whether the lock is free.
        takeover_seconds: How long a failing attempt to receive in place of another process is repeated.
        join_seconds: How long ``stop`` waits for such an attempt.
        tick_seconds: How often a pause checks whether its cause is over.
        quiet_seconds: After a stop, messages are received until none has come for this long, or
            ``Filler.drain_seconds`` are over.
        refused_seconds: How long a stop waits for a disk that refuses.
    """

    reader_name = None  # a ``QueryLog`` has the name of its query's lease here
    lock_wait_seconds = LOCK_WAIT_SECONDS
    warn_seconds = 1.0
    standby_seconds = 0.25
    takeover_seconds = 15.0
    join_seconds = 5.0
    tick_seconds = 0.02
    quiet_seconds = 0.2
    refused_seconds = 5.0

    log: LogWriter
    filler: Filler

    def __init__(
        self,
        options: StreamReadOptions,
        counters: SourceCounters | None = None,
        *,
        replay_timeout: float = REPLAY_SECONDS,
        retry_seconds: float = STORE_RETRY_SECONDS,
        tick: Callable[[], None] = lambda: None,
        fill: Callable[..., Filling] = filling_of,
    ) -> None:
        self._options = options
        self.counters = counters or SourceCounters()
        self.storage = log_storage(options)
        if self.storage.request_interval:  # each request to a bucket costs money
            self.standby_seconds = _BUCKET_STANDBY_SECONDS
        self._fill = partial(fill, options, self.storage, self.counters, replay_timeout, retry_seconds)
        self._tick = tick
        self._next_tick = 0.0
        self.state: State = "waiting"
        self.failure: Exception | None = None
        self.resumed_at = 0
        self.receives = False
        self._has_lock = False
        self._stands_by_for: str | None = None  # the id of the log that another process fills
        self._stopping: Stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_in_thread, name="zmq-receiver", daemon=True)
        self._settled: Future[None] = Future()  # until the loop waits or receives for the first time
        self._faults = LimitedLog(__name__, "attempts to receive in place of another process")
        self._seal_wanted = False
        self._sealed: Future[Future[int]] = Future()
        self._progress = threading.Event()  # set when a message is received, or the loop ends
        self._last_received = time.monotonic()
        self._next_pause_line = 0.0
        self._cut_off = False  # whether messages still came when the time for draining was over

    # For the thread that starts and stops the loop.

    def open(self, lock_wait: float | None = None) -> bool:
        """Become the log's writer, unless another process receives the same into it. Receives nothing yet.

        Args:
            lock_wait: Seconds to wait for the lock; by default ``lock_wait_seconds``.

        Returns:
            Whether this process is the writer now; otherwise the loop stands by.

        Raises:
            LogLockedError: Another process receives something else into the log, or with other options.
            OptionError: The log has messages of another framing or socket type, or of other topics.
            LogError: The log cannot be opened.
        """
        began = time.monotonic()
        deadline = began + (self.lock_wait_seconds if lock_wait is None else lock_wait)
        warn_at = began + self.warn_seconds
        while True:
            try:
                self._take_lock()
            except LogLockedError as e:
                found = differences(self.storage, self._options)
                if found is not None and not found:
                    self._stands_by_for = self.storage.log_id_again()
                    _log.info(
                        "another process receives into %s; waiting to receive in its place", self.storage
                    )
                    return False
                # Perhaps that process has not noted its options yet, or is stopping.
                now, why = time.monotonic(), refused(self.storage, self._options, found) if found else e
                if now >= deadline:
                    raise why from None
                if now >= warn_at:
                    warn_at = deadline
                    _log.warning("%s; waiting up to %.0f s more for that process to end", why, deadline - now)
                check_signals()
                time.sleep(_LOCK_TICK)
            else:
                self.receives = True
                return True

    def _take_lock(self) -> None:
        """Open the log as its writer, and restore the state of the last one.

        Raises:
            LogError: The log cannot be opened, or another process has the lock.
            OptionError: As ``open``.
        """
        allow_many_files()
        filling = self._fill()
        filling.log.open(receives=partial(take_up, self.storage, self._options))
        try:
            filling.restore()
        except BaseException:
            filling.log.close()
            raise
        self.log, self.filler = filling.log, filling.filler
        self.resumed_at = self.log.durable_end
        self._has_lock = True

    def start(self) -> None:
        """Run the loop in a thread. Returns when it receives or waits. A second call does nothing.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked.
            LogError: The log cannot be opened.
        """
        if self._thread.ident is None:
            self._thread.start()
            try:
                self._settled.result()
            except Exception:
                self._thread.join()
                raise

    def stop(self) -> None:
        """End the loop, which drains the sockets, seals and frees the log. May be called if ``start`` was not called.

        Raises:
            LogError, SocketError: Receiving has ended before, or received messages could not be sealed.
        """
        self._stopping.set()
        if self._thread.ident is None:
            self._end()
        deadline = time.monotonic() + self.join_seconds
        while self._thread.is_alive():
            self._thread.join(_JOIN_TICK)
            # The store does not answer the attempt to take over. The thread frees the lock when it has answered.
            if self.state == "waiting" and time.monotonic() >= deadline:
                return
        if self._has_lock:
            self.check()

    def check(self) -> None:
        """Raise the error that has ended receiving, if there is one.

        Raises:
            LogError, SocketError, OptionError: Receiving has ended.
        """
        if self.failure is not None:
            raise self.failure

    def seal(self, wait_for_disk: bool = False) -> int:
        """Make the messages durable that were received before this call, unless the disk refuses at present.

        Args:
            wait_for_disk: Whether to wait for a disk that refuses.

        Returns:
            The durable end of the log.

        Raises:
            LogError, SocketError: Receiving or sealing has ended.
        """
        self.check()
        filler, log = self.filler.facts(), self.log
        if not (filler.pending or filler.appending or log.unsealed):
            return log.durable_end
        if log.fault is not None and not wait_for_disk:
            return log.durable_end
        sealed: Future[Future[int]] | Future[int] = self._request_seal()
        deadline = time.monotonic() + _SEAL_SECONDS
        while time.monotonic() < deadline:
            if log.fault is not None:
                if not wait_for_disk:
                    return log.durable_end
                deadline = time.monotonic() + _SEAL_SECONDS
            try:
                done = sealed.result(_SEAL_TICK)
            except TimeoutError:
                check_signals()
                continue
            if not isinstance(done, Future):
                return done
            sealed = done
        raise LogError(f"sealing {self.storage}: the disk did not answer for {_SEAL_SECONDS:.0f} s")

    def _request_seal(self) -> Future[Future[int]]:
        """Ask the loop to cut a chunk with all messages that were received before this call.

        Returns:
            Resolves, once the chunk is cut, to the future that ``LogWriter.cut`` returns.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        if not self._seal_wanted:  # else an earlier request is still open
            self._sealed = Future()
            self._seal_wanted = True
        self.check()  # the loop may have ended just before the request
        return self._sealed

    def receive_for(self, timeout: float, idle_timeout: float | None) -> int:
        """Wait until ``timeout`` seconds have passed, no message has come for ``idle_timeout``, or the log is full.

        Then seal.

        Returns:
            The durable end of the log.
        """
        deadline = time.monotonic() + timeout
        idle_from = time.monotonic()
        begin = self.log.durable_end
        while time.monotonic() < deadline and not (self.log.full or is_signalled()):
            self.check()
            idle_from = time.monotonic() if self.log.fault else max(idle_from, self._last_received)
            idle = idle_timeout is not None and time.monotonic() - idle_from >= idle_timeout
            if idle:
                break
            time.sleep(WAIT_MS / 1000)
        # If there are durable messages, do not wait for a full disk: the query reads them, which makes room.
        return self.seal(wait_for_disk=self.log.durable_end == begin)

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait up to ``seconds`` for messages from id ``end`` on, but not while the log is full or has a fault."""
        deadline = time.monotonic() + seconds
        while self.received_end <= end and (left := deadline - time.monotonic()) > 0:
            if self.failure is not None or self.is_blocked:
                return
            self._progress.wait(left)  # polling instead would be most of the load of an idle query
            self._progress.clear()

    # For any thread.

    @property
    def contents(self) -> LogWriter:
        """The chunks of the log."""
        return self.log

    @property
    def is_blocked(self) -> bool:
        """Whether the log can take nothing: it has no room, or its disk has a fault."""
        return self.log.full or self.log.fault is not None

    @property
    def received_end(self) -> int:
        """The id after the last received message, without messages that are just being appended to the log."""
        return self.log.durable_end + self.log.unsealed + self.filler.facts().pending

    def facts(self) -> SourceFacts:
        """The figures of this source as of now."""
        filler = self.filler.facts()
        return SourceFacts(
            self.counters,
            self.counters,
            received=self.counters.received,
            receives=True,
            totals=filler.totals,
            publishers=filler.publishers,
            gaps=filler.gaps,
        )

    # The loop.

    def run(self, stopping: Stopping | None = None) -> None:
        """Receive until ``stopping`` is set, or ``stop`` is called. Then drain the sockets, seal, and free the log.

        Raises:
            LogError, SocketError, OptionError: Receiving cannot begin, or has ended.
        """
        self._stopping = stopping or self._stopping
        try:
            with ExitStack() as sockets:
                if self._begin(sockets):
                    self._receive()
        except Exception as e:
            self.failure = e
        finally:
            self._end()
        self.check()

    def _run_in_thread(self) -> None:
        with suppress(Exception):  # ``failure`` has it
            self.run()

    def _enter(self, state: State) -> None:
        self.state = state
        self._tick()
        if not self._settled.done():
            self._settled.set_result(None)

    def _act_when_due(self, now: float) -> None:
        if now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick()

    # Waiting.

    def _begin(self, sockets: ExitStack) -> bool:
        """Wait until this process has the lock and its sockets are open. False if it was stopped before.

        Raises:
            ZmqDataSourceError: Receiving cannot begin.
        """
        if self._has_lock or (self._stands_by_for is None and self.open()):
            sockets.enter_context(self.filler)
            self._log_begin()
            return True
        self._enter("waiting")
        failing_since: float | None = None  # when the first of the failed attempts to receive was made
        received_since: float | None = None  # when another process was first seen to receive
        while not self._stopping.wait(self.standby_seconds):
            now = time.monotonic()
            self._act_when_due(now)
            try:
                if self._is_received():
                    # A process whose attempt to receive fails has the lock for a moment, too.
                    received_since = received_since or now
                    if now - received_since >= _STABLE_SECONDS:
                        failing_since = None
                    continue
                received_since = None
                if self._take_over(sockets):
                    return True
            except Exception as e:  # an error that lasts must end receiving, or it would wait for ever
                now = time.monotonic()
                failing_since = failing_since or now
                lasting = STORE_RETRY_SECONDS if isinstance(e, DiskFaultError) else 0.0
                if now - failing_since >= max(self.takeover_seconds, lasting):
                    raise
                self._faults.warn("receiving in place of a process that has ended: %s", e)
        return False

    def _is_received(self) -> bool:
        """Whether another process writes the log.

        Raises:
            DataLossError: Another log is in its place.
            LogFormatError: The log is damaged.
            DiskFaultError: The log is not there at present. A standby must not make a log.
            LogLockedError: Something else is received into the log, or with other options.
        """
        self._check_log(self.storage.log_id_again())
        if not self.storage.is_written():
            return False
        if found := differences(self.storage, self._options):
            # Repeated like a failing takeover, because the record may be older than the lock.
            raise refused(self.storage, self._options, found)
        return True

    def _check_log(self, found: str) -> None:
        if found != self._stands_by_for:
            raise DataLossError(
                f"following log {self.storage.root}: it is another log now ({found}, not {self._stands_by_for}); give "
                "the query a new checkpoint"
            )

    def _take_over(self, sockets: ExitStack) -> bool:
        """Receive in place of a process that has ended. False if another process is quicker, or this one is stopped."""
        failpoints.reach("source.takeover.before_open")
        try:
            self._take_lock()
        except LogLockedError:
            return False
        failpoints.reach("source.takeover.after_open")
        try:
            self._check_log(self.log.log_id)
            if not self._stopping.is_set():
                sockets.enter_context(self.filler)
                self.receives = True
        finally:
            if not self.receives:
                self._has_lock = False
                self.log.close()
        if self.receives:
            _log.warning(
                "the process that received into %s has ended; this process receives in its place",
                self.storage,
            )
            self._log_begin()
        return self.receives

    def _log_begin(self) -> None:
        _log.info(
            "receiving from %s into %s (%s), next id %d",
            *(self._options.endpoints, self.storage, self.log.log_id, self.resumed_at),
        )

    # Receiving.

    def _receive(self) -> None:
        if threading.current_thread() is threading.main_thread():
            forget_signal()  # from here on a signal only sets the flag, and no wait in ``log`` is left half-way
        self._enter("receiving")
        try:
            self._receive_until_stopped()
        except SocketError:  # the log still takes what the sockets have
            self._drain()
            raise
        self._drain()

    def _receive_until_stopped(self) -> None:
        filler, log = self.filler, self.log
        held_since = time.monotonic()
        while not self._stopping.is_set():
            if self._obstacle() is not None:
                self._pause()
            if log.failure is not None:  # a log with nothing to write can fail, too
                raise log.failure
            if filler.receive():
                self._last_received = time.monotonic()
                self.counters.last_received = time.time()
                if not self._progress.is_set():
                    self._progress.set()
            now = time.monotonic()
            self._act_when_due(now)
            if self._seal_wanted:
                self._answer_seal()
                held_since = now
            elif now - held_since >= self._options.wal_flush_interval and not log.busy:
                if filler.facts().pending or log.open_bytes:
                    filler.cut()
                held_since = now

    def _answer_seal(self) -> None:
        sealed = self._sealed
        done = self.filler.cut()  # if this fails, _end answers the request
        self._seal_wanted = False
        sealed.set_result(done)

    def _pause(self) -> None:
        """Receive nothing until the log can take more. Requests to seal are answered meanwhile.

        Raises:
            LogError: The disk has refused for too long.
        """
        began = counted = time.monotonic()
        counters = self.counters
        # A small log pauses many times a second, so only some pauses are logged as warnings.
        level = logging.WARNING if began >= self._next_pause_line else logging.DEBUG
        if level == logging.WARNING:
            self._next_pause_line = began + _PAUSE_LINE_SECONDS
        self.filler.cut()
        while (cause := self._obstacle()) is not None:
            if cause != counters.paused_by:
                _log.log(
                    level, "receiving paused: %s (%d pauses before)", _PAUSES[cause], counters.pauses.total()
                )
                counters.pauses[cause] += 1
                counters.paused_by = cause
            if self._stopping.wait(self.tick_seconds):
                break
            if self.log.failure is not None:
                raise self.log.failure
            self.filler.extend_timeouts()
            if self._seal_wanted:
                self._answer_seal()
            now = time.monotonic()
            self._act_when_due(now)
            counters.paused_seconds[cause] += now - counted
            counted = now
        counters.paused_by = None
        _log.log(level, "receiving goes on after %.1f s", time.monotonic() - began)

    def _obstacle(self) -> str | None:
        """The cause for a pause; None if there is none."""
        log = self.log
        return "diskFault" if log.fault else "logFull" if log.full else "slowDisk" if log.slow else None

    # Draining, and the end.

    def _drain(self) -> None:
        """Receive the messages that libzmq and the kernel still have, even if the log then exceeds its limit."""
        self._enter("draining")
        self.log.end_within(self.refused_seconds)
        quiet_from = time.monotonic()
        deadline = quiet_from + self.filler.drain_seconds  # for a feed that does not end
        came_at = -math.inf
        while time.monotonic() - quiet_from < self.quiet_seconds:
            if time.monotonic() >= deadline:
                self._cut_off = time.monotonic() - came_at < self.quiet_seconds
                break
            if self.log.slow or self.log.fault:
                time.sleep(self.tick_seconds)
                quiet_from = time.monotonic()
                continue
            connected = self.filler.is_connected()
            if self.filler.receive():
                quiet_from = came_at = time.monotonic()
            elif not connected:  # nothing can come any more, so another query may have the port at once
                break
        self.filler.finish(_FINISH_SECONDS)

    def _end(self) -> None:
        """Seal what was received, free the log, and count what is lost."""
        if self.state == "ended":
            return
        try:
            if self._has_lock:
                self.log.close()
        except Exception as e:
            self.failure = self.failure or e
        finally:
            if self._has_lock:
                self._count_loss()
                _log.info("stopped receiving into %s at id %d", self.storage, self.log.durable_end)
            self._answer_all()

    def _answer_all(self) -> None:
        """Answer the threads that wait for the loop."""
        if self.failure is not None and self._settled.done():
            _log.error("receiving ended: %s", self.failure)
        if self.failure is not None and not self._settled.done():
            self._settled.set_exception(self.failure)
        self._enter("ended")
        self._progress.set()
        if self._seal_wanted:
            self._seal_wanted = False
            self._sealed.set_exception(
                self.failure or LogError(f"sealing {self.storage}: receiving was stopped")
            )

    def _count_loss(self) -> None:
        """Count and log the messages that were received and could not be sealed, or were left in a socket.

        Transactions lose nothing: their senders repeat what was not acknowledged.
        """
        if self._options.socket_type == "ROUTER":
            return
        facts = self.filler.facts()
        still_sent = self._cut_off and self._options.socket_type == "PULL"
        lost, left = self.log.unsealed + facts.pending + facts.refused, still_sent or facts.left
        if not (lost or left):
            return
        why = self.log.failure or self.log.fault or (None if still_sent else self.failure)
        if why is None:
            after = (
                f"{self.filler.drain_seconds:.0f} s after the stop"
                if still_sent
                else "at the end of the stop"
            )
            why = f"messages still came {after}; stop a PUSH before its reader"
        counted = [f"{lost} received messages could not be sealed and are lost"] * bool(lost)
        unknown = ["the messages that the socket had taken are lost, and their number is unknown"] * left
        self.counters.lost_at_stop += lost
        _log.error("stopping to receive into %s: %s: %s", self.storage, " and ".join(counted + unknown), why)
