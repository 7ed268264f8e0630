"""The size of the next micro-batch. Does no I/O."""

from __future__ import annotations

import time
from collections.abc import Callable

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

    def holds_back(self, available: int) -> bool:
        """Whether there are fewer messages than ``minMessagesPerTrigger``, and ``maxTriggerDelay`` has not passed."""
        return (
            available < (self._options.min_messages_per_trigger or 0)
            and self._clock() - self._last_batch < self._options.max_trigger_delay
        )

    def end(
        self, begin: int, available: int, end_within: Callable[[int, int, int], int], *, wait: bool = True
    ) -> int:
        """The end of the next batch.

        Args:
            begin: The first id of the batch.
            available: The end of the messages that the batch may take.
            end_within: Takes ``(begin, end, bytes)``. Returns the largest end with at most this many bytes.
            wait: Whether ``minMessagesPerTrigger`` may hold the batch back.
        """
        options, now = self._options, self._clock()
        if begin >= available or (wait and self.holds_back(available - begin)):
            return begin
        end = available
        if options.max_messages_per_trigger is not None:
            end = min(end, begin + options.max_messages_per_trigger)
        if options.max_bytes_per_trigger is not None:
            # A message that is larger than the limit is a batch of its own.
            end = max(begin + 1, end_within(begin, end, options.max_bytes_per_trigger))
        self._last_batch = now
        return end
