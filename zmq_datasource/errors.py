"""All errors of this package, in one tree, sorted by the side at fault.

::

    ZmqDataSourceError
    ├── OptionError            the caller's options (also a ValueError)
    ├── RowError               the caller's rows, on the way to a socket
    ├── SocketError            the network
    │   ├── EndpointError      an endpoint that cannot be bound, connected or resolved
    │   ├── NoPeerError        no peer answered within connectTimeout, or the peer refused
    │   ├── SendTimeoutError   the peers stayed full for sendTimeout
    │   ├── FlushTimeoutError  linger ran out with messages still queued
    │   ├── ConnectionLostError  connections are lost again and again before their rows have left
    │   ├── ProtocolError      the other side of a transaction or a durable subscription uses another protocol
    │   ├── SubscriptionError  a durable subscription that the proxy refuses, or has ended
    │   ├── TransactionError   a transaction that the receiver refused
    │   ├── MalformedMessageError  a message does not fit its framing (onMalformed=fail)
    │   └── MessageLossError   sequences show messages that never came (onLoss=fail)
    ├── DeadLetterError        the storage of a sink's dead letters
    ├── WorkbenchError         an experiment with high-water marks that failed
    ├── MetricsError           the storage of metrics; never ends a query
    └── LogError               the message log's storage
        ├── LogLockedError     another writer holds this log
        ├── LogFormatError     not a log, or one of another format version
        ├── LogWriteError      the disk refused: full, read-only, gone
        │   └── DiskFaultError     a refusal that may pass, and is waited out for walRetryTimeout
        ├── DamagedChunkError  a chunk with other bytes than were written
        ├── LogFetchError      an executor that does not see the log could not read it from the driver
        └── DataLossError      an offset asks for messages that the log no longer has

A message names the act that did not succeed, then the reason, then the way out.
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
    """An option, or a combination of options, is wrong."""


class RowError(ZmqDataSourceError):
    """A row cannot be a ZeroMQ message: its ``value`` is null, or its ``frames`` is empty."""


class SocketError(ZmqDataSourceError):
    """The network side: endpoints, peers, queues."""


class EndpointError(SocketError):
    """An endpoint cannot be bound, connected or resolved."""


class ConnectionLostError(SocketError):
    """Connections are lost again and again, so that their rows may not have left."""


class NoPeerError(SocketError):
    """No peer has connected or subscribed within ``connectTimeout``, or a proxy has been silent for too long."""


class SendTimeoutError(SocketError):
    """The peers' queues stayed full for ``sendTimeout``."""


class FlushTimeoutError(SocketError):
    """``linger`` ran out while messages were still queued. libzmq cannot tell how many."""


class ProtocolError(SocketError):
    """The other side of a transaction or a durable subscription has sent a message that its protocol does not have."""


class SubscriptionError(SocketError):
    """The proxy refuses a durable subscription, or another client has taken it over."""


class TransactionError(SocketError):
    """The receiver has refused a transaction, or the transaction could not be completed."""


class MalformedMessageError(SocketError):
    """A message does not fit its framing (``onMalformed=fail``), or its value not the schema (``mode=FAILFAST``)."""


class MessageLossError(SocketError):
    """Publishers' sequences show that messages are missing (``onLoss=fail``)."""


class DeadLetterError(ZmqDataSourceError):
    """A sink's dead letters could not be stored, so the batch has failed."""


class MetricsError(ZmqDataSourceError):
    """Metrics could not be stored or read. In a query this is only logged and counted."""


class WorkbenchError(ZmqDataSourceError):
    """An experiment with high-water marks has failed, or its account does not add up."""


class LogError(ZmqDataSourceError):
    """Base of the errors of the message log's storage."""


class LogLockedError(LogError):
    """Another writer holds this log partition."""


class LogFormatError(LogError):
    """The directory holds no log, or a log of another format version."""


# The way out for a damaged file of the log.
RESTORE = "Restore the file, or use a new walLocation and, for each query of this log, a new checkpoint"


class LogWriteError(LogError):
    """The file system refuses a write."""


class DiskFaultError(LogWriteError):
    """The file system refuses for now: it is full, has an I/O error, or no file can be opened."""


class DamagedChunkError(LogError):
    """A chunk has other bytes than were written."""

    @classmethod
    def of(cls, what: str) -> Self:
        """The error for a needed file: what was found, and the way out."""
        return cls(f"{what}. {RESTORE}")


class LogFetchError(LogError):
    """An executor that does not see the log's directory could not read the log from the driver."""


class DataLossError(LogError):
    """An offset needs messages that the log does not have."""
