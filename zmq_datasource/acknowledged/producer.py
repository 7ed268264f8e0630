"""A small client of the transaction protocol, for programs outside Spark."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa

from zmq_datasource.acknowledged.protocol import (
    MOST_FRAME_BYTES,
    MOST_NAME_BYTES,
    anonymous_name,
    is_name,
)
from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.errors import (
    AttemptLostError,
    OptionError,
    RowError,
    SocketError,
    TransactionError,
)
from zmq_datasource.host.machine import ThisProcess
from zmq_datasource.options import WriteOptions
from zmq_datasource.options.parser import parse, texts_of

# What a message takes in memory besides its bytes.
_MESSAGE_OVERHEAD = 64
_MOST_BYTES = 1 << 30


@dataclass
class _Transaction:
    """Messages that are to be committed together.

    Attributes:
        number: Its number; None before the first attempt.
        size: The bytes that it takes in memory.
        asked: The attempts that may be in the log, because their commit was asked for.
    """

    number: int | None
    values: list[bytes]
    topics: list[bytes | None]
    size: int
    asked: set[str] = field(default_factory=set)


class Producer:
    """Sends messages to a ROUTER source (``zmq-datasource receive``, or a query), acknowledged.

    ```python
    with Producer("tcp://receiver:5558", name="billing-7") as producer:
        producer.send(b"both", topic="invoices")
        producer.send(b"or none")
        producer.flush()  # returns when both are in the log, on disk
    ```

    Each ``flush`` is a transaction: a reader sees all of its messages or none. Until then they are kept in memory, up
    to ``max_bytes``. A ``flush`` that fails has lost nothing and doubled nothing: call it again, and it finds out
    whether the commit took place. But if a ``TransactionError`` says that another program has used the name, close the
    producer. If a program dies before its flush was answered, ``last_committed`` tells its successor of the same name
    whether the commit took place. The methods may be called from any thread; calls wait for each other. A forked child
    cannot use a producer of its parent.

    Args:
        endpoint: Where the receiver is bound, as in ``tcp://host:port``.
        name: The producer's name, which is the ``publisher`` of its rows. Its transactions continue the numbers of that
            name (``sequence``). Only one producer at a time may use a name. By default, a new name.
        max_bytes: The most bytes that are kept in memory.
        options: Options of the sink: ``connect_timeout``, ``send_timeout``, ``zmq_*``; in snake_case or as documented.

    Raises:
        OptionError: An unknown option, or a value that is not allowed.
    """

    def __init__(
        self, endpoint: str, name: str | None = None, max_bytes: int = 32 << 20, **options: object
    ) -> None:
        given = texts_of(WriteOptions, options)
        self._options = parse(WriteOptions, {"socketType": "DEALER", "connect": endpoint, **given})
        if self._options.transaction_id is not None:
            raise OptionError(
                "transactionId is for df.write; a producer has a name, and numbers its transactions"
            )
        if not 0 < max_bytes <= _MOST_BYTES:
            raise OptionError(f"max_bytes={max_bytes} must be from 1 to {_MOST_BYTES}")
        self._name = anonymous_name("producer") if name is None else name
        if not is_name(self._name):
            raise OptionError(f"name={self._name!r} must have 1 to {MOST_NAME_BYTES} bytes of printable text")
        self._max_bytes = max_bytes
        self._process = ThisProcess(f"the Producer {self._name}")
        self._lock = threading.RLock()
        self._values: list[bytes] = []
        self._topics: list[bytes | None] = []
        self._kept_bytes = 0
        self._pending: _Transaction | None = None
        self._uplink: Uplink | None = None
        self._next: int | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Flush, unless the block has failed, and close. In a forked child, do neither."""
        if self._process.is_forked:
            return
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    @property
    def last_committed(self) -> int | None:
        """The number of the last transaction of this name in the log; None if there is none. Asks the receiver.

        Raises:
            SocketError: The receiver does not answer.
        """
        self._process.check()
        with self._lock:
            return self._connected().last_committed()

    def send(self, value: bytes | str, topic: bytes | str | None = None) -> None:
        """Keep a message for the next ``flush``.

        Raises:
            TransactionError: There is no room for it in ``max_bytes``: flush first.
            RowError: The message is larger than a receiver takes, or has a text that UTF-8 cannot encode.
        """
        self._process.check()
        data = _bytes(value, "value")
        name = None if topic is None else _bytes(topic, "topic")
        size = len(data) + len(name or b"") + _MESSAGE_OVERHEAD
        for what, frame in (("topic", name or b""), ("value", data)):
            if len(frame) > MOST_FRAME_BYTES:
                raise RowError(
                    f"sending a message with a {what} of {len(frame)} bytes: a receiver takes {MOST_FRAME_BYTES} at "
                    "most; send it in parts"
                )
        with self._lock:
            self._check_open()
            if self._kept_bytes and self._kept_bytes + size > self._max_bytes:
                raise TransactionError(
                    f"sending to {self._options.connect}: there is no room for a message of {len(data)} bytes in "
                    f"max_bytes={self._max_bytes}; flush first, or raise it"
                )
            self._values.append(data)
            self._topics.append(name)
            self._kept_bytes += size

    def flush(self) -> None:
        """Wait until all messages are in the receiver's log, on disk. After an error they are kept: call this again.

        Raises:
            SocketError: The messages are not there, or there was no answer.
            TransactionError, RowError: The receiver has refused, or another producer uses this name.
        """
        self._process.check()
        with self._lock:
            while self._pending is not None or self._values:
                if self._pending is None:
                    self._pending = _Transaction(None, self._values, self._topics, self._kept_bytes)
                    self._values, self._topics = [], []
                self._commit(self._pending)
                self._kept_bytes -= self._pending.size
                self._pending = None

    def close(self) -> None:
        """Drop what was not flushed, and disconnect. In a forked child, do nothing."""
        if self._process.is_forked:
            return
        with self._lock:
            self._closed = True
            self._values, self._topics, self._kept_bytes, self._pending = [], [], 0, None
            self._disconnect()

    def _check_open(self) -> None:
        if self._closed:
            raise OptionError("this producer is closed")

    def _connected(self) -> Uplink:
        self._check_open()
        if self._uplink is None:
            self._uplink = Uplink(self._options, self._name, 0).__enter__()
        self._uplink.begin_attempt()
        return self._uplink

    def _disconnect(self) -> None:
        if self._uplink is not None:
            self._uplink.__exit__(None, None, None)
            self._uplink = None

    def _commit(self, transaction: _Transaction) -> None:
        """Commit a transaction, unless it is committed already."""
        deadline = time.monotonic() + self._options.send_timeout
        while True:
            try:
                self._stage_and_commit(transaction)
                return
            except AttemptLostError:  # the receiver has restarted: send all of it again
                self._disconnect()
                if time.monotonic() >= deadline:
                    raise
            except SocketError:
                self._disconnect()
                raise

    def _stage_and_commit(self, transaction: _Transaction) -> None:
        uplink = self._connected()
        session, committed = uplink.session, uplink.last_committed()
        self._check_log(committed)
        if transaction.number is None:
            if self._next is None:
                self._next = 0 if committed is None else committed + 1
            transaction.number = self._next
        if committed is not None and committed >= transaction.number:
            self._check_ours(transaction, uplink, committed)
            return
        session.number = transaction.number
        columns: dict[str, pa.Array] = {"value": pa.array(transaction.values, pa.binary())}
        if any(topic is not None for topic in transaction.topics):
            columns["topic"] = pa.array(transaction.topics, pa.binary())
        uplink.send(pa.record_batch(columns))
        uplink.finish()
        transaction.asked.add(session.attempt)
        uplink.commit([session.attempt], session.rows, uplink.digest)
        self._check_ours(transaction, uplink, transaction.number)

    def _check_log(self, committed: int | None) -> None:
        """Check that the log has what this producer knows to be committed."""
        if self._next is not None and (-1 if committed is None else committed) < self._next - 1:
            raise TransactionError(
                f"sending as {self._name}: the receiver's log has "
                f"{'no transaction' if committed is None else f'transaction {committed}'} of this name, and "
                f"{self._next - 1} was acknowledged. Others are lost: the log is an older copy, or another. (Or the "
                "receiver has more producers than maxPublishers, and has forgotten this name: one that was silent for "
                "seven days, or that was chosen for a Producer without a name. Then nothing is lost.) Close this "
                "producer, and make a new one"
            )

    def _check_ours(self, transaction: _Transaction, uplink: Uplink, committed: int) -> None:
        """Check that this producer, and not another one of its name, has committed the last transaction.

        Args:
            committed: The number of the last transaction of this name in the log; ``session.by`` is its attempt.
        """
        if uplink.session.by in transaction.asked:
            self._next = committed + 1
            return
        raise TransactionError(
            f"committing transaction {transaction.number} of {self._name}: another producer of this name has put its "
            f"transaction {committed} into the log. Close this producer; see whether its last messages are in the log, "
            "and send those that are not there under another name"
        )


def _bytes(text: bytes | str, what: str) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise RowError(f"sending a {what} that UTF-8 cannot encode: {e}") from None
