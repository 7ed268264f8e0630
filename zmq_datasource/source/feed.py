"""The log that a query reads: this process fills it, or another one does.

The rules:

* If several processes want to receive a feed into one log, the process with the log's lock receives. The others follow
  the log.
* The lock becomes free when the receiving process or its host ends. Then a process that follows takes the lock, and
  receives (the thread ``zmq-standby``).
* A query without a ``replayEndpoint`` gives way to a query with one.
* A record in the log has the query's position (``log/readers``). The query writes the record before it chooses where to
  begin, so the messages that it finds then are not deleted.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DataLossError, DiskFaultError, LogError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import STORE_RETRY_SECONDS, LogFollower, LogWriter, Reader, Readers
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.facts import SourceFacts
from zmq_datasource.source.follow import FollowingSource
from zmq_datasource.source.ingest import Ingest
from zmq_datasource.source.location import feed_of, log_storage, other_feed, terms_of, warn_of_terms

_log = logging.getLogger(__name__)

_STANDBY_IN_A_BUCKET_SECONDS = 2.0
# A process that has had the log's lock for this long counts as receiving without errors.
_STABLE_SECONDS = 2.0


class Feed:
    """The log that a query reads, filled by this process (``Ingest``) or another one (``FollowingSource``).

    Any thread may call ``facts``; one thread calls the other methods.

    Args:
        options: The options of the query.

    Attributes:
        counters: The counters of this process, whether it fills the log or follows it.
        reader: The query's record in the log; from ``open`` on.
        resumed_at: The id of the first message that comes after ``open``.
        standby_seconds: How often a query that follows checks whether the log's lock is free.
        takeover_seconds: How long a query repeats an attempt to receive in place of a process that has ended. The port
            of that process may become free a moment later than the lock.
        join_seconds: How long ``stop`` waits for such an attempt.
    """

    standby_seconds = 0.25
    takeover_seconds = 15.0
    join_seconds = 5.0

    reader: Reader

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        self._source: Ingest | FollowingSource
        self._done: int | None = None
        self._started = False
        self._standby = self._new_standby()
        self._stopping = threading.Event()
        # Whether ``stop`` has given up waiting for the standby, and stops the source that it finds.
        self._stopped = False
        self._changing = threading.Lock()  # for ``_source`` and ``_stopped``
        self._failure: Exception | None = None
        self._faults = LimitedLog(__name__, "attempts to receive in place of another process")
        self.storage = log_storage(options)
        if self.storage.request_interval:  # each request to a bucket costs money
            self.standby_seconds = _STANDBY_IN_A_BUCKET_SECONDS
        self.counters = SourceCounters()
        self.resumed_at = 0

    def _new_standby(self) -> threading.Thread:
        return threading.Thread(target=self._stand_by, name="zmq-standby", daemon=True)

    def open(self, *, begins: bool = False) -> None:
        """Become the writer of the log, or follow it if it has a writer; and keep its messages from being deleted.

        Receives nothing yet.

        Args:
            begins: Whether the query has no checkpoint.

        Raises:
            LogFormatError: There is no log, and this query has no sockets to fill one.
            LogLockedError: Another query reads under this name, or another feed is received into the log.
            LogError: The log cannot be opened.
        """
        self._source = self._open_source()
        try:
            self._keep_everything()
        except BaseException as e:
            self._stop_because_of(e)
            raise
        if isinstance(self._source, Ingest):
            self._source.readers.own = self.reader.name
        self.resumed_at = self._source.log.durable_end
        if begins and self._options.reader is None and not self.receives:
            _log.warning(
                "%s is filled by another process, and this query has no name. When it stops, messages that it has not "
                "read are kept for the walRetention of that process. To keep them for longer, set the option reader",
                self.storage,
            )

    def _keep_everything(self) -> None:
        """Write the query's record, so that nothing is deleted while the query chooses where to begin."""
        options = self._options
        self.reader = Reader(
            self.storage, options.reader, options.reader_timeout, terms_of(options), STORE_RETRY_SECONDS
        )
        try:
            self.reader.keep_everything(self._earliest)
        except BaseException:
            self.reader.discard()
            raise

    def _open_source(self) -> Ingest | FollowingSource:
        if not self._options.has_endpoints:
            return self._open_following()
        ingest = self._new_ingest()
        if ingest.open_unless_received():
            return ingest
        _log.info("another process receives this feed into %s; this query follows it", self.storage)
        following = self._open_following()
        with suppress(LogError):  # a warning is not worth waiting for the disk
            warn_of_terms(self.storage, self._options)
        return following

    def _new_ingest(self) -> Ingest:
        return Ingest(self._options, self.counters)

    def _open_following(self) -> FollowingSource:
        following = FollowingSource(self.storage, self._options, self.counters)
        following.log.open()
        return following

    def start(self) -> None:
        """Begin to receive, or to stand by; after ``open``.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked. The log and the reader's name are free
            again.
        """
        self._started = True
        try:
            self._source.start()
        except BaseException as e:
            self.reader.discard()
            self._stop_because_of(e)
            raise
        if self._options.has_endpoints and not self.receives and self._standby.ident is None:
            self._standby.start()

    def _stop_because_of(self, why: BaseException) -> None:
        """Stop because of the error ``why``, and only log another error."""
        try:
            self._stop_source()
        except BaseException as e:
            if e is not why:
                _log.error("%s: %s", self.storage, e)

    @property
    def receives(self) -> bool:
        """Whether this process fills the log."""
        return isinstance(self._source, Ingest)

    @property
    def reader_name(self) -> str:
        """The name of the query's record."""
        return self.reader.name

    @property
    def is_full(self) -> bool:
        """Whether the log can receive nothing: it has no room, or its disk has a fault."""
        return bool(self.log.full or self.log.fault)

    @property
    def log(self) -> LogWriter | LogFollower:
        """The log that the query reads."""
        return self._source.log

    @property
    def received_end(self) -> int:
        """The id after the last received message that this process knows of."""
        return self._source.received_end

    def _earliest(self) -> int:
        """The first id in the log. If another process writes it, this lists the log."""
        if isinstance(self.log, LogFollower):
            self.log.refresh_now()
        return self.log.earliest

    def check(self) -> None:
        """Raise the error that has ended receiving, or the attempt to receive in place of another process.

        Raises:
            LogError, SocketError: Receiving has ended.
        """
        if self._failure is not None:
            raise self._failure
        self._source.check()

    def seal(self) -> int:
        """Make the messages durable that this process has received. Returns the durable end.

        If another query with a ``replayEndpoint`` runs, and this query has none, this query stops receiving and follows
        the log. If another process fills the log, this call lists its new chunks instead.
        """
        self.check()
        source = self._source
        if isinstance(source, Ingest) and (query := self._replaying_query(source)) is not None:
            source = self._give_way(source, query)
        return source.seal() if isinstance(source, Ingest) else source.refresh()

    def _replaying_query(self, ingest: Ingest) -> str | None:
        try:
            return ingest.replaying_query()
        except LogError as e:
            self._faults.warn("looking for a query that receives with a replayEndpoint: %s", e)
            return None

    def _give_way(self, ingest: Ingest, query: str) -> FollowingSource:
        """Stop receiving and follow the log, so that ``query`` can receive."""
        _log.warning(
            "the query %r has a replayEndpoint, and this query has none: that query receives into %s from here on",
            query,
            self.storage,
        )
        following = self._open_following()
        ingest.stop()
        following.log.refresh_now()
        self._source = following
        self._standby = self._new_standby()
        self._standby.start()
        return following

    def receive_for(self, timeout: float, idle_timeout: float | None) -> int:
        """See ``Ingest.receive_for``. If another process receives, this returns the durable end at once."""
        self.check()
        return self._source.receive_for(timeout, idle_timeout)

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until there are messages from id ``end`` on, for at most ``seconds``."""
        self._source.wait_for_more(end, seconds)

    def commit(self, end: int) -> None:
        """Let the log delete messages below ``end``, because the query has committed them.

        Raises:
            LogError: The query's record cannot be written.
        """
        if self.is_full or not self.receives or end != self._done:
            self._source.commit(end)
        self._done = end
        self.reader.move(end, lazily=self.receives)

    def facts(self) -> SourceFacts:
        """The figures of the log's receiver: as of now or, in another process, as of its newest chunk."""
        return self._source.facts()

    def stop(self) -> None:
        """End receiving or following, and release the log and the reader's name.

        Raises:
            LogError: Received messages could not be sealed.
        """
        try:
            self._stop_source()
        finally:
            if self._started:
                self.reader.end(self._done)
            else:  # the query did not start: delete the record that it has created
                self.reader.discard()

    def _stop_source(self) -> None:
        self._stopping.set()
        if self._standby.ident is not None:
            self._standby.join(self.join_seconds)
        with self._changing:
            self._stopped = True
        self._source.stop()

    # The standby thread.

    def _stand_by(self) -> None:
        failing_since: float | None = None  # when the first of the failed attempts to receive was made
        received_since: float | None = None  # when another process was first seen to receive
        is_foreign = False  # whether that process has noted another feed
        while not self._stopping.wait(self.standby_seconds):
            now = time.monotonic()
            try:
                if self._is_received():
                    if self.storage.feed() == feed_of(self._options):
                        is_foreign = False
                    elif is_foreign:  # for the second time: the note may be older than the lock
                        self._failure = LogLockedError(
                            f"reading log {self.storage.root}: another process now receives another feed into it "
                            f"({other_feed(self.storage, self._options) or 'unknown'}); set another walLocation for "
                            "one of them"
                        )
                        return
                    else:
                        is_foreign = True
                    # A process whose attempt to receive fails has the lock for a moment, too.
                    received_since = received_since or now
                    if now - received_since >= _STABLE_SECONDS:
                        failing_since = None
                    continue
                received_since, is_foreign = None, False
                if self._gives_way():
                    continue
                if self._take_over():
                    return
            except Exception as e:  # an error that lasts must end the query, or it would wait for ever
                if isinstance(e, LogLockedError):
                    continue  # another process was quicker
                now = time.monotonic()
                failing_since = failing_since or now
                retry_timeout = STORE_RETRY_SECONDS if isinstance(e, DiskFaultError) else 0.0
                if now - failing_since >= max(self.takeover_seconds, retry_timeout):
                    self._failure = e
                    return
                self._faults.warn("receiving in place of a process that has ended: %s", e)

    def _is_received(self) -> bool:
        """Whether another process writes the log.

        Raises:
            DataLossError: Another log is in its place.
            LogFormatError: The log is damaged.
            DiskFaultError: The log is not there at present. A standby must not make a log.
        """
        self._check_log(self.storage.log_id_again())
        return self.storage.is_written()

    def _gives_way(self) -> bool:
        """Whether this query, without a ``replayEndpoint``, must leave receiving to a running query that has one."""
        return not self._options.replay_endpoint and Readers(self.storage).replaying() is not None

    def _check_log(self, found: str) -> None:
        if found != self._source.log.log_id:
            raise DataLossError(
                f"following log {self.storage.root}: it is another log now ({found}, not {self._source.log.log_id}); "
                "give the query a new checkpoint"
            )

    def _take_over(self) -> bool:
        """Receive in place of a process that has ended.

        Returns:
            Whether to stand by no longer: this process receives, or the query must end. False if ``stop`` was called
            meanwhile.
        """
        ingest, before = self._new_ingest(), self._source
        ingest.readers.own = self.reader.name
        failpoints.reach("source.takeover.before_open")
        ingest.open(0.0)
        failpoints.reach("source.takeover.after_open")
        try:
            self._check_log(ingest.log.log_id)
            if isinstance(before, FollowingSource):
                # Losses that the last writer has noticed while this query was busy with a batch.
                self._failure = before.act_on_losses(ingest.log.saved)
        except BaseException:
            ingest.stop()
            raise
        if self._stopping.is_set() or self._failure is not None:
            ingest.stop()
            return self._failure is not None
        ingest.start()
        with self._changing:
            if not self._stopped:
                # From here on ``stop`` stops this source, and waits while it drains its sockets.
                self._source = ingest
        if self._source is not ingest:  # ``stop`` has not waited for this thread
            ingest.stop()
            return False
        _log.warning(
            "the process that received into %s has ended; this query receives in its place, from id %d on",
            self.storage,
            ingest.resumed_at,
        )
        before.stop()
        return True
