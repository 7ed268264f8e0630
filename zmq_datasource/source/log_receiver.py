"""A receiver that fills a log: what has gathered to a good batch is appended."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log import FillerFacts, LogWriter
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Location
from zmq_datasource.source.receiver import ROUND_MESSAGES, Receiver

__all__ = ["LogReceiver"]

# After a stop, by socket type. What a PULL has taken nobody else gets; a SUB only wants what came before it was
# stopped.
_DRAIN_SECONDS = {"PULL": 5.0, "SUB": 1.0}


class LogReceiver(Receiver):
    """A ``log.filler.Filler`` of SUB or PULL sockets.

    Args:
        options, counters, batch_bytes, beside_log: As of ``Receiver``.

    Attributes:
        log: Where messages go; to be set, and opened, before the block. It asks ``intake`` for its state.
    """

    log: LogWriter

    def __init__(
        self,
        options: ReadOptions,
        counters: SourceCounters,
        batch_bytes: int,
        beside_log: Location | None = None,
    ) -> None:
        super().__init__(options, counters, batch_bytes, beside_log=beside_log)
        self._is_pull = options.socket_type == "PULL"
        self.drain_seconds = _DRAIN_SECONDS[options.socket_type]
        self._appending = False
        self._refused = 0
        self._left = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = self._is_pull and self.waiting
        super().__exit__(kind, error, trace)

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """One round; a batch that is ready is appended."""
        taken = super().receive(most)
        if self.batch_ready:
            self._append()
        return taken

    def cut(self) -> Future[int]:
        """Append what was received, and cut the log's chunk."""
        self._append_rest()
        return self.log.cut()

    def _append_rest(self) -> None:
        if self.pending or self.batch_ready:
            self._append()

    def _append(self) -> None:
        self._appending = True
        received = self.pending
        try:
            messages = self.take()
            received = messages.num_rows  # without those that are no rows
            self.log.append(messages)
        except Exception:
            self._refused += received
            raise
        self._appending = False
        if self.failure is not None:
            raise self.failure

    def finish(self, patience: float) -> None:
        """Append the rest; no sender waits for an answer."""
        self._append_rest()

    def facts(self) -> FillerFacts:
        """What the receiver has received and counted so far."""
        pending, tracker = self.pending, self.intake.tracker
        if tracker is None:
            return FillerFacts(pending, self._appending, self._refused, self._left)
        known = len(tracker.expected), len(tracker.gaps)
        return FillerFacts(pending, self._appending, self._refused, self._left, tracker.totals, *known)
