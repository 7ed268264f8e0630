"""The numbers of subscribers, plain and durable, which are also metrics (docs/metrics.md)."""

from __future__ import annotations

from dataclasses import dataclass

from zmq_datasource.counters import counted, declared, state


@dataclass
class SubscriberFigures:
    """The numbers of one durable subscriber."""

    next_id: int = state("nextId", "id", "The first id that it has not acknowledged.")
    backlog: int = state(
        "backlog", "messages", "The number of messages from there on.", series="backlog_messages"
    )
    lost: int = state(
        "lost",
        "messages",
        "The number of messages from there on that the log no longer has.",
        series="messages_lost",
    )
    away_seconds: float = state("awaySeconds", "s", "How long its client has been away; 0 while it is there.")


@dataclass
class PublishedFigures:
    """The numbers of the plain subscribers' side of a proxy."""

    published: int = counted(
        "published",
        "messages",
        "The number of messages that were published: those that libzmq has taken.",
        "process",
        series="messages_published",
    )
    subscribers: int = state("subscribers", "connections", "The number of plain subscribers.")
    topics: int = state(
        "subscriptions", "topics", "The number of different topics of plain subscribers that publishers know."
    )
    full: int = counted(
        "sndhwmReached",
        "messages",
        "How often the queue of a plain subscriber has become full. The number of messages that were dropped until "
        "it had room again is unknown.",
        "process",
    )
    waited_seconds: float = counted(
        "waitedSeconds", "s", "How long publishing has waited for subscribers.", "process", initial=0.0
    )


SUBSCRIBER = declared("zmq_durable", SubscriberFigures)
PROXY = declared("zmq_proxy", PublishedFigures)
