"""All errors of this package, in one tree, sorted by the side at fault.

::

    ZmqDataSourceError
    ├── OptionError         the caller's options (also a ValueError)
    ├── RowError            the caller's rows, on the way to a socket
    ├── SocketError         the network
    │   ├── EndpointError       an endpoint that cannot be bound, connected or resolved
    │   ├── ConnectionLostError  lost again and again before the rows had left
    │   ├── NoPeerError         no peer within connectTimeout, or the peer refused
    │   ├── SendTimeoutError    the peers stayed full for sendTimeout, or for linger
    │   ├── ProtocolError       the other side uses another protocol
    │   │   └── UnknownAttemptError  a commit of rows that the receiver does not have
    │   ├── SubscriptionError   a durable subscription that is refused, or has ended
    │   ├── TransactionError    a transaction that the receiver refused
    │   │   ├── AttemptLostError    the receiver lost its rows; it is sent again
    │   │   └── ConflictError       another transaction has its number, or a later one is committed
    │   ├── RefusedError        the receiver's side of a refusal
    │   ├── MalformedMessageError  a message does not fit its framing (onMalformed=fail)
    │   └── MessageLossError    sequences show messages that never came (onLoss=fail)
    ├── DeadLetterError     the storage of a sink's dead letters
    ├── MetricsError        the storage of metrics; never ends a query
    ├── WorkbenchError      an experiment that could not be made
    └── LogError            the message log's storage
        ├── LogLockedError      another writer holds this log, or has taken it over
        ├── LogFormatError      not a log, or one of another format version
        │   └── NoLogError          no log at all
        ├── KeyTakenError       an object of the log has other content
        ├── LogWriteError       the disk or bucket refused for a reason that stays
        │   └── DiskFaultError      one that may pass: full, gone, no answer
        ├── DamagedChunkError   a file of the log whose bytes have changed
        ├── LogFetchError       an executor could not read the log from the driver
        └── DataLossError       an offset asks for messages that the log no longer has

The text of an error names the act that did not succeed, then the reason, then the way out. ``docs/errors.md`` is
generated from the docstrings, which say what has happened and what to do.
"""

from typing import Self

__all__ = [
    "AttemptLostError",
    "ConflictError",
    "ConnectionLostError",
    "DamagedChunkError",
    "DataLossError",
    "DeadLetterError",
    "DiskFaultError",
    "EndpointError",
    "KeyTakenError",
    "LogError",
    "LogFetchError",
    "LogFormatError",
    "LogLockedError",
    "LogWriteError",
    "MalformedMessageError",
    "MessageLossError",
    "MetricsError",
    "NoLogError",
    "NoPeerError",
    "OptionError",
    "ProtocolError",
    "RefusedError",
    "RowError",
    "SendTimeoutError",
    "SocketError",
    "SubscriptionError",
    "TransactionError",
    "UnknownAttemptError",
    "WorkbenchError",
    "ZmqDataSourceError",
]


class ZmqDataSourceError(Exception):
    """Base of all errors of this package."""


class OptionError(ZmqDataSourceError, ValueError):
    """An option is unknown, its value is not allowed, or options do not go together. It is also a
    ``ValueError``.

    What to do: The message names the option, the value, and what is allowed. All options are in
    docs/options.md.
    """


class RowError(ZmqDataSourceError):
    """A row of the DataFrame cannot be a message: ``frames`` is null or empty, or contains a null. Or a row is larger
    than a ``ROUTER`` source accepts. Or a function of ``zmq_datasource.functions`` cannot read a value, and its
    ``mode`` is ``failfast``.

    What to do: Filter such rows out. For a function, correct its arguments, or use ``mode='permissive'``.
    """


class SocketError(ZmqDataSourceError):
    """Base of the errors of sockets, peers and their queues."""


class EndpointError(SocketError):
    """An endpoint cannot be bound or connected.

    What to do: Check the address. If it is still in use after 8 s, stop the other program, or use another port.
    """


class ConnectionLostError(SocketError):
    """Connections were lost again and again before the rows had left.

    What to do: Find out why the consumer or the network ends the connections. Often a row is larger than the
    consumer's ``ZMQ_MAXMSGSIZE``. What a PUSH does after a loss: docs/delivery.md#when-a-push-loses-a-connection.
    """


class NoPeerError(SocketError):
    """No peer has connected or subscribed within ``connectTimeout``, a proxy was silent for as long, or the
    peer refused: its socket type or its keys do not match.

    What to do: Start the consumer before the sink. Check the endpoint, the socket types (PUSH to PULL, PUB to
    SUB, DEALER to ROUTER) and the keys (docs/security.md). The message has the reason that the peer gave.
    """


class SendTimeoutError(SocketError):
    """The consumer took nothing for ``sendTimeout`` while the queue was full, or messages were still queued when
    ``linger`` had passed at the end of a task. How many is then not known.

    What to do: Make the consumer faster, add consumers, or raise ``sndhwm`` and ``sendTimeout``, or ``linger``.
    To drop instead, set ``noblock=true``.
    """


class ProtocolError(SocketError):
    """The other side of a transaction or of a durable subscription does not speak the protocol, or speaks
    another version of it.

    What to do: For a DEALER or a ``Producer``, check that the endpoint is a ROUTER source or ``receive``
    (docs/protocol.md). For a ``DurableSubscriber``, check that it is the ``durable`` of a receiver or a proxy
    (docs/durable-subscribers.md).
    """


class UnknownAttemptError(ProtocolError):
    """A receiver does not have an attempt that a sender commits.

    What to do: Nothing: the sender sends the rows again, as another attempt.
    """


