"""The interface of a filler, which receives messages from sockets and appends them to a log.

There are two: for transactions (``acknowledged.acceptor``), and for plain sockets (``source.receiver``). The log
asks for the filler's state at each cut, so state, log and filler are created in this order (``log.state``).
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple, Protocol, Self

from zmq_datasource.sequences import Totals


class FillerFacts(NamedTuple):
    """The figures of a filler. A figure that it does not have keeps its default.

    Attributes:
        pending: Messages in memory that are not appended to the log yet.
        pending_bytes: Their bytes.
        appending: Whether some messages are being appended, and counted neither here nor in the log.
        refused: Messages that the log has refused for good. They are lost, and receiving ends.
        left: Whether the sockets were closed with unread messages that no other receiver gets.
        totals: The totals of the publishers' sequences; None if messages are not numbered.
        publishers: How many publishers are known; None as for ``totals``.
        gaps: How many gaps the table of gaps has; None as for ``totals``.
    """

    pending: int = 0
    pending_bytes: int = 0
    appending: bool = False
    refused: int = 0
    left: bool = False
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None


class Filler(Protocol):
    """Used by one thread in a ``with`` block. Any thread may call ``facts`` at any time.

    Attributes:
        drain_seconds: Limit of the time for which messages on their way are received after a stop.
    """

    drain_seconds: float

    def __enter__(self) -> Self:
        """Open the sockets."""

    def __exit__(self, *_: object) -> None:
        """Close the sockets."""

    def receive(self, gather: float = 0.0) -> int:
        """Wait a moment for a message, receive those that are there, and append complete batches to the log.

        Args:
            gather: For how many seconds the call may go on to receive, if the filler can wait without the GIL.

        Returns:
            How many messages were received.

        Raises:
            LogError: The log has failed for good.
            SocketError: Receiving must end. Messages that were received before are in the log.
        """

    def wake(self) -> None:
        """End a call of ``receive`` that waits or gathers. Any thread may call this."""

    def cut(self) -> Future[int]:
        """Append all received messages and cut the chunk: see ``LogWriter.cut``. Raises what ``receive`` does."""

    def extend_timeouts(self) -> None:
        """Keep connections alive, and stop timeouts. Called every few hundred ms while receiving is paused."""

    def finish(self, seconds: float) -> None:
        """Append the last messages, and answer open requests for so many ``seconds``. Called at the end."""

    def facts(self) -> FillerFacts:
        """The figures of the filler."""
