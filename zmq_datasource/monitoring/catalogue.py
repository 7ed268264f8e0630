"""Every metric, declared once: what it is called, what it means, and what counts it (see ``metric``).

From these declarations come the dictionaries of a query's progress (``figures``), the columns of the metrics
DataFrame, the series for Prometheus and the reference in ``docs/metrics.md``.
"""

from __future__ import annotations

from typing import Any

from zmq_datasource.counters import DEAD_LETTER_REASONS, DROP_REASONS, PAUSE_CAUSES
from zmq_datasource.monitoring.metric import MAP, Metric

__all__ = ["SINK", "SOURCE", "TOTAL"]


def _source(name: str, unit: str, since: str, doc: str, series: str | None = None, **more: Any) -> Metric:
    return Metric(
        name, more.pop("type", "BIGINT"), unit, since, doc, series and f"zmq_source_{series}", **more
    )


def _now(name: str, unit: str, doc: str, series: str | None = None, **more: Any) -> Metric:
    """A metric that is computed when somebody asks for it."""
    return _source(name, unit, "now", doc, series, **more)


def _log(name: str, unit: str, doc: str, series: str, attribute: str) -> Metric:
    """A metric that the log keeps across restarts."""
    return _source(name, unit, "log", doc, series, counted="log", attribute=attribute)


def _receiver(
    name: str,
    unit: str,
    doc: str,
    series: str | None = None,
    attribute: str = "",
    since: str = "receiver",
    **more: Any,
) -> Metric:
    """Counted by the process that receives, unless ``counted`` says otherwise; mostly under the series' name."""
    return _source(
        name, unit, since, doc, series, attribute=attribute or series or "", **{"counted": "receiver", **more}
    )


def _numbered(
    name: str, unit: str, doc: str, series: str, attribute: str = "", since: str = "log", **more: Any
) -> Metric:
    """Of publishers that number their messages; without an attribute it is put together when it is asked for."""
    counted = {"counted": "sequences", "attribute": attribute} if attribute else {}
    return _source(name, unit, since, f"Of numbered messages: {doc}", series, **{**counted, **more})


