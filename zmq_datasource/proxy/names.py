"""Which client has which name. Requests in, answers out.

The newest OPEN of a name wins. The requests of other sessions are refused as ``taken``, also those of a session that
had the name before. The keeper (``positions``) reads and writes the lease of a name; until it has done so, a request
has no answer, and the client asks again.
"""

from __future__ import annotations

import heapq
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

from zmq_datasource.counters import figures
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.proxy.fetch_protocol import (
    Fetch,
    Forget,
    Forgotten,
    FromProxy,
    Open,
    Opened,
    Refused,
    client_of,
)
from zmq_datasource.proxy.figures import SubscriberFigures
from zmq_datasource.proxy.positions import PRESENT_SECONDS, Position, Positions, bytes_of_topics
from zmq_datasource.proxy.view import LogView

_MOST_DISPLACED = 1000
# What a status shows of a name: so many topics, and so many characters of a topic.
_MOST_TOPICS_SHOWN, _MOST_CHARACTERS = 10, 60


class NameBounds(NamedTuple):
    """How much durable subscribers may ask for.

    Attributes:
        names: The number of names.
        topic_bytes: About how many bytes the topics of all names have in their leases.
        shown: How many names a status shows: those with the largest backlog.
        present_seconds: A client that has asked for nothing for so long is away.
    """

    names: int = 1000
    topic_bytes: int = 2 << 20
    shown: int = 100
    present_seconds: float = PRESENT_SECONDS


NAME_BOUNDS = NameBounds()


class NameJob(NamedTuple):
    """A request that the keeper works on: an OPEN, a FORGET, or the first FETCH of a client that was away."""

    peer: bytes
    request: Open | Fetch | Forget
    future: Future[Any]


