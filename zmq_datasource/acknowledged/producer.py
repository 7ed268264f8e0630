"""A small client of the transaction protocol, for programs outside Spark."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import pyarrow as pa

from zmq_datasource.acknowledged.protocol import (
    INTERNAL,
    MOST_FRAME_BYTES,
    MOST_NAME_BYTES,
    anonymous_name,
    is_name,
)
from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.errors import (
    AttemptLostError,
    OptionError,
    RefusedByReceiverError,
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


def _current_task() -> object:
    """The asyncio task that runs in this thread; None if there is none."""
    asyncio = sys.modules.get("asyncio")  # without it there is no task, and it takes a moment to import
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


@dataclass
class _Transaction:
    """Messages that are to be committed together.

    Attributes:
        number: Its number; None before the first attempt.
        size: The bytes that it takes in memory.
        is_block: Whether its messages come from a ``transaction()`` block.
        asked: The attempts that may be in the log: their commit was asked for, and was not refused.
    """

    number: int | None
    values: list[bytes]
    topics: list[bytes | None]
    size: int
    is_block: bool
    asked: set[str] = field(default_factory=set)


class Producer:
    """Sends messages to a ROUTER source (``zmq-datasource receive``, or a query), acknowledged.

    ```python
    with Producer("tcp://receiver:5558", name="billing-7") as producer:
        producer.send(b"one", topic="invoices")
        producer.flush()  # returns when all that was sent is in the log, on disk
        with producer.transaction():
            producer.send(b"both")
            producer.send(b"or none")
    ```

    Messages that are not flushed are kept in memory, up to ``max_bytes``. When there are more, ``send`` flushes by
    itself; in a transaction it raises an error. A ``flush`` that fails has lost nothing and doubled nothing: call it
    again, and it finds out whether the commit took place. A transaction that the receiver refuses is dropped: run its
    block again. But if a ``TransactionError`` says that another program has used the name, close the producer. If a
    program dies before its flush was answered, ``last_committed`` tells its successor of the same name whether the
    commit took place. The methods may be called from any thread; calls wait for each other. In asyncio, a task that
    sends, flushes or begins a transaction while another task is in ``transaction()`` gets an error. A forked child
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
        self._in_block = False
        self._task: object = None  # the asyncio task of the open block
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
        """Keep a message for the next ``flush``. If there is no room, flush first.

        Raises:
            SocketError: The flush has failed, and the message was not taken.
            TransactionError: The open transaction is larger than ``max_bytes``, or it is that of another asyncio task.
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
            self._check_task()
            if self._kept_bytes and self._kept_bytes + size > self._max_bytes:
                if self._in_block:
                    raise TransactionError(
                        f"sending in a transaction: it has more than max_bytes={self._max_bytes}; commit in smaller "
                        "transactions, or raise it"
                    )
                self.flush()
            self._values.append(data)
            self._topics.append(name)
            self._kept_bytes += size

    def flush(self) -> None:
        """Wait until all messages are in the receiver's log, on disk.

        Raises:
            SocketError: The messages are not there, or there was no answer. They are kept: call this again.
            TransactionError, RowError: The receiver has refused, or another producer uses this name. Messages from
                outside of a ``transaction()`` are kept. A transaction is dropped, unless an earlier commit may still
                have put it into the log. Then the next ``transaction()`` says so.
        """
        self._process.check()
        with self._lock:
            self._check_task()
            if self._in_block:
                raise TransactionError("flushing within a transaction: leave its block to commit it")
            self._flush(is_block=False)

    def _flush(self, is_block: bool) -> None:
        while self._pending is not None or self._values:
            if self._pending is None:
                self._pending = _Transaction(None, self._values, self._topics, self._kept_bytes, is_block)
                self._values, self._topics = [], []
            try:
                self._commit(self._pending)
            except (TransactionError, RowError):
                if self._pending.is_block and not self._pending.asked:
                    self._forget_pending()
                raise
            self._forget_pending()

    def _forget_pending(self) -> None:
        if self._pending is not None:
            self._kept_bytes -= self._pending.size
            self._pending = None

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """Commit all messages of the block together at its end. If the block fails, none of them is committed.

        Messages from before the block are flushed first.

        Raises:
            TransactionError, RowError: The receiver has refused the transaction. It is dropped, and the block can be
                run again. Or it is not known whether the transaction before this one is in the log: then the block does
                not run.
            SocketError: The commit was not answered. The transaction is kept, and ``flush`` commits it: do not run the
                block again before ``flush`` has returned.
        """
        self._process.check()
        with self._lock:
            if self._pending is not None and self._pending.is_block:
                raise TransactionError(
                    "beginning a transaction: it is not known whether the transaction before it is in the log. Call "
                    "flush(), which commits it if it is not there, and then begin"
                )
            self.flush()
            self._in_block, self._task = True, _current_task()
            try:
                yield self
            except BaseException:
                self._values, self._topics, self._kept_bytes = [], [], 0
                raise
            finally:
                self._in_block = False
            self._flush(is_block=True)

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

    def _check_task(self) -> None:
        """Refuse another asyncio task than that of the open transaction: its message would be part of it."""
        if self._in_block and _current_task() is not self._task:
            raise TransactionError(
                "using a producer while another asyncio task is in transaction(): wait for the end of its block, or "
                "make a producer for each task"
            )

    def _connected(self) -> Uplink:
        self._check_open()
        if self._uplink is None:
            uplink = Uplink(self._options, self._name, 0)
            self._uplink = uplink.__enter__()
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
        try:
            uplink.commit([session.attempt], session.rows, uplink.digest)
        except (AttemptLostError, RefusedByReceiverError) as e:
            # After an unexpected error of the receiver, the transaction may be in the log.
            if not (isinstance(e, RefusedByReceiverError) and e.code == INTERNAL):
                transaction.asked.discard(session.attempt)
            raise
        self._check_ours(transaction, uplink, transaction.number)

    def _check_log(self, committed: int | None) -> None:
        """Check that the log has what this producer knows to be committed."""
        if self._next is not None and (-1 if committed is None else committed) < self._next - 1:
            raise TransactionError(
                f"sending as {self._name}: the receiver's log has "
                f"{'no transaction' if committed is None else f'transaction {committed}'} of this name, and "
                f"{self._next - 1} was acknowledged. Others are lost: the log is an older copy, or another. (Or the "
                "name was silent for seven days, and forgotten; then nothing is lost.) Close this producer, and make "
                "a new one"
            )

    def _check_ours(self, transaction: _Transaction, uplink: Uplink, committed: int) -> None:
        """Check that this producer, and not another one of its name, has committed the last transaction.

        Args:
            committed: The number of the last transaction of this name in the log; ``session.by`` is its attempt.
        """
        number = transaction.number
        assert number is not None
        if uplink.session.by in transaction.asked:
            self._next = number + 1
            return
        if committed == number:
            transaction.asked.clear()  # the number is another transaction's
        whether = (
            "it is not known whether this one is there too" if transaction.asked else "this one is not there"
        )
        raise TransactionError(
            f"committing transaction {number} of {self._name}: another producer of this name has put its transaction "
            f"{committed} into the log; {whether}. Close this producer, and send what it has not committed under "
            "another name"
        )


def _bytes(text: bytes | str, what: str) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise RowError(f"sending a {what} that UTF-8 cannot encode: {e}") from None