SOURCE = (
    _now("source", "", "Socket type and endpoints; or the log that is followed.", type="STRING"),
    _now(
        "core",
        "",
        "What takes messages from the socket: the `compiled` core, or `python` where that was not built.",
        "core",
        type="STRING",
        label="core",
        keys=("compiled", "python"),
        series_doc="Which core takes messages from the socket.",
    ),
    _log(
        "messagesReceived",
        "messages",
        "Messages that were given an id: rows.",
        "messages_received",
        "received",
    ),
    _log(
        "bytesReceived", "bytes", "Bytes of the values of the messages received.", "received_bytes", "bytes"
    ),
    _now("messagesReceivedPerSecond", "messages/s", "Of the last ten seconds, about.", type="DOUBLE"),
    _now(
        "lastReceived",
        "",
        "When a message last came (UTC, ISO 8601); null before the first since the receiver started.",
        "last_received_timestamp_seconds",
        type="TIMESTAMP",
        series_doc="When a message last came.",
    ),
    _now(
        "backlogMessages",
        "messages",
        "Received, and not in a finished batch yet; the batch that is being read is part of it.",
        "backlog_messages",
    ),
    _now(
        "backlogBytes",
        "bytes",
        "What the backlog takes in the log; a chunk that is read in part counts in proportion.",
        "backlog_bytes",
    ),
    _now(
        "backlogAgeMs",
        "ms",
        "How long ago the oldest message of the backlog was received: how stale the data gets.",
        "backlog_age_seconds",
        highest=True,
    ),
    _log(
        "messagesMalformed",
        "messages",
        "Messages that do not fit their framing.",
        "messages_malformed",
        "malformed",
    ),
    _log(
        "messagesOversize",
        "messages",
        "Messages discarded because no row can hold them.",
        "messages_oversize",
        "oversize",
    ),
    _log(
        "controlMessages",
        "messages",
        "Messages without content, such as heartbeats: no rows.",
        "control_messages",
        "control",
    ),
    _receiver(
        "deadLettersLost",
        "messages",
        "Malformed messages that could not be kept at `deadLetterLocation`.",
        "dead_letters_lost",
    ),
    _receiver(
        "internalErrors",
        "messages",
        "Messages of senders that were refused because of an unexpected error of the receiver, which its log explains "
        "(`ROUTER`).",
        "internal_errors",
    ),
    _receiver(
        "dataLosses",
        "times",
        "Offsets that the log could not honour (`failOnDataLoss=false`).",
        "data_losses",
        counted="reader",
    ),
    _receiver(
        "messagesExpired",
        "messages",
        "Messages that are known to be lost because the log no longer had them.",
        "messages_expired",
        "expired",
        counted="reader",
    ),
    _receiver(
        "receivePauses",
        "times",
        "How often receiving stopped, so that RCVHWM fills and the peer's own high-water mark decides.",
        attribute="pauses",
    ),
    _receiver(
        "receivePausesByCause",
        "times",
        "How often receiving stopped, by cause: `logFull` (`walMaxBytes` is reached), `slowDisk`, or `diskFault` "
        "(writing the log is refused, and tried again for `walRetryTimeout`).",
        "receive_pauses",
        "pauses",
        type=MAP,
        label="cause",
        keys=PAUSE_CAUSES,
    ),
    _receiver("receivePausedMs", "ms", "For how long receiving stopped in all.", attribute="paused_seconds"),
    _receiver(
        "receivePausedMsByCause",
        "ms",
        "For how long receiving stopped in all, by cause.",
        "receive_paused_seconds",
        "paused_seconds",
        type=MAP,
        label="cause",
        keys=PAUSE_CAUSES,
    ),
    _receiver(
        "receivePausedBy",
        "",
        "The cause of the pause that is on; null while receiving.",
        "receive_paused",
        "paused_by",
        since="now",
        type="STRING",
        label="cause",
        keys=PAUSE_CAUSES,
        series_doc="Whether receiving is paused, by cause.",
    ),
    _now("logBytes", "bytes", "Size of the log's chunks.", "log_bytes"),
    _now("logChunks", "chunks", "Chunks of the log.", "log_chunks"),
    _receiver(
        "connections",
        "connections",
        "Connections that are up: a handshake has succeeded.",
        "connections",
        since="now",
    ),
    _receiver("connectionsMade", "connections", "Connections that there have been.", "connections_made"),
    _receiver(
        "connectionsLost", "connections", "Connections that were up and went down.", "connections_lost"
    ),
    _receiver(
        "handshakeFailures",
        "handshakes",
        "Handshakes that were refused or broken off: another socket type, or security that does not match.",
        "handshake_failures",
    ),
    _receiver(
        "protocolErrors",
        "connections",
        "Connections that were ended because of what the peer sent: a frame over `zmq.maxmsgsize`, bytes that are not "
        "ZMTP (both at `connect` only; at a bound socket libzmq does not tell them from other ends), or a message that "
        "does not end. What was sent behind it is lost.",
        "protocol_errors",
    ),
    _receiver(
        "rcvhwm",
        "messages",
        "The receive high-water mark in use, read back from the socket.",
        "rcvhwm",
        since="now",
        highest=True,
    ),
    _source(
        "metricsFailures",
        "times",
        "receiver",
        "Reports that `metricsLocation` did not take.",
        "metrics_failures",
    ),
    _numbered(
        "messagesLost",
        "messages",
        "those missing now. One that comes late, or by a replay, is no longer.",
        "messages_lost",
        "lost",
        since="now",
    ),
    _numbered(
        "messagesDuplicate",
        "messages",
        "those with a number seen before.",
        "messages_duplicate",
        "duplicates",
    ),
    _numbered("messagesLate", "messages", "those that came after a higher number.", "messages_late", "late"),
    _numbered("messagesHealed", "messages", "those that filled a gap.", "messages_healed", "healed"),
    _numbered(
        "messagesReplayed",
        "messages",
        "those that came by a replay.",
        "messages_replayed",
        "replayed",
        counted="replays",
    ),
    _numbered(
        "messagesOverlapping",
        "messages",
        "those that a replay had brought a moment before; left out.",
        "messages_overlapping",
        "overlapping",
    ),
    _numbered(
        "repliesMalformed",
        "replies",
        "replies of a replay that make no sense.",
        "replies_malformed",
        "malformed_replies",
        counted="replays",
    ),
    _numbered(
        "publisherRestarts", "times", "publishers that started anew.", "publisher_restarts", "restarts"
    ),
    _numbered("publishers", "publishers", "counters that are remembered.", "publishers", since="now"),
    _numbered(
        "publishersForgotten",
        "publishers",
        "counters forgotten because there were more than `maxPublishers`.",
        "publishers_forgotten",
        "forgotten",
    ),
    _numbered("gaps", "gaps", "rows of the gap table (`view=gaps`).", "gaps", since="now"),
)


