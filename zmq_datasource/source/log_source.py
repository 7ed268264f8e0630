"""A log as a streaming query reads it: filled here (``ingest``), or by another process (``follow``)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.sequences import Totals

__all__ = ["LogSource", "SourceFacts"]


class SourceFacts(NamedTuple):
    """What a source tells of itself, for monitoring.

    Attributes:
        counters: Of this process.
        receiver: Of the process that receives, as far as known here; None if the log could not tell yet.
        received: Messages received in all, to see how fast that grows.
        receives: Whether that is this process.
        totals: What the publishers' numbers tell; None if messages are not numbered.
        publishers: How many are known; None where that is not known here.
        gaps: How many gaps are in the table; None as for ``publishers``.
    """

    counters: SourceCounters
    receiver: SourceCounters | None
    received: int
    receives: bool
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None


class LogSource(Protocol):
    """Opened, then started, at last stopped; ``facts`` may be asked by any thread, the rest is for one.

    Attributes:
        counters: What is counted in this process.
        storage: Where the log is.
        resumed_at: Where the log ended when it was opened.
        reader: The name under which a query reads the log; None for a receiver without a query.
    """

    storage: LogStorage
    resumed_at: int

    @property
    def counters(self) -> SourceCounters: ...

    @property
    def reader(self) -> str | None: ...

    @property
    def log(self) -> LogWriter | LogFollower:
        """The log that is read; there from ``open`` on."""

    @property
    def received_end(self) -> int:
        """The id after the last message received, as far as known here; those on their way between threads may miss."""

    def open(self) -> None:
        """Find the log; receive nothing yet.

        A disk that refuses is waited for.

        Raises:
            LogError: See the message.
        """

    def look(self) -> int:
        """List the log, if another process writes it; the first id there is.

        Raises:
            LogError: It cannot be listed.
        """

    def start(self) -> None:
        """Open the log, unless that is done, and begin to receive. Once is enough.

        Raises:
            LogError, EndpointError, OptionError: See the message.
        """

    def stop(self) -> None:
        """End receiving, and let others have the log.

        Raises:
            LogError: What was received last could not be sealed.
        """

    def check(self) -> None:
        """Raise why receiving has ended, if it has.

        Raises:
            LogError, SocketError: See the message.
        """

    def seal(self) -> int:
        """Make durable what was received before this call, unless the disk refuses; returns the durable end."""

    def gather(self, timeout: float, idle_timeout: float | None) -> int:
        """Receive for a while, then seal: until ``timeout`` seconds, ``idle_timeout`` of silence, or a full log."""

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until something is received after ``end``, or so many seconds, where somebody tells of it."""

    def commit(self, end: int) -> None:
        """The query in this process is done with what is below ``end``."""

    def facts(self) -> SourceFacts:
        """What there is to tell, as of now.

        Raises:
            LogError: The log cannot be listed.
        """
