"""A connection of the sending side of the transaction protocol, whose calls return when they are answered.

``sender_session`` has the rules of the conversation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.acknowledged.digests import digest_of
from zmq_datasource.acknowledged.protocol import split_batch
from zmq_datasource.acknowledged.sender_session import AttemptLostError, SenderSession
from zmq_datasource.acknowledged.transactions import conflict_with_later
from zmq_datasource.errors import NoPeerError, SendTimeoutError
from zmq_datasource.host import failpoints
from zmq_datasource.options import WriteOptions
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.spec import SocketSpec, frame_limit

__all__ = ["AttemptLostError", "Uplink"]

_MOST_ANSWER_BYTES = 1 << 20


class Uplink:
    """A connection to one receiver; use it in a ``with`` block, in one thread.

    Args:
        options: Endpoint, timeouts and socket options.
        producer, number: The transaction.
        partition: Which part of it this is.

    Attributes:
        session: The attempt, and what is known of the producer's transactions.
        digest: Of the rows that were sent or only counted, of which that of the transaction is the sum.
        blocked_seconds: How long it waited until more data might be on the way.
    """

    def __init__(self, options: WriteOptions, producer: str, number: int, partition: int = 0) -> None:
        self._options = options
        self._producer = producer
        self.session = SenderSession(producer, number, partition, options.send_timeout, str(options.connect))
        self._link = Link(
            SocketSpec.of_sink(options),
            self.session,
            lambda sock: sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(_MOST_ANSWER_BYTES)),
        )
        self.digest = 0
        self.blocked_seconds = 0.0

    def __enter__(self) -> Self:
        """Connect to the receiver.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            NoPeerError: Nobody answered within ``connectTimeout``.
        """
        self._link.open()
        try:
            self._wait_for_peer()
        except BaseException:
            self._link.close(linger=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.let_go()
        with suppress(zmq.ZMQError):
            self._link.send_outbox()
        self._link.close(linger=200)  # what matters was acknowledged

    def _wait_for_peer(self) -> None:
        watch = self._link.watch
        deadline = time.monotonic() + self._options.connect_timeout
        while not watch.peers:
            if time.monotonic() >= deadline:
                why = "".join(f" ({endpoint}: {reason})" for endpoint, reason in watch.refused.items())
                raise NoPeerError(
                    f"waiting {self._options.connect_timeout} for {self._options.connect}: no answer{why}. Start the "
                    "receiver, correct the endpoint, or raise connectTimeout"
                )
            watch.monitor.poll(100)
            self._link.check_connection()

    @property
    def peers(self) -> int:
        """Connections that are up: one, or none while it is made anew."""
        self._link.watch.update()
        return self._link.watch.peers

    @property
    def sndhwm(self) -> int:
        """The socket's send high-water mark, as libzmq says."""
        return int(self._link.socket.getsockopt(zmq.SNDHWM))

    # An attempt.

    def greet(self) -> bool:
        """Announce the attempt, and wait for the receiver's welcome.

        Returns:
            Whether the transaction is committed already, so that nothing is to be sent; whether it is the same one,
            ``commit`` finds out.

        Raises:
            SendTimeoutError: No answer.
            ConflictError: A later transaction of this producer is committed.
            TransactionError: A refusal.
        """
        committed, number = self.ask(), self.session.number
        if committed is not None and number < committed:
            raise conflict_with_later(self._producer, number, committed)
        return number == committed

    def ask(self) -> int | None:
        """The number of the producer's last transaction; None if there is none.

        Raises:
            SendTimeoutError, TransactionError: No answer, or a refusal.
        """
        self.session.ask(time.monotonic())
        self._wait()
        return self.session.committed

    def renew(self) -> None:
        """Begin another attempt on the same connection, and give the old one back."""
        self.session.renew()
        self.digest = 0

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows: ``value`` and perhaps ``topic``, or ``frames``.

        Raises:
            SendTimeoutError: No data was taken for ``sendTimeout``.
            TransactionError: The receiver refused, or does not know the attempt any more.
            RowError: A row larger than the receiver takes.
        """
        for piece in split_batch(batch):
            self.digest += digest_of(piece)
            size, frames = self.session.pack(piece)
            self._wait_for_room(size)
            failpoints.reach("acknowledged.data.before_send")
            self.session.push(size, frames, piece.num_rows)
            self._flush()

    def count(self, batch: pa.RecordBatch) -> None:
        """Take rows into the digest and the account, and send none: their transaction is committed already."""
        for piece in split_batch(batch):
            self.digest += digest_of(piece)
            self.session.bytes += self.session.pack(piece)[0]

    def _wait_for_room(self, size: int) -> None:
        self._link.receive_all()
        began = time.monotonic()
        self.session.wait_for_room(size, began)
        if self.session.waiting:
            self._wait()
            self.blocked_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait until the receiver has all of the attempt on disk.

        Raises:
            SendTimeoutError, TransactionError: It has not.
        """
        self.session.wait_until_taken(time.monotonic())
        self._wait()
        self.session.end(time.monotonic())
        self._wait()
        failpoints.reach("acknowledged.end.after_staged")

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
        failpoints.reach("acknowledged.commit.before_send")
        self.session.commit(attempts, rows, digest, time.monotonic())
        self._wait()
        failpoints.reach("acknowledged.commit.after_committed")
        return self.session.again

    def abort(self, attempts: Sequence[str]) -> None:
        """Have the receiver forget these attempts."""
        self.session.abort(attempts, time.monotonic())
        self._wait()

    # Messages.

    def carry(self, seconds: float = TICK_SECONDS) -> None:
        """Take an answer, if one comes within so many seconds, and send what is due."""
        self._link.run_once(seconds)

    def _wait(self) -> None:
        """For the answer to what the session was asked last."""
        while self.session.waiting:
            self.carry()

    def _flush(self) -> None:
        """Give libzmq all that is to be sent: it takes more than may be on the way, unless there is no connection."""
        self._link.send_outbox()
        deadline = time.monotonic() + self._options.send_timeout
        while self.session.outbox:
            if time.monotonic() >= deadline:
                raise SendTimeoutError(
                    f"sending to {self._options.connect}: nobody has been there for {self._options.send_timeout}"
                )
            self.carry(0.02)
