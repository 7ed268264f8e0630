"""A log that this process fills. The thread in ``receiving`` fills it; one other thread calls ``Ingest``."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future

from zmq_datasource.acknowledged.acceptor import Acceptor, AcceptorTerms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DiskFaultError, LogError, LogFormatError, LogLockedError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.machine import allow_many_files
from zmq_datasource.host.signals import check_signals, is_signalled
from zmq_datasource.log import (
    LOCK_WAIT_SECONDS,
    STORE_RETRY_SECONDS,
    CarriedState,
    Filler,
    LogWriter,
    Readers,
)
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.channel import WAIT_MS
from zmq_datasource.source.facts import SourceFacts
from zmq_datasource.source.location import (
    compare_terms,
    feed_of,
    has_feed,
    log_storage,
    naming_other_feed,
)
from zmq_datasource.source.receiver import REPLAY_SECONDS, LogReceiver, Receiver
from zmq_datasource.source.receiving import ReceivingThread, loss_at_stop
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

# How long to wait for a disk that gives no answer, not even an error.
_SEAL_SECONDS = 120.0
_SEAL_TICK = 0.1
_LOCK_TICK = 0.05


class Ingest:
    """Fills a log from ``start`` to ``stop``: receives a feed.

    Args:
        options: The options of the feed.
        counters: The counters to increase.
        replay_timeout: Seconds without a reply after which a request for missing messages is repeated.
        retry_seconds: How long to wait for a disk or a bucket that refuses.

    Attributes:
        filler: Receives, and appends to ``log``.
        readers: The queries and subscribers that read the log.
        resumed_at: The id of the first message that this process receives; from ``open`` on.
        lock_wait_seconds: How long to wait for the lock, because another writer may be stopping.
        warn_seconds: After how long a wait for the lock is logged.
        replaying_seconds: How often ``replaying_query`` reads the records of the readers.
    """

    lock_wait_seconds = LOCK_WAIT_SECONDS
    warn_seconds = 1.0
    replaying_seconds = 1.0
    reader_name = None  # a ``Feed`` has the name of its query's record here

    def __init__(
        self,
        options: StreamReadOptions,
        counters: SourceCounters | None = None,
        replay_timeout: float = REPLAY_SECONDS,
        retry_seconds: float = STORE_RETRY_SECONDS,
    ) -> None:
        self._options = options
        self._retry_seconds = retry_seconds
        self.counters = counters or SourceCounters()
        self.storage = log_storage(options)
        self.readers = Readers(self.storage, options.wal_retention)
        chunk_bytes = options.chunk_bytes
        self.filler: Filler
        self._state: CarriedState
        # Make state, log and filler in this order: the log reads the state, and the filler appends to the log.
        if options.socket_type == "ROUTER":
            self._state = transactions = CommittedTransactions(self.counters, options.max_publishers)
            self.log = self._new_log(transactions, chunk_bytes)
            terms = AcceptorTerms(
                options.transaction_timeout,
                options.wal_max_bytes,
                retry_seconds=retry_seconds,
            )
            spec = SocketSpec.of_source(options)
            files = self.storage.staged_files()
            self.filler = Acceptor(spec, terms, self.counters, files, transactions, self.log)
        else:
            receiver = Receiver(options, self.counters, chunk_bytes, replay_timeout=replay_timeout)
            self._state = receiver.intake
            self.log = self._new_log(receiver.intake, chunk_bytes)
            self.filler = LogReceiver(receiver, self.log, options.socket_type)
        self._receiving = ReceivingThread(self.filler, self.log, self.counters, options.wal_flush_interval)
        self._reader_faults = LimitedLog(__name__, "warnings about readers")
        self._is_open = False
        self._replaying: str | None = None
        self._next_replaying = 0.0
        self.resumed_at = 0

    def _new_log(self, state: CarriedState, chunk_bytes: int) -> LogWriter:
        options = self._options
        return LogWriter(
            self.storage,
            chunk_bytes=chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            make_room="any" if options.when_full == "discard" else "done",
            retry_timeout=self._retry_seconds,
            carried=state,
            readers=self.readers,
        )

    def open(self, lock_wait: float | None = None) -> None:
        """Become the log's writer, without receiving yet.

        Args:
            lock_wait: Seconds to wait for the lock; by default ``lock_wait_seconds``.

        Raises:
            LogError: The log cannot be opened, or another process has the lock.
        """
        allow_many_files()
        self.log.open(
            self.lock_wait_seconds if lock_wait is None else lock_wait,
            feed_of(self._options),
            lambda: compare_terms(self.storage, self._options),
        )
        self.readers.opened()
        self.resumed_at = self.log.durable_end
        try:
            self._restore_state()
        except BaseException:
            self.log.close()
            raise
        self._is_open = True

    def open_unless_received(self) -> bool:
        """Become the log's writer, unless another process receives the same feed into it.

        Returns:
            Whether this process is the writer now.

        Raises:
            LogLockedError: Another process receives another feed into the log.
            LogError: The log cannot be opened.
        """
        began = time.monotonic()
        deadline, warn_at = began + self.lock_wait_seconds, began + self.warn_seconds
        while True:
            try:
                self.open(0.0)
            except LogLockedError as e:
                if has_feed(self.storage, self._options):
                    return False
                # Perhaps the writer has not noted its feed yet, or a writer of another feed is stopping.
                now = time.monotonic()
                if now >= deadline:
                    raise naming_other_feed(e, self.storage, self._options) from None
                if now >= warn_at:
                    warn_at = deadline
                    refused = naming_other_feed(e, self.storage, self._options)
                    _log.warning(
                        "%s; waiting up to %.0f s more for that process to end", refused, deadline - now
                    )
                check_signals()
                time.sleep(_LOCK_TICK)
            else:
                return True

    def start(self) -> None:
        """Open the log, unless it is open, and the sockets, and begin to receive. A second call does nothing.

        Raises:
            LogError: The log cannot be opened.
            EndpointError, OptionError: A socket cannot be opened as asked.
        """
        if self._receiving.has_started:
            return
        if not self._is_open:
            self.open()
        self._warn_of_longer_retention()
        try:
            self._receiving.start()
        except Exception:
            self.log.close()
            raise
        _log.info(
            "receiving from %s into %s (%s), next id %d",
            self._options.endpoints,
            self.storage,
            self.log.log_id,
            self.resumed_at,
        )

    def _warn_of_longer_retention(self) -> None:
        """Log a warning if a query's ``walRetention`` keeps messages for longer than that of this process."""
        try:
            self.readers.others()
        except LogError as e:
            self._reader_faults.warn("%s", e)
        if self.readers.longest_retention > self._options.wal_retention:
            _log.warning(
                "messages in %s stay for %gs, because a query that reads it has this walRetention; this process has "
                "walRetention=%gs, which applies when that query's position is gone",
                self.storage,
                self.readers.longest_retention,
                self._options.wal_retention,
            )

    def _restore_state(self) -> None:
        """Continue counters and tracking from the state of the last writer."""
        try:
            known = self._state.restore(self.log.saved)
        except Exception as e:
            raise LogFormatError(
                f"reading the state of log {self.storage.root}: {e!r}; it was written by another release. Give the "
                "query a new walLocation and a new checkpoint"
            ) from e
        if not known:
            _log.warning(
                "the messages in log %s were numbered in another way; tracking of sequences begins again",
                self.storage.root,
            )

    def check(self) -> None:
        """Raise the error that has ended receiving, if there is one.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        self._receiving.raise_failure()

    def replaying_query(self) -> str | None:
        """The name of a running query with a ``replayEndpoint``; None if there is none, or this process has one.

        That query should receive the feed instead of this process.

        Raises:
            LogError: The positions of the queries cannot be read.
        """
        if not self._options.replay_endpoint and time.monotonic() >= self._next_replaying:
            self._next_replaying = time.monotonic() + self.replaying_seconds + self.storage.request_interval
            self._replaying = self.readers.replaying()
        return self._replaying

    def commit_readers(self) -> int | None:
        """Let the log delete the messages that all readers have read; for a process without a query.

        Returns:
            The end of these messages; None if the log has no reader, and nothing is deleted.
        """
        needed = self.readers.needed(fresh=False)  # the log reads the records again before it deletes
        return None if needed is None else self._commit(self.log.durable_end, needed)

    def commit(self, end: int) -> None:
        """Let the log delete messages below ``end`` that no other reader needs: the query has committed them."""
        try:
            self._commit(end, self.readers.needed(fresh=False))  # as in commit_readers
        except (DiskFaultError, LogFormatError) as e:  # an unreadable record may need everything
            self._reader_faults.warn("%s", e)

    def _commit(self, end: int, needed: int | None) -> int:
        """Let the log delete the messages below ``end`` and ``needed``. Returns the end of these messages.

        If the log is full, drops the ended queries without a name, if only they need the oldest chunk.
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

    @property
    def received_end(self) -> int:
        """The id after the last received message, without messages that are just being appended to the log."""
        return self.log.durable_end + self.log.unsealed + self.filler.facts().pending

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait up to ``seconds`` for messages from id ``end`` on, but not while the log is full or has a fault."""
        deadline = time.monotonic() + seconds
        log, progress = self.log, self._receiving.progress
        while self.received_end <= end and (left := deadline - time.monotonic()) > 0:
            if self._receiving.failure is not None or log.full or log.fault:
                return
            progress.wait(left)  # polling instead would be most of the load of an idle query
            progress.clear()

    def seal(self, wait_for_disk: bool = False) -> int:
        """Make the messages durable that were received before this call, unless the disk refuses at present.

        Args:
            wait_for_disk: Whether to wait for a disk that refuses.

        Returns:
            The durable end of the log.

        Raises:
            LogError, SocketError: Receiving or sealing has ended.
        """
        self._receiving.raise_failure()
        filler = self.filler.facts()
        if not (filler.pending or filler.appending or self.log.unsealed):
            return self.log.durable_end
        if self.log.fault is not None and not wait_for_disk:
            return self.log.durable_end
        sealed: Future[Future[int]] | Future[int] = self._receiving.request_seal()
        deadline = time.monotonic() + _SEAL_SECONDS
        while time.monotonic() < deadline:
            if self.log.fault is not None:
                if not wait_for_disk:
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
            self._receiving.raise_failure()
            idle_from = time.monotonic() if self.log.fault else max(idle_from, self._receiving.last_received)
            idle = idle_timeout is not None and time.monotonic() - idle_from >= idle_timeout
            if idle:
                break
            time.sleep(WAIT_MS / 1000)
        # If there are durable messages, do not wait for a full disk: the query reads them, and its commit makes room.
        return self.seal(wait_for_disk=self.log.durable_end == begin)

    def stop(self) -> None:
        """Drain the sockets, seal, and release the log. It may be called if ``start`` has failed.

        Raises:
            LogError: Received messages could not be sealed. A log line says how many.
        """
        self._receiving.stop()
        try:
            self.log.close()
        finally:
            loss = loss_at_stop(self._options.socket_type, self.log, self.filler, self._receiving)
            if loss is not None:
                self.counters.lost_at_stop += loss.messages
                _log.error("stopping to receive into %s: %s", self.storage, loss)
        _log.info("stopped receiving into %s at id %d", self.storage, self.log.durable_end)
        self._receiving.raise_failure()
