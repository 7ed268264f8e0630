"""The attempts that are being received, and how many there may be; the answers and refusals that their senders get.

Times are monotonic seconds. The rules:

* A session begins with an attempt's first data. A sender that only asks has none.
* A connection sends one attempt at a time: the first data of the next attempt ends a session that has sent no end.
* There are ``SenderBounds.places`` sessions. When all places are taken, a session that was silent for long is ended to
  make room. If there is none, the receiver is busy, and the sender asks again later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from zmq_datasource.acknowledged.attempt_files import Attempt
from zmq_datasource.acknowledged.protocol import (
    BUSY,
    CONFLICT,
    INTERNAL,
    UNKNOWN,
    Data,
    Message,
    Refusal,
    encode,
)
from zmq_datasource.acknowledged.staging import StagedFile
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    ConflictError,
    LogError,
    ProtocolError,
    RefusedError,
    UnknownAttemptError,
)
from zmq_datasource.host.log_lines import LimitedLog


class CollectedAnswers:
    """Answers to senders, collected until the socket sends them.

    Args:
        counters: Counts malformed messages and unexpected errors.
        abandon: Called with the attempt of a message that has met an unexpected error, and may be half done.
    """

    def __init__(self, counters: SourceCounters, abandon: Callable[[str | None], None]) -> None:
        self._counters = counters
        self._abandon = abandon
        self._answers: list[tuple[bytes, list[Any]]] = []
        self._refusals = LimitedLog(__name__, "refusals")
        self._faults = LimitedLog(__name__, "unexpected errors")

    def add(self, peer: bytes, message: Message) -> None:
        self._answers.append((peer, encode(message)))

    def take(self) -> list[tuple[bytes, list[Any]]]:
        """The answers since the last call: to which peer, and the frames."""
        answers, self._answers = self._answers, []
        return answers

    @contextmanager
    def refusing(self, peer: bytes, attempt: str | None = None) -> Iterator[None]:
        """Turn an error in this block into a refusal to the peer.

        Raises:
            LogError: The log has failed, which is not about one message.
        """
        try:
            yield
        except UnknownAttemptError as e:
            self._refuse(peer, UNKNOWN, str(e), attempt)
        except ConflictError as e:
            self._refuse(peer, CONFLICT, str(e), attempt)
        except RefusedError as e:
            self._refuse(peer, e.code, str(e), attempt)
        except ProtocolError as e:
            self._counters.malformed += 1
            self._refuse(peer, "protocol", str(e), attempt)
        except LogError:
            raise
        except Exception as e:
            self._counters.internal_errors += 1
            self._faults.fault("an unexpected error at a message of the transaction protocol: %r", e, error=e)
            self._abandon(attempt)
            reason = f"an unexpected error of the receiver ({type(e).__name__}), which its log explains"
            self._refuse(peer, INTERNAL, reason, attempt)

    def _refuse(self, peer: bytes, code: str, reason: str, attempt: str | None) -> None:
        self._refusals.warn("refused a message of the transaction protocol: %s", reason)
        self.add(peer, Refusal(code=code, reason=reason, attempt=attempt))

    def flush(self) -> None:
        """Log how many lines were left out, if it is time. Call it often."""
        self._refusals.flush()
        self._faults.flush()


@dataclass(frozen=True)
class SenderBounds:
    """How many senders may send at a time.

    Attributes:
        places: The number of attempts that are received at a time. Each has at most two data messages of about 1 MiB on
            the way, so the backlog has room for all of them.
        silent_seconds: A session that was silent for so long may lose its place to another one.
    """

    places: int = 256
    silent_seconds: float = 60.0


SENDER_BOUNDS = SenderBounds()


class AcceptorTerms(NamedTuple):
    """The limits for senders.

    Attributes:
        transaction_timeout: Seconds after which the attempts of a silent sender are discarded.
        most_staged_bytes: The bytes on disk of all attempts that are not committed.
        most_attempts: The number of these attempts. Each is a file, which the next writer has to open.
        retry_seconds: How long senders wait for a disk that refuses.
        senders: How many senders send at a time.
    """

    transaction_timeout: float
    most_staged_bytes: int
    most_attempts: int = 16_384
    retry_seconds: float = 300.0
    senders: SenderBounds = SENDER_BOUNDS


@dataclass
class AttemptSession:
    """One attempt, as far as it has been received.

    Attributes:
        peer: Where to answer; another one after a reconnect.
        heard: When the last message of its sender came.
        file: Where its rows are staged.
        received: The number of data messages whose rows are in the file.
        finishing: Done when the file is on disk; None until the attempt has ended.
    """

    peer: bytes
    attempt: str
    heard: float
    file: StagedFile
    received: int = 0
    finishing: Future[Attempt] | None = None

    def mark_heard(self, peer: bytes, now: float) -> None:
        """Note that a message of its sender has come, perhaps by a new connection."""
        self.peer, self.heard = peer, now

    def expects(self, message: Data) -> bool:
        """Whether this data message is the next one. If not, it is a repeated one, or the one before it was lost.

        Raises:
            ProtocolError: A sender that follows the protocol does not send it now.
        """
        if message.index < self.received:
            return False
        if self.file.is_ended:
            raise ProtocolError(f"data message {message.index} of an attempt after its end")
        if self.file.part != (message.producer, message.number, message.partition):
            raise ProtocolError(f"data message {message.index} for another part than that of its attempt")
        return message.index == self.received


class Sessions:
    """All sessions, by their attempts."""

    def __init__(self, bounds: SenderBounds = SENDER_BOUNDS) -> None:
        self._bounds = bounds
        self._sessions: dict[str, AttemptSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[AttemptSession]:
        """The sessions of this moment. They may be ended during the iteration."""
        return iter(list(self._sessions.values()))

    def get(self, attempt: str | None) -> AttemptSession | None:
        return self._sessions.get(attempt or "")

    @property
    def staged_bytes(self) -> int:
        """The bytes on disk that all sessions have staged so far."""
        return sum(session.file.bytes for session in self._sessions.values())

    def is_full(self, now: float) -> bool:
        """Whether there is no place for an attempt of another connection."""
        return len(self._sessions) >= self._bounds.places and self._longest_silent(now) is None

    def to_replace(self, peer: bytes, now: float) -> AttemptSession | None:
        """The session to end before another one of this peer is added; None if there is a free place.

        Raises:
            RefusedError: All places are taken, and all senders are active.
        """
        for session in self._sessions.values():
            if session.peer == peer and session.finishing is None:
                return session
        if len(self._sessions) < self._bounds.places:
            return None
        longest = self._longest_silent(now)
        if longest is None:
            raise RefusedError(
                BUSY, f"{self._bounds.places} senders are sending already; send it again later"
            )
        return longest

    def _longest_silent(self, now: float) -> AttemptSession | None:
        sending = [session for session in self._sessions.values() if session.finishing is None]
        longest = min(sending, key=lambda session: session.heard, default=None)
        is_silent = longest is not None and now - longest.heard >= self._bounds.silent_seconds
        return longest if is_silent else None

    def add(self, session: AttemptSession) -> None:
        self._sessions[session.attempt] = session

    def remove(self, session: AttemptSession) -> None:
        """Remove a session, unless that is done already."""
        if self._sessions.get(session.attempt) is session:
            del self._sessions[session.attempt]
