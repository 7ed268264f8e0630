"""The size of the next micro-batch. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable

from zmq_datasource.options import StreamReadOptions


def batch_end(
    options: StreamReadOptions, begin: int, available: int, end_within: Callable[[int, int, int], int]
) -> int:
    """The end of the next batch within ``maxMessagesPerTrigger`` and ``maxBytesPerTrigger``, applied together.

    Spark has no combined limit.

    Args:
        begin: The first id of the batch.
        available: The end of the messages that the batch may take.
        end_within: Takes ``(begin, end, bytes)``. Returns the largest end with at most this many bytes.
    """
    end = max(begin, available)
    if options.max_messages_per_trigger is not None:
        end = min(end, begin + options.max_messages_per_trigger)
    if options.max_bytes_per_trigger is not None and end > begin:
        # A message that is larger than the limit is a batch of its own.
        end = max(begin + 1, end_within(begin, end, options.max_bytes_per_trigger))
    return end
