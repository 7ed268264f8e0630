"""Every metric, declared once: name, type, unit, since when it is counted, meaning, Prometheus series.

From these declarations come the dictionaries of a query's progress, the columns of the metrics
DataFrame, the series for Prometheus and the reference in ``docs/metrics.md``.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["SINK", "SOURCE", "TOTAL", "Metric"]

Type = Literal["BIGINT", "DOUBLE", "STRING", "MAP<STRING, BIGINT>"]


class Metric(NamedTuple):
    """One figure.

    Attributes:
        name: In dictionaries, and as a column.
        type: Spark's. A map's keys are reasons.
        unit: Of the value; empty for text.
        since: Since when it is counted: ``log`` (across restarts), ``receiver`` (since the process that
            receives started), or ``now`` for what is not counted but is so at the moment.
        doc: Its meaning.
        series: For Prometheus, without ``_total``; None if another series has it.
        label: What the keys of a map are called there.
        scale: By what to multiply for Prometheus' base units.
        series_doc: The meaning there, where the series is not what the field is.
    """

    name: str
    type: Type
    unit: str
    since: str
    doc: str
    series: str | None = None
    label: str = ""
    scale: float = 1.0
    series_doc: str = ""

    @property
    def counts(self) -> bool:
        """Whether it only grows."""
        return self.since != "now"


def _source(name: str, unit: str, since: str, doc: str, series: str | None = None, **more: Any) -> Metric:
    return Metric(
        name, more.pop("type", "BIGINT"), unit, since, doc, series and f"zmq_source_{series}", **more
    )


_MAP: Type = "MAP<STRING, BIGINT>"
_NUMBERED = "Of numbered messages: "

SOURCE = (
    _source("source", "", "now", "Socket type and endpoints; or the log that is followed.", type="STRING"),
    _source(
        "messagesReceived", "messages", "log", "Messages that were given an id: rows.", "messages_received"
    ),
    _source(
        "bytesReceived", "bytes", "log", "Bytes of the values of the messages received.", "received_bytes"
    ),
    _source(
        "messagesReceivedPerSecond",
        "messages/s",
        "now",
        "Of the last ten seconds, about.",
        type="DOUBLE",
    ),
    _source(
        "lastReceived",
        "",
        "now",
        "When a message last came (UTC, ISO 8601); null before the first since the receiver started.",
        "last_received_timestamp_seconds",
        type="STRING",
        series_doc="When a message last came.",
    ),
    _source(
        "backlogMessages",
        "messages",
        "now",
        "Received, and not in a finished batch yet; the batch that is being read is part of it.",
        "backlog_messages",
    ),
    _source(
        "backlogBytes",
        "bytes",
        "now",
        "What the backlog takes in the log; a chunk that is read in part counts in proportion.",
        "backlog_bytes",
    ),
    _source(
        "backlogAgeMs",
        "ms",
        "now",
        "How long ago the oldest message of the backlog was received: how stale the data gets.",
        "backlog_age_seconds",
        scale=0.001,
    ),
    _source(
        "messagesMalformed",
        "messages",
        "log",
        "Messages that do not fit their framing; set aside.",
        "messages_malformed",
    ),
    _source(
        "messagesOversize",
        "messages",
        "log",
        "Messages discarded because no row can hold them.",
        "messages_oversize",
    ),
    _source(
        "controlMessages",
        "messages",
        "log",
        "Messages without content, such as heartbeats: no rows.",
        "control_messages",
    ),
    _source(
        "deadLettersLost",
        "messages",
        "receiver",
        "Malformed messages that could not be kept at `deadLetterLocation`.",
        "dead_letters_lost",
    ),
    _source(
        "internalErrors",
        "messages",
        "receiver",
        "Messages of senders that were refused because of an unexpected error of the receiver, which its log explains "
        "(`ROUTER`).",
        "internal_errors",
    ),
    _source(
        "dataLosses",
        "times",
        "receiver",
        "Offsets that the log could not honour (`failOnDataLoss=false`).",
        "data_losses",
    ),
    _source(
        "messagesExpired",
        "messages",
        "receiver",
        "Messages that are known to be lost because the log no longer had them.",
        "messages_expired",
    ),
    _source(
        "receivePauses",
        "times",
        "receiver",
        "How often receiving stopped, so that RCVHWM fills and the peer's own high-water mark decides.",
    ),
    _source(
        "receivePausesByCause",
        "times",
        "receiver",
        "How often receiving stopped, by cause: `logFull` (`walMaxBytes` is reached), `slowDisk`, or `diskFault` "
        "(writing the log is refused, and tried again for `walRetryTimeout`).",
        "receive_pauses",
        type=_MAP,
        label="cause",
    ),
    _source("receivePausedMs", "ms", "receiver", "For how long receiving stopped in all."),
    _source(
        "receivePausedMsByCause",
        "ms",
        "receiver",
        "For how long receiving stopped in all, by cause.",
        "receive_paused_seconds",
        type=_MAP,
        label="cause",
        scale=0.001,
    ),
    _source(
        "receivePausedBy",
        "",
        "now",
        "The cause of the pause that is on; null while receiving.",
        "receive_paused",
        type="STRING",
        label="cause",
        series_doc="Whether receiving is paused, by cause.",
    ),
    _source("logBytes", "bytes", "now", "Size of the log's chunks.", "log_bytes"),
    _source("logChunks", "chunks", "now", "Chunks of the log.", "log_chunks"),
    _source(
        "connections",
        "connections",
        "now",
        "Connections that are up: a handshake has succeeded.",
        "connections",
    ),
    _source(
        "connectionsMade", "connections", "receiver", "Connections that there have been.", "connections_made"
    ),
    _source(
        "connectionsLost",
        "connections",
        "receiver",
        "Connections that were up and went down.",
        "connections_lost",
    ),
    _source(
        "handshakeFailures",
        "handshakes",
        "receiver",
        "Handshakes that were refused or broken off: another socket type, or security that does not match.",
        "handshake_failures",
    ),
    _source(
        "protocolErrors",
        "connections",
        "receiver",
        "Connections that were ended because of what the peer sent: a frame over `zmq.maxmsgsize`, bytes that are not "
        "ZMTP (both at `connect` only; at a bound socket libzmq does not tell them from other ends), or a message that "
        "does not end. What was sent behind it is lost.",
        "protocol_errors",
    ),
    _source(
        "rcvhwm",
        "messages",
        "now",
        "The receive high-water mark in use, read back from the socket.",
        "rcvhwm",
    ),
    _source(
        "metricsFailures",
        "times",
        "receiver",
        "Reports that `metricsLocation` did not take.",
        "metrics_failures",
    ),
    _source(
        "messagesLost",
        "messages",
        "now",
        f"{_NUMBERED}those missing now. One that comes late, or by a replay, is no longer.",
        "messages_lost",
    ),
    _source(
        "messagesDuplicate",
        "messages",
        "log",
        f"{_NUMBERED}those with a number seen before.",
        "messages_duplicate",
    ),
    _source(
        "messagesLate",
        "messages",
        "log",
        f"{_NUMBERED}those that came after a higher number.",
        "messages_late",
    ),
    _source("messagesHealed", "messages", "log", f"{_NUMBERED}those that filled a gap.", "messages_healed"),
    _source(
        "messagesReplayed", "messages", "log", f"{_NUMBERED}those that came by a replay.", "messages_replayed"
    ),
    _source(
        "messagesOverlapping",
        "messages",
        "log",
        f"{_NUMBERED}those that a replay had brought a moment before; left out.",
        "messages_overlapping",
    ),
    _source(
        "repliesMalformed",
        "replies",
        "log",
        f"{_NUMBERED}replies of a replay that make no sense.",
        "replies_malformed",
    ),
    _source(
        "publisherRestarts", "times", "log", f"{_NUMBERED}publishers that started anew.", "publisher_restarts"
    ),
    _source("publishers", "publishers", "now", f"{_NUMBERED}counters that are remembered.", "publishers"),
    _source(
        "publishersForgotten",
        "publishers",
        "log",
        f"{_NUMBERED}counters forgotten because there were more than `maxPublishers`.",
        "publishers_forgotten",
    ),
    _source("gaps", "gaps", "now", f"{_NUMBERED}rows of the gap table (`view=gaps`).", "gaps"),
)


def _sink(name: str, unit: str, since: str, doc: str, series: str | None = None, **more: Any) -> Metric:
    return Metric(name, more.pop("type", "BIGINT"), unit, since, doc, series and f"zmq_sink_{series}", **more)


# Of a batch, or in total. `rows = sent + dropped + deadLettered` always.
SINK = (
    _sink("rows", "rows", "query", "Rows that came in.", "rows"),
    _sink(
        "sent",
        "messages",
        "query",
        "Messages that the socket accepted, each once, which is not yet delivered; DEALER: staged at the receiver.",
        "messages_sent",
    ),
    _sink("bytes", "bytes", "query", "Bytes of the messages sent, all frames.", "sent_bytes"),
    _sink("dropped", "messages", "query", "Messages not sent and gone (`noblock`)."),
    _sink(
        "droppedByReason",
        "messages",
        "query",
        "Messages not sent and gone, by reason: `hwm` (the queue is full), `no_peer` (nobody is there), or "
        "`connection_lost`: sent into a connection that was lost, so that some of them may have arrived.",
        "messages_dropped",
        type=_MAP,
        label="reason",
    ),
    _sink("deadLettered", "messages", "query", "Messages not sent but set aside at `deadLetterLocation`."),
    _sink(
        "deadLetteredByReason",
        "messages",
        "query",
        "Messages set aside, by reason: `hwm`, `no_peer`, `connection_lost`, or `timeout` (waiting was in vain).",
        "messages_dead_lettered",
        type=_MAP,
        label="reason",
    ),
    _sink("retries", "times", "query", "How often a message was tried again.", "retries"),
    _sink(
        "resent",
        "messages",
        "query",
        "Messages sent again because a PUSH lost a connection that may have had them; not in `sent` again.",
        "messages_resent",
    ),
    _sink(
        "blockedMs",
        "ms",
        "query",
        "How long tasks waited in all for room at the high-water mark, also between retries; DEALER: for credit.",
        "blocked_seconds",
        scale=0.001,
    ),
    _sink(
        "peers",
        "connections",
        "now",
        "Peers of the newest batch: the most that one task had at its end.",
        "peers",
    ),
    _sink(
        "sndhwm", "messages", "now", "The send high-water mark in use, read back from the sockets.", "sndhwm"
    ),
    _sink("tasks", "tasks", "query", "Tasks that wrote the batches; one without rows counts too.", "tasks"),
    _sink(
        "unflushedTasks",
        "tasks",
        "query",
        "Tasks whose `linger` ran out (`noblock`) with messages queued; how many, libzmq cannot tell.",
        "unflushed_tasks",
    ),
    _sink(
        "metricsFailures",
        "times",
        "query",
        "Accounts that `metricsLocation` did not take; seen in the driver only.",
        "metrics_failures",
    ),
)
# In a total there is one figure more.
TOTAL = (_sink("batches", "batches", "query", "Committed batches in this total.", "batches"), *SINK)