def _sink(
    name: str,
    unit: str,
    doc: str,
    series: str | None = None,
    attribute: str = "",
    since: str = "query",
    **more: Any,
) -> Metric:
    """Counted by the tasks; mostly under the series' name."""
    of = more.pop("type", "BIGINT")
    shown = series and f"zmq_sink_{series}"
    return Metric(
        name, of, unit, since, doc, shown, counted="sink", attribute=attribute or series or "", **more
    )


# Of a batch, or in total. `rows = sent + dropped + deadLettered` always.
SINK = (
    _sink("rows", "rows", "Rows that came in.", "rows"),
    _sink(
        "sent",
        "messages",
        "Messages that the socket accepted, each once, which is not yet delivered; DEALER: staged at the receiver.",
        "messages_sent",
        "sent",
    ),
    _sink("bytes", "bytes", "Bytes of the messages sent, all frames.", "sent_bytes", "bytes"),
    _sink("dropped", "messages", "Messages not sent and gone (`noblock`).", attribute="dropped"),
    _sink(
        "droppedByReason",
        "messages",
        "Messages not sent and gone, by reason: `hwm` (the queue is full), `no_peer` (nobody is there), or "
        "`connection_lost`: sent into a connection that was lost, so that some of them may have arrived.",
        "messages_dropped",
        "dropped",
        type=MAP,
        label="reason",
        keys=DROP_REASONS,
    ),
    _sink(
        "deadLettered",
        "messages",
        "Messages not sent but kept at `deadLetterLocation`.",
        attribute="dead_lettered",
    ),
    _sink(
        "deadLetteredByReason",
        "messages",
        "Messages kept as dead letters, by reason: `hwm`, `no_peer`, `connection_lost`, or `timeout` (after a wait).",
        "messages_dead_lettered",
        "dead_lettered",
        type=MAP,
        label="reason",
        keys=DEAD_LETTER_REASONS,
    ),
    _sink("retries", "times", "How often a message was tried again.", "retries"),
    _sink(
        "resent",
        "messages",
        "Messages sent again because a PUSH lost a connection that may have had them; not in `sent` again.",
        "messages_resent",
        "resent",
        later=True,
    ),
    _sink(
        "blockedMs",
        "ms",
        "How long tasks waited in all for room at the high-water mark, also between retries; DEALER: for credit.",
        "blocked_seconds",
    ),
    _sink(
        "peers",
        "connections",
        "Peers of the newest batch: the most that one task had at its end.",
        "peers",
        since="now",
    ),
    _sink(
        "sndhwm",
        "messages",
        "The send high-water mark in use, read back from the sockets.",
        "sndhwm",
        since="now",
    ),
    _sink("tasks", "tasks", "Tasks that wrote the batches; one without rows counts too.", "tasks"),
    _sink(
        "unflushedTasks",
        "tasks",
        "Tasks whose `linger` ran out (`noblock`) with messages queued; how many, libzmq cannot tell.",
        "unflushed_tasks",
    ),
    _sink(
        "metricsFailures",
        "times",
        "Accounts that `metricsLocation` did not take; seen in the driver only.",
        "metrics_failures",
    ),
)
# In a total there is one figure more.
TOTAL = (
    Metric("batches", "BIGINT", "batches", "query", "Committed batches in this total.", "zmq_sink_batches"),
    *SINK,
)
