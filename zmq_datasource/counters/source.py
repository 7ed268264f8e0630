"""The counters and states of a source, with the declarations of their figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from zmq_datasource.counters.metric import counted, state

# Why a source stops receiving.
_PAUSE_CAUSES = ("logFull", "slowDisk", "diskFault")


@dataclass
class SourceCounters:
    """The counters and states of a process that receives, or of a query that reads.

    What the sequence numbers of publishers show, such as lost messages, is counted in ``sequences.Totals``.
    ``replayed`` and ``malformed_replies`` are counted here, but their figures are shown only if messages are numbered.
    """

    received: int = counted(
        "messagesReceived",
        "messages",
        "The number of messages that were given an id. Each of them is a row.",
        "log",
    )
    bytes: int = counted(
        "bytesReceived",
        "bytes",
        "The number of bytes in the values of the received messages.",
        "log",
        series="received_bytes",
    )
    malformed: int = counted(
        "messagesMalformed",
        "messages",
        "The number of messages that do not fit their framing. With `onMalformed=keep` they are rows, and part of "
        "`messagesReceived`.",
        "log",
    )
    lost_at_stop: int = counted(
        "messagesLostAtStop",
        "messages",
        "The number of messages that were received, but could not be written to the log when receiving was stopped. "
        "What a PULL socket had taken from a sender that was still sending is not among them: its number is unknown, "
        "and the log output says that there was some.",
        "process",
    )
    control: int = counted(
        "controlMessages",
        "messages",
        "The number of messages without content, such as heartbeats. They are not rows.",
        "log",
    )
    replayed: int = counted(
        "messagesReplayed",
        "messages",
        "The number of messages that a replay has fetched.",
        "log",
        numbered=True,
    )
    malformed_replies: int = counted(
        "repliesMalformed",
        "replies",
        "The number of invalid replies to replay requests.",
        "log",
        numbered=True,
    )
    oversize: int = counted(
        "messagesOversize",
        "messages",
        "The number of messages that were discarded because they are too large for a row.",
        "log",
    )
    internal_errors: int = counted(
        "internalErrors",
        "messages",
        "The number of messages that a `ROUTER` source refused because of an unexpected error. The log output of the "
        "receiver explains the error.",
        "process",
    )
    data_losses: int = counted(
        "dataLosses",
        "times",
        "How often the log did not have the offset that a query asked for, and the query continued "
        "(`failOnDataLoss=false`).",
        "reader",
    )
    expired: int = counted(
        "messagesExpired",
        "messages",
        "The number of messages that are known to be lost because the log no longer had them.",
        "reader",
    )
    pauses: Counter[str] = counted(
        "receivePauses",
        "times",
        "How often receiving stopped, in all and for each cause. Meanwhile the receive queue (RCVHWM) fills, and then "
        "the high-water mark of the peer decides what happens. `logFull`: the log has reached `walMaxBytes`. "
        "`slowDisk`: the disk is slower than the feed. `diskFault`: the log cannot be written, and writing is tried "
        "again for five minutes.",
        "process",
        by="cause",
        keys=_PAUSE_CAUSES,
        initial=lambda: Counter(dict.fromkeys(_PAUSE_CAUSES, 0)),
    )
    paused_seconds: dict[str, float] = counted(
        "receivePausedMs",
        "ms",
        "The total time for which receiving was stopped, in all and for each cause.",
        "process",
        by="cause",
        keys=_PAUSE_CAUSES,
        initial=lambda: dict.fromkeys(_PAUSE_CAUSES, 0.0),
    )
    paused_by: str | None = state(
        "receivePausedBy",
        "",
        "The cause of the current pause. It is null while the source receives. In Prometheus it is 1 for the cause of "
        "the current pause, and 0 for each other cause.",
        type="text",
        label="cause",
        keys=_PAUSE_CAUSES,
        initial=None,
    )
    connections: int = state(
        "connections",
        "connections",
        "The number of connections that are up. A connection is up when its handshake has succeeded.",
    )
    connections_made: int = counted(
        "connectionsMade", "connections", "The number of connections that have come up.", "process"
    )
    connections_lost: int = counted(
        "connectionsLost", "connections", "The number of connections that were up and went down.", "process"
    )
    handshake_failures: int = counted(
        "handshakeFailures",
        "handshakes",
        "The number of handshakes that were refused or broken off. The peer has a socket type that does not fit, or "
        "its security does not match.",
        "process",
    )
    protocol_errors: int = counted(
        "protocolErrors",
        "connections",
        "The number of connections that were ended because of what the peer sent: a frame over `zmq.maxmsgsize`, bytes "
        "that are not ZMTP, or, at `ROUTER`, a message that does not end. The first two are counted only for "
        "`connect`, because libzmq does not tell a bound socket why a connection has ended. What the peer sent after "
        "the fault is lost.",
        "process",
    )
    rcvhwm: int = state(
        "rcvhwm",
        "messages",
        "The receive high-water mark in use, as read back from the socket.",
    )
    last_received: float = state(
        "lastReceived",
        "",
        "The time when the last message came (UTC, ISO 8601). It is null until the first message has come after the "
        "start of the receiver.",
        type="time",
        series="last_received_timestamp_seconds",
        initial=0.0,
    )

    def count(self, rows: int, value_bytes: int) -> None:
        """Count rows that were appended to the log: of a source, of transactions, of a proxy."""
        self.received += rows
        self.bytes += value_bytes

    @classmethod
    def kept(cls) -> list[str]:
        """The counters of figures that count since the log began. Their names are part of its format on disk."""
        return [field.name for field in fields(cls) if field.metadata["metrics"][0].since == "log"]

    def to_json(self) -> dict[str, int]:
        """The counters that the log keeps across restarts."""
        return {name: getattr(self, name) for name in self.kept()}

    def restore(self, kept: Mapping[str, int]) -> None:
        """Set the counters to the values that the log kept; a missing one to 0."""
        for name in self.kept():
            setattr(self, name, kept.get(name, 0))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_json().items() if value)
