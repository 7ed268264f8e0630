"""The sending side of the transaction protocol, as a state machine: one attempt or one commit at a time.

The rules:

* At most two data messages are on the way. They are kept until the receiver has taken them. After a lost connection the
  receiver says how many it has, and the others are sent again.
* A request without an answer is repeated, and has the same answer.
* A receiver whose disk refuses data is asked again until it takes data.
* An attempt fails after ``timeout`` without progress, and when the receiver no longer knows it. Then the caller may
  begin another attempt (``begin_attempt``).
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from zmq_datasource.acknowledged.protocol import (
    BUSY,
    MOST_BYTES_ON_THE_WAY,
    MOST_FRAME_BYTES,
    MOST_ON_THE_WAY,
    UNKNOWN,
    Abort,
    Aborted,
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
    RefusedByReceiverError,
    RowError,
    SendTimeoutError,
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
        request: The message to repeat.
        answered: Whether a message is the answer; with None, whether no answer is needed.
        deadline: When the attempt fails, unless there is progress.
    """

    what: str
    request: Message
    answered: Callable[[Message | None], bool]
    deadline: float


class SenderSession(RequestSession):
    """A conversation with one receiver.

    After a request (``greet``, ``end``, ...) wait until ``waiting`` is False. If the request fails, ``receive`` or
    ``wake`` raises SendTimeoutError, AttemptLostError, or TransactionError for a refusal.

    Args:
        producer, number: The transaction.
        partition: Which part of it this is.
        timeout: Seconds without progress after which a request fails.
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
        self._begin()

    def _begin(self) -> None:
        self.attempt = uuid.uuid4().hex
        self.rows = self.bytes = 0
        self._is_open = False  # the receiver may have something of the attempt that it must not keep
        self._sent = self._taken = 0  # data messages, and how many of them the receiver has taken
        self._kept: deque[tuple[int, Sequence[Any]]] = deque()  # the others, with their sizes
        self._resumed = -math.inf  # when the kept messages were sent again, on this connection
        self._question: _Question | None = None
        self._mark_answered()

    def begin_attempt(self) -> None:
        """Abort the attempt, unless it is staged, and begin another one on the same connection."""
        self.outbox.clear()
        self.abort_unfinished()
        self._begin()

    def abort_unfinished(self) -> None:
        """Abort the attempt, unless it is staged. If the message is lost, the receiver discards the attempt later."""
        if self._is_open:
            self._send(Abort(producer=self._producer, number=self.number, attempts=[self.attempt]))

    # Rows.

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
            index=self._sent,
            rows=piece.num_rows,
            columns=columns,
        )
        return sum(sizes), encode(header, buffers)

    def send_packed(self, size: int, frames: Sequence[Any], rows: int) -> None:
        """Send a data message for which there is room."""
        self._kept.append((size, frames))
        self._sent += 1
        self.rows += rows
        self.bytes += size
        self.outbox.append(frames)

    # Requests.

    def greet(self, now: float) -> None:
        """Announce the attempt, and ask for the producer's last transaction."""
        self._is_open = True
        self._ask("a welcome", self._hello, lambda m: isinstance(m, Welcome), now)

    def wait_for_room(self, size: int, now: float) -> None:
        """Wait until one more data message of this size may be on the way."""
        self._wait("room for data", self._hello, lambda _: self._has_room(size), now)

    def _has_room(self, size: int) -> bool:
        most = MOST_ON_THE_WAY if self._taken else 1  # many senders begin at the same moment
        on_the_way = sum(kept for kept, _ in self._kept)
        return not self._kept or (len(self._kept) < most and on_the_way + size <= MOST_BYTES_ON_THE_WAY)

    def wait_until_taken(self, now: float) -> None:
        """Wait until the receiver has taken all data messages."""
        self._wait("the last data to be taken", self._hello, lambda _: not self._kept, now)

    def end(self, now: float) -> None:
        """Ask the receiver to stage the attempt on its disk."""
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
        """Ask the receiver to commit these attempts; see ``Uplink.commit``."""
        request = Commit(
            producer=self._producer,
            number=self.number,
            attempts=list(attempts),
            rows=rows,
            digest=None if digest is None else as_text(digest),
        )
        self._ask("the commit", request, lambda m: isinstance(m, Committed), now)

    def abort(self, attempts: Sequence[str], now: float) -> None:
        """Ask the receiver to discard these attempts."""
        request = Abort(producer=self._producer, number=self.number, attempts=list(attempts))
        self._ask("the abort", request, lambda m: isinstance(m, Aborted), now)

    def _ask(
        self, what: str, request: Message, answered: Callable[[Message | None], bool], now: float
    ) -> None:
        self._wait(what, request, answered, now)
        self._send(request)

    def _wait(
        self, what: str, request: Message, answered: Callable[[Message | None], bool], now: float
    ) -> None:
        """Begin to wait for a message; does not block. The request is sent only if none comes for ``repeat_after``."""
        if not answered(None):
            self._question = _Question(what, request, answered, now + self._timeout)
            self._mark_asked(now)

    # What happens.

    def reconnected(self, now: float) -> None:
        self._resumed = -math.inf
        super().reconnected(now)

    def wake(self, now: float) -> None:
        """Repeat the request if it is time.

        Raises:
            SendTimeoutError: There was no progress for ``timeout``.
        """
        self._check_deadline(now)
        super().wake(now)

    def _repeat(self, now: float) -> None:
        question = self._question
        if self._kept and (question is None or question.request != self._hello):
            self._send(self._hello)
        if question is not None:
            self._mark_asked(now)
            self._send(question.request)

    def _check_deadline(self, now: float) -> None:
        if self._question is not None and now >= self._question.deadline:
            raise SendTimeoutError(
                f"waiting {self._timeout} for {self._question.what} from {self._receiver}: no answer. The receiver is "
                "stopped, its log is full, or the network is down; the transaction can be repeated"
            )

    def receive(self, frames: list[bytes], now: float) -> None:
        """Take a message of the receiver.

        Raises:
            AttemptLostError: The receiver does not have the attempt any more.
            TransactionError: A refusal.
            SendTimeoutError: There was no progress for ``timeout``.
        """
        message, _ = decode(frames)
        self._mark_heard(now)
        taken, is_busy = self._taken, False
        answer: Message | None = None
        match message:
            case Taken() if message.attempt == self.attempt:
                self._drop_taken(message.received)
            case Welcome() if message.attempt == self.attempt:
                self.committed, self.by = message.committed, message.by
                self._send_rest(message.received, now)
                answer = message
            case Refusal(code=code) if code == BUSY and message.attempt == self.attempt:
                is_busy = True
            case Refusal() if message.attempt in (None, self.attempt):
                refused = (
                    f"sending transaction {self.number} of {self._producer} to {self._receiver}: refused "
                    f"({printable(message.code, 64)}): {printable(message.reason, _MOST_REASON)}"
                )
                if message.code == UNKNOWN:
                    raise AttemptLostError(refused)
                raise RefusedByReceiverError(message.code, refused)
            case Staged() if message.attempt == self.attempt:
                self._is_open = False
                answer = message
            case Committed() if (message.producer, message.number) == (self._producer, self.number):
                self.by, self.again, answer = message.by, message.again, message
            case Aborted() if (message.producer, message.number) == (self._producer, self.number):
                answer = message
        question = self._question
        if question is not None and question.answered(answer):
            self._question = None
            self._mark_answered()
        elif question is not None and (self._taken > taken or is_busy):
            # There is progress, or a busy receiver that will take data later.
            question.deadline = now + self._timeout
        self._check_deadline(now)

    def _send_rest(self, received: int, now: float) -> None:
        """Send the kept messages again that the receiver has not taken: they may have been lost with a connection."""
        if received < self._taken:
            raise AttemptLostError(
                f"sending transaction {self.number} of {self._producer}: the receiver has restarted and lost data that "
                "it had taken. Send the transaction again"
            )
        self._drop_taken(received)
        # After a pause the receiver answers each repeated greeting. The messages are sent again after the first of
        # these answers only.
        if self._kept and now - self._resumed > self.repeat_after:
            self._resumed = now
            self.outbox.extend(frames for _, frames in self._kept)

    def _drop_taken(self, taken: int) -> None:
        while self._taken < taken and self._kept:
            self._kept.popleft()
            self._taken += 1

    @property
    def _hello(self) -> Hello:
        return Hello(attempt=self.attempt, producer=self._producer)

    def _send(self, message: Message) -> None:
        self.outbox.append(encode(message))
