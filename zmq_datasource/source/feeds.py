"""All partitions of the log that a query reads, a ``Feed`` for each.

The rules:

* Each of the query's receivers fills a partition. The query also reads further partitions that other receivers fill, or
  have filled. So a query can be restarted with fewer receivers, and reads the messages of those that are gone.
* A query opens partitions that other processes add to the log while it runs.
* One record has the query's position in all partitions (``log/readers``). The query writes the record before it chooses
  where to begin, so the messages that it finds then are not deleted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from zmq_datasource.errors import DiskFaultError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log import PARTITION, STORE_RETRY_SECONDS, Reader
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.feed import Feed
from zmq_datasource.source.location import log_storage, terms_of

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.005
_JOIN_SECONDS = 0.1


class Feeds:
    """The feeds of one query; for one thread.

    Attributes:
        parts: The feeds by log partition, in order; from ``open`` on.
        storage: The log's first partition.
        reader: The query's record in the log; from ``open`` on.
        refresh_seconds: How often ``open_new_partitions`` lists the log.
    """

    refresh_seconds = 1.0

    reader: Reader

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        self.storage = log_storage(options)
        self.parts: dict[int, Feed] = {}
        self._done: dict[int, int] = {}
        self._started = False
        self._next_refresh = 0.0
        self._faults = LimitedLog(__name__, "attempts to open new partitions")

    def open(self, *, begins: bool) -> None:
        """Open all partitions, and keep their messages from being deleted. Receives nothing yet.

        Args:
            begins: Whether the query has no checkpoint.

        Raises:
            LogLockedError: Another query reads under this name, or another feed is received into the log.
            LogError: A partition cannot be opened.
        """
        try:
            first = Feed(self._options, PARTITION)
            first.open()
            self.parts[PARTITION] = first
            self._open_missing()
            self.reader = Reader(
                self.storage,
                self._options.reader,
                self._options.reader_timeout,
                terms_of(self._options),
                STORE_RETRY_SECONDS,
            )
            try:
                self.reader.keep_everything(self._earliest)
                for feed in self.parts.values():
                    feed.read_as(self.reader.name)
            except BaseException:
                self.reader.discard()
                raise
        except BaseException as e:
            self._abandon(e)
            raise
        if begins and self._options.reader is None and not self.receives:
            _log.warning(
                "%s is filled by another process, and this query has no name. When it stops, messages that it has not "
                "read are kept for the walRetention of that process. To keep them for longer, set the option reader",
                self.storage,
            )

    def _earliest(self) -> dict[int, int]:
        return {partition: feed.list_earliest() for partition, feed in self.parts.items()}

    def _open_missing(self) -> list[Feed]:
        """Open the partitions that are not open. Returns their feeds."""
        ours = range(self._options.receivers) if self._options.has_endpoints else ()
        there = {*self.storage.partitions(), *ours}
        opened: dict[int, Feed] = {}
        try:
            for partition in sorted(there - self.parts.keys()):
                feed = Feed(self._options, partition)
                feed.open()
                opened[partition] = feed
        except BaseException as e:
            self._stop_all(opened.values(), e)  # they are not in self.parts, so no other call would stop them
            raise
        self.parts = dict(sorted({**self.parts, **opened}.items()))
        self._next_refresh = time.monotonic() + self.refresh_seconds
        return list(opened.values())

    def open_new_partitions(self) -> list[Feed]:
        """Open and start the partitions that other processes have added to the log. Returns their feeds.

        The query's record keeps all messages in them. Most calls do nothing: see ``refresh_seconds``.
        """
        if time.monotonic() < self._next_refresh:
            return []
        try:
            opened = self._open_missing()
        except DiskFaultError as e:
            self._next_refresh = time.monotonic() + self.refresh_seconds
            self._faults.warn("opening new partitions of %s: %s", self.storage, e)
            return []
        for feed in opened:
            feed.read_as(self.reader.name)
            feed.start()
        return opened

    def start(self) -> None:
        """Begin to receive, or to stand by; after ``open``.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked. The log and the reader's name are free
            again.
        """
        self._started = True
        try:
            for feed in self.parts.values():
                feed.start()
        except BaseException as e:
            self.reader.discard()
            self._abandon(e)
            raise

    def _abandon(self, why: BaseException) -> None:
        parts, self.parts = self.parts, {}
        self._stop_all(parts.values(), why)

    def _stop_all(self, feeds: Iterable[Feed], why: BaseException) -> None:
        """Stop feeds because of the error ``why``, and only log other errors."""
        for feed in feeds:
            failure = _failure_of(feed.stop)
            if failure is not None and failure is not why:
                _log.error("%s: %s", feed.storage, failure)

    def commit(self, ends: Mapping[int, int]) -> None:
        """Let the log delete messages below these ids, because the query has committed them.

        Raises:
            LogError: The query's record cannot be written.
        """
        full = self.is_full
        for partition, end in ends.items():
            feed = self.parts.get(partition)
            if feed is not None and (full or not feed.receives or end != self._done.get(partition)):
                feed.commit(end)
        self._done |= ends
        self.reader.move(self._done, lazily=self.receives)

    @property
    def receives(self) -> bool:
        """Whether this process fills all partitions."""
        return all(feed.receives for feed in self.parts.values())

    @property
    def log_id(self) -> str:
        return self.parts[PARTITION].log.log_id

    @property
    def is_full(self) -> bool:
        """Whether a partition can receive nothing: it has no room, or its disk has a fault."""
        return any(feed.log.full or feed.log.fault for feed in self.parts.values())

    def check(self) -> None:
        """See ``Feed.check``."""
        for feed in self.parts.values():
            feed.check()

    def seal(self) -> dict[int, int]:
        """See ``Feed.seal``. Returns the durable end of each partition."""
        return {partition: feed.seal() for partition, feed in self.parts.items()}

    def receive_for(self, timeout: float, idle_timeout: float | None) -> dict[int, int]:
        """See ``Feed.receive_for``. Returns the durable end of each partition."""
        ends: dict[int, int] = {}

        def receive_one(partition: int, feed: Feed) -> None:
            ends[partition] = feed.receive_for(timeout, idle_timeout)

        run_in_parallel([partial(receive_one, *part) for part in self.parts.items()])
        return ends

    def wait_for_more(self, begins: Mapping[int, int], seconds: float) -> None:
        """Wait until a partition has messages from its id in ``begins`` on, or is full, for at most ``seconds``."""
        if len(self.parts) == 1:
            self.parts[PARTITION].wait_for_more(begins[PARTITION], seconds)
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_full:
            self.check()
            if any(feed.received_end > begins[partition] for partition, feed in self.parts.items()):
                return
            check_signals()
            time.sleep(_TICK_SECONDS)

    def stop(self) -> None:
        """Stop all feeds, even if some of them fail to stop.

        Raises:
            LogError: Received messages could not be sealed.
        """
        parts, self.parts = self.parts, {}
        if not parts:
            return
        try:
            run_in_parallel([feed.stop for feed in parts.values()])
        finally:
            if self._started:
                self.reader.end(self._done or None)
            else:  # the query did not start: delete the record that it has created
                self.reader.discard()


def run_in_parallel(acts: Sequence[Callable[[], None]]) -> None:
    """Run functions at the same time, because each of them may wait for long, and return when all have ended.

    Raises:
        BaseException: The first error; further errors are only logged.
    """
    if not acts:  # after an interrupted start there may be nothing to stop
        return
    failures: list[BaseException] = []

    def attempt(act: Callable[[], None]) -> None:
        if (failure := _failure_of(act)) is not None:
            failures.append(failure)

    first, *others = [partial(attempt, act) for act in acts]
    threads = [threading.Thread(target=act, name="zmq-parallel", daemon=True) for act in others]
    left = []
    for thread, act in zip(threads, others, strict=True):
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            left.append(act)
    for act in (first, *left):
        act()
    for thread in threads:
        while thread.ident is not None and thread.is_alive():
            thread.join(_JOIN_SECONDS)
            check_signals()
    for failure in failures[1:]:
        _log.error("%s", failure)
    if failures:
        raise failures[0]


def _failure_of(act: Callable[[], None]) -> BaseException | None:
    """Run a function. Returns the error that it raised; None if it raised none."""
    try:
        act()
    except BaseException as e:
        return e
    return None
