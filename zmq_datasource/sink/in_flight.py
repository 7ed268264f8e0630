"""The rows that a task keeps, to send them again if a connection is lost. Pure.

A PUSH gets no acknowledgements. It can only see that all queues of this machine are empty: then the next machine has
all rows. But that machine may be a load balancer or a tunnel with a memory of its own. So rows are forgotten only after
all queues were seen empty, and even then the newest ``KEEP`` bytes stay. At twice ``KEEP`` a task sends nothing more
until the queues are empty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pyarrow as pa

# A TCP connection on Linux holds at most 4 MB at one end and 6 MB at the other, unless the system is configured
# otherwise, and a middlebox makes two connections of one.
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
        bytes: The bytes of all rows here.
    """

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self.batches: deque[RowBatch] = deque()
        self.bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no row may be sent before the queues were seen empty."""
        return self.bytes >= 2 * self._keep

    def add(self, batch: RowBatch) -> None:
        """Keep rows that libzmq has accepted."""
        self.batches.append(batch)
        self.bytes += batch.size

    def forget_old(self) -> None:
        """All queues of this machine were seen empty: forget all rows but the newest ``keep`` bytes."""
        # Rows may have been given up since they were added.
        self.bytes = sum(batch.size for batch in self.batches)
        while self.batches and self.bytes - self.batches[0].size >= self._keep:
            self.bytes -= self.batches.popleft().size
