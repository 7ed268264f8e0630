"""What is counted, at the source and at the sink. Pure data that adds up.

The sink's identity holds for every task, batch and query::

    rows = sent + dropped
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["SinkCounters", "SourceCounters"]


@dataclass
class SinkCounters:
    """One task's, or one batch's, account of its rows.

    Attributes:
        rows: Rows that came in.
        sent: Messages that the socket accepted. Accepted is not delivered.
        bytes: Bytes of those messages, all frames.
        dropped: Messages not sent, by reason: ``hwm`` (queue full), ``no_peer`` (nobody there).
        unflushed_tasks: Tasks whose ``linger`` ran out with messages still queued. libzmq
            cannot tell how many those were; they are part of ``sent``.
        tasks: Tasks that are in this account.
    """

    rows: int = 0
    sent: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    unflushed_tasks: int = 0
    tasks: int = 1

    def __add__(self, other: SinkCounters) -> SinkCounters:
        return SinkCounters(
            rows=self.rows + other.rows,
            sent=self.sent + other.sent,
            bytes=self.bytes + other.bytes,
            dropped=self.dropped + other.dropped,
            unflushed_tasks=self.unflushed_tasks + other.unflushed_tasks,
            tasks=self.tasks + other.tasks,
        )

    @classmethod
    def none(cls) -> SinkCounters:
        """The account of no task: the zero of ``+``."""
        return cls(tasks=0)

    @property
    def balanced(self) -> bool:
        """Whether every row is accounted for."""
        return self.rows == self.sent + self.dropped.total()

    def __str__(self) -> str:
        drops = "".join(f" dropped.{why}={n}" for why, n in sorted(self.dropped.items()))
        unflushed = f" unflushedTasks={self.unflushed_tasks}" if self.unflushed_tasks else ""
        return (
            f"rows={self.rows} sent={self.sent} bytes={self.bytes} "
            f"dropped={self.dropped.total()}{drops}{unflushed} tasks={self.tasks}"
        )


@dataclass
class SourceCounters:
    """What a receiver did since its query started.

    Attributes:
        received: Messages taken from the socket and given an id.
        bytes: Bytes of their values.
        oversize: Messages discarded because no Arrow array can hold them.
        data_losses: Offsets that the log could not honour (with ``failOnDataLoss=false``).
        lost: Messages that are known to be lost by that.
        pauses: How often receiving stopped because the log was full or its disk too slow.
        paused_seconds: For how long in all.
    """

    received: int = 0
    bytes: int = 0
    oversize: int = 0
    data_losses: int = 0
    lost: int = 0
    pauses: int = 0
    paused_seconds: float = 0.0
