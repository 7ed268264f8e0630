"""The names of durable subscribers: which session has which name. Messages in, answers out.

The newest OPEN of a name wins. Requests of other sessions are refused (``taken``), also of a session that has lost the
name. The keeper of the positions reads and writes the record of a name; until it has done so, a request is not answered
and the client asks again.
"""

from __future__ import annotations

import heapq
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from zmq_datasource.counters import counted, figures, state
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.printable import printable
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
from zmq_datasource.proxy.positions import Position, Positions, bytes_of_topics
from zmq_datasource.proxy.view import LogView

__all__ = ["Job", "Names", "SubscriberFigures"]

_MOST_POSITIONS = 1000
_MOST_TOPIC_BYTES = 2 << 20
_MOST_DISPLACED = 1000
# What a status tells of names.
_MOST_SHOWN, _MOST_TOPICS_SHOWN = 100, 10
_MOST_CHARACTERS = 60  # of a topic


@dataclass
class SubscriberFigures:
    """The numbers of one durable subscriber in a proxy's status."""

    connected: bool = state("connected", "", "Whether its client is there.")
    next_id: int = state("nextId", "id", "The first id that it has not acknowledged.")
    backlog: int = state(
        "backlog", "messages", "The number of messages from there on.", series="backlog_messages"
    )
    sent: int = counted(
        "sent", "messages", "The number of messages that were sent to it.", "log", series="messages_sent"
    )
    lost: int = counted(
        "lost",
        "messages",
        "The number of messages that were deleted before they were sent to it.",
        "log",
        series="messages_lost",
    )
    away_seconds: float = state("awaySeconds", "s", "How long its client has been away.")


class Job(NamedTuple):
    """An OPEN or FORGET of a client, and what the keeper does for it."""

    peer: bytes
    wanted: Open | Forget
    future: Future[Any]


