"""The leases of a log as its writer sees them: what they need, and how long each has been silent.

The rules:

* A lease is *silent* while a writer sees no change of it, measured by the writer's monotonic clock. The sum is in the
  head, so that the next writer continues it. Time in which no writer ran counts by the wall clock, but at each start of
  a writer as a tenth of the timeout at most. So no single reading of a wall clock drops a lease, and many short runs
  do.
* A lease is dropped if it was silent for longer than its timeout, its name is free, and another lease lives. In a full
  log, the lease of a query without a name needs only to be silent. If none lives, the one with the highest id stays.
  Before the first lease, a log keeps everything.
* A damaged lease may need everything, so nothing is deleted until it is restored or dropped. The others go on.
"""

from __future__ import annotations

import logging
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
        keeps_unread: Whether the log keeps everything before its first lease, and what its last lease needs. Not for a
            proxy, which also sends messages on when nobody reads its log.
        clock: Returns seconds, monotonic.
    """

    def __init__(
        self, storage: LogStorage, *, keeps_unread: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage = storage
        self._files = LeaseFiles(storage)
        self._keeps_unread = keeps_unread
        self._clock = clock
        # A step counts at most three times as long as it should be: a stopped machine sees no change, either.
        self._longest_step = 3 * max(1.0, storage.request_interval)
        self._leases: dict[str, Lease] = {}  # as of the last look, without damaged ones
        self._entries: dict[str, Entry] = {}
        self._silent: dict[str, float] = {}
        self._looked_at = clock()
        self._faults = LimitedLog(__name__, "leases that cannot be read")

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
        self._read_changed(lambda lease: min(gap, _LARGEST_GAP * lease.timeout))
        self._looked_at = self._clock()
        for key, lease in self._leases.items():
            if lease.next > end:
                raise DataLossError(
                    f"opening {self._storage}: it ends at id {end}, and reader {lease.name!r} has read the ids below "
                    f"{lease.next} ({self._files.path_of(key)}): its newest chunks are gone. Their ids are not given "
                    "to other messages. Restore the chunks, or use a new walLocation, and for each query of this log a "
                    "new checkpoint"
                )

    def look(self, end: int, full: bool = False) -> int:
        """Read the leases that have changed, and drop those that count no more.

        Args:
            end: The id after the last one of the log.
            full: Whether the log is full: leases without a name count no more if they are silent at all.

        Returns:
            The lowest id that a reader needs; ``end`` if nothing is needed.

        Raises:
            LogError: The leases cannot be listed or read now, or another process has the log.
        """
        step = min(self._clock() - self._looked_at, self._longest_step)
        self._read_changed(lambda lease: step)
        self._looked_at = self._clock()  # now: a lease that was written during the look was silent for less
        self._drop_silent(full)
        if len(self._leases) < len(self._entries) or (not self._leases and self._keeps_unread):
            return 0
        return min((lease.next for lease in self._leases.values()), default=end)

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

    def _drop_silent(self, full: bool) -> None:
        silent = {
            key: lease
            for key, lease in self._leases.items()
            if self._silent[lease.beat] > (0.0 if full and not lease.named else lease.timeout)
        }
        if silent and self._keeps_unread and len(silent) == len(self._leases):
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
            if self._files.entries().get(key) != self._entries[key]:  # it has run meanwhile
                return
            self._storage.check_writer()  # another writer may have the log, and keep this lease for longer
            _log.log(
                # Each run of a query without a name leaves a lease, so dropping it needs no warning.
                logging.WARNING if lease.named else logging.INFO,
                "log %s: dropped the lease of reader %r, which needed the messages from id %d on: it has been silent "
                "for %.0f s. If it comes back and misses messages, failOnDataLoss decides",
                *(self._storage.root, lease.name, lease.next, self._silent[lease.beat]),
            )
            self._files.remove(key)
            del self._leases[key], self._entries[key]
        finally:
            hold.release()
