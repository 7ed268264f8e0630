"""The receiving side of the transaction protocol, without its socket: messages and the time in, answers out.

The rules:

* A commit is answered when the chunk with the whole transaction is on disk. A chunk is one file that appears at
  once, so a reader sees all of a transaction or none of it. Transactions that are committed in the same moment share a
  chunk.
* Every message may be repeated, because answers get lost: a staged attempt stays staged, a committed transaction stays
  committed (``again``), and an unknown attempt is refused.
* No message ends the receiver. A message that cannot be processed is refused with a reason, also after an unexpected
  error, which the receiver's log explains.

``attempts`` has the rules for the rows before the commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.attempts import Attempts
from zmq_datasource.acknowledged.protocol import (
    Abort,
    Aborted,
    Commit,
    Committed,
    Data,
    End,
    Hello,
    Message,
    decode,
)
from zmq_datasource.acknowledged.sessions import AcceptorTerms
from zmq_datasource.acknowledged.staging import Staging
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Committer, Done, TransactionLog
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import ProtocolError, RefusedError
from zmq_datasource.host import failpoints
from zmq_datasource.transport.authentication import any_name

__all__ = ["AcceptorTerms", "Reception"]


class Reception:
    """Processes the messages of senders; for one thread. ``now`` is in monotonic seconds.

    The timeouts of senders stand still while nothing is received (``extend_timeouts``).

    A LogError that a method raises is about the log, and not about one message.

    Args:
        terms: The limits.
        counters: Counts rows, malformed messages and errors.
        files: Where attempts are staged.
        transactions: Which transactions are committed; restored before the first message.
        log: Where transactions are committed.
        forcing: Forces files to the disk in other threads, because that takes long.
        clock: Seconds since the epoch, for the column ``timestamp``.

    Attributes:
        attempts: The attempts that are received or staged, and not committed.
    """

    def __init__(
        self,
        terms: AcceptorTerms,
        counters: SourceCounters,
        files: AttemptFiles,
        transactions: CommittedTransactions,
        log: TransactionLog,
        forcing: Executor,
        clock: Callable[[], float] = time.time,
    ) -> None:
        staging = Staging(files)
        self._transactions = transactions
        self._committer = Committer(counters, staging, transactions, log)
        self.attempts = Attempts(terms, counters, staging, transactions, self._committer, forcing, clock)
        self._answers = self.attempts.answers
        self._last_call = self._paused_seconds = 0.0

    def recover(self, now: float) -> None:
        """Find the attempts that the writer before has staged. Called once, before the first message.

        Raises:
            LogError: A file cannot be read or deleted.
        """
        self._last_call = now
        self.attempts.recover(now)

    def close(self) -> None:
        """Delete the files of unfinished attempts."""
        self.attempts.close()

    @property
    def busy(self) -> bool:
        """Whether an answer waits for another thread, and needs no further message."""
        return self._committer.busy or self.attempts.busy

    def answers(self) -> list[tuple[bytes, list[Any]]]:
        """The answers since the last call: to which peer, and the frames."""
        return self._answers.take()

    # Time.

    def _without_pauses(self, now: float) -> float:
        """The time by a clock that stands still in pauses."""
        self._last_call = now
        return now - self._paused_seconds

    def check_timeouts(self, now: float) -> None:
        """Discard the attempts of silent senders, and attempts that are never committed. Call it often."""
        self._answers.flush()
        self.attempts.check_timeouts(self._without_pauses(now))

    def extend_timeouts(self, now: float) -> None:
        """Take the time since the last call out of all timeouts. Call it often while nothing is received."""
        self._paused_seconds += now - self._last_call
        self.answer_completed(now)

    def answer_completed(self, now: float) -> None:
        """Answer for the files and chunks that are on disk by now. Call it often."""
        now = self._without_pauses(now)
        self.attempts.retry_refused(now)
        self.attempts.answer_staged(now)
        for done in self._committer.done():
            with self._answers.refusing(done.peers[0]):
                self._committed(done)

    def cut(self) -> None:
        """Have the transactions that were appended since the last call written, as one chunk."""
        self._committer.cut()

    # Messages.

    def receive(
        self,
        peer: bytes,
        frames: Sequence[bytes],
        now: float,
        may_use: Callable[[str], bool] = any_name,
    ) -> None:
        """Process a message, or refuse it.

        Args:
            may_use: Whether the peer may commit under the name of this producer.
        """
        with self._answers.refusing(peer):
            message, buffers = decode(frames)
            name = getattr(message, "producer", None)
            if name is not None and not may_use(name):
                raise RefusedError(
                    "forbidden", f"the name {name!r} belongs to another key (allowedClients at the receiver)"
                )
            with self._answers.refusing(peer, getattr(message, "attempt", None)):
                self._process(peer, message, buffers, self._without_pauses(now))

    def _process(self, peer: bytes, message: Message, buffers: Sequence[bytes], now: float) -> None:
        match message:
            case Hello():
                self.attempts.hello(peer, message, now)
            case Data():
                self.attempts.data(peer, message, buffers, now)
            case End():
                self.attempts.end(peer, message, now)
            case Commit():
                if self._committer.commit(peer, message):
                    self._committed(Done(message, [peer], again=True))
            case Abort(producer=producer, number=number):
                self.attempts.discard(producer, number, message.attempts)
                self._answers.add(peer, Aborted(producer=producer, number=number))
            case _:
                raise ProtocolError(f"a {type(message).__name__} message is for a sender")

    def _committed(self, done: Done) -> None:
        """Answer for a transaction, and discard the other attempts for it and for those before it."""
        failpoints.reach("acknowledged.committed.before_answer")
        producer, number = done.message.producer, done.message.number
        self.attempts.discard_through(producer, number)
        last = self._transactions.last(producer)
        by = None if last is None else last.attempt
        for peer in done.peers:
            self._answers.add(peer, Committed(producer=producer, number=number, again=done.again, by=by))
        failpoints.reach("acknowledged.committed.after_answer")
