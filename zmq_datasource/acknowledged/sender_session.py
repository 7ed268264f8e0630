"""The sending side of the transaction protocol, as a session: one attempt or one commit at a time.

The rules:

* What the receiver has not taken yet is kept here (never more than its credit), and sent again after
  a reconnect from where the receiver says it is.
* An answer that does not come is asked for again; every request may be repeated.
* ``timeout`` bounds the time without any progress. Then, and when the receiver no longer knows the
  attempt, the attempt has failed: whoever has the rows starts a new one.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from zmq_datasource.acknowledged.digests import as_text
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
)
from zmq_datasource.errors import RowError, SendTimeoutError, TransactionError
from zmq_datasource.host.printable import printable
from zmq_datasource.messages.packed import pack_columns
from zmq_datasource.transport.link import Session

__all__ = ["AttemptLostError", "RefusedByReceiverError", "SenderSession"]

# How long an answer may take before it is asked for once more: it may have been lost.
ASK_AGAIN_SECONDS = 2.0
# Characters of a refusal's reason.
_MOST_REASON = 2000


class AttemptLostError(TransactionError):
    """The receiver does not have the attempt (any more); another one may succeed."""


class RefusedByReceiverError(TransactionError):
    """The receiver refused a message.

    Attributes:
        code: The code of the refusal (docs/protocol.md).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


_Answered: TypeAlias = Callable[[Message | None], bool]


@dataclass
class _Question:
    """A request whose answer has not come yet.

    Attributes:
        what: For people.
        request: What to say for it.
        answered: Whether this message, or what came before it, is the answer.
        deadline: When it is given up, unless there is progress.
        again: When it is asked once more.
    """

    what: str
    request: Message
    answered: _Answered
    deadline: float
    again: float


