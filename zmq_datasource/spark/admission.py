"""The size of the next micro-batch. Does no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from zmq_datasource.options import StreamReadOptions


class Admission:
    """The trigger limits of one query, applied together, because Spark has no combined limit.

    Args:
        options: ``maxMessagesPerTrigger``, ``maxBytesPerTrigger``, ``minMessagesPerTrigger``
            and ``maxTriggerDelay``.
        clock: Seconds, monotonic.
    """

    def __init__(self, options: StreamReadOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._last_batch = clock()
        self._turn = 0
        # Partitions whose next message is larger than their share take turns: the next one, and the last one served.
        self._next: int | None = None
        self._last = -1

    def holds_back(self, available: int) -> bool:
        """Whether there are fewer messages than ``minMessagesPerTrigger``, and ``maxTriggerDelay`` has not passed."""
        return (
            available < (self._options.min_messages_per_trigger or 0)
            and self._clock() - self._last_batch < self._options.max_trigger_delay
        )

    def ends(
        self,
        begins: Mapping[int, int],
        available: Mapping[int, int],
        size_of: Callable[[int, int, int], int],
        end_within: Callable[[int, int, int, int], tuple[int, int]],
        *,
        wait: bool = True,
    ) -> dict[int, int]:
        """The end of the next batch in each log partition. Partitions share the limits in proportion to their messages.

        Args:
            begins: The first ids of the batch.
            available: The end of the messages that the batch may take, in each partition.
            size_of: Takes ``(partition, begin, end)``. Returns about how many bytes these messages have.
            end_within: Takes ``(partition, begin, end, bytes)``. Returns the largest end with at most this many bytes,
                and the bytes up to it.
            wait: Whether ``minMessagesPerTrigger`` may hold the batch back.
        """
        options, now = self._options, self._clock()
        waiting = {partition: available[partition] - begin for partition, begin in begins.items()}
        if wait and self.holds_back(sum(waiting.values())):
            return dict(begins)
        if options.max_messages_per_trigger is not None:
            waiting = _shares(waiting, options.max_messages_per_trigger, self._turn)
            self._turn += 1
        ends = {partition: begin + waiting[partition] for partition, begin in begins.items()}
        if options.max_bytes_per_trigger is not None:
            ends = self._within_bytes(begins, ends, options.max_bytes_per_trigger, size_of, end_within)
        if ends != begins:
            self._last_batch = now
        return ends

    def _within_bytes(
        self,
        begins: Mapping[int, int],
        ends: Mapping[int, int],
        most: int,
        size_of: Callable[[int, int, int], int],
        end_within: Callable[[int, int, int, int], tuple[int, int]],
    ) -> dict[int, int]:
        """Limit a batch to ``most`` bytes, but to one message at least.

        The bytes that are left over go in turn to the partitions whose next message is larger than their share. If one
        of these still gets none, its next message comes first in the next batch, however large it is.
        """
        cut, others = (
            dict(begins),
            [partition for partition, begin in begins.items() if ends[partition] > begin],
        )
        if self._next in others:
            most -= self._add_one(self._next, cut, end_within)
            others.remove(self._next)
        sizes = {
            partition: max(1, size_of(partition, begins[partition], ends[partition])) for partition in others
        }
        for partition, size in _shares(sizes, max(0, most), whole=True).items():
            cut[partition], taken = end_within(partition, begins[partition], ends[partition], size)
            most -= taken
        waiting = [partition for partition in others if cut[partition] == begins[partition]]
        waiting.sort(key=lambda partition: (partition <= self._last, partition))
        for partition in list(waiting):
            cut[partition], taken = end_within(partition, begins[partition], ends[partition], max(0, most))
            if cut[partition] > begins[partition]:
                most -= taken
                self._last = partition
                waiting.remove(partition)
        if cut == begins and waiting:
            self._add_one(waiting.pop(0), cut, end_within)
        self._next = waiting[0] if waiting else None
        return cut

    def _add_one(
        self, partition: int, cut: dict[int, int], end_within: Callable[[int, int, int, int], tuple[int, int]]
    ) -> int:
        """Add one message of a partition to the batch, however large. Returns its bytes."""
        self._last = partition
        cut[partition], size = end_within(partition, cut[partition], cut[partition] + 1, 2**63 - 1)
        return size


def _shares(wanted: Mapping[int, int], most: int, turn: int = 0, whole: bool = False) -> dict[int, int]:
    """Divide ``most`` in proportion to what each partition wants. The rest goes first to those that would get nothing.

    Args:
        turn: A number that grows with each call, so that partitions take turns if ``most`` is less than their number.
        whole: Whether to divide all of ``most`` even if less is wanted, because the wanted sizes are estimates.
    """
    total = sum(wanted.values())
    if total <= most and not whole:
        return dict(wanted)
    shares = {partition: want * most // total for partition, want in wanted.items()}
    left = most - sum(shares.values())
    # First the partitions that get nothing, then those that lose most by rounding.
    order = sorted(wanted, key=lambda p: (shares[p] > 0, -(wanted[p] * most % total)))
    empty = [partition for partition in order if wanted[partition] and not shares[partition]]
    at = turn % max(1, len(empty))
    for partition in [*empty[at:], *empty[:at], *(p for p in order if shares[p])]:
        if left and wanted[partition]:
            shares[partition] += 1
            left -= 1
    return shares
