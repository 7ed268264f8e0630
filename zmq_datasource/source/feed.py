"""One partition of the log that a query reads: filled by this process, or by another one.

The rules:

* Of the processes that want to receive a feed into one log, the one that has the log's lock does. The others follow
  that log.
* When the lock is free, because the receiving query was stopped, or killed, or its host is gone, one of those that
  follow takes it and goes on receiving (``zmq-standby``).
* Of those that run, one with a ``replayEndpoint`` receives: a query that has none gives way to it.
"""

from __future__ import annotations

import logging
import threading
import time

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DataLossError, DiskFaultError, LogError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log import PARTITION, LogFollower, LogWriter, Readers
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.types import Place
from zmq_datasource.source.follow import FollowingSource
from zmq_datasource.source.idle_partitions import IdlePartition
from zmq_datasource.source.ingest import Ingest, SharedOtherwiseError
from zmq_datasource.source.location import log_storage
from zmq_datasource.source.source_facts import SourceFacts
from zmq_datasource.source.terms import feed_of

__all__ = ["Feed"]

_log = logging.getLogger(__name__)

_STANDBY_IN_A_BUCKET_SECONDS = 2.0
# Who has had the log's lock for so long, receives.
_SETTLED_SECONDS = 2.0


class Feed:
    """The log partition that one query reads, filled here (``Ingest``) or by another process (``FollowingSource``).

    ``facts`` may be called by any thread, the other methods are for one.

    Args:
        options: Of the query.
        partition: Which log partition. One beyond those that the query's receivers fill is only read.

    Attributes:
        counters: What is counted in this process, whether it fills the log or follows it.
        standby_seconds: How often a query that follows looks whether the log's lock is free.
        takeover_seconds: How long it tries again to receive in place of a process that has ended: that one may
            hold the port for a moment longer than the log.
        join_seconds: How long ``stop`` waits for an attempt to do so.
    """

    standby_seconds = 0.25
    takeover_seconds = 15.0
    join_seconds = 5.0

    def __init__(self, options: StreamReadOptions, partition: int = PARTITION) -> None:
        self._options = options
        self._is_live = bool(options.connect or options.bind) and partition < options.receivers
        self._idle: IdlePartition | None = None
        self._source: Ingest | FollowingSource
        self._reader: str | None = None
        self._standby = self._new_standby()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._faults = LimitedLog(__name__, "attempts to receive in place of another process")
        self.storage = log_storage(options, partition)
        if self.storage.leisure:  # requests to a bucket are paid for
            self.standby_seconds = _STANDBY_IN_A_BUCKET_SECONDS
        if (options.connect or options.bind) and partition >= options.receivers:
            self._idle = IdlePartition(self.storage, options)
        self.starting_place = options.start or Place(
            # What a log holds that somebody else fills was received for whoever reads it.
            "latest" if options.connect or options.bind else "earliest",
            None,
        )
        self.counters = SourceCounters()
        self.resumed_at = 0

    def _new_standby(self) -> threading.Thread:
        return threading.Thread(target=self._stand_by, name="zmq-standby", daemon=True)

    def open(self) -> None:
        """Find the partition, or become its writer if it has none; receive nothing yet.

        Raises:
            LogFormatError: There is no log, and none to be made.
            LogLockedError: Another feed is received into the log.
            LogError: See the message.
        """
        self._source = self._open_source()

    def read_as(self, reader: str) -> None:
        """Begin to read under this name, whose record keeps what there is; after ``open``.

        From then on ``resumed_at`` is the id of the first message that comes.
        """
        self._reader = reader
        if isinstance(self._source, Ingest):
            self._source.readers.own = reader
        self.resumed_at = self._source.log.durable_end

    def _open_source(self) -> Ingest | FollowingSource:
        if not self._is_live:
            return self._open_following()
        ingest = self._new_ingest()
        if ingest.open_unless_received():
            return ingest
        _log.info("another process receives this feed into %s; this query follows it", self.storage)
        return self._open_following()

    def _new_ingest(self) -> Ingest:
        return Ingest(self._options, self.storage.partition, self.counters)

    def _open_following(self) -> FollowingSource:
        following = FollowingSource(self.storage, self._options, self.counters)
        following.log.open()
        return following

    def start(self) -> None:
        """Begin to receive, or to stand by; after ``open``. Once is enough.

        Raises:
            EndpointError, OptionError: See the message.
        """
        self._source.start()
        if self._is_live and not self.receives and self._standby.ident is None:
            self._standby.start()

    @property
    def receives(self) -> bool:
        """Whether this process fills the log."""
        return isinstance(self._source, Ingest)

    @property
    def reader(self) -> str | None:
        """Under which name the query's position is recorded."""
        return self._reader

    @property
    def log(self) -> LogWriter | LogFollower:
        """The log that is read."""
        return self._source.log

    @property
    def received_end(self) -> int:
        """The id after the last message received, as far as known here."""
        return self._source.received_end

    def list_earliest(self) -> int:
        """The first id there is; lists the log, if another process writes it."""
        if isinstance(self.log, LogFollower):
            self.log.refresh_now()
        return self.log.earliest

    def check(self) -> None:
        """Raise why nothing is received here any more, or why this process could not receive in place of another.

        Raises:
            LogError, SocketError: See the message.
        """
        if self._failure is not None:
            raise self._failure
        self._source.check()

    def seal(self) -> int:
        """Make durable what was received before this call, as far as this process receives; the durable end.

        Afterwards another process may receive in place of this one: one that asks publishers for what is missing.
        """
        self.check()
        ingest = self._source
        if isinstance(ingest, Ingest) and (better := self._better_receiver(ingest)) is not None:
            self._give_way(ingest, better)
        return self._source.seal()

    def _better_receiver(self, ingest: Ingest) -> str | None:
        try:
            return ingest.better_receiver()
        except LogError as e:
            self._faults.warn("looking for a query that receives with a replayEndpoint: %s", e)
            return None

    def _give_way(self, ingest: Ingest, better: str) -> None:
        """Follow the log from here on, and let a query receive that has a ``replayEndpoint``."""
        _log.warning(
            "the query %r has a replayEndpoint, and this query has none: that query receives into %s from here on",
            better,
            self.storage,
        )
        following = self._open_following()
        ingest.stop()
        following.log.refresh_now()
        self._source = following
        self._standby = self._new_standby()
        self._standby.start()

    def gather(self, timeout: float, idle_timeout: float | None) -> int:
        """Receive for a while, then seal; what another process receives is taken as it is."""
        self.check()
        return self._source.gather(timeout, idle_timeout)

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until there is something after ``end``, or so many seconds."""
        self._source.wait_for_more(end, seconds)

    def commit(self, end: int) -> None:
        """The query needs nothing below ``end`` any more."""
        self._source.commit(end)
        if self._idle is not None:
            try:
                self._idle.expire()
            except LogError as e:
                self._faults.warn("deleting from a partition without a receiver: %s", e)

    def facts(self) -> SourceFacts:
        """What there is to tell, as of now."""
        return self._source.facts()

    def stop(self) -> None:
        """End receiving or following, and let others have the log.

        Raises:
            LogError: What was received last could not be sealed.
        """
        self._stopping.set()
        if self._standby.ident is not None:
            self._standby.join(self.join_seconds)
        self._source.stop()

    # The standing-by thread.

    def _stand_by(self) -> None:
        failing: float | None = None
        received: float | None = None
        foreign = False
        while not self._stopping.wait(self.standby_seconds):
            now = time.monotonic()
            try:
                if self._is_received():
                    if self.storage.feed() == feed_of(self._options):
                        foreign = False
                    elif foreign:  # twice, for it is no lock that guards the note
                        self._failure = LogLockedError(
                            f"reading log {self.storage.root}: another feed is received into it by now; give one of "
                            "them a walLocation of its own"
                        )
                        return
                    else:
                        foreign = True
                    # One that fails as this one does has the lock for a moment, too.
                    received = now if received is None else received
                    if now - received >= _SETTLED_SECONDS:
                        failing = None
                    continue
                received, foreign = None, False
                if self._better_waits():
                    continue
                if self._take_over():
                    return
            except Exception as e:  # whatever it is, the query is not to wait for ever
                if isinstance(e, LogLockedError) and not isinstance(e, SharedOtherwiseError):
                    continue  # another one was quicker
                failing = time.monotonic() if failing is None else failing
                patience = self._options.wal_retry_timeout if isinstance(e, DiskFaultError) else 0.0
                if time.monotonic() - failing >= max(self.takeover_seconds, patience):
                    self._failure = e
                    return
                self._faults.warn("receiving in place of a process that has ended: %s", e)

    def _is_received(self) -> bool:
        """Whether another process writes our log.

        Raises:
            DataLossError, LogFormatError: It is gone, and to make another one is nothing for who stands by.
            DiskFaultError: It is not there now.
        """
        self._check_log(self.storage.log_id_again())
        return self.storage.is_written()

    def _better_waits(self) -> bool:
        """Whether another query waits to receive that has a ``replayEndpoint``, and this one has none."""
        return not self._options.replay_endpoint and Readers(self.storage).replaying() is not None

    def _check_log(self, found: str) -> None:
        if found != self._source.log.log_id:
            raise DataLossError(
                f"reading along log {self.storage.root}: it was created again ({found}, not "
                f"{self._source.log.log_id}); give the query a new checkpoint"
            )

    def _take_over(self) -> bool:
        """Become the one that receives; False if that is no longer wanted."""
        ingest, before = self._new_ingest(), self._source
        ingest.readers.own = self._reader
        failpoints.reach("source.takeover.before_open")
        ingest.open(0.0)
        failpoints.reach("source.takeover.after_open")
        try:
            self._check_log(ingest.log.log_id)
        except DataLossError:
            ingest.stop()
            raise
        if self._stopping.is_set():
            ingest.stop()
            return False
        ingest.start()
        # From here on ``stop`` ends it, however long it takes to take what the socket has.
        self._source = ingest
        _log.warning(
            "the process that received into %s has ended; this query receives in its place, from id %d on",
            self.storage,
            ingest.resumed_at,
        )
        before.stop()
        return True
