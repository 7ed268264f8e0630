"""The rows that a lost connection may take along, and how often they are sent again. Pure.

A PUSH gets no acknowledgements. It can only see that all queues of this machine are empty: then the next machine has
all rows. But that machine may be a load balancer or a tunnel with a memory of its own. So ``KEEP`` bytes of rows stay
here even then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from zmq_datasource.errors import ConnectionLostError

# A TCP connection on Linux holds at most 4 MB at one end and 6 MB at the other, unless the system is configured
# otherwise, and a middlebox makes two connections of one. A task has about twice ``KEEP`` in memory, as the Arrow
# columns that Spark has made; more while the queues do not become empty.
KEEP = 32 << 20

# The overhead of a row: headers on the wire, offsets in Arrow.
_ROW_BYTES = 16


@dataclass
class RowBatch:
    """The rows of one call of the sender, as Arrow columns, and how many of them were sent.

    Attributes:
        values, topics: Binary. ``topics`` is None if the rows have none.
        frames: Lists of binary, in place of values and topics.
        first: The number of the first row in the task.
        sent: The number of rows that count as sent.
        sent_bytes: The bytes of their frames.
        given_up: The positions of the rows that were dropped or became dead letters.
    """

    values: pa.Array | None
    topics: pa.Array | None
    frames: pa.Array | None
    first: int
    sent: int = 0
    sent_bytes: int = 0
    given_up: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        column = self.values if self.frames is None else self.frames
        return 0 if column is None else len(column)

    def drop_columns(self) -> None:
        """Keep only the counts, for rows that are never sent again."""
        self.values = self.topics = self.frames = None
        self.given_up = set()

    @property
    def size(self) -> int:
        """About how many bytes the sent rows take in memory and on the wire."""
        return self.sent_bytes + self.sent * _ROW_BYTES


class InFlight:
    """The rows to send again if a connection were lost now.

    Args:
        keep: At least this many bytes of the newest rows stay here.

    Attributes:
        batches: The oldest first.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self.batches: deque[RowBatch] = deque()
        self._bytes = 0
        self._check_at = 2 * keep

    def __bool__(self) -> bool:
        return bool(self.batches)

    @property
    def bytes(self) -> int:
        """The bytes of all rows here, without those that were given up after they were added."""
        return sum(batch.size for batch in self.batches)

    def add(self, batch: RowBatch) -> bool:
        """Keep rows that libzmq has accepted. Returns whether to check the queues now, to forget what has left."""
        self.batches.append(batch)
        self._bytes += batch.size
        return self._bytes >= self._check_at

    def checked(self, all_sent: bool) -> None:
        """Forget rows, or put off the next check, after a check of the queues.

        Args:
            all_sent: Whether all queues of this machine were empty. If so, forget all rows but the newest ``keep``
                bytes. If not, the next check is due after another quarter of ``keep``.
        """
        if all_sent:
            self._bytes = self.bytes
            while self.batches and self._bytes - self.batches[0].size >= self._keep:
                self._bytes -= self.batches.popleft().size
        self._check_at = max(2 * self._keep, self._bytes + self._keep // 4)

    def clear(self) -> None:
        """Forget all rows."""
        self.batches.clear()
        self._bytes = 0
        self._check_at = 2 * self._keep


class ResendLimit:
    """Bounds how often rows are sent again, one lost connection after the other.

    Args:
        seconds: After this time and three attempts, the next attempt is refused.
        endpoints: For the text of the error.
    """

    _LEAST_ATTEMPTS = 3
    _LONGEST_PAUSE = 2.0

    def __init__(
        self,
        seconds: float,
        endpoints: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds, self._endpoints = seconds, endpoints
        self._clock, self._sleep = clock, sleep
        self._deadline = clock() + seconds
        self._made = 0

    def next(self) -> None:
        """Count an attempt. From the second one on, wait before it: 100 ms, doubled each time, up to 2 s.

        Raises:
            ConnectionLostError: There have been enough attempts.
        """
        if self._made >= self._LEAST_ATTEMPTS and self._clock() >= self._deadline:
            raise ConnectionLostError(
                f"sending to {self._endpoints}: {self._made + 1} connections were lost, one after the other for "
                f"{self._seconds}, before their rows had left. Find out why the peer or the network ends them (a row "
                "larger than the peer's zmq.maxmsgsize, for example), or raise sendTimeout"
            )
        if self._made:
            self._sleep(min(0.05 * 2**self._made, self._LONGEST_PAUSE))
        self._made += 1
