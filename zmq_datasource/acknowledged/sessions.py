"""Who is sending, and how much may be on its way. Pure: the time is an argument, in monotonic seconds.

The rules:

* A session begins with an attempt's first data, and gets a window then, as long as there are any.
* A sender has at most its window on the way, and all together the budget of ``SenderBounds``, and a message each. While
  that is all given away, who is silent lends his window to the others.
* There is a bounded number of places. While all are taken, one of a peer that has several makes place, for an honest
  task has a connection of its own; or else who was silent for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from zmq_datasource.acknowledged.answers import RefusedError
from zmq_datasource.acknowledged.protocol import Data
from zmq_datasource.errors import ProtocolError
from zmq_datasource.log import FilledFile, Part, StagedFile

__all__ = ["SENDER_BOUNDS", "SenderBounds", "Session", "Sessions"]


@dataclass(frozen=True)
class SenderBounds:
    """How much senders may have on the way, and how many may send.

    Attributes:
        window: Bytes of data that one sender may have on the way. Before its first message has come, and while all
            windows are given away, a sender sends one message at a time.
        budget: Bytes of all windows together.
        places: Senders at a time.
        lends_window_seconds, lends_place_seconds: After so much silence a session lends its window, and its place, if
            others want for one.
    """

    window: int = 4 << 20
    budget: int = 256 << 20
    places: int = 1024
    lends_window_seconds: float = 5.0
    lends_place_seconds: float = 60.0


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
        window: Bytes of the budget that it holds.
        credit: What it heard last.
        notified: Whether it has heard that a message is missing.
        finishing: Its file is being forced to the disk.
    """

    peer: bytes
    attempt: str
    part: Part
    heard: float
    received: int = 0
    digest: int = 0
    window: int = 0
    credit: int = 0
    notified: bool = False
    file: StagedFile | None = None
    finishing: Future[FilledFile | None] | None = None

    def heard_from(self, peer: bytes, now: float) -> None:
        """Its sender is there, perhaps on a new connection."""
        self.peer, self.heard = peer, now

    def missing_before(self, message: Data) -> int | None:
        """How many data messages were lost before this one; None if it was sent again after a reconnect.

        Raises:
            ProtocolError: No honest sender sends it now.
        """
        if message.index < self.received:
            return None
        if self.finishing is not None:
            raise ProtocolError(f"data message {message.index} of an attempt after its end")
        if self.part[:3] != (message.producer, message.number, message.partition):
            raise ProtocolError(f"data message {message.index} of an attempt at something else")
        return message.index - self.received


class Sessions:
    """All sessions there are, by their attempts.

    Args:
        bounds: How many there may be, and how much they may have on the way.

    Attributes:
        budget: Bytes of windows that are not given away.
    """

    def __init__(self, bounds: SenderBounds = SENDER_BOUNDS) -> None:
        self._bounds = bounds
        self._sessions: dict[str, Session] = {}
        self.budget = bounds.budget

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """The present sessions; they may be ended during the iteration."""
        return iter(list(self._sessions.values()))

    def get(self, attempt: str | None) -> Session | None:
        return self._sessions.get(attempt or "")

    @property
    def bytes(self) -> int:
        """Bytes that all sessions have staged so far."""
        return sum(session.file.bytes for session in self._sessions.values() if session.file)

    def must_leave(self, now: float) -> Session | None:
        """Whom to end before another one is added, if that is necessary.

        Raises:
            RefusedError: There are too many, and all are at work.
        """
        if len(self._sessions) < self._bounds.places:
            return None
        sending = [session for session in self._sessions.values() if session.finishing is None]
        peer, places = Counter(session.peer for session in sending).most_common(1)[0] if sending else (b"", 0)
        if places > 1:
            return min((s for s in sending if s.peer == peer), key=lambda session: session.heard)
        longest = min(sending, key=lambda session: session.heard, default=None)
        if longest is None or now - longest.heard < self._bounds.lends_place_seconds:
            raise RefusedError(
                "busy", f"{self._bounds.places} senders are at work already; repeat the transaction later"
            )
        return longest

    def add(self, session: Session) -> None:
        self._sessions[session.attempt] = session

    def remove(self, session: Session) -> None:
        """End a session; its window is free for others."""
        self.budget += session.window
        del self._sessions[session.attempt]

    def grant(self, session: Session) -> None:
        """Give it a window, unless it has one or all are given away."""
        if not session.window and self.budget >= self._bounds.window:
            self.budget -= self._bounds.window
            session.window = self._bounds.window

    def take_windows_back(self, now: float) -> None:
        """While there is none left for who comes, from those who do not use theirs."""
        if self.budget >= self._bounds.window:
            return
        for session in self._sessions.values():
            if now - session.heard > self._bounds.lends_window_seconds:
                self.budget += session.window
                session.window = 0

    def hold_still(self, now: float) -> None:
        """Restart every session's silence: nothing could be received for a while."""
        for session in self._sessions.values():
            session.heard = now
