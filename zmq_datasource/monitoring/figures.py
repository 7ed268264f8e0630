"""From what was counted to the figures of the catalogue, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zmq_datasource.counters import (
    DEAD_LETTER_REASONS,
    DROP_REASONS,
    PAUSE_CAUSES,
    SinkCounters,
    SourceCounters,
)
from zmq_datasource.sequences import Totals

__all__ = ["kept_metrics", "receiver_metrics", "sequence_metrics", "sink_counters", "sink_metrics"]


def kept_metrics(counters: SourceCounters) -> dict[str, int]:
    """What the log keeps of a receiver's counters."""
    return {
        "messagesReceived": counters.received,
        "bytesReceived": counters.bytes,
        "messagesMalformed": counters.malformed,
        "messagesOversize": counters.oversize,
        "controlMessages": counters.control,
    }


def sequence_metrics(counters: SourceCounters, totals: Totals) -> dict[str, int]:
    """What the publishers' numbers tell."""
    return {
        "messagesLost": totals.lost,
        "messagesDuplicate": totals.duplicates,
        "messagesLate": totals.late,
        "messagesHealed": totals.healed,
        "messagesReplayed": counters.replayed,
        "messagesOverlapping": totals.overlapping,
        "repliesMalformed": counters.malformed_replies,
        "publisherRestarts": totals.restarts,
        "publishersForgotten": totals.forgotten,
    }


def sink_metrics(counters: SinkCounters) -> dict[str, Any]:
    """An account under the names that a query's progress shows; each reason is there, also with 0."""
    return {
        "rows": counters.rows,
        "sent": counters.sent,
        "bytes": counters.bytes,
        "dropped": counters.dropped.total(),
        "droppedByReason": {reason: counters.dropped[reason] for reason in DROP_REASONS},
        "deadLettered": counters.dead_lettered.total(),
        "deadLetteredByReason": {reason: counters.dead_lettered[reason] for reason in DEAD_LETTER_REASONS},
        "retries": counters.retries,
        "resent": counters.resent,
        "blockedMs": round(counters.blocked_seconds * 1000),
        "peers": counters.peers,
        "sndhwm": counters.sndhwm,
        "tasks": counters.tasks,
        "unflushedTasks": counters.unflushed_tasks,
        "metricsFailures": counters.metrics_failures,
    }


def sink_counters(metrics: Mapping[str, Any]) -> SinkCounters:
    """Back from ``sink_metrics``.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    return SinkCounters(
        rows=int(metrics["rows"]),
        sent=int(metrics["sent"]),
        bytes=int(metrics["bytes"]),
        dropped=Counter({reason: int(n) for reason, n in metrics["droppedByReason"].items() if n}),
        dead_lettered=Counter({reason: int(n) for reason, n in metrics["deadLetteredByReason"].items() if n}),
        retries=int(metrics["retries"]),
        resent=int(metrics.get("resent", 0)),  # files of before it was counted have none
        blocked_seconds=metrics["blockedMs"] / 1000,
        peers=int(metrics["peers"]),
        sndhwm=int(metrics["sndhwm"]),
        tasks=int(metrics["tasks"]),
        unflushed_tasks=int(metrics["unflushedTasks"]),
        metrics_failures=int(metrics["metricsFailures"]),
    )


def receiver_metrics(counters: SourceCounters) -> dict[str, Any]:
    """What a receiver counted. Safe to call while it goes on counting."""
    paused_ms = {cause: round(seconds * 1000) for cause, seconds in counters.paused_seconds.items()}
    return {
        **kept_metrics(counters),
        "deadLettersLost": counters.dead_letters_lost,
        "internalErrors": counters.internal_errors,
        "dataLosses": counters.data_losses,
        "messagesExpired": counters.expired,
        "receivePauses": counters.pauses.total(),
        "receivePausesByCause": {cause: counters.pauses[cause] for cause in PAUSE_CAUSES},
        "receivePausedMs": sum(paused_ms.values()),
        "receivePausedMsByCause": paused_ms,
        "receivePausedBy": counters.paused_by,
        "connections": counters.connections,
        "connectionsMade": counters.connections_made,
        "connectionsLost": counters.connections_lost,
        "handshakeFailures": counters.handshake_failures,
        "protocolErrors": counters.protocol_errors,
        "rcvhwm": counters.rcvhwm,
    }
