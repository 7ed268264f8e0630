"""Which attempts are being received, and how many may be. Pure: the time is an argument, in monotonic seconds.

The rules:

* A session begins with an attempt's first data. A sender that only asks has none.
* A connection sends one attempt at a time: the first data of the next one ends a session that is still being received.
* There are ``SenderBounds.places``. While all are taken, a session that was silent for long makes place; if none was,
  the receiver is busy, and the sender comes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from zmq_datasource.acknowledged.answers import RefusedError
from zmq_datasource.acknowledged.protocol import BUSY, Data
from zmq_datasource.errors import ProtocolError
from zmq_datasource.log import FilledFile, Part, StagedFile

__all__ = ["SENDER_BOUNDS", "SenderBounds", "Session", "Sessions"]


@dataclass(frozen=True)
class SenderBounds:
    """How many senders may be at work.

    Attributes:
        places: So many attempts are received at a time. Each has at most two data messages of about 1 MiB on the way,
            so that the backlog has room for all of them.
        silent_seconds: After so much silence a session makes place for another one.
    """

    places: int = 256
    silent_seconds: float = 60.0


SENDER_BOUNDS = SenderBounds()


@dataclass
class Session:
    """One attempt of a task, as far as it has been received.

    Attributes:
        peer: Where to answer; another one after a reconnect.
        part: What it is an attempt at.
        heard: When its sender last said something.
        received: Data messages taken.
        digest: Of the rows that they had.
        file: Where the rows are staged.
        finishing: Its file is being forced to the disk.
    """

    peer: bytes
    attempt: str
    part: Part
    heard: float
    received: int = 0
    digest: int = 0
    file: StagedFile | None = None
    finishing: Future[FilledFile | None] | None = None

    def heard_from(self, peer: bytes, now: float) -> None:
        """Its sender is there, perhaps on a new connection."""
        self.peer, self.heard = peer, now

    def expects(self, message: Data) -> bool:
        """Whether this data message is the next one. Otherwise it was sent again, or the one before it was lost.

        Raises:
            ProtocolError: No honest sender sends it now.
        """
        if message.index < self.received:
            return False
        if self.finishing is not None:
            raise ProtocolError(f"data message {message.index} of an attempt after its end")
        if self.part[:3] != (message.producer, message.number, message.partition):
            raise ProtocolError(f"data message {message.index} of an attempt at something else")
        return message.index == self.received


class Sessions:
    """All sessions there are, by their attempts.

    Args:
        bounds: How many there may be.
    """

    def __init__(self, bounds: SenderBounds = SENDER_BOUNDS) -> None:
        self._bounds = bounds
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """The present sessions; they may be ended during the iteration."""
        return iter(list(self._sessions.values()))

    def get(self, attempt: str | None) -> Session | None:
        return self._sessions.get(attempt or "")

    @property
    def staged_bytes(self) -> int:
        """Bytes that all sessions have staged so far."""
        return sum(session.file.bytes for session in self._sessions.values() if session.file)

    def is_full(self, now: float) -> bool:
        """Whether there is no place for another attempt of another connection."""
        return len(self._sessions) >= self._bounds.places and self._longest_silent(now) is None

    def must_leave(self, peer: bytes, now: float) -> Session | None:
        """The session to end before another one of this peer is added, if one has to be.

        Raises:
            RefusedError: All places are taken, and all senders are at work.
        """
        for session in self._sessions.values():
            if session.peer == peer and session.finishing is None:
                return session
        if len(self._sessions) < self._bounds.places:
            return None
        longest = self._longest_silent(now)
        if longest is None:
            raise RefusedError(
                BUSY, f"{self._bounds.places} senders are at work already; send it again later"
            )
        return longest

    def _longest_silent(self, now: float) -> Session | None:
        sending = [session for session in self._sessions.values() if session.finishing is None]
        longest = min(sending, key=lambda session: session.heard, default=None)
        is_silent = longest is not None and now - longest.heard >= self._bounds.silent_seconds
        return longest if is_silent else None

    def add(self, session: Session) -> None:
        self._sessions[session.attempt] = session

    def remove(self, session: Session) -> None:
        del self._sessions[session.attempt]
