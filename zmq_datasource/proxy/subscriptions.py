"""Durable subscriptions: who wants what, and how far each has come. Kept in one small file.

The file is replaced as a whole, and forced to the disk, before anybody hears that a position holds.
Time counts as *away* only while the proxy runs and the subscriber is not there.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import msgspec

from zmq_datasource.errors import DataLossError, DiskFaultError, LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log import PARTITION, SUBSCRIPTIONS_NAME, LogStorage, ReaderRecord, ReaderRecords

__all__ = ["READER", "Subscription", "Subscriptions", "size_of"]

_log = logging.getLogger(__name__)

_FORMAT = 1
# Forgetting is announced when this much of the time has passed.
_WARNING_AT = 0.8
# How often what changes by itself (time away, topics that nobody sent) is written.
_LAZY_SECONDS = 1.0
# The place that a new subscription takes is marked as that of a reader of this name.
READER = "durable"
# For as long a place stays marked if the server process does not come back.
_HELD_SECONDS = 7 * 86_400.0
# How soon after the disk refused it is asked again.
_REFUSED_SECONDS = 0.25
# Messages to subscribers wait while positions are written. A write that takes longer than this is followed by a pause
# of the same length; and one of more bytes than this by a pause that keeps the disk free for the log.
_QUICK_SECONDS, _QUICK_BYTES, _BYTES_PER_SECOND = 0.01, 64 << 10, 32 << 20
# Bytes that the file takes for a topic, beside the topic.
_TOPIC_BYTES = 8


class Subscription(msgspec.Struct):
    """One durable subscription.

    Attributes:
        topics: Prefixes; empty for all messages.
        next: The id of the first message that is not acknowledged.
        sent: Messages that were sent, those sent again included.
        lost: Messages that the log had no more when they were due; of all topics.
        lost_to: Up to which id they are counted: whoever did not acknowledge it gets LOST again.
        away: Seconds that it was not there.
        created: Seconds since the epoch.
        acknowledged: When it last acknowledged something; None if never.
    """

    name: str
    topics: tuple[bytes, ...]
    next: int
    created: float
    sent: int = 0
    lost: int = 0
    lost_to: int = 0
    away: float = 0.0
    acknowledged: float | None = None


class _File(msgspec.Struct):
    format: int
    log: str
    subscriptions: list[Subscription]


class Subscriptions:
    """All durable subscriptions of a log.

    Args:
        storage: Where they are kept.
        end: The id after the log's last one.
        expiry: Seconds after which one that is away is forgotten.
        clock: Seconds, monotonic.

    Attributes:
        topic_bytes: What all topics take, see ``size_of``.
        hold_seconds: How long ``hold`` keeps what a new one needs: the writer hears four times a second of it.

    Raises:
        LogFormatError: The file is not what was written.
        DataLossError: Somebody has acknowledged more than the log has: its ids would be given again.
    """

    hold_seconds = 3.0

    def __init__(
        self,
        storage: LogStorage,
        end: int,
        expiry: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._records = ReaderRecords(storage)
        self._key = storage.key(SUBSCRIPTIONS_NAME)
        self._expiry = expiry
        self._clock = clock
        self._log_id = storage.log_id()
        self._all: dict[str, Subscription] = {}
        self._warned: set[str] = set()
        self._present: set[str] = set()
        self._changed = self._urgent = False
        self._changes = self._kept = 0  # counted; and which of them are on the disk
        self._fault: str | None = None
        self._refused_at = 0.0
        self._faults = LimitedLog(__name__, "positions that could not be kept")
        self._saved_at = self._counted_at = clock()
        self._pause_until = -math.inf
        self.topic_bytes = 0
        self._held_from: int | None = None
        self._held_since = 0.0
        for subscription in self._read():
            if subscription.next > end:
                raise DataLossError(
                    f"opening log {storage.root}: it ends at id {end}, and durable subscriber {subscription.name!r} "
                    f"has acknowledged the ids below {subscription.next}: its newest chunks are gone (after a crash of "
                    "the machine with walSync=false, or from a copy). Their ids are not given to other messages. "
                    "Restore the chunks, or use a new walLocation"
                )
            self._all[subscription.name] = subscription
            self.topic_bytes += size_of(subscription.topics)

    def _read(self) -> list[Subscription]:
        content = self._storage.read(self._key)
        if content is None:
            return []
        path = self._storage.store.path_of(self._key)
        try:
            file = msgspec.json.decode(content, type=_File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            raise LogFormatError(f"reading {path}: {e}; without it all durable subscribers begin anew") from e
        if file.format != _FORMAT:
            raise LogFormatError(f"reading {path}: format {file.format}, this release reads {_FORMAT}")
        if file.log != self._log_id:
            raise LogFormatError(
                f"reading {path}: it is about log {file.log}, and this is {self._log_id}; remove it"
            )
        return file.subscriptions

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def get(self, name: str) -> Subscription | None:
        return self._all.get(name)

    def add(self, subscription: Subscription) -> int:
        """Add a new subscription; returns the number of the change, for ``is_kept``."""
        self._all[subscription.name] = subscription
        self.topic_bytes += size_of(subscription.topics)
        return self.change(urgent=True)

    def set_topics(self, subscription: Subscription, topics: tuple[bytes, ...]) -> None:
        """Replace the topics of a subscription.

        The client says its topics each time that it subscribes, so it waits for no write.
        """
        self.topic_bytes += size_of(topics) - size_of(subscription.topics)
        subscription.topics = topics
        self.change(urgent=False)

    def placing(self) -> AbstractContextManager[None]:
        """Nothing is deleted meanwhile: whoever looks for the log's beginning, and holds it, has it.

        Raises:
            LogError: The writer deletes for very long, or the disk refuses.
        """
        return self._records.placing()

    def hold(self, first: int) -> None:
        """Keep what a new one needs until the writer has heard of it; see ``let_go``."""
        self._held_since = self._clock()
        if self._held_from is None or first < self._held_from:
            self._records.write(READER, ReaderRecord({PARTITION: first}, _HELD_SECONDS))
            self._held_from = first

    def hold_on(self) -> None:
        """Take over what a server process that was killed has held: the writer may not have heard of it yet.

        Raises:
            LogError: The disk refuses.
        """
        if (earliest := self.earliest_needed) is None:
            self._records.remove(READER)
        else:
            self.hold(earliest)

    def let_go(self) -> None:
        """The writer has heard by now, many times, which of the subscriptions needs the earliest message."""
        if self._held_from is not None and self._clock() - self._held_since >= self.hold_seconds:
            self._records.remove(READER)
            self._held_from = None

    def remove(self, name: str) -> int:
        """Remove a subscription; returns the number of the change, for ``is_kept``."""
        removed = self._all.pop(name, None)
        self.topic_bytes -= 0 if removed is None else size_of(removed.topics)
        self._present.discard(name)
        self._warned.discard(name)
        return self.change(urgent=True)

    def change(self, urgent: bool) -> int:
        """Note that something has changed and is to be saved; returns the change's number, for ``is_kept``.

        Args:
            urgent: Whether somebody waits for it to be kept.
        """
        self._changed = True
        self._changes += 1
        self._urgent = self._urgent or urgent
        return self._changes

    def come(self, name: str) -> None:
        """Note that a subscriber has connected."""
        self._count_time()
        self._present.add(name)
        self._warned.discard(name)
        self._all[name].away = 0.0
        self.change(urgent=False)

    def leave(self, name: str) -> None:
        """Note that a subscriber has disconnected."""
        self._count_time()
        self._present.discard(name)

    @property
    def unsaved(self) -> str | None:
        """Why the disk refuses what somebody waits for; it is tried again whenever something is to be saved."""
        return self._fault if self._urgent else None

    @property
    def pauses(self) -> bool:
        """Whether a client waits for a write that is due within a moment."""
        return self._urgent and self._fault is None

    def is_kept(self, change: int) -> bool:
        """Whether this change is on the disk."""
        return change <= self._kept

    def save(self) -> bool:
        """Write what has changed, if somebody waits for it or it is time.

        A write that takes long, or has many bytes, is followed by a pause: changes of one client do not take all time.

        Returns:
            Whether something was written. A disk that refuses for now is tried again later.

        Raises:
            LogWriteError: The disk refused for good.
        """
        now = self._clock()
        if not self._urgent and (not self._changed or now - self._saved_at < _LAZY_SECONDS):
            return False
        if now < self._pause_until:
            return False
        if self._fault is not None and now - self._refused_at < _REFUSED_SECONDS:
            return False
        file = _File(_FORMAT, self._log_id, list(self._all.values()))
        content = msgspec.json.encode(file)
        try:
            failpoints.reach("log.subscriptions.before_write")
            self._storage.store.put(self._key, content)
            failpoints.reach("log.subscriptions.after_write")
        except DiskFaultError as e:
            self._fault, self._refused_at = str(e), now
            self._faults.warn("%s; positions of durable subscribers are not acknowledged until then", e)
            return False
        self._fault = None
        self._changed = self._urgent = False
        self._kept = self._changes
        self._saved_at = self._clock()
        took, size = self._saved_at - now, len(content)
        self._pause_until = self._saved_at + max(
            took if took > _QUICK_SECONDS else 0.0,
            size / _BYTES_PER_SECOND if size > _QUICK_BYTES else 0.0,
        )
        return True

    def expire(self) -> None:
        """Forget who was away for too long; warn before."""
        self._count_time()
        for subscription in list(self._all.values()):
            name, away = subscription.name, subscription.away
            if name in self._present:
                continue
            if away >= self._expiry:
                self.remove(name)
                _log.warning(
                    "durable subscriber %r was away for %s and is forgotten; it was at id %d",
                    name,
                    _words(away),
                    subscription.next,
                )
            elif away >= self._expiry * _WARNING_AT and name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "durable subscriber %r has been away for %s and is forgotten in %s; messages from id %d on are "
                    "kept for it",
                    name,
                    _words(away),
                    _words(self._expiry - away),
                    subscription.next,
                )

    def _count_time(self) -> None:
        now = self._clock()
        passed, self._counted_at = now - self._counted_at, now
        for subscription in self._all.values():
            if subscription.name not in self._present:
                subscription.away += passed
                self._changed = True

    @property
    def earliest_needed(self) -> int | None:
        """The lowest position; None if there is nobody."""
        return min((s.next for s in self._all.values()), default=None)


def size_of(topics: Iterable[bytes]) -> int:
    """Bytes that the file takes for topics, about."""
    return sum(len(topic) + _TOPIC_BYTES for topic in topics)


def _words(seconds: float) -> str:
    units = ((86_400, "days"), (3600, "hours"), (60, "minutes"))
    for size, unit in units:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