class Names:
    """Gives names to clients, and finds the position of a client's name; in one thread.

    Args:
        view: The log.
        positions: The positions of all names.
        bounds: How much clients may ask for.
    """

    def __init__(self, view: LogView, positions: Positions, bounds: NameBounds = NAME_BOUNDS) -> None:
        self._bounds = bounds
        self._view = view
        self._positions = positions
        self._jobs: dict[str, NameJob] = {}
        self._opening: dict[str, int] = {}  # of the names that the keeper opens, the bytes of their topics
        # Sessions that have lost their name, so that a late OPEN of theirs does not take it back.
        self._displaced: dict[tuple[str, int], None] = {}
        self._openings = LimitedLog(__name__, "times that a durable subscriber has opened its name")

    # Requests. Each returns the answer, or None while the keeper works on the name.

    def open(self, peer: bytes, request: Open, topics: tuple[bytes, ...]) -> FromProxy | None:
        known = self._positions.get(request.name)
        job = self._jobs.get(request.name)
        if job is not None and not isinstance(job.request, Fetch):
            if isinstance(job.request, Open) and job.request.session == request.session:
                self._jobs[request.name] = job._replace(peer=peer)  # the client may have a new connection
            return None
        if known is not None and self._is_late(known, request):
            return _taken(request)
        if known is not None and known.lock is not None and known.notes.session == request.session:
            return self._opened(known)  # the same OPEN again
        if (reason := self._why_full(known, topics)) is not None:
            return Refused(code="full", reason=reason, session=request.session)
        positions = self._positions
        future = positions.submit(positions.open, request, topics, self._view.moment())
        self._jobs[request.name] = NameJob(peer, request, future)
        self._opening[request.name] = bytes_of_topics(topics)
        return None

    def fetch(self, peer: bytes, request: Fetch) -> Position | Refused | None:
        """Move the position of the name to ``done``, and return the position; or why the session has no such name."""
        position = self.position_of(request)
        if not isinstance(position, Position):
            return position
        if position.asked is not None and position.lock is not None:
            self._arrive(position, request)
            return position
        job = self._jobs.get(request.name)
        if job is None:
            future = self._positions.submit(self._positions.lock_again, position, self._view.moment())
            self._jobs[request.name] = NameJob(peer, request, future)
        elif isinstance(job.request, Fetch):
            self._jobs[request.name] = job._replace(peer=peer, request=request)
        return None

    def forget(self, peer: bytes, request: Forget) -> FromProxy | None:
        known = self._positions.get(request.name)
        if request.name in self._jobs:
            return None
        if known is None:
            return Forgotten(session=request.session)
        session = known.notes.session
        if session != request.session and not _are_of_one_client(session, request.session):
            return _taken(request)
        self._jobs[request.name] = NameJob(
            peer, request, self._positions.submit(self._positions.forget, known)
        )
        return None

    def _why_full(self, known: Position | None, topics: tuple[bytes, ...]) -> str | None:
        """Why there is no room for a name with these topics; None if there is."""
        # Names that the keeper opens count too: a client may open a thousand before the first is on the disk.
        sizes = {position.name: position.topic_bytes for position in self._positions} | self._opening
        most = self._bounds
        if known is None and len(sizes) >= most.names:
            return f"there are {most.names} subscriptions; end some with FORGET, or lower subscriberExpiry"
        before = 0 if known is None else known.topic_bytes
        size = sum(sizes.values()) - before + bytes_of_topics(topics)
        if bytes_of_topics(topics) <= before or size <= most.topic_bytes:
            return None
        return (
            f"the topics of all subscriptions would have {size} bytes, and {most.topic_bytes} are the most; subscribe "
            "to fewer topics, or to their common prefix, or end some subscriptions with FORGET"
        )

    def _is_late(self, known: Position, request: Open) -> bool:
        """Whether another client has taken the name since, or the same client has opened it again."""
        if (request.name, request.session) in self._displaced:
            return True
        session = known.notes.session
        return _are_of_one_client(session, request.session) and request.session < session

    def _opened(self, position: Position) -> Opened:
        position.asked = time.monotonic()
        return Opened(
            session=position.notes.session, next=position.next, end=self._view.end, new=position.is_new
        )

    def _arrive(self, position: Position, request: Fetch) -> None:
        position.asked = time.monotonic()
        position.is_new = False
        self._positions.move(position, request.done)

    # What the keeper has done.

    def done_jobs(self) -> list[NameJob]:
        """The jobs that the keeper has done since the last call."""
        done = [job for job in self._jobs.values() if job.future.done()]
        for job in done:
            del self._jobs[job.request.name]
            self._opening.pop(job.request.name, None)
        return done

    def result(self, job: NameJob) -> FromProxy | Position | None:
        """The answer to a job; for a FETCH the position of its name.

        Raises:
            LogLockedError: The command line drops the lease at this moment; the client asks again.
            LogError: The lease cannot be read or written.
        """
        result = job.future.result()
        match job.request:
            case Forget():
                return Forgotten(session=job.request.session)
            case Fetch():
                if not result:
                    return _moved(job.request)
                position = self.position_of(job.request)
                if isinstance(position, Position):
                    self._arrive(position, job.request)
                return position
        self._openings.info(
            "durable subscriber %r is present, from id %d on%s",
            result.name,
            result.next,
            " (new)" if result.is_new else "",
        )
        return self._opened(result)

    def position_of(self, request: Fetch) -> Position | Refused | None:
        """The position of a FETCH's name, or why its session does not have the name.

        None if the keeper works on the name: its result says which session has it.
        """
        position = self._positions.get(request.name)
        if position is not None and position.notes.session == request.session:
            return position
        if request.name in self._jobs:
            return None
        if position is None:
            return Refused(code="gone", reason=_GONE, session=request.session)
        while len(self._displaced) >= _MOST_DISPLACED:
            del self._displaced[next(iter(self._displaced))]
        self._displaced[request.name, request.session] = None
        return _taken(request)

    def status(self) -> list[dict[str, Any]]:
        """The figures of each subscriber; of many, only those with the largest backlog."""
        now, monotonic = time.time(), time.monotonic()
        accounts = []
        for position in heapq.nsmallest(self._bounds.shown, self._positions, key=lambda p: p.next):
            notes, is_present = position.notes, position.asked is not None
            numbers = SubscriberFigures(
                connected=is_present,
                next_id=position.next,
                backlog=self._view.end - position.next,
                sent=notes.sent,
                lost=notes.lost,
                away_seconds=0.0 if is_present else round(monotonic - position.left, 1),
            )
            accounts.append(
                {
                    "name": position.name,
                    "topics": [printable(t, _MOST_CHARACTERS) for t in notes.topics[:_MOST_TOPICS_SHOWN]],
                    **figures(numbers),
                    "lastAckSeconds": None
                    if notes.acknowledged is None
                    else round(now - notes.acknowledged, 1),
                    "ageSeconds": round(now - notes.created, 1),
                }
            )
        return accounts

    def flush(self) -> None:
        """Log how many lines were left out."""
        self._openings.flush()


_GONE = (
    "the proxy does not know the subscription: its log was replaced, or the subscription was removed or has expired. "
    "Messages that were not acknowledged by then may be lost. Open the subscriber again: it begins at its start"
)


def _moved(request: Fetch) -> Refused:
    reason = "the position was removed while the subscriber was away; open it again"
    return Refused(code="moved", reason=reason, session=request.session)


def _taken(request: Open | Fetch | Forget) -> Refused:
    reason = f"another client has subscribed as {request.name!r}"
    return Refused(code="taken", reason=reason, session=request.session)


def _are_of_one_client(session: int, other: int) -> bool:
    return bool(client_of(session)) and client_of(session) == client_of(other)
