"""The sending side of the acknowledged transport: one DEALER, one attempt or one commit at a time.

The rules:

* What the receiver has not taken yet is kept here (never more than its credit), and sent again after
  a reconnect from where the receiver says it is.
* An answer that does not come is asked for again; every request may be repeated.
* ``sendTimeout`` bounds the time without any progress. Then, and when the receiver no longer knows the
  attempt, the attempt has failed: whoever has the rows starts a new one.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import zmq

from zmq_datasource.acknowledged.digests import as_text, digest_of
from zmq_datasource.acknowledged.protocol import (
    UNKNOWN,
    Abort,
    Aborted,
    Commit,
    Committed,
    Credit,
    Data,
    End,
    Hello,
    Message,
    Refusal,
    Staged,
    Welcome,
    decode,
    encode,
    pack_columns,
    split_batch,
)
from zmq_datasource.acknowledged.transactions import conflict_with_later
from zmq_datasource.errors import NoPeerError, RowError, SendTimeoutError, TransactionError
from zmq_datasource.options import WriteOptions
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["AttemptLostError", "Uplink"]

# How long an answer may take before it is asked for once more: it may have been lost.
_ASK_AGAIN_SECONDS = 2.0
_MOST_ANSWER_BYTES = 1 << 20


class AttemptLostError(TransactionError):
    """The receiver does not have the attempt (any more); another one may succeed."""


class Uplink:
    """A connection to one receiver; use it in a ``with`` block, in one thread.

    Args:
        options: Endpoint, timeouts and socket options.
        producer, number: The transaction.
        partition: Which part of it this is.

    Attributes:
        attempt: Names this attempt at the part.
        rows: Sent so far.
        digest: Of the rows that were sent or only counted, of which that of the transaction is the sum.
        committed, by: The producer's last committed transaction and one of its attempts, as last heard.
        bytes: Of their columns.
        blocked_seconds: How long it waited for credit.
    """

    def __init__(self, options: WriteOptions, producer: str, number: int, partition: int = 0) -> None:
        self._options = options
        self._producer, self._number, self._partition = producer, number, partition
        self.attempt = uuid.uuid4().hex
        self.rows = 0
        self.bytes = 0
        self.digest = 0
        self.blocked_seconds = 0.0
        self._sent = 0
        self._received = 0
        self._kept: deque[tuple[int, list[Any]]] = deque()  # size and frames, from message _received on
        self._kept_bytes = 0
        self._credit = 0
        self._limit = 0
        self.committed: int | None = None
        self.by: str | None = None
        self._connections = 0
        self._greeted = False
        self._staged = False

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            NoPeerError: Nobody answered within ``connectTimeout``.
        """
        self._open = OpenSocket(
            SocketSpec.of_sink(self._options),
            lambda sock: sock.setsockopt(zmq.MAXMSGSIZE, _MOST_ANSWER_BYTES),
        )
        self._socket, self._watch = self._open.socket, self._open.watch
        try:
            self._wait_for_peer()
        except BaseException:
            self._open.close(linger=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._let_go()
        self._open.close(linger=200)  # what matters was acknowledged

    def _let_go(self) -> None:
        """Of the attempt, if it is not staged. Best effort: what is not given back now, the receiver takes in time."""
        if self._greeted and not self._staged:
            abort = Abort(producer=self._producer, number=self._number, attempts=[self.attempt])
            with suppress(zmq.ZMQError):
                self._socket.send_multipart(encode(abort), zmq.NOBLOCK)

    def _wait_for_peer(self) -> None:
        deadline = time.monotonic() + self._options.connect_timeout
        while not self._watch.peers:
            if time.monotonic() >= deadline:
                why = "".join(f" ({endpoint}: {reason})" for endpoint, reason in self._watch.refused.items())
                raise NoPeerError(
                    f"waiting {self._options.connect_timeout} for {self._options.connect}: no answer{why}. Start the "
                    "receiver, correct the endpoint, or raise connectTimeout"
                )
            self._watch.monitor.poll(100)
            self._watch.update()
            self._watch.redial()
        self._connections = self._watch.connections

    @property
    def peers(self) -> int:
        """Connections that are up: one, or none while it is made anew."""
        self._watch.update()
        return self._watch.peers

    @property
    def sndhwm(self) -> int:
        """The socket's send high-water mark, as libzmq says."""
        return int(self._socket.getsockopt(zmq.SNDHWM))

    # An attempt.

    def greet(self) -> bool:
        """Announce the attempt.

        Returns:
            Whether the transaction is committed already, so that nothing is to be sent; whether it is the same one,
            ``commit`` finds out.

        Raises:
            SendTimeoutError: No answer.
            ConflictError: A later transaction of this producer is committed.
            TransactionError: A refusal.
        """
        self.ask()
        if self.committed is not None and self._number < self.committed:
            raise conflict_with_later(self._producer, self._number, self.committed)
        return self._number == self.committed

    def ask(self) -> None:
        """Learn what the producer's last transaction is: ``committed`` and ``by``.

        Raises:
            SendTimeoutError, TransactionError: No answer, or a refusal.
        """
        self._greeted = True
        self._await(lambda m: isinstance(m, Welcome), self._hello, "a welcome")

    def renew(self) -> None:
        """Begin another attempt on the same connection, and give the old one back."""
        self._let_go()
        self.attempt = uuid.uuid4().hex
        self.rows = self.bytes = self.digest = 0
        self._sent = self._received = 0
        self._kept.clear()
        self._kept_bytes = 0
        self._greeted = self._staged = False

    def number(self, number: int) -> None:
        """Say which transaction this is about, before anything is sent."""
        self._number = number

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows: ``value`` and perhaps ``topic``, or ``frames``.

        Raises:
            SendTimeoutError: No credit came for ``sendTimeout``.
            TransactionError: The receiver refused, or does not know the attempt any more.
            RowError: A row larger than the receiver takes.
        """
        for piece in split_batch(batch):
            self.digest += digest_of(piece)
            columns, buffers = pack_columns(piece)
            sizes = [memoryview(buffer).nbytes for buffer in buffers]  # type: ignore[arg-type]
            if max(sizes) > self._limit:
                raise RowError(
                    f"sending a row of {max(sizes)} bytes: the receiver takes {self._limit} at most; send it in parts"
                )
            header = Data(
                attempt=self.attempt,
                producer=self._producer,
                number=self._number,
                partition=self._partition,
                index=self._sent,
                rows=piece.num_rows,
                columns=columns,
            )
            size = sum(sizes)
            self._wait_for_credit(size)
            frames = encode(header, buffers)
            self._kept.append((size, frames))
            self._kept_bytes += size
            self._sent += 1
            self.rows += piece.num_rows
            self.bytes += size
            self._write(frames)

    def count(self, batch: pa.RecordBatch) -> None:
        """Only take rows into the digest: their transaction is committed, and is to be compared."""
        for piece in split_batch(batch):
            self.digest += digest_of(piece)

    def _wait_for_credit(self, size: int) -> None:
        self._read(0)
        if self._kept and self._kept_bytes + size > self._credit:
            began = time.monotonic()
            self._await(
                lambda m: not self._kept or self._kept_bytes + size <= self._credit,
                self._hello,
                "credit",
                at_once=False,
            )
            self.blocked_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait until the receiver has all of the attempt on disk.

        Raises:
            SendTimeoutError, TransactionError: It has not.
        """
        end = End(
            attempt=self.attempt,
            producer=self._producer,
            number=self._number,
            partition=self._partition,
            messages=self._sent,
            rows=self.rows,
        )
        self._await(lambda m: not self._kept, self._hello, "the last credit", at_once=False)
        self._await(
            lambda m: isinstance(m, Staged) and m.attempt == self.attempt,
            lambda: self._write(encode(end)),
            "the end to be staged",
        )
        self._staged = True

    # A transaction.

    def commit(self, attempts: Sequence[str], rows: int, digest: int | None = None) -> bool:
        """Have the receiver publish these attempts.

        Args:
            rows, digest: Of the whole transaction, by which the receiver knows it when it is repeated.

        Returns:
            Whether it had done so before.

        Raises:
            SendTimeoutError: No answer: it may be committed or not; ask again.
            TransactionError: It refused.
        """
        request = Commit(
            producer=self._producer,
            number=self._number,
            attempts=list(attempts),
            rows=rows,
            digest=None if digest is None else as_text(digest),
        )
        answer = self._await(
            lambda m: isinstance(m, Committed) and (m.producer, m.number) == (self._producer, self._number),
            lambda: self._write(encode(request)),
            "the commit",
        )
        assert isinstance(answer, Committed)
        self.by = answer.by
        return answer.again

    def abort(self, attempts: Sequence[str]) -> None:
        """Have the receiver forget these attempts."""
        request = Abort(producer=self._producer, number=self._number, attempts=list(attempts))
        self._await(lambda m: isinstance(m, Aborted), lambda: self._write(encode(request)), "the abort")

    # Messages.

    def _await(
        self, done: Callable[[Message | None], bool], ask: Callable[[], None], what: str, at_once: bool = True
    ) -> Message | None:
        """Ask, and again after a reconnect or a while, until an answer (or what it changed) is there."""
        if at_once:
            ask()
        now = time.monotonic()
        deadline, again = now + self._options.send_timeout, now + _ASK_AGAIN_SECONDS
        received = self._received
        while True:
            message = self._read(min(100, max(1, round((again - now) * 1000))))
            if done(message):
                return message
            now = time.monotonic()
            if self._received > received:  # progress
                received = self._received
                deadline, again = now + self._options.send_timeout, now + _ASK_AGAIN_SECONDS
            if now >= deadline:
                raise SendTimeoutError(
                    f"waiting {self._options.send_timeout} for {what} from {self._options.connect}: nothing came. The "
                    "receiver is stopped, its log is full, or the network is gone; the transaction can be repeated"
                )
            if self._reconnected() or now >= again:
                again = now + _ASK_AGAIN_SECONDS
                if self._greeted and self._kept and ask != self._hello:
                    self._hello()
                ask()

    def _reconnected(self) -> bool:
        self._watch.update()
        self._watch.redial()
        if self._watch.connections == self._connections:
            return False
        self._connections = self._watch.connections
        return True

    def _read(self, wait_ms: int) -> Message | None:
        """Take in one answer, if one comes in time; all credit that is there in any case."""
        while self._socket.poll(wait_ms):
            message, _ = decode(self._socket.recv_multipart())
            match message:
                case Credit() if message.attempt == self.attempt:
                    self._taken(message.received)
                case Welcome() if message.attempt == self.attempt:
                    self._credit, self._limit, self.committed = (
                        message.credit,
                        message.limit,
                        message.committed,
                    )
                    self.by = message.by
                    self._resume(message.received)
                    return message
                case Refusal() if message.attempt in (None, self.attempt):
                    raise (AttemptLostError if message.code == UNKNOWN else TransactionError)(
                        f"sending transaction {self._number} of {self._producer} to {self._options.connect}: refused "
                        f"({message.code}): {message.reason}"
                    )
                case Staged() | Committed() | Aborted():
                    return message
            wait_ms = 0
        return None

    def _taken(self, received: int) -> None:
        while self._received < received and self._kept:
            size, _ = self._kept.popleft()
            self._kept_bytes -= size
            self._received += 1

    def _resume(self, received: int) -> None:
        """Send again what the receiver has not; it may have been lost with a connection."""
        if received < self._received:
            raise AttemptLostError(
                f"sending transaction {self._number} of {self._producer}: the receiver has lost what it had taken; it "
                "has restarted. The attempt is to be repeated"
            )
        self._taken(received)
        for _, frames in self._kept:
            self._write(frames)

    def _hello(self) -> None:
        self._write(encode(Hello(attempt=self.attempt, producer=self._producer)))

    def _write(self, frames: Sequence[Any]) -> None:
        deadline = time.monotonic() + self._options.send_timeout
        while True:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames) <= 2)
                return
            except zmq.Again:
                # sndhwm is far above what credit lets through, unless nobody is there.
                self._watch.update()
                if time.monotonic() >= deadline:
                    raise SendTimeoutError(
                        f"sending to {self._options.connect}: nobody has been there for {self._options.send_timeout}"
                    ) from None
                self._watch.monitor.poll(20)
