"""The sending side of the transaction protocol, as a state machine: one attempt or one commit at a time.

The rules:

* One request is open at a time; a data message is one, too. Without an answer, and on a new connection, it is sent
  again, and has the same answer.
* A request fails after ``timeout``, and an attempt when the receiver no longer knows it. Then the caller may begin
  another attempt (``begin_attempt``).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from zmq_datasource.acknowledged.protocol import (
    MOST_FRAME_BYTES,
    UNKNOWN,
    Commit,
    Committed,
    Data,
    End,
    Hello,
    Message,
    Refusal,
    Staged,
    Taken,
    Welcome,
    as_text,
    decode,
    encode,
)
from zmq_datasource.errors import (
    AttemptLostError,
    RowError,
    SendTimeoutError,
    TransactionError,
)
from zmq_datasource.host.log_lines import printable
from zmq_datasource.messages.packed import pack_columns
from zmq_datasource.transport.session import RequestSession

# After this time without an answer a request is repeated, because the answer may have been lost; earlier if the timeout
# is short.
ASK_AGAIN_SECONDS = 2.0
# The characters of a refusal's reason that are shown.
_MOST_REASON = 2000


@dataclass
class _Question:
    """A request whose answer has not come yet.

    Attributes:
        what: What is waited for, in words.
        frames: The message to repeat.
        answer: The kind of message that answers it.
        deadline: When it fails.
    """

    what: str
    frames: Sequence[Any]
    answer: type[Message]
    deadline: float


class SenderSession(RequestSession):
    """A conversation with one receiver.

    After a request (``greet``, ``send_packed``, ``end``, ``commit``) wait until ``waiting`` is False. If the request
    fails, ``receive`` or ``wake`` raises SendTimeoutError, AttemptLostError, or TransactionError for a refusal.

    Args:
        producer, number: The transaction.
        partition: Which part of it this is.
        timeout: Seconds after which a request fails.
        receiver: The receiver's name in errors.

    Attributes:
        attempt: The id of this attempt.
        rows, bytes: Sent so far; the bytes of their columns.
        committed, by: The producer's last committed transaction and one of its attempts, as last heard.
        again: Whether the committed transaction was in the log before the commit was asked for.
        most_frame_bytes: The size of the largest column of a row that the receiver takes.
    """

    most_frame_bytes = MOST_FRAME_BYTES

    def __init__(self, producer: str, number: int, partition: int, timeout: float, receiver: str) -> None:
        super().__init__(min(ASK_AGAIN_SECONDS, timeout / 2))
        self._producer, self.number, self._partition = producer, number, partition
        self._timeout = timeout
        self._receiver = receiver
        self.committed: int | None = None
        self.by: str | None = None
        self.again = False
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Give up the attempt, unless it is staged, and begin another one on the same connection."""
        self.outbox.clear()
        self.attempt = uuid.uuid4().hex
        self.rows = self.bytes = 0
        self._messages = 0  # data messages, with the one that waits for its answer
        self._question: _Question | None = None
        self._mark_answered()

    def pack(self, piece: pa.RecordBatch) -> tuple[int, Sequence[Any]]:
        """Make a data message of rows, for ``send_packed``. Returns its size and its frames.

        Raises:
            RowError: A row is larger than a receiver takes.
        """
        columns, buffers = pack_columns(piece)
        sizes = [memoryview(buffer).nbytes for buffer in buffers]  # type: ignore[arg-type]
        most = self.most_frame_bytes
        if max(sizes) > most:
            raise RowError(
                f"sending a row of {max(sizes)} bytes: a receiver takes {most} at most; send it in parts"
            )
        header = Data(
            attempt=self.attempt,
            producer=self._producer,
            number=self.number,
            partition=self._partition,
            index=self._messages,
            rows=piece.num_rows,
            columns=columns,
        )
        return sum(sizes), encode(header, buffers)

    # Requests.

    def greet(self, now: float) -> None:
        """Announce the attempt, and ask for the producer's last transaction."""
        hello = Hello(attempt=self.attempt, producer=self._producer)
        self._ask("a welcome", encode(hello), Welcome, now)

    def send_packed(self, size: int, frames: Sequence[Any], rows: int, now: float) -> None:
        """Send a data message, when the one before is answered."""
        self._messages += 1
        self.rows += rows
        self.bytes += size
        self._ask("the data to be taken", frames, Taken, now)

    def end(self, now: float) -> None:
        """Ask the receiver to stage the attempt on its disk."""
        end = End(attempt=self.attempt, messages=self._messages, rows=self.rows)
        self._ask("the end to be staged", encode(end), Staged, now)

    def commit(self, attempts: Sequence[str], rows: int, digest: int | None, now: float) -> None:
        """Ask the receiver to commit these attempts; see ``Uplink.commit``."""
        request = Commit(
            producer=self._producer,
            number=self.number,
            attempts=list(attempts),
            rows=rows,
            digest=None if digest is None else as_text(digest),
        )
        self._ask("the commit", encode(request), Committed, now)

    def _ask(self, what: str, frames: Sequence[Any], answer: type[Message], now: float) -> None:
        self._question = _Question(what, frames, answer, now + self._timeout)
        self._mark_asked(now)
        self.outbox.append(frames)

    def start_timeout(self, now: float) -> None:
        """The caller waits from now on. It may have done something else since it asked."""
        if self._question is not None:
            self._question.deadline = now + self._timeout

    # What happens.

    def wake(self, now: float) -> None:
        """Repeat the request if it is time.

        Raises:
            SendTimeoutError: There was no answer for ``timeout``.
        """
        self._check_deadline(now)
        super().wake(now)

    def _repeat(self, now: float) -> None:
        if self._question is not None:
            self._mark_asked(now)
            self.outbox.append(self._question.frames)

    def _check_deadline(self, now: float) -> None:
        if self._question is not None and now >= self._question.deadline:
            raise SendTimeoutError(
                f"waiting {self._timeout} for {self._question.what} from {self._receiver}: no answer. The receiver is "
                "stopped, its log is full, its disk refuses, or the network is down; the transaction can be repeated"
            )

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take a message of the receiver.

        Raises:
            AttemptLostError: The receiver does not have the attempt any more.
            TransactionError: A refusal.
            SendTimeoutError: There was no answer for ``timeout``.
        """
        message, _ = decode(frames)
        self._mark_heard(now)
        question = self._question
        if question is not None and self._is_mine(message):
            match message:
                case Refusal():
                    kind = AttemptLostError if message.code == UNKNOWN else TransactionError
                    raise kind(
                        f"sending transaction {self.number} of {self._producer} to {self._receiver}: refused: "
                        f"{printable(message.reason, _MOST_REASON)}"
                    )
                case Welcome():
                    self.committed, self.by = message.committed, message.by
                case Committed():
                    self.by, self.again = message.by, message.again
            is_late = isinstance(message, Taken) and message.received < self._messages
            if isinstance(message, question.answer) and not is_late:
                self._question = None
                self._mark_answered()
        self._check_deadline(now)

    def _is_mine(self, message: Message) -> bool:
        """Whether a message is about this attempt, or answers the open commit."""
        if isinstance(message, Committed):
            return (message.producer, message.number) == (self._producer, self.number)
        attempt = getattr(message, "attempt", None)
        return attempt == self.attempt or (attempt is None and isinstance(message, Refusal))
