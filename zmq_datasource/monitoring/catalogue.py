"""Every metric, declared once: what it is called, what it means, and what counts it (see ``metric``).

From these declarations come the dictionaries of a query's progress (``figures``), the columns of the metrics
DataFrame, the series for Prometheus and the reference in ``docs/metrics.md``.
"""

from __future__ import annotations

from typing import Any

from zmq_datasource.counters import DEAD_LETTER_REASONS, DROP_REASONS, PAUSE_CAUSES
from zmq_datasource.monitoring.metric import MAP, Metric

__all__ = ["PROXY", "SINK", "SOURCE", "SUBSCRIBER", "TOTAL"]


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
    return _source(name, unit, since, doc, series, **{**counted, **more})


SOURCE = (
    _now(
        "source",
        "",
        "The socket type and the endpoints of the source, or the log that it follows.",
        type="STRING",
    ),
    _now(
        "core",
        "",
        "Which core takes messages from the socket: `compiled`, or `python` where the compiled core was "
        "not built.",
        "core",
        type="STRING",
        label="core",
        keys=("compiled", "python"),
        series_doc="Which core takes messages from the socket.",
    ),
    _log(
        "messagesReceived",
        "messages",
        "The number of messages that were given an id. Each of them is a row.",
        "messages_received",
        "received",
    ),
    _log(
        "bytesReceived",
        "bytes",
        "The number of bytes in the values of the received messages.",
        "received_bytes",
        "bytes",
    ),
    _now(
        "messagesReceivedPerSecond",
        "messages/s",
        "The average rate over about the last ten seconds.",
        type="DOUBLE",
    ),
    _now(
        "lastReceived",
        "",
        "The time when the last message came (UTC, ISO 8601). It is null until the first message has "
        "come after the start of the receiver.",
        "last_received_timestamp_seconds",
        type="TIMESTAMP",
        series_doc="The time when the last message came.",
    ),
    _now(
        "backlogMessages",
        "messages",
        "The number of messages that were received and are not yet in a finished micro-batch. The "
        "micro-batch that is being read is part of the backlog.",
        "backlog_messages",
    ),
    _now(
        "backlogBytes",
        "bytes",
        "The size of the backlog in the log. A chunk that was read in part counts in proportion.",
        "backlog_bytes",
    ),
    _now(
        "backlogAgeMs",
        "ms",
        "How long ago the oldest message of the backlog was received. It shows how old the data gets.",
        "backlog_age_seconds",
        highest=True,
    ),
    _log(
        "messagesMalformed",
        "messages",
        "The number of messages that do not fit their framing.",
        "messages_malformed",
        "malformed",
    ),
    _log(
        "messagesLostAtStop",
        "messages",
        "The number of messages that were received, and that could not be sealed when receiving was stopped.",
        "messages_lost_at_stop",
        "lost_at_stop",
    ),
    _log(
        "stopsWithLosses",
        "stops",
        "How often messages were lost because receiving was stopped: those in `messagesLostAtStop`, or an "
        "unknown number that the socket of a PULL had taken while its sender still sent.",
        "stops_with_losses",
        "lossy_stops",
    ),
    _log(
        "messagesOversize",
        "messages",
        "The number of messages that were discarded because they are too large for a row.",
        "messages_oversize",
        "oversize",
    ),
    _log(
        "controlMessages",
        "messages",
        "The number of messages without content, such as heartbeats. They are not rows.",
        "control_messages",
        "control",
    ),
    _receiver(
        "deadLettersLost",
        "messages",
        "The number of malformed messages that could not be kept as dead letters.",
        "dead_letters_lost",
    ),
    _receiver(
        "internalErrors",
        "messages",
        "The number of messages that a `ROUTER` source refused because of an unexpected error. The log "
        "output of the receiver explains the error.",
        "internal_errors",
    ),
    _receiver(
        "dataLosses",
        "times",
        "How often the log did not have the offset that a query asked for, and the query continued "
        "(`failOnDataLoss=false`).",
        "data_losses",
        counted="reader",
    ),
    _receiver(
        "messagesExpired",
        "messages",
        "The number of messages that are known to be lost because the log no longer had them.",
        "messages_expired",
        "expired",
        counted="reader",
    ),
    _receiver(
        "receivePauses",
        "times",
        "How often receiving stopped. Meanwhile the receive queue (RCVHWM) fills, and then the "
        "high-water mark of the peer decides what happens.",
        attribute="pauses",
    ),
    _receiver(
        "receivePausesByCause",
        "times",
        "How often receiving stopped, for each cause. `logFull`: the log has reached `walMaxBytes`. "
        "`slowDisk`: the disk is slower than the feed. `diskFault`: the log cannot be written, and "
        "writing is tried again for `walRetryTimeout`.",
        "receive_pauses",
        "pauses",
        type=MAP,
        label="cause",
        keys=PAUSE_CAUSES,
    ),
    _receiver(
        "receivePausedMs", "ms", "The total time for which receiving was stopped.", attribute="paused_seconds"
    ),
    _receiver(
        "receivePausedMsByCause",
        "ms",
        "The total time for which receiving was stopped, for each cause.",
        "receive_paused_seconds",
        "paused_seconds",
        type=MAP,
        label="cause",
        keys=PAUSE_CAUSES,
    ),
    _receiver(
        "receivePausedBy",
        "",
        "The cause of the current pause. It is null while the source receives.",
        "receive_paused",
        "paused_by",
        since="now",
        type="STRING",
        label="cause",
        keys=PAUSE_CAUSES,
        series_doc="Whether receiving is paused, for each cause.",
    ),
    _now("logBytes", "bytes", "The total size of the chunks of the log.", "log_bytes"),
    _now("logChunks", "chunks", "The number of chunks of the log.", "log_chunks"),
    _receiver(
        "connections",
        "connections",
        "The number of connections that are up. A connection is up when its handshake has succeeded.",
        "connections",
        since="now",
    ),
    _receiver(
        "connectionsMade", "connections", "The number of connections that have come up.", "connections_made"
    ),
    _receiver(
        "connectionsLost",
        "connections",
        "The number of connections that were up and went down.",
        "connections_lost",
    ),
    _receiver(
        "handshakeFailures",
        "handshakes",
        "The number of handshakes that were refused or broken off. The peer has a socket type that does "
        "not fit, or its security does not match.",
        "handshake_failures",
    ),
    _receiver(
        "protocolErrors",
        "connections",
        "The number of connections that were ended because of what the peer sent: a frame over "
        "`zmq.maxmsgsize`, bytes that are not ZMTP, or a message that does not end. The first two are "
        "counted only for `connect`, because libzmq does not tell a bound socket why a connection has "
        "ended. What the peer sent after it is lost.",
        "protocol_errors",
    ),
    _receiver(
        "rcvhwm",
        "messages",
        "The receive high-water mark in use, as read back from the socket.",
        "rcvhwm",
        since="now",
        highest=True,
    ),
    _source(
        "metricsFailures",
        "times",
        "receiver",
        "How often the metrics could not be put together, or could not be written to `metricsLocation`.",
        "metrics_failures",
    ),
    _numbered(
        "messagesLost",
        "messages",
        "The number of numbered messages that are missing now. A message that comes late or by a replay "
        "is not missing any more. Of one of several partitions it may be negative: that one has healed gaps "
        "that another partition had noticed.",
        "messages_lost",
        "lost",
        since="now",
    ),
    _numbered(
        "messagesDuplicate",
        "messages",
        "The number of messages whose sequence had come before.",
        "messages_duplicate",
        "duplicates",
    ),
    _numbered(
        "messagesLate",
        "messages",
        "The number of messages that came after a message with a higher sequence.",
        "messages_late",
        "late",
    ),
    _numbered(
        "messagesHealed", "messages", "The number of messages that filled a gap.", "messages_healed", "healed"
    ),
    _numbered(
        "messagesReplayed",
        "messages",
        "The number of messages that came by a replay.",
        "messages_replayed",
        "replayed",
        counted="replays",
    ),
    _numbered(
        "messagesOverlapping",
        "messages",
        "The number of messages that were left out because a replay had brought them a moment before.",
        "messages_overlapping",
        "overlapping",
    ),
    _numbered(
        "repliesMalformed",
        "replies",
        "The number of replies in replays that make no sense.",
        "replies_malformed",
        "malformed_replies",
        counted="replays",
    ),
    _numbered(
        "publisherRestarts",
        "times",
        "How often a publisher has started again.",
        "publisher_restarts",
        "restarts",
    ),
    _numbered(
        "publishers",
        "publishers",
        "The number of counters that are remembered. `sequenceBy` says what has a counter.",
        "publishers",
        since="now",
    ),
    _numbered(
        "publishersForgotten",
        "publishers",
        "The number of counters that were forgotten because there were more than `maxPublishers`.",
        "publishers_forgotten",
        "forgotten",
    ),
    _numbered("gaps", "gaps", "The number of rows of the gap table (`view=gaps`).", "gaps", since="now"),
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
    _sink("rows", "rows", "The number of rows that the sink was given.", "rows"),
    _sink(
        "sent",
        "messages",
        "The number of messages that the socket accepted. Each message counts once. An accepted message "
        "is not yet delivered. For DEALER, it is the number of messages that are staged at the receiver.",
        "messages_sent",
        "sent",
    ),
    _sink(
        "bytes",
        "bytes",
        "The number of bytes in all frames of the messages that were sent.",
        "sent_bytes",
        "bytes",
    ),
    _sink(
        "dropped",
        "messages",
        "The number of messages that were dropped (`noblock`).",
        attribute="dropped",
    ),
    _sink(
        "droppedByReason",
        "messages",
        "The number of messages that were dropped, for each reason. `hwm`: the queue was full. `no_peer`: "
        "no peer was there. `connection_lost`: the messages were sent into a connection that was lost, "
        "so some of them may have arrived.",
        "messages_dropped",
        "dropped",
        type=MAP,
        label="reason",
        keys=DROP_REASONS,
    ),
    _sink(
        "deadLettered",
        "messages",
        "The number of messages that were not sent and are kept at `deadLetterLocation`.",
        attribute="dead_lettered",
    ),
    _sink(
        "deadLetteredByReason",
        "messages",
        "The number of messages that are kept as dead letters, for each reason: `hwm`, `no_peer`, "
        "`connection_lost`, or `timeout`. With `timeout` the task had waited, and the queue was still full.",
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
        "The number of messages that were sent again because a PUSH lost a connection that may have held "
        "them. They do not count again in `sent`.",
        "messages_resent",
        "resent",
    ),
    _sink(
        "blockedMs",
        "ms",
        "The total time that tasks waited for room in the queue, also between retries. For DEALER, it is "
        "the time that they waited until the receiver had taken data.",
        "blocked_seconds",
    ),
    _sink(
        "peers",
        "connections",
        "The number of peers in the newest micro-batch. It is the highest number that one task had at "
        "its end.",
        "peers",
        since="now",
    ),
    _sink(
        "sndhwm",
        "messages",
        "The send high-water mark in use, as read back from the sockets.",
        "sndhwm",
        since="now",
    ),
    _sink(
        "tasks",
        "tasks",
        "The number of tasks that wrote the micro-batches. A task without rows counts too.",
        "tasks",
    ),
    _sink(
        "unflushedTasks",
        "tasks",
        "The number of tasks whose `linger` ran out while messages were still queued (`noblock`). libzmq "
        "cannot tell how many messages these were.",
        "unflushed_tasks",
    ),
    _sink(
        "metricsFailures",
        "times",
        "The number of accounts that could not be written to `metricsLocation`. Only the driver knows "
        "this figure.",
        "metrics_failures",
    ),
)
# In a total there is one figure more.
TOTAL = (
    Metric(
        "batches",
        "BIGINT",
        "batches",
        "query",
        "The number of committed micro-batches in this total.",
        "zmq_sink_batches",
    ),
    *SINK,
)


