"""When a receiver seals what it has received, as a function of times and sizes.

A chunk is sealed every ``walFlushInterval``. While a durable subscriber waits at the end of the log, it is sealed
earlier, within these bounds:

* 50 chunks a second; in a bucket, whose provider charges for requests, one;
* a tenth of the time: if a slow disk needs 10 ms for a chunk, the next one follows 100 ms after it began. A disk that
  stalls once is not slow, so a chunk counts for at most twice the time of the one before;
* for the writer's state, which is whole in each chunk, a tenth of the bytes. A state of a few KiB may be larger than
  the messages.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LEAST_SECONDS, LEAST_BUCKET_SECONDS = 0.02, 1.0
_SHARE = 10
_SMALL_STATE_BYTES = 4 << 10


class LastSeal(NamedTuple):
    """How the last chunk was sealed.

    Attributes:
        began: When the chunk was handed to the disk, monotonic.
        seconds: How long this took, as far as it counts.
        state_bytes: The size of the writer's state in the chunk.
    """

    began: float
    seconds: float
    state_bytes: int

    def followed_by(self, began: float, seconds: float, state_bytes: int) -> LastSeal:
        """The next chunk, which took so many seconds."""
        most = max(2 * self.seconds, LEAST_SECONDS / _SHARE)
        return LastSeal(began, min(seconds, most), state_bytes)


def seal_time(size: int, last: LastSeal, least_seconds: float = LEAST_SECONDS) -> float:
    """When to seal for a durable subscriber that waits at the end of the log, monotonic; infinity if not for it.

    Args:
        size: The bytes of the messages that are not sealed.
        least_seconds: Between the beginnings of two chunks.
    """
    if last.state_bytes > max(_SMALL_STATE_BYTES, size / _SHARE):
        return math.inf
    return last.began + max(least_seconds, _SHARE * last.seconds)
