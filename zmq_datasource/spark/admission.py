"""How much of what is durable goes into the next micro-batch. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from zmq_datasource.options import StreamReadOptions

__all__ = ["Admission"]


class Admission:
    """The trigger limits of one query, applied together (Spark knows no composite limit).

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
        self._next: int | None = None  # the partition whose next message was larger than its share
        self._last = -1  # the one that such a message was taken from last

    def holds_back(self, available: int) -> bool:
        """Whether so many messages are too few for a batch, and it is too soon to make one of them."""
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
        """The end of the next batch in each log partition. What it may have they share by what each of them has.

        Args:
            begins: Its first ids.
            available: The ids after the last durable ones.
            size_of: ``(partition, begin, end)`` to about so many bytes.
            end_within: ``(partition, begin, end, bytes)`` to the largest end with at most that many
                bytes, and how many these are.
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
        """Cut a batch off at so many bytes; a batch with something has one message at least.

        Partitions whose next message is larger than their share take in turn what the others leave. One that gets
        nothing comes first in the next batch, with its next message alone.
        """
        cut, others = (
            dict(begins),
            [partition for partition, begin in begins.items() if ends[partition] > begin],
        )
        if self._next in others:
            most -= self._let_in(self._next, cut, end_within)
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
            self._let_in(waiting.pop(0), cut, end_within)
        self._next = waiting[0] if waiting else None
        return cut

    def _let_in(
        self, partition: int, cut: dict[int, int], end_within: Callable[[int, int, int, int], tuple[int, int]]
    ) -> int:
        """Put one message of a partition into the batch, however large; returns its bytes."""
        self._last = partition
        cut[partition], size = end_within(partition, cut[partition], cut[partition] + 1, 2**63 - 1)
        return size


def _shares(wanted: Mapping[int, int], most: int, turn: int = 0, whole: bool = False) -> dict[int, int]:
    """Share ``most`` out in proportion to what is wanted; what is left over goes first to those who got nothing.

    Args:
        turn: Another one each time: where there is not one for each, who gets something takes turns.
        whole: Whether to share out all of it, though less is wanted: what is wanted is a guess.
    """
    total = sum(wanted.values())
    if total <= most and not whole:
        return dict(wanted)
    shares = {partition: want * most // total for partition, want in wanted.items()}
    left = most - sum(shares.values())
    # Those that got nothing come first, then those of which most was cut off.
    order = sorted(wanted, key=lambda p: (shares[p] > 0, -(wanted[p] * most % total)))
    empty = [partition for partition in order if wanted[partition] and not shares[partition]]
    at = turn % max(1, len(empty))
    for partition in [*empty[at:], *empty[:at], *(p for p in order if shares[p])]:
        if left and wanted[partition]:
            shares[partition] += 1
            left -= 1
    return shares
