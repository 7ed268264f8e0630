"""What fills a log: the writer, its state, and the filler that receives messages and appends them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from zmq_datasource.acknowledged.acceptor import Acceptor, Terms
from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogFormatError
from zmq_datasource.log import STORE_RETRY_SECONDS, CarriedState, LogStorage, LogWriter
from zmq_datasource.options import ProxyOptions, StreamReadOptions
from zmq_datasource.source.receiver import REPLAY_SECONDS, LogReceiver, Publisher, Receiver
from zmq_datasource.transport.spec import SocketSpec

# Receives messages from sockets and appends them to a log; for one thread, in a ``with`` block.
Filler: TypeAlias = LogReceiver | Acceptor

# The largest transaction for a log in a bucket: it is one object, which is in memory while it is put.
_MOST_OBJECT_BYTES = 1 << 30


class Filling(NamedTuple):
    """One attempt to fill a log; it is used once.

    Attributes:
        log: The writer, which is not open yet.
        filler: Receives, and appends to ``log``.
        state: The counters and tracked sequences, which the log keeps with the rows.
    """

    log: LogWriter
    filler: Filler
    state: CarriedState

    def restore(self) -> None:
        """Continue counters and tracking from the state of the last writer; after ``log.open``.

        Raises:
            LogFormatError: The state was written by another release.
        """
        try:
            self.state.restore(self.log.saved)
        except Exception as e:
            raise LogFormatError(
                f"reading the state of log {self.log.log_id}: {e!r}; it was written by another release. Give the "
                "query a new walLocation and a new checkpoint"
            ) from e


def filling_of(
    options: StreamReadOptions,
    storage: LogStorage,
    counters: SourceCounters,
    *,
    replay_timeout: float = REPLAY_SECONDS,
    retry_seconds: float = STORE_RETRY_SECONDS,
    publisher: Publisher | None = None,
) -> Filling:
    """Make state, log and filler, in this order: the log reads the state, and the filler appends to the log.

    Args:
        replay_timeout: Seconds without a reply after which a request for missing messages is repeated.
        retry_seconds: How long to wait for a disk or a bucket that refuses.
        publisher: Sends on what is received.
    """

    def writer(state: CarriedState) -> LogWriter:
        return LogWriter(
            storage,
            chunk_bytes=options.chunk_bytes,
            max_bytes=options.wal_max_bytes,
            retention=options.wal_retention,
            discards=options.when_full == "discard",
            retry_timeout=retry_seconds,
            carried=state,
            keeps_unread=not isinstance(options, ProxyOptions),
        )

    if options.socket_type == "ROUTER":
        transactions = CommittedTransactions(counters, options.max_publishers)
        log = writer(transactions)
        most = _MOST_OBJECT_BYTES if storage.directory is None else options.wal_max_bytes
        terms = Terms(options.transaction_timeout, options.wal_max_bytes, most)
        files, spec = AttemptFiles(storage.directory), SocketSpec.of_source(options)
        return Filling(log, Acceptor(spec, terms, counters, files, transactions, log), transactions)
    receiver = Receiver(
        options, counters, options.chunk_bytes, replay_timeout=replay_timeout, publisher=publisher
    )
    log = writer(receiver.intake)
    return Filling(log, LogReceiver(receiver, log), receiver.intake)
