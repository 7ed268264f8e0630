"""A connection of a sender of transactions. Its requests return when the receiver has answered.

The rules of the conversation are in ``sender_session``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.acknowledged.protocol import digest_of, split_batch
from zmq_datasource.acknowledged.sender_session import SenderSession
from zmq_datasource.errors import NoPeerError
from zmq_datasource.host import failpoints
from zmq_datasource.options import WriteOptions
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.spec import SocketSpec, frame_limit

_MOST_ANSWER_BYTES = 1 << 20


class Uplink:
    """A connection to one receiver; use it in a ``with`` block, in one thread.

    Each method that asks raises SendTimeoutError without an answer, TransactionError for a refusal, and
    AttemptLostError if the receiver does not have the attempt any more.

    Args:
        options: Endpoint, timeouts and socket options.
        producer, number: The transaction.
        partition: Which part of it this is.

    Attributes:
        session: The attempt, and the producer's last transaction.
        digest: Of the rows that were sent or counted. The sum over all parts is the digest of the transaction.
        blocked_seconds: How long ``send`` has waited for the receiver.
    """

    def __init__(self, options: WriteOptions, producer: str, number: int, partition: int = 0) -> None:
        self._options = options
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
            OptionError, EndpointError: The socket cannot be opened with these options.
            NoPeerError: The receiver has not answered within ``connectTimeout``.
        """
        self._link.open()
        try:
            self._wait_for_peer()
        except BaseException:
            self._link.close(linger=0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close(linger=0)

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

    def greet(self) -> bool:
        """Announce the attempt, and wait for the receiver's answer.

        Returns:
            Whether a transaction of this number, or a later one, is committed already, so that no rows need to be sent.
            ``commit`` then checks that it is the last one, with the same rows.
        """
        committed = self.last_committed()
        return committed is not None and committed >= self.session.number

    def last_committed(self) -> int | None:
        """Ask the receiver for the number of the producer's last transaction. None if there is none."""
        self.session.greet(time.monotonic())
        self._wait()
        return self.session.committed

    def begin_attempt(self) -> None:
        """Give up the attempt, unless it is staged, and begin another one on the same connection."""
        self.session.begin_attempt()
        self.digest = 0

    def send(self, batch: pa.RecordBatch) -> None:
        """Send rows with the columns ``value`` and perhaps ``topic``, or ``frames``. Wait for the data before them.

        Raises:
            RowError: A row is larger than the receiver takes.
        """
        for piece in split_batch(batch):
            self.digest += digest_of(piece)
            size, frames = self.session.pack(piece)
            began = time.monotonic()
            self._wait()
            self.blocked_seconds += time.monotonic() - began
            failpoints.reach("acknowledged.data.before_send")
            self.session.send_packed(size, frames, piece.num_rows, time.monotonic())
            self._link.send_outbox()

    def count(self, batch: pa.RecordBatch) -> None:
        """Add rows to the digest and the account, but do not send them: their transaction is committed already."""
        for piece in split_batch(batch):
            self.digest += digest_of(piece)
            self.session.bytes += self.session.pack(piece)[0]

    def finish(self) -> None:
        """End the attempt, and wait until the receiver has all of it on disk."""
        self._wait()
        self.session.end(time.monotonic())
        self._wait()
        failpoints.reach("acknowledged.end.after_staged")

    def commit(self, attempts: Sequence[str], rows: int, digest: int | None = None) -> bool:
        """Commit these attempts as one transaction. Without an answer it may be committed or not: call this again.

        Args:
            rows, digest: Of the whole transaction. By them the receiver recognises a repeated transaction.

        Returns:
            Whether the transaction was committed before.
        """
        failpoints.reach("acknowledged.commit.before_send")
        self.session.commit(attempts, rows, digest, time.monotonic())
        self._wait()
        failpoints.reach("acknowledged.commit.after_committed")
        return self.session.again

    def _wait(self) -> None:
        """Wait for the answer to the session's last request."""
        self.session.start_timeout(time.monotonic())
        while self.session.waiting:
            self._link.run_once(TICK_SECONDS)