class Names:
    """Use it in one thread.

    Args:
        view: The log.
        positions: Of the names that are known.
    """

    def __init__(self, view: LogView, positions: Positions) -> None:
        self._view = view
        self._positions = positions
        self._jobs: dict[str, Job] = {}
        self._opening: dict[str, int] = {}  # bytes of topics, of the names that are being opened
        # Sessions that have lost their name, so that a late OPEN does not take it back.
        self._displaced: dict[tuple[str, int], None] = {}
        self._comings = LimitedLog(__name__, "times that a durable subscriber came")

    def open(self, peer: bytes, wanted: Open, topics: tuple[bytes, ...]) -> FromProxy | None:
        """Have a name opened; the answer, if it is known now."""
        known = self._positions.get(wanted.name)
        job = self._jobs.get(wanted.name)
        if job is not None:
            if isinstance(job.wanted, Open) and job.wanted.session == wanted.session:
                self._jobs[wanted.name] = job._replace(
                    peer=peer
                )  # asked again, perhaps by another connection
            return None  # else it is asked again
        if known is not None and self._is_late(known, wanted):
            return _taken(wanted)
        if known is not None and known.hold is not None and known.session == wanted.session:
            return self._opened(known)  # asked again
        if (reason := self._why_full(known, topics)) is not None:
            return Refused(code="full", reason=reason, session=wanted.session)
        future = self._positions.open(wanted, topics, self._view.end, self._view.open_batches())
        self._jobs[wanted.name] = Job(peer, wanted, future)
        self._opening[wanted.name] = bytes_of_topics(topics)
        return None

    def _why_full(self, known: Position | None, topics: tuple[bytes, ...]) -> str | None:
        """Why there is no room for a name with these topics; None if there is."""
        # Names that are being opened count, too: a client may open a thousand before the first is on the disk.
        sizes = {position.name: position.topic_bytes for position in self._positions} | self._opening
        if known is None and len(sizes) >= _MOST_POSITIONS:
            return (
                f"there are {_MOST_POSITIONS} subscriptions; end some with FORGET, or lower subscriberExpiry"
            )
        before = 0 if known is None else known.topic_bytes
        size = sum(sizes.values()) - before + bytes_of_topics(topics)
        if bytes_of_topics(topics) <= before or size <= _MOST_TOPIC_BYTES:
            return None
        return (
            f"the topics of all subscriptions would have {size} bytes, and {_MOST_TOPIC_BYTES} are the most; subscribe "
            "to fewer topics, or to their common prefix, or end some subscriptions with FORGET"
        )

    def _is_late(self, known: Position, wanted: Open) -> bool:
        """Whether another client has taken the name since, or the same client has opened it again."""
        if (wanted.name, wanted.session) in self._displaced:
            return True
        return _are_of_one_client(known.session, wanted.session) and wanted.session < known.session

    def _opened(self, position: Position) -> Opened:
        position.asked = time.monotonic()
        return Opened(session=position.session, next=position.next, end=self._view.end, new=position.is_new)

    def forget(self, peer: bytes, wanted: Forget) -> FromProxy | None:
        """Have a name forgotten; the answer, if it is known now."""
        known = self._positions.get(wanted.name)
        if wanted.name in self._jobs:
            return None  # it is asked again
        if known is None:
            return Forgotten(session=wanted.session)
        if known.session != wanted.session and not _are_of_one_client(known.session, wanted.session):
            return _taken(wanted)
        self._jobs[wanted.name] = Job(peer, wanted, self._positions.forget(known))
        return None

    def done_jobs(self) -> list[Job]:
        """The jobs that the keeper has done since the last call."""
        done = [job for job in self._jobs.values() if job.future.done()]
        for job in done:
            del self._jobs[job.wanted.name]
            self._opening.pop(job.wanted.name, None)
        return done

    def result(self, job: Job) -> FromProxy:
        """The answer to a job.

        Raises:
            LogLockedError: The command line looks at the name now; the client asks again.
            LogError: The record cannot be read or written.
        """
        if isinstance(job.wanted, Forget):
            job.future.result()
            return Forgotten(session=job.wanted.session)
        position, position.is_new = job.future.result()
        self._comings.info(
            "durable subscriber %r is there, from id %d on%s",
            position.name,
            position.next,
            " (new)" if position.is_new else "",
        )
        return self._opened(position)

    def is_busy(self, name: str) -> bool:
        """Whether the keeper opens or forgets a name now, whose end says which session has it."""
        return name in self._jobs

    def position_of(self, fetch: Fetch) -> Position | Refused:
        """The position of a FETCH's name, or why its session does not have the name."""
        assert fetch.name is not None
        position = self._positions.get(fetch.name)
        if position is None:
            return Refused(code="gone", reason=_GONE, session=fetch.session)
        if position.session == fetch.session:
            return position
        if not position.session:
            return moved(fetch)
        while len(self._displaced) >= _MOST_DISPLACED:
            del self._displaced[next(iter(self._displaced))]
        self._displaced[fetch.name, fetch.session] = None
        return _taken(fetch)

    def arrive(
        self, position: Position, fetch: Fetch, coming_back: Future[bool] | None
    ) -> Future[bool] | None:
        """The client of a name has asked: it is there, and has done with what is below ``done``.

        Args:
            coming_back: Of the request before, if that one waits.

        Returns:
            If the client was away, whether its name is still its own.
        """
        assert fetch.done is not None
        is_away, position.asked = position.asked is None, time.monotonic()
        position.is_new = False
        if not is_away and position.hold is not None:
            self._positions.move(position, fetch.done)
            return None
        if coming_back is None:
            tail = self._view.open_batches() if position.next < position.snapshot else []
            coming_back = self._positions.come_back(position, tail)
        return coming_back

    def status(self) -> list[dict[str, Any]]:
        """An account of each subscriber, as plain data: of those that are furthest behind, if there are many."""
        now, monotonic = time.time(), time.monotonic()
        accounts = []
        for position in heapq.nsmallest(_MOST_SHOWN, self._positions, key=lambda p: p.next):
            topics = position.topics[:_MOST_TOPICS_SHOWN]
            connected, acknowledged = position.asked is not None, position.acknowledged
            numbers = SubscriberFigures(
                connected=connected,
                next_id=position.next,
                backlog=self._view.end - position.next,
                sent=position.sent,
                lost=position.lost,
                away_seconds=0.0 if connected else round(monotonic - position.left, 1),
            )
            accounts.append(
                {
                    "name": position.name,
                    "topics": [printable(topic, _MOST_CHARACTERS) for topic in topics],
                    **figures(numbers),
                    "lastAckSeconds": None if acknowledged is None else round(now - acknowledged, 1),
                    "ageSeconds": round(now - position.created, 1),
                }
            )
        return accounts

    def flush(self) -> None:
        """Log what was left out."""
        self._comings.flush()


_GONE = (
    "the proxy does not know the subscription any more: its log was replaced, or the subscription was removed or has "
    "expired. What was not acknowledged by then may be lost. Open the subscriber again: it begins at its start"
)


def moved(fetch: Fetch) -> Refused:
    """The answer to a client whose position was changed while it was away."""
    reason = "the position was set or removed by hand while the subscriber was away; open it again"
    return Refused(code="moved", reason=reason, session=fetch.session)


def _taken(wanted: Open | Fetch | Forget) -> Refused:
    reason = f"another client has subscribed as {wanted.name!r}"
    return Refused(code="taken", reason=reason, session=wanted.session)


def _are_of_one_client(session: int, other: int) -> bool:
    return bool(client_of(session)) and client_of(session) == client_of(other)
