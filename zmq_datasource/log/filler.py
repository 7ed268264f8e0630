"""What fills a log: whoever takes messages off sockets and appends them.

It is built after the log, and the log after what its filler remembers (``log.carried``), because the log asks for that
at every cut. Transactions do it (``acknowledged.acceptor``), and plain sockets (``source.receiver``).
"""

from __future__ import annotations

from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from zmq_datasource.sequences import Totals

__all__ = ["Filler", "FillerFacts"]


class FillerFacts(NamedTuple):
    """What a filler tells of itself. What does not apply to it stays at its default.

    Attributes:
        pending: Messages that were received and wait in memory to be appended to the log.
        appending: Whether some are on their way from there to the log, in neither's count.
        refused: Messages that the log did not take, so that receiving ends; they are lost.
        left: Whether the sockets were closed with messages that come to no other receiver.
        totals: What the publishers' numbers tell in all; None if messages are not numbered.
        publishers: How many of them are known; None as for ``totals``.
        gaps: How many gaps are in the table; None as for ``totals``.
    """

    pending: int = 0
    appending: bool = False
    refused: int = 0
    left: bool = False
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None


class Filler(Protocol):
    """Used in a ``with`` block by one thread; ``facts`` and ``awaits_replies`` may be called by any, at any time.

    Attributes:
        drain_seconds: For how long, after a stop, what is still on its way is received at most.
    """

    drain_seconds: float

    def __enter__(self) -> Self:
        """Open the sockets."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the sockets."""

    def receive(self) -> int:
        """One round: wait a moment for a message, take what is there, and append what is ready for it to the log.

        Returns:
            How many messages were taken.

        Raises:
            LogError: The log can take nothing any more.
            SocketError: Receiving must end; what was received before is in the log.
        """

    def cut(self) -> Future[int]:
        """Append what was received, and cut the log's chunk; for the rest see ``LogWriter.cut``, and ``receive``."""

    def postpone(self) -> None:
        """Keep connections alive and timeouts from running. Called every few hundred ms while nothing is received."""

    def finish(self, patience: float) -> None:
        """Append the rest, and answer for ``patience`` seconds what is being written. Called after the last round."""

    def awaits_replies(self) -> bool:
        """Whether messages were asked for that may still come though the sockets are silent."""

    def facts(self) -> FillerFacts:
        """What the filler has received and counted so far."""
