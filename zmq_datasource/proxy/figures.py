"""The numbers in a proxy's status, which are also its metrics (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zmq_datasource.counters import counted, declared, figures, state


@dataclass
class LiveFigures:
    """The numbers of the log and of the publishers' side."""

    next_id: int = state("nextId", "id", "The id of the next message.")
    earliest_id: int = state("earliestId", "id", "The first id that the log still has.")
    log_bytes: int = state("logBytes", "bytes", "The size of the log.")
    received: int = counted(
        "received",
        "messages",
        "The number of messages that were received.",
        "log",
        series="messages_received",
    )
    bytes: int = counted(
        "bytes", "bytes", "The number of bytes in their values.", "log", series="received_bytes"
    )
    oversize: int = counted(
        "oversize", "messages", "The number of messages of more than 1 GiB, which were discarded.", "log"
    )
    protocol_errors: int = counted(
        "protocolErrors",
        "connections",
        "The number of connections that were ended because of what the publisher sent.",
        "process",
    )
    paused: bool = state("paused", "", "Whether receiving waits for the log.")
    paused_seconds: float = counted(
        "pausedSeconds", "s", "How long receiving has waited for the log.", "process", initial=0.0
    )


@dataclass
class PublishedFigures:
    """The numbers of the plain subscribers' side."""

    published: int = counted(
        "published",
        "messages",
        "The number of messages that were published: those that libzmq has taken.",
        "process",
        series="messages_published",
    )
    subscribers: int = state("subscribers", "connections", "The number of plain subscribers.")
    refused: int = counted(
        "subscriptionsRefused",
        "requests",
        "The number of requests for topics that were not passed on to publishers.",
        "process",
    )
    disconnected: int = counted(
        "disconnected",
        "connections",
        "The number of plain subscribers that the proxy has disconnected: they asked for too many topics.",
        "process",
        series="subscribers_disconnected",
    )
    waited_seconds: float = counted(
        "waitedSeconds", "s", "How long publishing has waited for subscribers.", "process", initial=0.0
    )


@dataclass
class SubscriberFigures:
    """The numbers of one durable subscriber."""

    connected: bool = state("connected", "", "Whether its client is there.")
    next_id: int = state("nextId", "id", "The first id that it has not acknowledged.")
    backlog: int = state(
        "backlog", "messages", "The number of messages from there on.", series="backlog_messages"
    )
    sent: int = counted(
        "sent", "messages", "The number of messages that were sent to it.", "log", series="messages_sent"
    )
    lost: int = counted(
        "lost",
        "messages",
        "The number of messages that were deleted before they were sent to it.",
        "log",
        series="messages_lost",
    )
    away_seconds: float = state("awaySeconds", "s", "How long its client has been away.")


PROXY = declared("zmq_proxy", LiveFigures, PublishedFigures)
SUBSCRIBER = declared("zmq_proxy_durable", SubscriberFigures)

# The parts of the status of a proxy without ``publish``, and of one without ``durable``.
NO_SUBSCRIBERS: Mapping[str, Any] = {**figures(PublishedFigures()), "subscriptions": []}
NO_CLIENTS: Mapping[str, Any] = {"durable": []}
