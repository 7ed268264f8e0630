"""What a sink counts. The identity holds for every task, batch and query::

rows = sent + dropped + dead_lettered
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

from zmq_datasource.counters.metric import counted, declared, state

# ``hwm``: the queue was full. ``no_peer``: no peer was there. ``timeout``: the queue was still full after
# ``sendTimeout``. ``null``: the row has no value.
_DROP_REASONS = ("hwm", "no_peer", "null")
_DEAD_LETTER_REASONS = ("no_peer", "timeout", "null")


@dataclass
class SinkCounters:
    """One task's, or one batch's, account of its rows. The names of figures are in the declarations."""

    rows: int = counted("rows", "rows", "The number of rows that the sink was given.", "batch")
    sent: int = counted(
        "sent",
        "messages",
        "The number of messages that the socket accepted. Each message counts once. An accepted message is not yet "
        "delivered. For DEALER, it is the number of messages that are staged at the receiver.",
        "batch",
        series="messages_sent",
    )
    bytes: int = counted(
        "bytes",
        "bytes",
        "The number of bytes in all frames of the messages that were sent.",
        "batch",
        series="sent_bytes",
    )
    dropped: Counter[str] = counted(
        "dropped",
        "messages",
        "The number of rows that were dropped, in all and for each reason. `null`: the row's `value` is null. With "
        "`noblock`, also `hwm`: the queue was full; `no_peer`: no peer was there.",
        "batch",
        by="reason",
        keys=_DROP_REASONS,
        series="messages_dropped",
        initial=Counter,
    )
    dead_lettered: Counter[str] = counted(
        "deadLettered",
        "messages",
        "The number of messages that were not sent and are kept at `deadLetterLocation`, in all and for each reason: "
        "`no_peer`, `null`, or `timeout`. With `timeout` the task had waited, and the queue was still full.",
        "batch",
        by="reason",
        keys=_DEAD_LETTER_REASONS,
        series="messages_dead_lettered",
        initial=Counter,
    )
    retries: int = counted("retries", "times", "How often a message was tried again.", "batch")
    resent: int = counted(
        "resent",
        "messages",
        "The number of messages that were sent again because a PUSH lost a connection that may have held them. They do "
        "not count again in `sent`.",
        "batch",
        series="messages_resent",
    )
    blocked_seconds: float = counted(
        "blockedMs",
        "ms",
        "The total time that tasks waited for room in the queue, also between retries. For DEALER, it is the time that "
        "they waited until the receiver had taken data.",
        "batch",
        initial=0.0,
    )
    peers: int = state(
        "peers",
        "connections",
        "The number of peers in the newest micro-batch. It is the highest number that one task had at its end.",
        highest=True,
    )
    sndhwm: int = state(
        "sndhwm",
        "messages",
        "The send high-water mark in use, as read back from the sockets. It is 0 if no task had a row.",
        highest=True,
    )
    tasks: int = counted(
        "tasks",
        "tasks",
        "The number of tasks that wrote the micro-batches. A task without rows counts too.",
        "batch",
        initial=1,
    )
    unflushed_tasks: int = counted(
        "unflushedTasks",
        "tasks",
        "The number of tasks whose `linger` ran out while messages were still queued (`noblock`). These messages are "
        "part of `sent`; libzmq cannot tell how many they were.",
        "batch",
    )
    metrics_failures: int = counted(
        "metricsFailures",
        "times",
        "The number of accounts that could not be written to `metricsLocation`. Only the driver knows this figure.",
        "batch",
    )

    def __add__(self, other: SinkCounters) -> SinkCounters:
        values = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        highest = {metric.attribute for metric in declared("", SinkCounters) if metric.highest}
        return SinkCounters(
            **{name: max(pair) if name in highest else pair[0] + pair[1] for name, pair in values.items()}
        )

    @classmethod
    def none(cls) -> SinkCounters:
        """The account of no task: the zero of ``+``."""
        return cls(tasks=0)

    @property
    def balanced(self) -> bool:
        """Whether every row is accounted for."""
        return self.rows == self.sent + self.dropped.total() + self.dead_lettered.total()

    def __str__(self) -> str:
        drops = "".join(f" dropped.{why}={n}" for why, n in sorted(self.dropped.items()))
        letters = f" deadLettered={self.dead_lettered.total()}" if self.dead_lettered else ""
        letters += "".join(f" deadLettered.{why}={n}" for why, n in sorted(self.dead_lettered.items()))
        retries = f" retries={self.retries}" if self.retries else ""
        resent = f" resent={self.resent}" if self.resent else ""
        unflushed = f" unflushedTasks={self.unflushed_tasks}" if self.unflushed_tasks else ""
        blocked_ms = round(self.blocked_seconds * 1000)
        blocked = f" blockedMs={blocked_ms}" if blocked_ms else ""
        return (
            f"rows={self.rows} sent={self.sent} bytes={self.bytes} "
            f"dropped={self.dropped.total()}{drops}{letters}{retries}{resent}{unflushed}{blocked} tasks={self.tasks}"
        )
