"""What a source tells of itself, whether its log is filled here (``ingest``) or by another process (``follow``)."""

from __future__ import annotations

from typing import NamedTuple

from zmq_datasource.counters import SourceCounters
from zmq_datasource.sequences import Totals

__all__ = ["SourceFacts"]


class SourceFacts(NamedTuple):
    """What a source tells of itself, for monitoring.

    Attributes:
        counters: Of this process.
        receiver: Of the process that receives, as far as known here; None if the log could not tell yet.
        received: Messages received in all, to see how fast that grows.
        receives: Whether that is this process.
        totals: What the publishers' numbers tell; None if messages are not numbered.
        publishers: How many are known; None where that is not known here.
        gaps: How many gaps are in the table; None as for ``publishers``.
    """

    counters: SourceCounters
    receiver: SourceCounters | None
    received: int
    receives: bool
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None
