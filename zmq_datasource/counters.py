"""What is counted, at the source and at the sink. Pure data that adds up.

The sink's identity holds for every task, batch and query::

    rows = sent + dropped + dead_lettered
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

__all__ = ["DEAD_LETTER_REASONS", "DROP_REASONS", "PAUSE_CAUSES", "SinkCounters", "SourceCounters"]

# Why a sink does not send: the queue is full, nobody is there, waiting was in vain; or why it cannot vouch for
# what it has sent: a connection was lost that may have had it.
DROP_REASONS = ("hwm", "no_peer", "connection_lost")
DEAD_LETTER_REASONS = ("hwm", "no_peer", "timeout", "connection_lost")
# Why a source stops receiving.
PAUSE_CAUSES = ("logFull", "slowDisk", "diskFault")


@dataclass
class SinkCounters:
    """One task's, or one batch's, account of its rows.

    Attributes:
        rows: Rows that came in.
        sent: Messages that the socket accepted, each once. Accepted is not delivered.
        bytes: Bytes of those messages, all frames.
        dropped: Messages not sent, by reason: ``hwm`` (queue full), ``no_peer`` (nobody there); and
            ``connection_lost``: sent into a connection that was lost, so that some may have arrived.
        dead_lettered: Messages not sent but kept as dead letters, by reason: those, and ``timeout``.
        retries: How often a message was tried again.
        resent: How often a message was sent again because a connection was lost that may have had it.
        unflushed_tasks: Tasks whose ``linger`` ran out with messages still queued. libzmq
            cannot tell how many those were; they are part of ``sent``.
        tasks: Tasks that are in this account.
        blocked_seconds: How long they waited in all for room in the queues, also between retries.
        peers: The most peers that one of them had at its end.
        sndhwm: Their sockets' send high-water mark, as read back from libzmq; 0 if there was none.
        metrics_failures: How often an account could not be written to ``metricsLocation``.
    """

    rows: int = 0
    sent: int = 0
    bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dead_lettered: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    unflushed_tasks: int = 0
    tasks: int = 1
    blocked_seconds: float = 0.0
    peers: int = 0
    sndhwm: int = 0
    metrics_failures: int = 0
    resent: int = 0

    # What is so at the moment: of two tasks the most counts.
    _STATES: ClassVar = ("peers", "sndhwm")

    def __add__(self, other: SinkCounters) -> SinkCounters:
        added = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        most = {name: max(getattr(self, name), getattr(other, name)) for name in self._STATES}
        return SinkCounters(**added | most)

    def then(self, later: SinkCounters) -> SinkCounters:
        """The sum with a later batch; what is so at the moment is the later one's, if it has opened a socket."""
        newest = later if later.sndhwm else self
        return replace(self + later, **newest._states())

    def idle(self) -> SinkCounters:
        """A batch afterwards that wrote nothing; the sockets are as they were."""
        return replace(SinkCounters.none(), **self._states())

    def _states(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._STATES}

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


@dataclass
class SourceCounters:
    """What a receiver has counted.

    The first seven are counted since the log began, across restarts and exactly, because the log
    keeps them beside its rows; what publishers' numbers tell is counted beside them, in
    ``sequences.tracker.Totals``. The others are counted since the receiver started.

    Attributes:
        received: Messages that were given an id.
        bytes: Bytes of their values.
        malformed: Messages that do not fit their framing.
        control: Messages without content, such as heartbeats; not given an id.
        replayed: Those of ``received`` that came by a replay.
        malformed_replies: Replies of a replay that make no sense; left out.
        oversize: Messages discarded because no Arrow array can hold them.
        dead_letters_lost: Malformed messages that could not be kept.
        lost_at_stop: Messages that were received, and that a stop could not seal; since the log began.
        lossy_stops: Stops that have lost such messages, or some of unknown number that the socket had taken.
        internal_errors: Messages of peers that were refused because of an unexpected error, which the log shows.
        data_losses: Offsets that the log could not honour (with ``failOnDataLoss=false``).
        expired: Messages that are known to be lost by that.
        pauses: How often receiving stopped, by cause: the log is full, its disk too slow, or refuses.
        paused_seconds: For how long in all, by cause.
        paused_by: The cause of the pause that is on; None while receiving.
        connections: Connections that are up now: a handshake has succeeded.
        connections_made: That there have been.
        connections_lost: That were up and are gone.
        handshake_failures: Handshakes that were refused, or broken off.
        protocol_errors: Connections that were ended because of what the peer sent, as far as that can be known.
        rcvhwm: The sockets' receive high-water mark, as read back from libzmq.
        last_received: When a message last came, in seconds since the epoch; 0 before the first.
    """

    received: int = 0
    bytes: int = 0
    malformed: int = 0
    control: int = 0
    replayed: int = 0
    malformed_replies: int = 0
    oversize: int = 0
    dead_letters_lost: int = 0
    lost_at_stop: int = 0
    lossy_stops: int = 0
    internal_errors: int = 0
    data_losses: int = 0
    expired: int = 0
    pauses: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(PAUSE_CAUSES, 0)))
    paused_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PAUSE_CAUSES, 0.0))
    paused_by: str | None = None
    connections: int = 0
    connections_made: int = 0
    connections_lost: int = 0
    handshake_failures: int = 0
    protocol_errors: int = 0
    rcvhwm: int = 0
    last_received: float = 0.0

    _KEPT: ClassVar = (
        "received",
        "bytes",
        "malformed",
        "control",
        "replayed",
        "malformed_replies",
        "oversize",
    )

    def to_json(self) -> dict[str, int]:
        """The counters that the log keeps across restarts."""
        return {name: getattr(self, name) for name in self._KEPT}

    def restore(self, kept: Mapping[str, int]) -> None:
        """Go on counting from what the log kept."""
        for name in self._KEPT:
            setattr(self, name, kept.get(name, 0))

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.to_json().items() if value)
