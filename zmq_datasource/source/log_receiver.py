"""A receiver that fills a log: what has gathered to a good batch is appended."""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import Self

from zmq_datasource.log import FillerFacts, LogWriter
from zmq_datasource.source.receiver import Receiver

__all__ = ["LogReceiver"]

# After a stop, by socket type. What a PULL has taken nobody else gets; a SUB only wants what came before it was
# stopped.
_DRAIN_SECONDS = {"PULL": 5.0, "SUB": 1.0}


class LogReceiver:
    """A ``log.filler.Filler`` of SUB or PULL sockets.

    Args:
        receiver: Not yet open.
        log: Open before the block.
        kind: SUB or PULL.

    Attributes:
        receiver: What it was given.
    """

    def __init__(self, receiver: Receiver, log: LogWriter, kind: str) -> None:
        self.receiver = receiver
        self._log = log
        self._kind = kind
        self.drain_seconds = _DRAIN_SECONDS[kind]
        self._appending = False
        self._refused = 0
        self._left = False

    def __enter__(self) -> Self:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: They cannot be opened as asked.
        """
        self.receiver.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = self._kind == "PULL" and self.receiver.waiting
        self.receiver.__exit__(kind, error, trace)

    def receive(self) -> int:
        """One round; a batch that is ready is appended."""
        taken = self.receiver.receive()
        if self.receiver.batch_ready:
            self._append()
        return taken

    def cut(self) -> Future[int]:
        """Append what was received, and cut the log's chunk."""
        self._append_rest()
        return self._log.cut()

    def _append_rest(self) -> None:
        if self.receiver.pending or self.receiver.batch_ready:
            self._append()

    def _append(self) -> None:
        self._appending = True
        received = self.receiver.pending
        try:
            messages = self.receiver.take()
            received = messages.num_rows  # without those that are no rows
            self._log.append(messages)
        except Exception:
            self._refused += received
            raise
        self._appending = False
        if self.receiver.failure is not None:
            raise self.receiver.failure

    def hold_still(self) -> None:
        self.receiver.hold_still()

    def settle(self, patience: float) -> None:
        """Append the rest; no sender waits for an answer."""
        self._append_rest()

    def still_asking(self) -> bool:
        """Whether more may come by a replay."""
        return self.receiver.still_asking()

    def facts(self) -> FillerFacts:
        pending, tracker = self.receiver.pending, self.receiver.intake.tracker
        if tracker is None:
            return FillerFacts(pending, self._appending, self._refused, self._left)
        known = len(tracker.expected), len(tracker.gaps)
        return FillerFacts(pending, self._appending, self._refused, self._left, tracker.totals, *known)
