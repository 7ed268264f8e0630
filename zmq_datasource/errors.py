"""Every error this package raises, in one tree, sorted by whose fault it is.

::

    ZmqDataSourceError
    ├── OptionError            the caller's options (also a ValueError)
    ├── RowError               the caller's rows, on the way to a socket
    ├── SocketError            the network
    │   ├── EndpointError      an endpoint that cannot be bound, connected or resolved
    │   ├── NoPeerError        nobody answered within connectTimeout, or the peer refused
    │   ├── SendTimeoutError   the peers stayed full for sendTimeout
    │   ├── FlushTimeoutError  linger ran out with messages still queued
    │   ├── ConnectionLostError  connections are lost again and again before their rows have left
    │   ├── ProtocolError      the other side of a transaction or a durable subscription speaks something else
    │   ├── SubscriptionError  a durable subscription that the proxy refuses, or has ended
    │   ├── TransactionError   a transaction that the receiver refused
    │   ├── MalformedMessageError  a message does not fit its framing (onMalformed=fail)
    │   └── MessageLossError   sequences show messages that never came (onLoss=fail)
    ├── DeadLetterError        the storage of a sink's dead letters
    ├── WorkbenchError         an experiment with high-water marks that could not be made
    ├── MetricsError           the storage of metrics; never ends a query
    └── LogError               the message log's storage
        ├── LogLockedError     another writer holds this log
        ├── LogFormatError     not a log, or one of another format version
        ├── LogWriteError      the disk refused: full, read-only, gone
        │   └── DiskFaultError     a refusal that may pass, and is waited out for walRetryTimeout
        ├── DamagedChunkError  a chunk whose bytes are not what was written
        ├── LogFetchError      an executor that does not see the log could not read it from the driver
        └── DataLossError      an offset asks for messages that the log no longer has

A message is worded as the act that did not succeed, then the reason, then the way out.
"""

from typing import Self

__all__ = [
    "ConnectionLostError",
    "DamagedChunkError",
    "DataLossError",
    "DeadLetterError",
    "DiskFaultError",
    "EndpointError",
    "FlushTimeoutError",
    "LogError",
    "LogFetchError",
    "LogFormatError",
    "LogLockedError",
    "LogWriteError",
    "MalformedMessageError",
    "MessageLossError",
    "MetricsError",
    "NoPeerError",
    "OptionError",
    "ProtocolError",
    "RowError",
    "SendTimeoutError",
    "SocketError",
    "SubscriptionError",
    "TransactionError",
    "WorkbenchError",
    "ZmqDataSourceError",
]


class ZmqDataSourceError(Exception):
    """Base of all errors of this package."""


class OptionError(ZmqDataSourceError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class RowError(ZmqDataSourceError):
    """A row that is no ZeroMQ message: a null ``value``, an empty ``frames``."""


class SocketError(ZmqDataSourceError):
    """The network side: endpoints, peers, queues."""


class EndpointError(SocketError):
    """An endpoint that cannot be bound, connected or resolved."""


class ConnectionLostError(SocketError):
    """Connections are lost again and again, so that nobody can say that their rows have left."""


class NoPeerError(SocketError):
    """No peer finished its handshake (or subscribed) within ``connectTimeout``, or a proxy was silent for as long."""


class SendTimeoutError(SocketError):
    """The peers' queues stayed full for ``sendTimeout``."""


class FlushTimeoutError(SocketError):
    """``linger`` ran out while messages were still queued; how many is not knowable."""


class ProtocolError(SocketError):
    """The other side of the protocol of transactions, or of durable subscribers, sent what is no message of it."""


class SubscriptionError(SocketError):
    """A durable subscription that the proxy refuses, or that another client has taken over."""


class TransactionError(SocketError):
    """A transaction that the receiver refused, or that could not be completed."""


class MalformedMessageError(SocketError):
    """A message does not fit its framing (``onMalformed=fail``), or its value not the schema (``mode=FAILFAST``)."""


class MessageLossError(SocketError):
    """Publishers' sequences show messages that never came, and ``onLoss`` is ``fail``."""


class DeadLetterError(ZmqDataSourceError):
    """A sink's dead letters could not be stored; without them the batch is not done."""


class MetricsError(ZmqDataSourceError):
    """Metrics could not be stored or read. It never ends a query: there it is logged and counted."""


class WorkbenchError(ZmqDataSourceError):
    """An experiment with high-water marks could not be made, or its account does not add up."""


class LogError(ZmqDataSourceError):
    """The message log's storage."""


class LogLockedError(LogError):
    """Another writer holds this log partition."""


class LogFormatError(LogError):
    """The directory holds no log, or a log of another format version."""


# What to do about a file of the log that is not what was written.
RESTORE = "Restore the file, or use a new walLocation and, for each query of this log, a new checkpoint"


class LogWriteError(LogError):
    """The file system refused a write."""


class DiskFaultError(LogWriteError):
    """The file system refused for now: it is full, has an I/O error, or no file can be opened any more."""


class DamagedChunkError(LogError):
    """A chunk's bytes differ from what was written."""

    @classmethod
    def of(cls, what: str) -> Self:
        """The error for a file that is needed: what was found, and the way out."""
        return cls(f"{what}. {RESTORE}")


class LogFetchError(LogError):
    """An executor that does not see the log's directory could not read it from the driver."""


class DataLossError(LogError):
    """An offset asks for messages that this log does not have."""
