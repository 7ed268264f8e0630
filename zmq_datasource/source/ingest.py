"""Receiver to log: the thread that keeps a feed flowing into a log partition.

The rules:

* Receiving never waits for the disk: chunks are cut here and written by the log's own thread.
* When the log is full, or its disk refuses or is two chunks behind, this thread stops receiving (and hands
  over what it holds). RCVHWM fills, and the peer's high-water mark decides. The socket is
  still touched, so that subscriptions and connections live on.
* An error ends receiving; it is raised to whoever calls next.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import ClassVar, Literal

from zmq_datasource.acknowledged.acceptor import Acceptor, AcceptorTerms
from zmq_datasource.acknowledged.transactions import Ledger
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, LogFormatError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.open_files import allow_many_files
from zmq_datasource.log.layout import LOCK_WAIT_SECONDS
from zmq_datasource.log.storage import LogStorage, default_location
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Judge
from zmq_datasource.source.intake import Intake
from zmq_datasource.source.receiver import WAIT_MS, Receiver
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["Ingest", "log_location"]

_log = logging.getLogger(__name__)

_PAUSES = {
    "diskFault": "the disk refuses",
    "logFull": "the log has reached walMaxBytes",
    "slowDisk": "the disk is slower than the feed",
}
_PAUSE_TICK = 0.02
_PAUSE_LINE_SECONDS = 10.0
# After stop: what libzmq and the kernel hold is taken until this long nothing came, ...
_QUIET_SECONDS = 0.2
# ... but a feed that goes on for ever is left after this. What a PULL has taken nobody else gets;
# a SUB only wants what came before it was stopped.
_DRAIN_SECONDS = {"PULL": 5.0, "SUB": 1.0, "ROUTER": 1.0}
# A disk that answers nothing, not even that it refuses.
_SEAL_SECONDS = 120.0
# One that refuses, at the end.
_REFUSED_SECONDS = 5.0
_SEAL_TICK = 0.1


def log_location(options: StreamReadOptions) -> str:
    """Where this feed's log is: ``walLocation``, or this machine's default for the feed."""
    if options.wal_location is not None:
        return options.wal_location
    return default_location(
        {
            "socketType": options.socket_type,
            "connect": sorted(map(str, options.connect)),
            "bind": sorted(map(str, options.bind)),
            "topics": sorted(options.topics),
        }
    )


class Ingest:
    """Receives a feed into its log, in a thread of its own, from ``start`` to ``stop``.

    All methods but those of the thread are for one calling thread.
    """

    follows: ClassVar[Literal[False]] = False  # the log is filled here, and not by another process

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        self.counters = SourceCounters()
        self.storage = LogStorage(log_location(options))
        chunk_bytes = min(options.wal_chunk_bytes, options.wal_max_bytes)
        self._receiver: Receiver | Acceptor
        if options.socket_type == "ROUTER":
            ledger = Ledger(self.counters, options.max_publishers)
            self._carried: Intake | Ledger = ledger
        else:
            self._receiver = Receiver(options, self.counters, chunk_bytes)
            self._carried = self._receiver.carried
        self.log = LogWriter(
            self.storage,
            chunk_bytes=chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            sync=options.wal_sync,
            retry_timeout=options.wal_retry_timeout,
            carried=self._carried,
        )
        if options.socket_type == "ROUTER":
            terms = AcceptorTerms(
                SocketSpec.of_source(options),
                options.transaction_timeout,
                options.wal_max_bytes,
                options.wal_sync,
            )
            self._receiver = Acceptor(terms, self.counters, self.storage, ledger, self.log)
        self._thread = threading.Thread(target=self._run, name="zmq-receiver", daemon=True)
        self._stopping = threading.Event()
        self._opened: Future[None] = Future()
        self._handing_over = False
        self._refused = 0
        self._seal_wanted = False
        self._sealed: Future[Future[int]] = Future()
        self._failure: Exception | None = None
        self._last_received = time.monotonic()
        self._next_pause_line = 0.0
        self._kept_at = time.monotonic()
        self._reader_faults = LimitedLog(__name__, "warnings about readers")
        self._given = 0
        self._is_open = self._started = False
        self.resumed_at = 0
        self.reader = None  # the log's own query
        self.given = None  # its position is compared with the log's end before anything is received

    def open(self) -> None:
        """Become the log's writer; receive nothing yet.

        From then on ``resumed_at`` is the id of the first message received by this process.

        Raises:
            LogError: See the message.
        """
        allow_many_files()
        self.log.open(LOCK_WAIT_SECONDS)
        self.resumed_at = self.log.durable_end
        self._remember()
        self._given = self.storage.read_given()
        self._is_open = True

    def start(self) -> None:
        """Open the log, unless that is done, and the socket; begin to receive. Once is enough.

        Raises:
            LogError, EndpointError, OptionError: See the message.
        """
        if self._started:
            return
        if not self._is_open:
            self.open()
        self._started = True
        self._thread.start()
        try:
            self._opened.result()
        except Exception:
            self._thread.join()
            self.log.close()
            raise
        _log.info(
            "receiving from %s into log %s (%s), next id %d",
            self._options.endpoints,
            self.storage.root,
            self.log.log_id,
            self.resumed_at,
        )

    def _remember(self) -> None:
        """Go on counting and judging where the log's last writer stopped."""
        saved = self.log.saved
        try:
            known = self._carried.restore(saved.full, saved.delta)
        except Exception as e:
            self.log.close()
            raise LogFormatError(
                f"reading the state of log {self.storage.root}: {e!r}; it was written by another release. Give the "
                "query a new walLocation and a new checkpoint"
            ) from e
        if not known:
            _log.warning(
                "the messages in log %s were numbered in another way; judging sequences begins anew",
                self.storage.root,
            )

    def check(self) -> None:
        """Raise why receiving has ended, if it has.

        Raises:
            LogError, SocketError: See the message.
        """
        self._raise_failure()

    def commit_readers(self) -> int | None:
        """Delete what all queries have read that follow this log without writing it.

        Returns:
            How far all of them have come; None if there are none.
        """
        readers = self.storage.readers()
        if not readers:
            return None
        end = min(*readers.values(), self.log.durable_end)
        self.log.commit(end)
        return end

    def commit(self, end: int) -> None:
        """The query that writes the log is done with what is below ``end``; what others read stays."""
        try:
            readers = self.storage.readers()
        except LogFormatError as e:  # what a reader may still need stays
            self._reader_faults.warn("%s", e)
            return
        self.log.commit(min([end, *readers.values()]))

    @property
    def judge(self) -> Judge | None:
        """What the publishers' numbers tell; for reading its totals only."""
        return self._receiver.judge

    @property
    def received_end(self) -> int:
        """The id after the last message received; those that are on their way between two threads may be missing."""
        return self.log.durable_end + self.log.unsealed + self._receiver.pending

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until something is received behind ``end``, receiving is in trouble, or so many seconds have passed."""
        deadline = time.monotonic() + seconds
        log = self.log
        while self.received_end <= end and time.monotonic() < deadline:
            if self._failure is not None or log.full or log.fault:
                return
            time.sleep(WAIT_MS / 1000)

    def give(self, _begin: int, end: int) -> None:
        """The log's own query is about to be given the ids below ``end``.

        A chunk that was forced to the disk says so itself.
        """
        if end > self._given and not self._options.wal_sync:
            self.storage.write_given(end)
            self._given = end

    def seal(self, patient: bool = False) -> int:
        """Make durable what was received before this call, unless the disk refuses at present.

        Args:
            patient: Whether to wait for a disk that refuses, too.

        Returns:
            The durable end of the log.

        Raises:
            LogError, SocketError: Why receiving or sealing has ended.
        """
        self._raise_failure()
        if not (self._receiver.pending or self._handing_over or self.log.unsealed):
            return self.log.durable_end
        if self.log.fault is not None and not patient:
            return self.log.durable_end
        if not self._seal_wanted:  # else what was asked for before is still to be answered
            self._sealed = Future()
            self._seal_wanted = True
        self._raise_failure()  # the thread may have ended just before it was asked
        sealed: Future[Future[int]] | Future[int] = self._sealed
        deadline = time.monotonic() + _SEAL_SECONDS
        while time.monotonic() < deadline:
            if self.log.fault is not None:
                if not patient:
                    return self.log.durable_end
                deadline = time.monotonic() + _SEAL_SECONDS
            try:
                done = sealed.result(_SEAL_TICK)
            except TimeoutError:
                continue
            if not isinstance(done, Future):
                return done
            sealed = done
        raise LogError(
            f"sealing the log in {self.storage.root}: the disk did not answer for {_SEAL_SECONDS:.0f} s"
        )

    def gather(self, timeout: float, idle_timeout: float | None) -> int:
        """Receive for a while, then seal: until ``timeout`` seconds, ``idle_timeout`` of silence, or a full log.

        What follows the last message is asked for before a silence ends it.

        Returns:
            The durable end of the log.
        """
        deadline = time.monotonic() + timeout
        idle_from = time.monotonic()
        begin = self.log.durable_end
        while time.monotonic() < deadline and not self.log.full:
            self._raise_failure()
            idle_from = time.monotonic() if self.log.fault else max(idle_from, self._last_received)
            idle = idle_timeout is not None and time.monotonic() - idle_from >= idle_timeout
            if idle and not self._still_asking():
                break
            time.sleep(WAIT_MS / 1000)
        # What is durable can be read, and committed, which may be what gives a full disk room.
        return self.seal(patient=self.log.durable_end == begin)

    def _still_asking(self) -> bool:
        return self._receiver.still_asking()

    def stop(self) -> None:
        """Drain the socket, seal, release the log; also if ``start`` was cut short.

        Raises:
            LogError: What was received last could not be sealed; says how much.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.log.close()
        finally:
            if lost := self.log.unsealed + self._receiver.pending + self._refused:
                _log.error("%d received messages could not be sealed and are lost", lost)
        _log.info("stopped receiving into log %s at id %d", self.storage.root, self.log.durable_end)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # The receiving thread.

    def _run(self) -> None:
        try:
            with self._receiver:
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
        self._failure = e
        if self._seal_wanted:
            self._seal_wanted = False
            self._sealed.set_exception(e)

    def _receive_until_stopped(self) -> None:
        receiver, log = self._receiver, self.log
        hold = float(self._options.wal_flush_interval)
        held_since = time.monotonic()
        while not self._stopping.is_set():
            if self._obstacle() is not None:
                self._pause()
            if receiver.receive():
                self._last_received = time.monotonic()
                self.counters.last_received = time.time()
            now = time.monotonic()
            if receiver.batch_ready:
                self._hand_over()
            if self._seal_wanted:
                self._answer_seal()
                held_since = now
            elif now - held_since >= hold:
                if receiver.pending or log.unsealed or self._carried.changed:
                    self._cut()
                held_since = now

    def _hand_over(self) -> None:
        if self._receiver.pending or self._receiver.batch_ready:
            self._handing_over = True  # between the two, messages are in neither's count
            messages = self._receiver.take()
            try:
                self.log.append(messages)
            except LogError:
                self._refused += messages.num_rows
                raise
            self._handing_over = False
            if self._receiver.failure is not None:
                raise self._receiver.failure

    def _cut(self) -> Future[int]:
        """Cut a chunk; now and then also keep what was learned from messages that are no rows."""
        self._hand_over()
        now = time.monotonic()
        keep = now - self._kept_at >= self._options.wal_flush_interval
        if keep:
            self._kept_at = now
        return self.log.cut(keep)

    def _answer_seal(self) -> None:
        sealed = self._sealed
        done = self._cut()  # if this fails, the request is still open and hears of it
        self._seal_wanted = False
        sealed.set_result(done)

    def _pause(self) -> None:
        """Hold still until the log has room, answering everybody but the feed.

        Raises:
            LogError: The disk has refused for too long.
        """
        began = counted = time.monotonic()
        counters = self.counters
        # A small log pauses many times a second; that is said now and then.
        level = logging.WARNING if began >= self._next_pause_line else logging.DEBUG
        if level == logging.WARNING:
            self._next_pause_line = began + _PAUSE_LINE_SECONDS
        self._cut()
        while (cause := self._obstacle()) is not None:
            if cause != counters.paused_by:
                _log.log(
                    level, "receiving paused: %s (%d pauses before)", _PAUSES[cause], counters.pauses.total()
                )
                counters.pauses[cause] += 1
                counters.paused_by = cause
            if self._stopping.wait(_PAUSE_TICK):
                break
            if self.log.failure is not None:
                raise self.log.failure
            self._receiver.hold_still()
            if self._seal_wanted:
                self._answer_seal()
            now = time.monotonic()
            counters.paused_seconds[cause] += now - counted
            counted = now
        counters.paused_by = None
        _log.log(level, "receiving goes on after %.1f s", time.monotonic() - began)

    def _obstacle(self) -> str | None:
        """Why nothing should be received now."""
        log = self.log
        return "diskFault" if log.fault else "logFull" if log.full else "slowDisk" if log.slow else None

    def _drain(self) -> None:
        """Take what libzmq and the kernel still hold; time bounds it, not the log's size."""
        patience = _DRAIN_SECONDS[self._options.socket_type]
        self.log.end_within(_REFUSED_SECONDS)
        deadline = time.monotonic() + patience
        quiet_from = time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - quiet_from < _QUIET_SECONDS:
            if self.log.slow or self.log.fault:
                time.sleep(_PAUSE_TICK)
                quiet_from = time.monotonic()
                continue
            if self._receiver.receive():
                quiet_from = time.monotonic()
            if self._receiver.batch_ready:
                self._hand_over()
        self._hand_over()
        self._receiver.settle(_SEAL_SECONDS)
        if self._options.socket_type == "PULL" and self._receiver.waiting:
            _log.error(
                "messages still came %.0f s after the stop: those that the socket had already taken are lost; "
                "stop a PUSH before its reader",
                patience,
            )
