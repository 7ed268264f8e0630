"""What one query reads: a feed for each partition of its log.

The rules:

* There is a partition for each of the query's receivers. Those beyond them, which other receivers fill or have filled,
  are read, too; so a query may be started again with fewer receivers, and has what the others have left.
* A query that only follows a log takes up the partitions that come while it runs.
* Its position in all of them is one record (``log/readers``), written before the query chooses where to begin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from zmq_datasource.errors import DiskFaultError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log import PARTITION, Reader
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.source.feed import Feed
from zmq_datasource.source.location import log_storage
from zmq_datasource.source.terms import terms_of

__all__ = ["Feeds", "side_by_side"]

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.005
_JOIN_SECONDS = 0.1


class Feeds:
    """The feeds of one query. For one thread.

    Attributes:
        parts: By log partition, in order; from ``open`` on.
        storage: Where the log is.
        reader: The query's own record; from ``open`` on.
        look_seconds: How often it looks for partitions that other processes have added.
    """

    look_seconds = 1.0

    reader: Reader

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        self.storage = log_storage(options)
        self.parts: dict[int, Feed] = {}
        self._done: dict[int, int] = {}
        self._started = False
        self._next_look = 0.0
        self._faults = LimitedLog(__name__, "looks for new partitions")

    def open(self, *, begins: bool) -> None:
        """Find the log and its partitions, and keep what there is from being deleted; receive nothing yet.

        Args:
            begins: Whether the query has no checkpoint.

        Raises:
            LogLockedError: Another query reads under this name, or another feed is received into the log.
            LogError: See the message.
        """
        try:
            first = Feed(self._options, PARTITION)
            first.open()
            self.parts[PARTITION] = first
            self._open_others()
            self.reader = self._hold_reader()
            try:
                self.reader.keep_everything(self._earliest)
                for feed in self.parts.values():
                    feed.read_as(self.reader.name)
            except BaseException:
                self.reader.discard()
                raise
        except BaseException as e:
            self._give_up(e)
            raise
        if begins and self._options.reader is None and not self.receives:
            _log.warning(
                "%s is filled by another process, and this query has no name. When it stops, messages that it has not "
                "read are kept for the walRetention of that process. To keep them for longer, set the option reader",
                self.storage,
            )

    def _hold_reader(self) -> Reader:
        options = self._options
        return Reader(
            self.storage,
            options.reader,
            options.reader_timeout,
            terms_of(options),
            options.wal_retry_timeout,
        )

    def _earliest(self) -> dict[int, int]:
        return {partition: feed.list_earliest() for partition, feed in self.parts.items()}

    def _open_others(self) -> list[Feed]:
        live = self._options.connect or self._options.bind
        there = {*self.storage.partitions(), *(range(self._options.receivers) if live else ())}
        opened: dict[int, Feed] = {}
        try:
            for partition in sorted(there - self.parts.keys()):
                feed = Feed(self._options, partition)
                feed.open()
                opened[partition] = feed
        except BaseException as e:
            self._stop_all(opened.values(), e)  # all of them or none: nobody would hear of these
            raise
        self.parts = dict(sorted({**self.parts, **opened}.items()))
        self._next_look = time.monotonic() + self.look_seconds
        return list(opened.values())

    def look_for_new(self) -> list[Feed]:
        """Open and start the partitions that other processes have added to the log.

        The query's record says that it needs all of them.
        """
        if time.monotonic() < self._next_look:
            return []
        try:
            opened = self._open_others()
        except DiskFaultError as e:
            self._next_look = time.monotonic() + self.look_seconds
            self._faults.warn("looking for new partitions of %s: %s", self.storage, e)
            return []
        for feed in opened:
            feed.read_as(self.reader.name)
            feed.start()
        return opened

    def start(self) -> None:
        """Begin to receive, or to stand by; after ``open``.

        Raises:
            EndpointError, OptionError: See the message. Other queries can have the log and the name then.
        """
        self._started = True
        try:
            for feed in self.parts.values():
                feed.start()
        except BaseException as e:
            self.reader.discard()
            self._give_up(e)
            raise

    def _give_up(self, why: BaseException) -> None:
        parts, self.parts = self.parts, {}
        self._stop_all(parts.values(), why)

    def _stop_all(self, feeds: Iterable[Feed], why: BaseException) -> None:
        """Stop these, because of an error that is worth more than what comes of that."""
        for feed in feeds:
            failure = _failure_of(feed.stop)
            if failure is not None and failure is not why:
                _log.error("%s: %s", feed.storage, failure)

    def begin(self, begins: Mapping[int, int]) -> None:
        """The query has no checkpoint, and begins at these ids."""
        self.reader.begin(begins)

    def commit(self, ends: Mapping[int, int]) -> None:
        """The query needs nothing below these ids any more.

        Raises:
            LogError: The disk refuses to record it.
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
        """Whether a partition has no room, or its disk has a fault, so that nothing more may come to it."""
        return any(feed.log.full or feed.log.fault for feed in self.parts.values())

    def check(self) -> None:
        """Raise why something is received no more: see ``Feed.check``."""
        for feed in self.parts.values():
            feed.check()

    def seal(self) -> dict[int, int]:
        """Make durable what was received before this call; where each partition ends."""
        return {partition: feed.seal() for partition, feed in self.parts.items()}

    def gather(self, timeout: float, idle_timeout: float | None) -> dict[int, int]:
        """Receive for a while in all partitions, then seal; where each of them ends."""
        ends: dict[int, int] = {}

        def gather(partition: int, feed: Feed) -> None:
            ends[partition] = feed.gather(timeout, idle_timeout)

        side_by_side([partial(gather, *part) for part in self.parts.items()])
        return ends

    def wait_for_more(self, begins: Mapping[int, int], seconds: float) -> None:
        """Wait until something is received after these ids, by partition, or so many seconds."""
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
        """End receiving or following everywhere, whatever goes wrong in one place.

        Raises:
            LogError: What was received last could not be sealed.
        """
        parts, self.parts = self.parts, {}
        if not parts:
            return
        try:
            side_by_side([feed.stop for feed in parts.values()])
        finally:
            if self._started:
                self.reader.end(self._done or None)
            else:  # the query was refused, and nothing is to be kept for it
                self.reader.discard()


def side_by_side(acts: Sequence[Callable[[], None]]) -> None:
    """Do all of these at the same time, because each of them may wait for long.

    Raises:
        BaseException: The first failure, once all are done; the others are logged.
    """
    if not acts:  # whoever was cut short has nothing to stop any more
        return
    failures: list[BaseException] = []

    def attempt(act: Callable[[], None]) -> None:
        if (failure := _failure_of(act)) is not None:
            failures.append(failure)

    first, *others = [partial(attempt, act) for act in acts]
    threads = [threading.Thread(target=act, name="zmq-side", daemon=True) for act in others]
    left = []
    for thread, act in zip(threads, others, strict=True):
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and starts none any more
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
    try:
        act()
    except BaseException as e:
        return e
    return None