class SenderSession(Session):
    """A conversation with one receiver.

    Every request (``ask``, ``end``, ...) is waited for until ``waiting`` is False; ``receive`` and ``wake`` raise
    what becomes of it: SendTimeoutError, AttemptLostError, or TransactionError for a refusal.

    Args:
        producer, number: The transaction.
        partition: Which part of it this is.
        timeout: Seconds without progress.
        receiver: Its name in messages.

    Attributes:
        attempt: Names this attempt at the part.
        rows, bytes: Sent so far; the bytes of their columns.
        kept, kept_bytes: What the receiver has not taken yet: size and frames.
        credit: How many bytes of data may be on their way.
        committed, by: The producer's last committed transaction and one of its attempts, as last heard.
        again: Whether what was committed had been before.
    """

    def __init__(self, producer: str, number: int, partition: int, timeout: float, receiver: str) -> None:
        super().__init__()
        self._producer, self.number, self._partition = producer, number, partition
        self._timeout = timeout
        self._receiver = receiver
        self.credit = 0
        self._limit = 0
        self.committed: int | None = None
        self.by: str | None = None
        self.again = False
        self._begin()

    def _begin(self) -> None:
        self.attempt = uuid.uuid4().hex
        self.rows = self.bytes = 0
        self._sent = self._received = 0
        self.kept: deque[tuple[int, Sequence[Any]]] = deque()  # from message _received on
        self.kept_bytes = 0
        self._greeted = self._staged = False
        self._question: _Question | None = None

    def renew(self) -> None:
        """Begin another attempt on the same connection, and give the old one back."""
        self.outbox.clear()
        self.let_go()
        self._begin()

    def let_go(self) -> None:
        """Of the attempt, if it is not staged. Nobody waits: if it does not arrive, the receiver lets go in time."""
        if self._greeted and not self._staged:
            self._say(Abort(producer=self._producer, number=self.number, attempts=[self.attempt]))

    # Rows.

    def pack(self, piece: pa.RecordBatch) -> tuple[int, Sequence[Any]]:
        """Rows as a data message, to be given to ``push``; its size and frames.

        Raises:
            RowError: A row larger than the receiver takes.
        """
        columns, buffers = pack_columns(piece)
        sizes = [memoryview(buffer).nbytes for buffer in buffers]  # type: ignore[arg-type]
        if max(sizes) > self._limit:
            raise RowError(
                f"sending a row of {max(sizes)} bytes: the receiver takes {self._limit} at most; send it in parts"
            )
        header = Data(
            attempt=self.attempt,
            producer=self._producer,
            number=self.number,
            partition=self._partition,
            index=self._sent,
            rows=piece.num_rows,
            columns=columns,
        )
        return sum(sizes), encode(header, buffers)

    def has_room(self, size: int) -> bool:
        """Whether there is credit for so many bytes; one message may always be on its way."""
        return not self.kept or self.kept_bytes + size <= self.credit

    def push(self, size: int, frames: Sequence[Any], rows: int) -> None:
        """Send a packed message, for which there is room."""
        self.kept.append((size, frames))
        self.kept_bytes += size
        self._sent += 1
        self.rows += rows
        self.bytes += size
        self.outbox.append(frames)

    # Requests.

    @property
    def waiting(self) -> bool:
        """Whether something that was asked for has not come yet."""
        return self._question is not None

    def ask(self, now: float) -> None:
        """Announce the attempt, and learn what the producer's last transaction is."""
        self._greeted = True
        self._ask("a welcome", self._hello, lambda m: isinstance(m, Welcome), now)

    def wait_for_room(self, size: int, now: float) -> None:
        """Wait until the credit allows so many bytes more."""
        self._wait("credit", self._hello, lambda _: self.has_room(size), now)

    def wait_until_taken(self, now: float) -> None:
        """Until the receiver has taken all that was sent."""
        self._wait("the last credit", self._hello, lambda _: not self.kept, now)

    def end(self, now: float) -> None:
        """Have the receiver put the attempt on its disk."""
        end = End(
            attempt=self.attempt,
            producer=self._producer,
            number=self.number,
            partition=self._partition,
            messages=self._sent,
            rows=self.rows,
        )
        self._ask("the end to be staged", end, lambda m: isinstance(m, Staged), now)

    def commit(self, attempts: Sequence[str], rows: int, digest: int | None, now: float) -> None:
        """Have the receiver publish these attempts; see ``Uplink.commit``."""
        request = Commit(
            producer=self._producer,
            number=self.number,
            attempts=list(attempts),
            rows=rows,
            digest=None if digest is None else as_text(digest),
        )
        self._ask("the commit", request, lambda m: isinstance(m, Committed), now)

    def abort(self, attempts: Sequence[str], now: float) -> None:
        """Have the receiver forget these attempts."""
        request = Abort(producer=self._producer, number=self.number, attempts=list(attempts))
        self._ask("the abort", request, lambda m: isinstance(m, Aborted), now)

    def _ask(self, what: str, request: Message, answered: _Answered, now: float) -> None:
        self._wait(what, request, answered, now)
        self._say(request)

    def _wait(self, what: str, request: Message, answered: _Answered, now: float) -> None:
        """For what comes unasked; the request is for later, if it does not."""
        if not answered(None):
            self._question = _Question(what, request, answered, now + self._timeout, now + ASK_AGAIN_SECONDS)

    # What happens.

    def wake(self, now: float) -> None:
        """Ask again if it is time.

        Raises:
            SendTimeoutError: There was no progress for too long.
        """
        self._check_deadline(now)
        if self._question is not None and now >= self._question.again:
            self._ask_again(now)

    def connected(self, now: float) -> None:
        self.outbox.clear()  # it was for the connection before, and all of it is said again
        self._ask_again(now)

    def _ask_again(self, now: float) -> None:
        question = self._question
        if self._greeted and self.kept and (question is None or question.request != self._hello):
            self._say(self._hello)
        if question is not None:
            question.again = now + ASK_AGAIN_SECONDS
            self._say(question.request)

    def _check_deadline(self, now: float) -> None:
        if self._question is not None and now >= self._question.deadline:
            raise SendTimeoutError(
                f"waiting {self._timeout} for {self._question.what} from {self._receiver}: nothing came. The "
                "receiver is stopped, its log is full, or the network is gone; the transaction can be repeated"
            )

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take in what the receiver has sent.

        Raises:
            AttemptLostError: It does not have the attempt any more.
            TransactionError: A refusal.
            SendTimeoutError: There was no progress for too long.
        """
        message, _ = decode(frames)
        received = self._received
        answer: Message | None = None
        match message:
            case Credit() if message.attempt == self.attempt:
                self._take(message.received)
            case Welcome() if message.attempt == self.attempt:
                self.credit, self._limit = message.credit, message.limit
                self.committed, self.by = message.committed, message.by
                self._resume(message.received)
                answer = message
            case Refusal() if message.attempt in (None, self.attempt):
                refused = (
                    f"sending transaction {self.number} of {self._producer} to {self._receiver}: refused "
                    f"({printable(message.code, 64)}): {printable(message.reason, _MOST_REASON)}"
                )
                if message.code == UNKNOWN:
                    raise AttemptLostError(refused)
                raise RefusedByReceiverError(message.code, refused)
            case Staged() if message.attempt == self.attempt:
                self._staged, answer = True, message
            case Committed() if (message.producer, message.number) == (self._producer, self.number):
                self.by, self.again, answer = message.by, message.again, message
            case Aborted() if (message.producer, message.number) == (self._producer, self.number):
                answer = message
        question = self._question
        if question is not None and question.answered(answer):
            self._question = None
        elif question is not None and self._received > received:  # progress
            question.deadline, question.again = now + self._timeout, now + ASK_AGAIN_SECONDS
        self._check_deadline(now)

    def _take(self, received: int) -> None:
        while self._received < received and self.kept:
            size, _ = self.kept.popleft()
            self.kept_bytes -= size
            self._received += 1

    def _resume(self, received: int) -> None:
        """Send again what the receiver has not; it may have been lost with a connection."""
        if received < self._received:
            raise AttemptLostError(
                f"sending transaction {self.number} of {self._producer}: the receiver has lost what it had taken; it "
                "has restarted. The attempt is to be repeated"
            )
        self._take(received)
        self.outbox.extend(frames for _, frames in self.kept)

    @property
    def _hello(self) -> Hello:
        return Hello(attempt=self.attempt, producer=self._producer)

    def _say(self, message: Message) -> None:
        self.outbox.append(encode(message))