class SubscriptionError(SocketError):
    """The server of a log has refused a durable subscription. Another client has taken its name, the name belongs to
    another key, or there are too many names. Or while the subscriber was away, its position was removed,
    or the log was replaced.

    What to do: The message has the reason. Give each subscriber its own name, or check its rights
    (docs/security.md#bind-a-name-to-a-key). If its position was removed
    (docs/durable-subscribers.md#what-can-be-served), start the subscriber again.
    """


class TransactionError(SocketError):
    """The receiver has refused a transaction, for example because it has another transaction of this number. A
    ``Producer`` also raises this error if a transaction is larger than ``max_bytes``, or if another producer has
    used its name.

    What to do: The message has the reason. Which transactions are refused:
    docs/delivery.md#which-transactions-are-refused.
    """


class AttemptLostError(TransactionError):
    """The receiver does not have the rows of an attempt any more, because it has started again or was cut off.

    What to do: Nothing: Spark repeats the task, and a ``Producer`` sends the transaction again. If it comes again and
    again, look into the receiver's log output.
    """


class ConflictError(TransactionError):
    """Another transaction is committed under this number, or a later one is.

    What to do: The message has the reason. Which transactions are refused:
    docs/delivery.md#which-transactions-are-refused.
    """


class RefusedError(SocketError):
    """A receiver cannot do what a sender's message asks. The sender gets the reason.

    What to do: The message has the reason.
    """


class MalformedMessageError(SocketError):
    """A message does not fit its ``framing``, and ``onMalformed`` is ``fail``. Or a value does not fit the
    schema of ``valueFormat=arrow``, and ``mode`` is ``FAILFAST``.

    What to do: Check ``framing``, or the schema (docs/arrow.md#values-that-do-not-fit). Set
    ``onMalformed=keep`` to go on: then such messages are rows (docs/sequences.md#messages-that-do-not-fit).
    """


class MessageLossError(SocketError):
    """Sequences are missing, and ``onLoss`` is ``fail``.

    What to do: Start the query again: it continues after the loss. How losses are found and healed:
    docs/sequences.md.
    """


class DeadLetterError(ZmqDataSourceError):
    """Dead letters could not be written to ``deadLetterLocation``.

    What to do: Check the location and its permissions. Spark repeats the micro-batch.
    """


class MetricsError(ZmqDataSourceError):
    """The account of a micro-batch could not be written. The query logs and counts this error, and goes on.

    What to do: Check ``metricsLocation`` and its permissions.
    """


class WorkbenchError(ZmqDataSourceError):
    """An experiment of ``zmq-datasource hwm`` could not be made.

    What to do: The message says what is missing.
    """


class LogError(ZmqDataSourceError):
    """Base of the errors of the log."""


class LogLockedError(LogError):
    """Another process writes this log, with other options. Or this process was cut off or stalled, and another
    one has taken over the log. Or another query with the same ``reader`` runs.

    What to do: Stop the other process, or use another ``walLocation`` or ``walStore``. The message names the
    process. A query that was cut off or overtaken follows the log when you start it again. Give each query a
    ``reader`` of its own.
    """


class LogFormatError(LogError):
    """There is no log in the directory or the bucket, files are missing, it has another format, or its messages
    have a framing of a later release (``includeFrames``).

    What to do: Check ``walLocation`` or ``walStore``. Restore what is missing, or use a new ``walLocation`` and
    new checkpoints. Let each query of a log of format 1 read to its end with the release that wrote it.
    """


class NoLogError(LogFormatError):
    """There is no log in the directory or the bucket.

    What to do: Check ``walLocation`` or ``walStore``, and start what fills the log.
    """


class KeyTakenError(LogError):
    """There is an object with this key and with other content in the log's directory or bucket.

    What to do: Look for another program that writes there. Each log needs a place of its own.
    """


# The way out for a damaged file of the log.
RESTORE = "Restore the file, or use a new walLocation and, for each query of this log, a new checkpoint"


class LogWriteError(LogError):
    """The file system or the bucket has refused for a reason that does not pass: no permission, a read-only
    disk, wrong keys, no such bucket.

    What to do: Set ``walLocation`` to a directory that can be written, or correct the bucket and its keys.
    """


class DiskFaultError(LogWriteError):
    """The disk is full or has an I/O error, the process has too many open files, or the bucket (``walStore``)
    does not answer, for longer than five minutes. Or the directory was unmounted or emptied.

    What to do: Make room, raise ``ulimit -n``, mount the directory, or see what is wrong with the bucket. Until
    five minutes have passed, receiving only pauses.
    """


class DamagedChunkError(LogError):
    """A file of the log has other bytes than were written.

    What to do: Restore it from a copy, or use a new ``walLocation`` and new checkpoints. Check the disk.
    """

    @classmethod
    def of(cls, what: str) -> Self:
        """The error for a damaged file that is needed. ``what`` names the file and the damage; the way out is added."""
        return cls(f"{what}. {RESTORE}")


class LogFetchError(LogError):
    """An executor that does not see the log could not read it from the driver.

    What to do: Check that executors can connect to the driver, or set ``serveLog`` to an endpoint that they
    reach, or share ``walLocation``: docs/scaling.md#executors-that-do-not-see-the-log.
    """


class DataLossError(LogError):
    """A query needs messages that the log no longer has: they were deleted, or a chunk is missing. Or an older
    copy of the log was restored, and new messages were received into it.

    What to do: Restore the log. With ``failOnDataLoss=false`` the query skips the missing messages, and counts
    them. If the log ends before the checkpoint, only a new checkpoint helps. If the log may then give an id to a
    second message, a new ``walLocation`` is needed, too.
    """
