"""A log that is filled here: opened, received into, sealed when a query asks, and given up.

``receiving`` is the thread that fills it. All this is for one calling thread.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from contextlib import suppress

from zmq_datasource.acknowledged.acceptor import Acceptor, AcceptorTerms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DiskFaultError, LogError, LogFormatError, LogLockedError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import check_signals, is_signalled
from zmq_datasource.log import (
    LOCK_WAIT_SECONDS,
    PARTITION,
    CarriedState,
    Filler,
    LogWriter,
    Readers,
)
from zmq_datasource.options import StreamReadOptions, share_of
from zmq_datasource.source.channel import WAIT_MS
from zmq_datasource.source.intake import Intake
from zmq_datasource.source.kept import states_beside
from zmq_datasource.source.location import dead_letters_beside, log_storage
from zmq_datasource.source.log_receiver import LogReceiver
from zmq_datasource.source.receiving import ReceivingThread
from zmq_datasource.source.source_facts import SourceFacts
from zmq_datasource.source.stop_losses import StopLoss, StopLosses
from zmq_datasource.source.terms import compare_terms, feed_of
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["Ingest", "SharedOtherwiseError"]

_log = logging.getLogger(__name__)

# A disk that answers nothing, not even that it refuses.
_SEAL_SECONDS = 120.0
_SEAL_TICK = 0.1
_LOCK_TICK = 0.05


class SharedOtherwiseError(LogLockedError):
    """Another partition of the log is filled by somebody who shares the feed out in another way."""


class Ingest:
    """A log partition that is filled here: receives a feed, or one receiver's share of it, from ``start`` to ``stop``.

    Args:
        options: Of the whole feed.
        partition: Which log partition is filled; of several receivers, with the share of the one with this number.
        counters: Where to count.

    Attributes:
        better_seconds: How often it looks for a query that would receive the feed better.
    """

    better_seconds = 1.0
    reader = None  # it is for any query, or none

    def __init__(
        self,
        options: StreamReadOptions,
        partition: int = PARTITION,
        counters: SourceCounters | None = None,
    ) -> None:
        self._options = options
        self._share = share_of(options, partition)
        self.counters = counters or SourceCounters()
        self.storage = log_storage(options, partition)
        self.readers = Readers(self.storage, options.wal_retention)
        chunk_bytes = min(options.wal_chunk_bytes, options.wal_max_bytes)
        # The log asks for the state at every cut, and the filler appends to the log.
        self._intake: Intake | None = None
        if options.socket_type == "ROUTER":
            transactions = CommittedTransactions(self.counters, options.max_publishers)
            self.log = self._new_log(transactions, chunk_bytes)
            terms = AcceptorTerms(
                options.transaction_timeout,
                options.wal_max_bytes,
                retry_seconds=options.wal_retry_timeout,
            )
            spec = SocketSpec.of_source(self._share)
            files = self.storage.staged_files()
            self._filler: Filler = Acceptor(spec, terms, self.counters, files, transactions, self.log)
            self._state: CarriedState = transactions
        else:
            beside_log = dead_letters_beside(options, self.storage)
            receiver = LogReceiver(self._share, self.counters, chunk_bytes, beside_log)
            receiver.log = self.log = self._new_log(receiver.intake, chunk_bytes)
            self._filler = receiver
            self._state = self._intake = receiver.intake
        self._receiving = ReceivingThread(self._filler, self.log, self.counters, options.wal_flush_interval)
        self._stop_losses = StopLosses(self.storage, self.counters)
        self._beside: list[bytes] = []  # what the other partitions keep
        self._reader_faults = LimitedLog(__name__, "warnings about readers")
        self._is_open = self._started = False
        self._better: str | None = None
        self._next_better = 0.0
        self.resumed_at = 0

    @property
    def filler(self) -> Filler:
        """What fills the log."""
        return self._filler

    def _new_log(self, state: CarriedState, chunk_bytes: int) -> LogWriter:
        options = self._options
        return LogWriter(
            self.storage,
            chunk_bytes=chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            make_room="any" if options.when_full == "discard" else "done",
            retry_timeout=options.wal_retry_timeout,
            carried=state,
            readers=self.readers,
        )

    def open(self, lock_wait: float = LOCK_WAIT_SECONDS) -> None:
        """Become the log's writer; receive nothing yet.

        From then on ``resumed_at`` is the id of the first message received by this process.

        Args:
            lock_wait: Seconds to wait for a writer that is just stopping.

        Raises:
            LogError: See the message.
        """
        allow_many_files()
        feed = feed_of(self._options)
        self.log.open(lock_wait, feed, self._refuse_another_division, self._read_beside)
        self.readers.opened()
        self.resumed_at = self.log.durable_end
        try:
            self._remember()
        except BaseException:
            self.log.close()
            raise
        self._is_open = True

    def _refuse_another_division(self) -> None:
        """Who shares the feed out among another number of receivers has another part of what is ours."""
        others = [
            self.storage.of(partition)
            for partition in self.storage.partitions()
            if partition != self.storage.partition
        ]
        # All of them are asked, and our own: object storage must be watched for a while to see that a writer is dead.
        if self._options.wal_store is not None:
            self.storage.is_written()
        for beside in [beside for beside in others if beside.is_written()]:
            if (feed := beside.feed()) != feed_of(self._options):
                raise SharedOtherwiseError(
                    f"opening log {self.storage.root}: another process receives into its partition {beside.partition}, "
                    f"another feed or with other receivers ({feed or 'it does not say what'}); stop that one, or set a "
                    "walLocation of its own"
                )

    def open_unless_received(self) -> bool:
        """Become the log's writer, unless another process receives the same feed into it.

        Returns:
            Whether this process is the writer now.

        Raises:
            LogError: As ``open``; ``LogLockedError`` if another feed is received into it, or this one shared otherwise.
        """
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                self.open(0.0)
            except LogLockedError as e:
                if not isinstance(e, SharedOtherwiseError) and self._is_our_feed():
                    return False
                # One that has the lock may not have said yet what it receives; one that does something else may end.
                if time.monotonic() >= deadline:
                    raise
                check_signals()
                time.sleep(_LOCK_TICK)
            else:
                return True

    def _is_our_feed(self) -> bool:
        """Whether the writer of the partition receives the same feed, as far as that can be read now."""
        with suppress(DiskFaultError):  # the next attempt to open the log waits for the disk
            return self.storage.feed() == feed_of(self._options)
        return False

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
        self._tell_retention()
        try:
            self._receiving.start()
        except Exception:
            self.log.close()
            raise
        _log.info(
            "receiving from %s into %s (%s), next id %d",
            self._share.endpoints,
            self.storage,
            self.log.log_id,
            self.resumed_at,
        )

    def _tell_retention(self) -> None:
        """Log that messages stay for longer than this process asks, because a query does."""
        try:
            self.readers.others()
        except LogError as e:
            self._reader_faults.warn("%s", e)
        if self.readers.retention > self._options.wal_retention:
            _log.warning(
                "messages in %s stay for %gs, because a query that reads it has this walRetention; this process has "
                "walRetention=%gs, which applies when that query's position is gone",
                self.storage,
                self.readers.retention,
                self._options.wal_retention,
            )

    def _read_beside(self) -> None:
        """Compare and replace what the last writer has noted beside the chunks; with the lock held, may be repeated."""
        compare_terms(self.storage, self._options)
        if self._intake is None:
            return
        self._stop_losses.open()
        if self._intake.tracker is not None:
            self._beside = states_beside(self.storage)

    def _remember(self) -> None:
        """Go on counting and tracking where the log's last writer stopped."""
        try:
            known = self._state.restore(self.log.saved)
        except Exception as e:
            raise LogFormatError(
                f"reading the state of log {self.storage.root}: {e!r}; it was written by another release. Give the "
                "query a new walLocation and a new checkpoint"
            ) from e
        if not known:
            _log.warning(
                "the messages in log %s were numbered in another way; tracking sequences begins anew",
                self.storage.root,
            )
        if self._intake is not None and self._intake.tracker is not None:
            self._intake.learn_newer_counters(self._beside, feed_of(self._options))

    def check(self) -> None:
        """Raise why receiving has ended, if it has.

        Raises:
            LogError, SocketError: See the message.
        """
        self._receiving.raise_failure()

    def better_receiver(self) -> str | None:
        """The name of a running query that would receive the feed with a ``replayEndpoint``; None if this one has one.

        Raises:
            LogError: The positions of the queries cannot be read.
        """
        if not self._options.replay_endpoint and time.monotonic() >= self._next_better:
            self._better = self.readers.replaying()
            self._next_better = time.monotonic() + self.better_seconds + self.storage.leisure
        return self._better

    def commit_readers(self) -> int | None:
        """Delete what all queries have read that follow this log; for a process without a query.

        Returns:
            How far all of them have come; None if there are none, and nothing is deleted.
        """
        needed = self.readers.needed(fresh=False)  # what is deleted is decided once more
        return None if needed is None else self._commit(self.log.durable_end, needed)

    def commit(self, end: int) -> None:
        """Delete what is below ``end``, which the query in this process has read, and what no other reader needs."""
        try:
            self._commit(end, self.readers.needed(fresh=False))  # what is deleted is decided once more
        except (DiskFaultError, LogFormatError) as e:  # what an unreadable record may still need is kept
            self._reader_faults.warn("%s", e)

    def _commit(self, end: int, needed: int | None) -> int:
        """Delete what is below ``end`` and ``needed``; returns how far that is.

        When the log is full, the readers that have ended and have no name make room.
        """
        done = end if needed is None else min(end, needed)
        self.log.commit(done)
        if done == end or not self.log.full:
            return done
        held = self.log.retention.oldest_done(end)
        if held is not None and self.readers.make_room(held.end):
            needed = self.readers.needed()
            done = end if needed is None else min(end, needed)
            self.log.commit(done)
        return done

    def facts(self) -> SourceFacts:
        """What there is to tell, as of now."""
        filler = self._filler.facts()
        return SourceFacts(
            self.counters,
            self.counters,
            received=self.counters.received,
            receives=True,
            totals=filler.totals,
            publishers=filler.publishers,
            gaps=filler.gaps,
        )

    @property
    def received_end(self) -> int:
        """The id after the last message received; those that are on their way between two threads may be missing."""
        return self.log.durable_end + self.log.unsealed + self._filler.facts().pending

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until something is received after ``end``, receiving has ended, or so many seconds have passed."""
        deadline = time.monotonic() + seconds
        log, heard = self.log, self._receiving.heard
        while self.received_end <= end and (left := deadline - time.monotonic()) > 0:
            if self._receiving.failure is not None or log.full or log.fault:
                return
            heard.wait(left)  # an idle query does little else; polling would be most of what it costs
            heard.clear()

    def seal(self, patient: bool = False) -> int:
        """Make durable what was received before this call, unless the disk refuses at present.

        Args:
            patient: Whether to wait for a disk that refuses, too.

        Returns:
            The durable end of the log.

        Raises:
            LogError, SocketError: Why receiving or sealing has ended.
        """
        self._receiving.raise_failure()
        filler = self._filler.facts()
        if not (filler.pending or filler.appending or self.log.unsealed):
            return self.log.durable_end
        if self.log.fault is not None and not patient:
            return self.log.durable_end
        sealed: Future[Future[int]] | Future[int] = self._receiving.request_seal()
        deadline = time.monotonic() + _SEAL_SECONDS
        while time.monotonic() < deadline:
            if self.log.fault is not None:
                if not patient:
                    return self.log.durable_end
                deadline = time.monotonic() + _SEAL_SECONDS
            try:
                done = sealed.result(_SEAL_TICK)
            except TimeoutError:
                check_signals()
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
        while time.monotonic() < deadline and not (self.log.full or is_signalled()):
            self._receiving.raise_failure()
            idle_from = time.monotonic() if self.log.fault else max(idle_from, self._receiving.last_received)
            idle = idle_timeout is not None and time.monotonic() - idle_from >= idle_timeout
            if idle and not self._filler.still_asking():
                break
            time.sleep(WAIT_MS / 1000)
        # What is durable can be read, and committed, which may be what gives a full disk room.
        return self.seal(patient=self.log.durable_end == begin)

    def stop(self) -> None:
        """Drain the socket, seal, release the log; also if ``start`` was cut short.

        Raises:
            LogError: What was received last could not be sealed; says how much.
        """
        self._receiving.stop()
        try:
            self.log.close(self._record_loss)
        finally:
            if (loss := self._loss()) is not None:
                _log.error("stopping to receive into %s: %s", self.storage, loss)
        _log.info("stopped receiving into %s at id %d", self.storage, self.log.durable_end)
        self._receiving.raise_failure()

    def _record_loss(self) -> None:
        if (loss := self._loss()) is not None and not isinstance(self.log.failure, LogLockedError):
            self._stop_losses.record(loss)

    def _loss(self) -> StopLoss | None:
        """What this stop has lost; a sender of transactions sends again what was not acknowledged."""
        if self._options.socket_type == "ROUTER":
            return None
        filler, receiving = self._filler.facts(), self._receiving
        still_sent = receiving.cut_off and self._options.socket_type == "PULL"
        lost, left = self.log.unsealed + filler.pending + filler.refused, still_sent or filler.left
        if not (lost or left):
            return None
        why = self.log.failure or self.log.fault or receiving.failure
        if why is None:
            after = (
                f"{self._filler.drain_seconds:.0f} s after the stop"
                if still_sent
                else "at the end of the stop"
            )
            why = f"messages still came {after}; stop a PUSH before its reader"
        return StopLoss(lost, left, str(why))