def _proxy(name: str, unit: str, since: str, doc: str, series: str) -> Metric:
    return Metric(name, "BIGINT", unit, since, doc, f"zmq_proxy_{series}")


# The fields of a proxy's status that are numbers.
PROXY = (
    _proxy("nextId", "id", "now", "The id of the next message.", "next_id"),
    _proxy("earliestId", "id", "now", "The first id that the log still has.", "earliest_id"),
    _proxy("logBytes", "bytes", "now", "The size of the log.", "log_bytes"),
    _proxy("received", "messages", "log", "The number of messages that were received.", "messages_received"),
    _proxy("bytes", "bytes", "log", "The number of bytes in their values.", "received_bytes"),
    _proxy(
        "oversize",
        "messages",
        "log",
        "The number of messages of more than 1 GiB, which were discarded.",
        "oversize",
    ),
    _proxy(
        "protocolErrors",
        "connections",
        "receiver",
        "The number of connections that were ended because of what the publisher sent.",
        "protocol_errors",
    ),
    _proxy(
        "published",
        "messages",
        "receiver",
        "The number of messages that were published.",
        "messages_published",
    ),
    _proxy("subscribers", "connections", "now", "The number of plain subscribers.", "subscribers"),
    _proxy(
        "subscriptionsRefused",
        "requests",
        "receiver",
        "The number of requests for topics that were not passed on to publishers.",
        "subscriptions_refused",
    ),
    _proxy(
        "disconnected",
        "connections",
        "receiver",
        "The number of plain subscribers that the proxy has disconnected.",
        "subscribers_disconnected",
    ),
    _proxy("paused", "", "now", "Whether receiving waits for the log.", "paused"),
    _proxy("pausedSeconds", "s", "receiver", "How long receiving has waited for the log.", "paused_seconds"),
    _proxy(
        "waitedSeconds", "s", "receiver", "How long publishing has waited for subscribers.", "waited_seconds"
    ),
)
# Those of one durable subscriber there.
SUBSCRIBER = (
    _proxy("connected", "", "now", "Whether its client is there.", "durable_connected"),
    _proxy("nextId", "id", "now", "The first id that it has not acknowledged.", "durable_next_id"),
    _proxy("backlog", "messages", "now", "The number of messages from there on.", "durable_backlog_messages"),
    _proxy(
        "sent", "messages", "log", "The number of messages that were sent to it.", "durable_messages_sent"
    ),
    _proxy(
        "lost",
        "messages",
        "log",
        "The number of messages that were deleted before they were sent to it.",
        "durable_messages_lost",
    ),
    _proxy("awaySeconds", "s", "now", "How long its client has been away.", "durable_away_seconds"),
)
