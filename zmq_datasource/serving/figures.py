"""The numbers of durable subscribers, which are also metrics (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass

from zmq_datasource.counters import counted, declared, state


@dataclass
class SubscriberFigures:
    """The numbers of one durable subscriber."""

    connected: bool = state("connected", "", "Whether its client is there.")
    next_id: int = state("nextId", "id", "The first id that it has not acknowledged.")
    backlog: int = state(
        "backlog", "messages", "The number of messages from there on.", series="backlog_messages"
    )
    sent: int = counted(
        "sent", "messages", "The number of messages that were sent to it.", "process", series="messages_sent"
    )
    lost: int = counted(
        "lost",
        "messages",
        "The number of messages that were deleted before they were sent to it.",
        "process",
        series="messages_lost",
    )
    away_seconds: float = state("awaySeconds", "s", "How long its client has been away.")


SUBSCRIBER = declared("zmq_durable", SubscriberFigures)
