"""The leases of a log as its writer sees them: what they need, and how long each has been silent.

The rules:

* A lease is *silent* while a writer sees no change of it, measured by the writer's monotonic clock. The sum is in the
  head, so that the next writer continues it. Time in which no writer ran counts by the wall clock, but at each start of
  a writer as a tenth of the timeout at most. So no single reading of a wall clock drops a lease, and many short runs
  do.
* A lease is dropped if it was silent for longer than its timeout, its name is free, and another lease lives. If none
  lives, the one with the highest id stays. Before the first lease, a log keeps everything.
* A damaged lease may need everything, so nothing is deleted until it is restored or dropped. The others go on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from zmq_datasource.errors import DataLossError, LogFormatError, LogLockedError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.head import Head
from zmq_datasource.log.leases import Lease, LeaseFiles
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Entry

_log = logging.getLogger(__name__)

# At each start of a writer, the time without a writer counts at most as this share of a timeout.
_LARGEST_GAP = 0.1


class Leases:
    """All leases of a log, as its writer sees them. For one thread at a time.

    Args:
        storage: The log.
        retention: Seconds of silence after which the lease of a query without a name counts no more (``walRetention``).
        keeps_unread: Whether the log keeps everything before its first lease, and what its last lease needs. Not for a
            proxy, which also sends messages on when nobody reads its log.
        clock: Returns seconds, monotonic.

    Attributes:
        slowest: The lease that needs the lowest id, as of the last look; None if there is none.
    """

    def __init__(
        self,
        storage: LogStorage,
        retention: float = math.inf,
        *,
        keeps_unread: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage = storage
        self._files = LeaseFiles(storage)
        self._retention = retention
        self._keeps_unread = keeps_unread
        self._clock = clock
        # A step counts at most three times as long as it should be: a stopped machine sees no change, either.
        self._longest_step = 3 * max(1.0, storage.request_interval)
        self._leases: dict[str, Lease] = {}  # as of the last look, without damaged ones
        self._entries: dict[str, Entry] = {}
        self._silent: dict[str, float] = {}
        self._looked_at = clock()
        self._faults = LimitedLog(__name__, "leases that cannot be read")
        self.slowest: Lease | None = None

    @property
    def silent(self) -> dict[str, float]:
        """For ``Head.silent``."""
        return {beat: round(seconds, 3) for beat, seconds in self._silent.items()}

    @property
    def all(self) -> list[tuple[Lease, float]]:
        """All leases that are not damaged, and for how many seconds each has been silent. Any thread may ask."""
        silent = self._silent
        return [(lease, silent.get(lease.beat, 0.0)) for lease in list(self._leases.values())]

    def continue_from(self, head: Head, now: float, end: int) -> None:
        """Continue the silences of the writer before, and compare all positions with the log.

        Args:
            head: The last head of that writer.
            now: Seconds since the epoch.
            end: The id after the last one of the log.

        Raises:
            DataLossError: The log ends before the position of a reader: it would give out ids a second time.
            LogError: As ``look``.
        """
        gap = max(0.0, now - head.at)
        self._leases, self._silent = {}, head.silent
        self._read_changed(lambda lease: min(gap, _LARGEST_GAP * self._timeout(lease)))
        self._looked_at = self._clock()
        for key, lease in self._leases.items():
            if lease.next > end:
                raise DataLossError(
                    f"opening {self._storage}: it ends at id {end}, and reader {lease.name!r} has read the ids below "
                    f"{lease.next} ({self._files.path_of(key)}): its newest chunks are gone. Their ids are not given "
                    "to other messages. Restore the chunks, or use a new walLocation, and for each query of this log a "
                    "new checkpoint"
                )

    def look(self, make_room: int = 0) -> int | None:
        """Read the leases that have changed, and drop those that count no more.

        Args:
            make_room: The log is full, and this is the end of its first chunk: a query without a name that has ended
                and needs that chunk is dropped before its time, unless a named reader needs it, too.

        Returns:
            The lowest id that a reader needs; None if nothing is needed.

        Raises:
            LogError: The leases cannot be listed or read now, or another process has the log.
        """
        step = min(self._clock() - self._looked_at, self._longest_step)
        self._read_changed(lambda lease: step)
        self._looked_at = (
            self._clock()
        )  # a lease that was written during the look has not been silent for as long
        self._drop_silent(make_room)
        self.slowest = min(self._leases.values(), key=lambda lease: lease.next, default=None)
        if len(self._leases) < len(self._entries) or (self.slowest is None and self._keeps_unread):
            return 0
        return None if self.slowest is None else self.slowest.next

    def _read_changed(self, step: Callable[[Lease], float]) -> None:
        """Read the leases that have changed, and those that are damaged; add ``step`` to the silence of the others."""
        leases: dict[str, Lease] = {}
        silent: dict[str, float] = {}
        entries = self._files.entries()
        for key, entry in list(entries.items()):
            lease = self._leases.get(key)
            if lease is None or self._entries[key] != entry:
                try:
                    lease = self._files.read(key)
                except LogFormatError as e:
                    self._faults.warn("%s", e)
                    continue
            if lease is None:  # it was deleted meanwhile
                del entries[key]
            else:
                leases[key] = lease
                known = self._silent.get(lease.beat)
                silent[lease.beat] = 0.0 if known is None else known + step(lease)
        self._leases, self._entries, self._silent = leases, entries, silent

    def _timeout(self, lease: Lease) -> float:
        return self._retention if lease.timeout is None else lease.timeout

    def _drop_silent(self, make_room: int) -> None:
        leases = self._leases
        if any(lease.timeout is not None and lease.next < make_room for lease in leases.values()):
            make_room = 0
        silent: dict[str, Lease] = {}
        for key, lease in leases.items():
            in_the_way = lease.timeout is None and lease.next < make_room
            if self._silent[lease.beat] > (0.0 if in_the_way else self._timeout(lease)):
                silent[key] = lease
        if silent and self._keeps_unread and len(silent) == len(leases):
            del silent[max(silent, key=lambda key: silent[key].next)]
        for key, lease in silent.items():
            self._drop(key, lease)

    def _drop(self, key: str, lease: Lease) -> None:
        """Delete a lease, unless its reader runs."""
        try:
            hold = self._files.hold(key, 0.0)
        except LogLockedError:
            return
        try:
            if self._files.find(key) != self._entries[key]:  # it has run meanwhile
                return
            self._storage.check_writer()  # another writer may have the log, and keep this lease for longer
            option = "readerTimeout" if lease.subscriber is None else "subscriberExpiry"
            _log.log(
                # Each run of an unnamed query leaves a lease, so dropping it needs no warning.
                logging.INFO if lease.timeout is None else logging.WARNING,
                "log %s: dropped the lease of reader %r, which needed the messages from id %d on: it has been silent "
                "for %.0f s (%s). If it comes back and misses messages, failOnDataLoss decides",
                self._storage.root,
                lease.name,
                lease.next,
                self._silent[lease.beat],
                "walRetention: it has no name" if lease.timeout is None else option,
            )
            self._files.remove(key)
            del self._leases[key], self._entries[key]
        finally:
            hold.release()
