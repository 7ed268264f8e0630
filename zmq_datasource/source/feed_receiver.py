"""Receives a feed into its log, in one loop.

| State | What the receiver does | What ends the state |
| --- | --- | --- |
| waiting | waits for another process that receives the same into the log (``standby``) | The log's lock is free. |
| receiving | receives, and pauses while the log can take nothing (``receive_loop``) | ``stop``, or an error |
| draining | receives what libzmq and the kernel still have | silence, or the ``drain_seconds`` of the filler |
| ended | nothing; the sockets and the lock are free | |

The rules:

* ``receive`` runs the loop in its main thread, a query in the thread ``zmq-receiver``.
* All that concerns receiving is the same in processes that wait for each other (``location``).
* The log is opened before the sockets, so that a query can compare its checkpoint with the log's end in between.
* An error ends the loop. The next call of another thread raises it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Literal

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, LogLockedError, SocketError
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import check_signals, forget_signal, is_signalled
from zmq_datasource.log import LOCK_WAIT_SECONDS, LogWriter
from zmq_datasource.options import ReceiveOptions, StreamReadOptions
from zmq_datasource.source.facts import SourceFacts
from zmq_datasource.source.filling import Filler, Filling, filling_of
from zmq_datasource.source.location import log_storage
from zmq_datasource.source.receive_loop import ReceiveLoop, Stopping
from zmq_datasource.source.receiver import WAIT_SECONDS
from zmq_datasource.source.receives import refusal, take_up
from zmq_datasource.source.sealing import LEAST_BUCKET_SECONDS, LEAST_SECONDS
from zmq_datasource.source.standby import Standby

_log = logging.getLogger(__name__)

State = Literal["waiting", "receiving", "draining", "ended"]

# How long to wait for a disk that gives no answer, not even an error.
_SEAL_SECONDS = 120.0
_SEAL_TICK = 0.1
_LOCK_TICK = 0.05
_TICK_SECONDS = 0.5


class FeedReceiver:
    """Receives a feed into its log. ``run``, or ``start`` in a thread of its own, is the loop.

    One other thread calls ``open``, ``start``, ``seal``, ``receive_for``, ``wait_for_more``, ``check`` and ``stop``.
    Any thread may call the rest.

    Args:
        options: The options of the feed.
        tick: Called by the loop about twice a second, and whenever ``state`` changes.
        fill: Makes log and filler for one attempt to receive.
        side: Serves the log of this receiver, until the sockets are drained; None for nothing.

    Attributes:
        state: See the table above.
        failure: Why receiving has ended; None if it was stopped, or goes on.
        receives: Whether this process fills the log, or has filled it until receiving ended.
        log: The log; from the first time on that this process has the lock.
        filler: Receives, and appends to ``log``.
        resumed_at: The id of the first message that this process receives.
        lock_wait_seconds: How long ``open`` waits for the lock, because another writer may be stopping.
    """

    reader_name = None  # a ``QueryLog`` has the name of its query's lease here
    lock_wait_seconds = LOCK_WAIT_SECONDS

    log: LogWriter
    filler: Filler
    _loop: ReceiveLoop

    def __init__(
        self,
        options: StreamReadOptions,
        counters: SourceCounters | None = None,
        *,
        tick: Callable[[], None] = lambda: None,
        fill: Callable[..., Filling] = filling_of,
        side: Callable[[FeedReceiver], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._options = options
        self.counters = counters or SourceCounters()
        self.storage = log_storage(options)
        self._fill = partial(fill, options, self.storage, self.counters)
        self._tick = tick
        self._side = side
        self._next_tick = 0.0
        self.state: State = "waiting"
        self.failure: Exception | None = None
        self.resumed_at = 0
        self.receives = False
        self._standby: Standby | None = None  # if another process fills the log
        self._stopping: Stopping = threading.Event()
        self._thread = threading.Thread(target=self._run_in_thread, name="zmq-receiver", daemon=True)
        self._began = threading.Event()  # the loop waits or receives, or has ended

    # For the thread that starts and stops the loop.

    def open(self) -> bool:
        """Become the log's writer, unless another process receives the same into it. Receives nothing yet.

        Returns:
            Whether this process is the writer now; otherwise the loop stands by.

        Raises:
            LogLockedError: Another process receives something else into the log, or with other options.
            OptionError: The log has messages of another framing or socket type, or of other topics.
            LogError: The log cannot be opened.
        """
        deadline, is_told = time.monotonic() + self.lock_wait_seconds, False
        while True:
            try:
                self._take_lock()
            except LogLockedError as e:
                why = refusal(self.storage, self._options, e)
                if why is None:
                    self._standby = Standby(self.storage, self._options)
                    _log.info(
                        "another process receives into %s; waiting to receive in its place", self.storage
                    )
                    return False
                # Perhaps that process has not noted its options yet, or is stopping.
                if (left := deadline - time.monotonic()) <= 0:
                    raise why from None
                if not is_told:
                    is_told = True
                    _log.warning("%s; waiting up to %.0f s for that process to end", why, left)
                check_signals()
                time.sleep(_LOCK_TICK)
            else:
                self.receives = True
                return True

    def _take_lock(self) -> None:
        """Open the log as its writer, and restore the state of the last one."""
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
        self._loop = ReceiveLoop(
            self.log,
            self.filler,
            self.counters,
            self._options.wal_flush_interval,
            self._act_when_due,
            LEAST_BUCKET_SECONDS if self.storage.request_interval else LEAST_SECONDS,
            gathers=isinstance(self._options, ReceiveOptions),
        )

    def start(self) -> None:
        """Run the loop in a thread. Returns when it receives or waits. A second call does nothing.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked.
            LogError: The log cannot be opened.
        """
        if self._thread.ident is None:
            self._thread.start()
            self._began.wait()
            if self.state == "ended":
                self._thread.join()
                self.check()

    def stop(self) -> None:
        """End the loop, which drains the sockets, seals and frees the log. May be called if ``start`` was not called.

        Raises:
            LogError, SocketError: Receiving has ended before, or received messages could not be sealed.
        """
        self._stopping.set()
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join()
        if self.receives:
            self.check()

    def check(self) -> None:
        """Raise the error that has ended receiving, if there is one.

        Raises:
            LogError, SocketError, OptionError: Receiving has ended.
        """
        if self.failure is not None:
            raise self.failure

    def seal(self) -> int:
        """Make the messages durable that were received before this call, unless the disk refuses at present.

        Returns:
            The durable end of the log.

        Raises:
            LogError, SocketError: Receiving or sealing has ended.
        """
        self.check()
        filler, log = self.filler.facts(), self.log
        if not (filler.pending or filler.appending or log.unsealed):
            return log.durable_end
        if log.fault is not None:
            return log.durable_end
        sealed = self._loop.ask_to_seal()
        self.check()  # the loop may have ended just before the request
        deadline = time.monotonic() + _SEAL_SECONDS
        while time.monotonic() < deadline:
            if log.fault is not None:
                return log.durable_end
            try:
                return sealed.result(_SEAL_TICK)
            except TimeoutError:
                check_signals()
        raise LogError(f"sealing {self.storage}: the disk did not answer for {_SEAL_SECONDS:.0f} s")

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
            idle_from = time.monotonic() if self.log.fault else max(idle_from, self._loop.last_received)
            idle = idle_timeout is not None and time.monotonic() - idle_from >= idle_timeout
            if idle:
                break
            time.sleep(WAIT_SECONDS)
        # If there are durable messages, do not wait for a full disk: the query reads them, which makes room.
        while (end := self.seal()) == begin and self.log.fault is not None and not is_signalled():
            time.sleep(WAIT_SECONDS)
        return end

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait up to ``seconds`` for messages from id ``end`` on, but not while the log is full or has a fault."""
        deadline = time.monotonic() + seconds
        while self.received_end <= end and (left := deadline - time.monotonic()) > 0:
            if self.failure is not None or self.log.full or self.log.fault is not None:
                return
            self._loop.progress.wait(left)  # polling instead would be most of the load of an idle query
            self._loop.progress.clear()

    # For any thread.

    @property
    def contents(self) -> LogWriter:
        """The chunks of the log."""
        return self.log

    def await_rows(self, end: int) -> None:
        """See ``ReceiveLoop.await_rows``. Only while this process receives."""
        self._loop.await_rows(end)

    @property
    def received_end(self) -> int:
        """The id after the last received message, without messages that are just being appended to the log."""
        return self.log.durable_end + self.log.unsealed + self.filler.facts().pending

    def facts(self) -> SourceFacts:
        """The figures of this source as of now."""
        filler = self.filler.facts()
        known = filler.totals, filler.publishers, filler.gaps
        return SourceFacts(self.counters, self.counters, self.counters.received, True, *known)

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
        self._began.set()

    def _act_when_due(self) -> None:
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            self._tick()

    # Waiting.

    def _begin(self, sockets: ExitStack) -> bool:
        """Wait until this process has the lock and its sockets are open. False if it was stopped before."""
        if self.receives or (self._standby is None and self.open()):
            sockets.enter_context(self.filler)
            return True
        assert self._standby is not None, "open has found another process"
        self._enter("waiting")
        return self._standby.wait(
            self._stopping, self._act_when_due, partial(self._take_over, self._standby, sockets)
        )

    def _take_over(self, standby: Standby, sockets: ExitStack) -> bool:
        """Receive in place of a process that has ended. False if another process is quicker."""
        failpoints.reach("source.takeover.before_open")
        try:
            self._take_lock()
        except LogLockedError:
            return False
        failpoints.reach("source.takeover.after_open")
        try:
            standby.check_log(self.log.log_id)
            sockets.enter_context(self.filler)
        except BaseException:
            self.log.close()
            raise
        self.receives = True
        _log.warning(
            "the process that received into %s has ended; this one receives in its place", self.storage
        )
        return True

    # Receiving.

    def _receive(self) -> None:
        if threading.current_thread() is threading.main_thread():
            forget_signal()  # from here on a signal only sets the flag, and no wait in ``log`` is left half-way
        _log.info(
            "receiving from %s into %s (%s), next id %d",
            *(self._options.endpoints, self.storage, self.log.log_id, self.resumed_at),
        )
        with ExitStack() as stack:
            if self._side is not None:
                stack.enter_context(self._side(self))
            self._enter("receiving")
            try:
                self._loop.receive(self._stopping)
            except SocketError:  # the log still takes what the sockets have
                self._drain()
                raise
            self._drain()

    def _drain(self) -> None:
        self._enter("draining")
        self._loop.drain()

    def _end(self) -> None:
        """Seal what was received, free the log, and count what is lost."""
        if self.state == "ended":
            return
        try:
            if self.receives:
                self.log.close()
        except Exception as e:
            self.failure = self.failure or e
        finally:
            if self.receives:
                self._count_loss()
                _log.info("stopped receiving into %s at id %d", self.storage, self.log.durable_end)
            why = self.failure
            if why is not None and self._began.is_set():  # otherwise ``start`` raises it
                _log.error("receiving ended: %s", why)
            self._enter("ended")
            if self.receives:
                self._loop.end_with(why or LogError(f"sealing {self.storage}: receiving was stopped"))

    def _count_loss(self) -> None:
        """Count and log the messages that were received and could not be sealed, or were left in a socket.

        Transactions lose nothing: their senders repeat what was not acknowledged.
        """
        if self._options.socket_type == "ROUTER":
            return
        facts = self.filler.facts()
        still_sent = self._loop.cut_off and "PULL" in self._options.receiving_types
        lost, left = self.log.unsealed + facts.pending + facts.refused, still_sent or facts.left
        if not (lost or left):
            return
        why = self.log.failure or self.log.fault or self.failure
        why = why or "messages still came after the stop; stop a PUSH before its reader"
        counted = [f"{lost} received messages could not be sealed and are lost"] * bool(lost)
        unknown = ["the messages that the socket had taken are lost, and their number is unknown"] * left
        self.counters.lost_at_stop += lost
        _log.error("stopping to receive into %s: %s: %s", self.storage, " and ".join(counted + unknown), why)
