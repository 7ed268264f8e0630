"""Counters under the names that a query's progress shows."""

from __future__ import annotations

from zmq_datasource.counters import SourceCounters
from zmq_datasource.sequences import Judge

__all__ = ["source_metrics"]


def source_metrics(counters: SourceCounters, judge: Judge | None) -> dict[str, int]:
    """What a receiver counted; with numbered messages also what their numbers tell."""
    metrics = {
        "messagesReceived": counters.received,
        "bytesReceived": counters.bytes,
        "messagesMalformed": counters.malformed,
        "messagesOversize": counters.oversize,
        "controlMessages": counters.control,
        "deadLettersLost": counters.dead_letters_lost,
        "dataLosses": counters.data_losses,
        "messagesExpired": counters.expired,
        "receivePauses": counters.pauses,
        "receivePausedMs": round(counters.paused_seconds * 1000),
    }
    if judge is None:
        return metrics
    totals = judge.totals
    return metrics | {
        "messagesLost": totals.lost,
        "messagesDuplicate": totals.duplicates,
        "messagesLate": totals.late,
        "messagesHealed": totals.healed,
        "messagesReplayed": counters.replayed,
        "messagesOverlapping": totals.overlapping,
        "repliesMalformed": counters.malformed_replies,
        "publisherRestarts": totals.restarts,
        "publishers": len(judge.expected),
        "publishersForgotten": totals.forgotten,
        "gaps": len(judge.gaps),
    }
