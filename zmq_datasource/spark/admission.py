"""How much of what is durable goes into the next micro-batch. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable

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

    def holds_back(self, begin: int, available: int) -> bool:
        """Whether there is too little for a batch, and it is too soon to make one of that."""
        return (
            available - begin < (self._options.min_messages_per_trigger or 0)
            and self._clock() - self._last_batch < self._options.max_trigger_delay
        )

    def end(
        self, begin: int, available: int, end_within: Callable[[int, int, int], int], *, wait: bool = True
    ) -> int:
        """The end of the next batch.

        Args:
            begin: Its first id.
            available: The id after the last durable one.
            end_within: ``(begin, end, bytes)`` to the largest end with at most that many
                bytes, one message at least.
            wait: Whether ``minMessagesPerTrigger`` may hold the batch back.
        """
        options, now = self._options, self._clock()
        end = available
        if wait and self.holds_back(begin, available):
            return begin
        if options.max_messages_per_trigger is not None:
            end = min(end, begin + options.max_messages_per_trigger)
        if options.max_bytes_per_trigger is not None and end > begin:
            end = end_within(begin, end, options.max_bytes_per_trigger)
        if end > begin:
            self._last_batch = now
        return end
