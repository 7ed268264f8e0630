"""The log of one query: the query follows it, and receives into it if no other process does.

The rules:

* The query reads the same chunks whether this process fills the log or another one does. In the process that fills it,
  its sealing thread adds them; otherwise they are listed.
* The query's lease says what the log must keep for it. It is written before the query chooses where to begin.
* A position is compared with the log before anything is received. So ``open`` comes first, and ``start`` later.
"""

from __future__ import annotations

import time
from contextlib import suppress

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import (
    REFRESH_SECONDS,
    STORE_RETRY_SECONDS,
    LogFollower,
    LogWriter,
    Reader,
    read_saved_state,
)
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.facts import SourceFacts, read_counters
from zmq_datasource.source.feed_receiver import FeedReceiver
from zmq_datasource.source.location import log_storage


class QueryLog:
    """The log of one query. Any thread may call ``facts``; one thread calls the other methods.

    Attributes:
        receiver: Receives into the log, or stands by; None for a query that only reads.
        counters: The counters of this process.
        reader: The query's lease; from ``open`` on.
        begins_at: A query without a checkpoint begins at this id or later; from ``open`` on.
        log_id: The log's id; from ``open`` on.
        resumed_at: The id of the first message that comes after ``open``.
    """

    reader: Reader

    def __init__(self, options: StreamReadOptions) -> None:
        self._options = options
        self.storage = log_storage(options)
        self.counters = SourceCounters()
        self.receiver = FeedReceiver(options, self.counters) if options.has_endpoints else None
        self._follower = LogFollower(self.storage, STORE_RETRY_SECONDS)
        self._stored: tuple[SourceCounters | None, Totals | None] = None, None
        self._stored_end = -1
        self._faults = LimitedLog(__name__, "states that could not be read")
        self._started = False
        self.log_id = ""
        self.resumed_at = self.begins_at = 0

    def open(self) -> None:
        """Become the writer of the log, or follow it if it has a writer; and keep its messages from being deleted.

        Receives nothing yet.

        Raises:
            LogFormatError: There is no log, and this query has no sockets to fill one.
            LogLockedError: Another query reads under this name, or another process receives with other options.
            LogError: The log cannot be opened.
        """
        if self.receiver is not None:
            self.receiver.open()
        try:
            if self.filling is None:
                self._follower.open()
            self._keep_everything()
        except BaseException:
            self._stop_receiving()
            raise
        self.log_id, self.resumed_at = self.contents.log_id, self.contents.durable_end

    def _keep_everything(self) -> None:
        """Write the query's lease, so that nothing is deleted while the query chooses where to begin."""
        options = self._options
        timeout = options.wal_retention if options.reader is None else options.reader_timeout
        self.reader = Reader(self.storage, options.reader, timeout, STORE_RETRY_SECONDS)
        try:
            announced = self.reader.open()
            if self.filling is None:
                self._follower.refresh_now()
            self.begins_at = max(announced, self.contents.earliest)
        except BaseException:
            self.reader.close(started=False)
            raise

    def start(self) -> None:
        """Begin to receive, or to stand by; after ``open``.

        Raises:
            EndpointError, OptionError: A socket cannot be opened as asked. The log and the reader's name are free
            again.
        """
        self._started = True
        try:
            if self.receiver is not None:
                self.receiver.start()
        except BaseException:
            self.reader.close(started=False)
            self._stop_receiving()
            raise

    def _stop_receiving(self) -> None:
        """Stop because of an error, which is raised in place of one that comes now."""
        if self.receiver is not None:
            with suppress(Exception):
                self.receiver.stop()

    @property
    def contents(self) -> LogWriter | LogFollower:
        """The chunks of the log: those that this process seals, or those that were listed last."""
        return self._follower if (filling := self.filling) is None else filling.log

    @property
    def reader_name(self) -> str:
        """The name of the query's lease."""
        return self.reader.name

    @property
    def filling(self) -> FeedReceiver | None:
        """The receiver of this process, if it fills the log."""
        return self.receiver if self.receiver is not None and self.receiver.receives else None

    def _refresh(self) -> int:
        """List the chunks of a log that another process fills. Returns the durable end."""
        self._follower.refresh()
        return self._follower.durable_end

    def check(self) -> None:
        """Raise the error that has ended receiving, or standing by: LogError, SocketError or OptionError."""
        if self.receiver is not None:
            self.receiver.check()

    def seal(self) -> int:
        """Make the messages durable that this process has received, or list those of another process.

        Returns:
            The durable end.

        Raises:
            LogError, SocketError: Receiving has ended, or the log cannot be listed.
        """
        return self._refresh() if (filling := self.filling) is None else filling.seal()

    def receive_for(self, timeout: float, idle_timeout: float | None) -> int:
        """See ``FeedReceiver.receive_for``. If another process receives, this returns the durable end at once."""
        self.check()
        return (
            self._refresh()
            if (filling := self.filling) is None
            else filling.receive_for(timeout, idle_timeout)
        )

    def wait_for_more(self, end: int, seconds: float) -> None:
        """Wait until there are messages from id ``end`` on, for at most ``seconds``."""
        if (filling := self.filling) is not None:
            filling.wait_for_more(end, seconds)
            return
        deadline = time.monotonic() + seconds
        while self._refresh() <= end and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, REFRESH_SECONDS))

    def commit(self, end: int) -> None:
        """Let the log delete messages below ``end``, because the query has committed them.

        Raises:
            LogLockedError: Another process has taken the query's name.
        """
        self.reader.move(end)

    def facts(self) -> SourceFacts:
        """The figures of the log's receiver: as of now or, in another process, as of its newest chunk."""
        if (filling := self.filling) is not None:
            return filling.facts()
        end = self._refresh()  # in a long batch Spark asks for no offset, so nothing else lists new chunks
        if self._stored_end != end:
            try:
                self._stored = read_counters(read_saved_state(self.storage))
                self._stored_end = end
            except LogError as e:
                self._faults.warn("%s", e)
        receiver, totals = self._stored
        return SourceFacts(self.counters, receiver, end, False, totals)

    def stop(self) -> None:
        """End receiving, and release the log and the reader's name.

        Raises:
            LogError, SocketError: Receiving has ended before, or received messages could not be sealed.
        """
        try:
            if self.receiver is not None:
                self.receiver.stop()
        finally:
            self._faults.flush()
            self.reader.close(self._started)
