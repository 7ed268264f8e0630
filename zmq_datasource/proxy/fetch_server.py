"""Answers durable subscribers, and replays of ranges: what follows an id, of these topics, up to so many bytes.

The rules:

* The server keeps positions (``positions``), and nothing else between two requests. Of each client one FETCH waits at
  a time: until there are rows, until its time is over, or until the position is on the disk that it confirms.
* The newest OPEN of a name wins. Requests of other sessions are refused (``taken``).
* A name has at most two answers that libzmq has not handed to the system yet, on two connections: a client whose
  network is gone has its answer by a new connection. So memory is bounded, whatever clients do: the answers of all
  clients share ``_MOST_BYTES``, and beyond that each may have ``_LEAST_BYTES``, or one message.
* An error at one client's request refuses that client, and is logged with its cause. Only an error of the positions
  or of the socket ends the server.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import zmq

from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.host.printable import printable
from zmq_datasource.messages.columns import number
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.fetch_protocol import (
    MOST_FRAMES,
    MOST_WAIT_MS,
    Batch,
    Fetch,
    Forget,
    Forgotten,
    FromProxy,
    Lost,
    Open,
    Opened,
    Refused,
    client_of,
    decode,
    encode,
    pack_rows,
)
from zmq_datasource.proxy.positions import PRESENT_SECONDS, Position, Positions, bytes_of_topics
from zmq_datasource.proxy.router import Request, Router
from zmq_datasource.proxy.topics import matching
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.transport.kernel import find_dead_peers

__all__ = ["FetchServer"]

# Bytes that the answers of all clients may have on their way to the system, and what each may have beyond that.
_MOST_BYTES, _LEAST_BYTES = 128 << 20, 128 << 10
# What one answer has at most, beside its last message.
_MOST_BATCH_BYTES = 4 << 20
_TURN_ROWS = 1 << 16
# For taking requests, until those that wait get their turn; and for reading rows of other topics at a turn.
_TURN_SECONDS = 0.005
_MOST_POSITIONS = 1000
_MOST_TOPIC_BYTES = 2 << 20
_MOST_DISPLACED = 1000
_MOST_REPLAYS = 64
# Each has an open file, and rows that were read.
_MOST_CURSORS = 64
# Answers of one connection that libzmq queues; more is no client's that waits for each one.
_SNDHWM = 8
_MOST_REQUEST_BYTES = 64 << 10
# What a status tells of names.
_MOST_SHOWN_OF_ALL, _MOST_TOPICS_SHOWN = 100, 10
_MOST_SHOWN = 60  # characters of a topic


@dataclass
class _Waiting:
    """A FETCH that is not answered yet.

    ``is_blocked``: whether it waits for something else than messages or its deadline, of which no event tells.
    """

    peer: bytes
    fetch: Fetch
    topics: tuple[bytes, ...]
    cursor: Cursor
    deadline: float
    rows: list[pa.RecordBatch]
    size: int = 0
    coming_back: Future[bool] | None = None
    is_blocked: bool = False


class _Unsent:
    """The answers that libzmq has not handed to the system yet."""

    def __init__(self) -> None:
        self._sent: dict[str | bytes, list[tuple[bytes, zmq.MessageTracker, int]]] = {}

    def add(self, owner: str | bytes, peer: bytes, tracker: zmq.MessageTracker, size: int) -> None:
        self._sent.setdefault(owner, []).append((peer, tracker, size))

    def of(self, owner: str | bytes) -> list[bytes]:
        """The connections by which answers of a name (or a replay) are on their way."""
        left = [sent for sent in self._sent.get(owner, ()) if not sent[1].done]
        if left:
            self._sent[owner] = left
        else:
            self._sent.pop(owner, None)
        return [sent[0] for sent in left]

    def bytes(self) -> int:
        return sum(size for owner in list(self._sent) if self.of(owner) for _, _, size in self._sent[owner])


class FetchServer:
    """Use it in one thread; ``router`` is where its clients are.

    Args:
        options: Where it is bound.
        view: The log.
        positions: Of the names that are known.

    Attributes:
        is_held_up: Whether an answer waits for a client to take the one before, of which no event tells.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    is_held_up = False

    def __init__(self, options: ProxyOptions, view: LogView, positions: Positions) -> None:
        self._view = view
        self._positions = positions
        self.router = Router(
            options, options.durable, _SNDHWM, _MOST_REQUEST_BYTES, MOST_FRAMES, find_dead_peers
        )
        self._waiting: dict[str | bytes, _Waiting] = {}
        # Of those, the ones to be looked at though the log has not grown, and when which ones must be answered: a
        # thousand clients that wait for messages cost nothing until there are some.
        self._active: dict[str | bytes, None] = {}
        self._deadlines: list[tuple[float, int, str | bytes]] = []
        self._count = itertools.count()
        self._seen = (0, 0)
        self._jobs: dict[str, tuple[bytes, Open | Forget, Future[Any]]] = {}
        self._opening: dict[str, int] = {}  # bytes of topics, of the names that are being opened
        # Where the last answers have ended. To find such a place again takes longer than the answer.
        self._cursors: dict[str | bytes, tuple[Cursor, float]] = {}
        self._unsent = _Unsent()
        self._used_bytes = 0
        # Sessions that have lost their name, so that a late OPEN does not take it back.
        self._displaced: dict[tuple[str, int], None] = {}
        self._requests: deque[Request] = deque()
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._errors = LimitedLog(__name__, "unexpected errors at durable subscribers")
        self._losses = LimitedLog(
            __name__, "times that messages were deleted before a durable subscriber had them"
        )
        self._comings = LimitedLog(__name__, "times that a durable subscriber came or went")

    # Requests.

    def _read_inbox(self) -> None:
        if not self._requests:
            self._requests.extend(self.router.inbox())
        deadline = time.monotonic() + _TURN_SECONDS
        while self._requests and time.monotonic() < deadline:
            request = self._requests.popleft()
            try:
                self._take(request)
            except ProtocolError as e:
                self._faults.warn("a durable subscriber sent %s", e)
                self._send(request.peer, Refused(code="protocol", reason=str(e)))
            except LogError as e:  # the open chunk cannot be read now; the client asks again
                self._faults.warn("a request of a durable subscriber: %s", e)
            except zmq.ZMQError:
                raise
            except Exception as e:
                self._fail(request.peer, e)

    def _fail(self, peer: bytes, error: Exception, session: int | None = None) -> None:
        """Something unexpected: the client begins again, from its position."""
        self._errors.fault("an unexpected error at a durable subscriber: %r", error, error=error)
        reason = f"an unexpected error of the proxy ({type(error).__name__}), which its log explains"
        self._send(peer, Refused(code="internal", reason=reason, session=session))

    def _take(self, request: Request) -> None:
        message, topics = decode(request.frames)
        if isinstance(message, (Open, Fetch, Forget)):
            name = message.name
            if name is not None and not request.may_use(name):
                reason = f"the name {name!r} belongs to another key (allowedClients of the proxy)"
                self._send(request.peer, Refused(code="forbidden", reason=reason, session=message.session))
                return
        match message:
            case Open():
                self._open(request.peer, message, tuple(topics))
            case Fetch(name=None):
                self._replay(request.peer, message, tuple(topics))
            case Fetch():
                self._fetch(request.peer, message)
            case Forget():
                self._forget(request.peer, message)
            case _:
                raise ProtocolError(f"{type(message).__name__}, which only a proxy sends")

    def _refuse(self, peer: bytes, session: int, code: str, reason: str) -> None:
        self._send(peer, Refused(code=code, reason=reason, session=session))

    # OPEN and FORGET: the keeper of the positions reads and writes the record.

    def _open(self, peer: bytes, wanted: Open, topics: tuple[bytes, ...]) -> None:
        known = self._positions.get(wanted.name)
        job = self._jobs.get(wanted.name)
        if job is not None:
            if isinstance(job[1], Open) and job[1].session == wanted.session:
                self._jobs[wanted.name] = (peer, *job[1:])  # asked again, perhaps by another connection
            return  # else it is asked again
        if known is not None and self._is_late(known, wanted):
            self._refuse(peer, wanted.session, "taken", _taken(wanted.name))
            return
        if known is not None and known.hold is not None and known.session == wanted.session:
            self._opened(peer, known)  # asked again
            return
        if (reason := self._why_full(known, topics)) is not None:
            self._refuse(peer, wanted.session, "full", reason)
            return
        future = self._positions.open(wanted, topics, self._view.end, self._view.open_batches())
        self._jobs[wanted.name] = peer, wanted, future
        self._opening[wanted.name] = bytes_of_topics(topics)

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

    def _opened(self, peer: bytes, position: Position) -> None:
        position.asked = time.monotonic()
        self._send(
            peer,
            Opened(session=position.session, next=position.next, end=self._view.end, new=position.is_new),
        )

    def _forget(self, peer: bytes, wanted: Forget) -> None:
        known = self._positions.get(wanted.name)
        if wanted.name in self._jobs:
            return  # it is asked again
        if known is None:
            self._send(peer, Forgotten(session=wanted.session))
        elif known.session != wanted.session and not _are_of_one_client(known.session, wanted.session):
            self._refuse(peer, wanted.session, "taken", _taken(wanted.name))
        else:
            self._jobs[wanted.name] = peer, wanted, self._positions.forget(known)

    def _finish_jobs(self) -> None:
        for name, (peer, wanted, future) in list(self._jobs.items()):
            if not future.done():
                continue
            del self._jobs[name]
            self._opening.pop(name, None)
            try:
                result = future.result()
            except LogLockedError as e:  # the command line looks at it; the client asks again
                self._faults.warn("durable subscriber %r: %s", name, e)
            except LogError as e:
                self._faults.warn("durable subscriber %r: %s", name, e)
                self._refuse(peer, wanted.session, "log", str(e))
            except Exception as e:
                self._fail(peer, e, wanted.session)
            else:
                if isinstance(wanted, Forget):
                    self._send(peer, Forgotten(session=wanted.session))
                else:
                    self._begin(peer, *result)

    def _begin(self, peer: bytes, position: Position, is_new: bool) -> None:
        waiting = self._waiting.pop(position.name, None)
        if waiting is not None and waiting.fetch.session != position.session:
            self._displace(position.name, waiting.fetch.session)
            self._refuse(waiting.peer, waiting.fetch.session, "taken", _taken(position.name))
        position.is_new = is_new
        self._opened(peer, position)
        self._comings.info(
            "durable subscriber %r is there, from id %d on%s",
            position.name,
            position.next,
            " (new)" if is_new else "",
        )

    def _displace(self, name: str, session: int) -> None:
        while len(self._displaced) >= _MOST_DISPLACED:
            del self._displaced[next(iter(self._displaced))]
        self._displaced[name, session] = None

    # FETCH.

    def _fetch(self, peer: bytes, fetch: Fetch) -> None:
        assert fetch.name is not None
        assert fetch.done is not None
        position = self._positions.get(fetch.name)
        if position is None:
            if fetch.name not in self._jobs:
                self._refuse(peer, fetch.session, "gone", _GONE)
            return
        if position.session != fetch.session:
            if position.session:
                self._displace(fetch.name, fetch.session)
                self._refuse(peer, fetch.session, "taken", _taken(fetch.name))
            else:
                self._refuse(peer, fetch.session, "moved", _MOVED)
            return
        if fetch.first > self._view.end:
            reason = (
                f"first {fetch.first} is beyond the log's end {self._view.end}: it came from another log; open the "
                "subscriber again"
            )
            self._refuse(peer, fetch.session, "ahead", reason)
            return
        before = self._waiting.get(fetch.name)
        is_away, position.asked = position.asked is None, time.monotonic()
        position.is_new = False
        waiting = self._waiting_for(peer, fetch, position.topics)
        if is_away or position.hold is None:
            again = before.coming_back if before is not None else None
            if again is None:
                tail = self._view.open_batches() if position.next < position.snapshot else []
                again = self._positions.come_back(position, tail)
            waiting.coming_back = again
        else:
            self._positions.move(position, fetch.done)
        self._wait(fetch.name, waiting)

    def _wait(self, owner: str | bytes, waiting: _Waiting) -> None:
        self._waiting[owner] = waiting
        self._active[owner] = None
        heapq.heappush(self._deadlines, (waiting.deadline, next(self._count), owner))

    def _waiting_for(self, peer: bytes, fetch: Fetch, topics: tuple[bytes, ...]) -> _Waiting:
        deadline = time.monotonic() + min(fetch.wait, MOST_WAIT_MS) / 1000
        cursor, _ = self._cursors.pop(fetch.name or peer, (None, 0.0))
        if cursor is None or cursor.position != fetch.first:
            cursor = Cursor(self._view, fetch.first)
        return _Waiting(peer, fetch, topics, cursor, deadline, [])

    def _replay(self, peer: bytes, fetch: Fetch, topics: tuple[bytes, ...]) -> None:
        replays = sum(isinstance(owner, bytes) for owner in self._waiting)
        if peer not in self._waiting and replays >= _MOST_REPLAYS:
            self._faults.warn("a replay is refused: %d others are served", replays)
            self._refuse(peer, fetch.session, "busy", f"{replays} others are served; ask again later")
            return
        self._wait(peer, self._waiting_for(peer, fetch, topics))

    def _answer(self, owner: str | bytes, waiting: _Waiting) -> bool:
        """Answer a FETCH if that is possible now; returns whether there is more to do at once."""
        fetch = waiting.fetch
        waiting.is_blocked = True
        position = self._positions.get(owner) if isinstance(owner, str) else None
        if isinstance(owner, str):
            if position is None or position.session != fetch.session:
                if owner in self._jobs:  # its end tells whether the name is taken or gone
                    return False
                del self._waiting[owner]
                self._refuse(waiting.peer, fetch.session, "gone", _GONE)
                return False
            if waiting.coming_back is not None and not self._is_back(waiting, position):
                return False
            if fetch.confirm and not position.is_kept:
                self._positions.keep()
                return False
        on_the_way = self._unsent.of(owner)
        if waiting.peer in on_the_way or len(on_the_way) > 1:
            self.is_held_up = True
            return False
        cursor = waiting.cursor
        if not waiting.rows and (lost := self._lost(cursor, position)) is not None:
            if position is not None and not position.is_kept:
                self._positions.keep()  # a client that has heard of it comes back after it, and it would not be counted
                return False
            head = Lost(
                session=fetch.session,
                first=fetch.first,
                next=lost,
                end=self._view.end,
                done=None if position is None else position.kept,
            )
            if self._send(waiting.peer, head):
                del self._waiting[owner]
            return False
        waiting.is_blocked = False
        more = self._read(waiting, position)
        ready = waiting.rows or time.monotonic() >= waiting.deadline or self._is_at_end_of_range(waiting)
        if more or not ready:
            return more
        if self._send_batch(owner, waiting, position):
            del self._waiting[owner]
            self._cursors[owner] = waiting.cursor, time.monotonic()
        else:
            waiting.is_blocked = True
        return False

    def _is_back(self, waiting: _Waiting, position: Position) -> bool:
        """Whether a client that was away has its name again."""
        coming, fetch = waiting.coming_back, waiting.fetch
        assert coming is not None
        if not coming.done():
            return False
        try:
            is_back = coming.result()
        except LogError as e:  # it asks again
            self._faults.warn("durable subscriber %r: %s", position.name, e)
            del self._waiting[position.name]
            return False
        if not is_back:
            del self._waiting[position.name]
            self._refuse(waiting.peer, fetch.session, "moved", _MOVED)
            return False
        waiting.coming_back = None
        position.asked = time.monotonic()
        assert fetch.done is not None
        self._positions.move(position, fetch.done)
        return True

    def _lost(self, cursor: Cursor, position: Position | None) -> int | None:
        """Count what is wanted and was deleted; the id after it, None if there is nothing."""
        first = cursor.position
        earliest = self._view.earliest
        if first >= earliest:
            return None
        if position is not None and position.lost_to < earliest:
            position.lost += earliest - max(first, position.lost_to)
            position.lost_to = earliest
            self._losses.warn(
                "durable subscriber %r: the ids %d to %d were deleted before it had them (walMaxBytes)",
                position.name,
                first,
                earliest - 1,
            )
        return earliest

    def _is_at_end_of_range(self, waiting: _Waiting) -> bool:
        until = waiting.fetch.until
        return waiting.fetch.name is None and waiting.cursor.position >= (
            self._view.end if until is None else until
        )

    def _read(self, waiting: _Waiting, position: Position | None) -> bool:
        """Read rows for an answer; whether there may be more of them, and time is over for this turn."""
        fetch, cursor = waiting.fetch, waiting.cursor
        end = self._view.end if fetch.until is None else min(fetch.until, self._view.end)
        room = min(fetch.max_bytes, _MOST_BATCH_BYTES, max(_LEAST_BYTES, _MOST_BYTES - self._used_bytes))
        deadline = time.monotonic() + _TURN_SECONDS
        while fetch.max_bytes and cursor.position < end and waiting.size < room:
            batch = cursor.read(min(_TURN_ROWS, end - cursor.position), room - waiting.size)
            if batch is None:
                return True  # deleted meanwhile: it is looked at again
            batch = _without_older(matching(batch, waiting.topics), position)
            if batch.num_rows:
                waiting.rows.append(batch)
                waiting.size += batch.nbytes
            if time.monotonic() >= deadline:
                return not waiting.rows and cursor.position < end
            if sum(rows.num_rows for rows in waiting.rows) >= _TURN_ROWS:
                break
        return False

    def _send_batch(self, owner: str | bytes, waiting: _Waiting, position: Position | None) -> bool:
        fetch = waiting.fetch
        columns: Sequence[str] = ()
        buffers: list[Any] = []
        rows = 0
        if waiting.rows:
            batch = waiting.rows[0] if len(waiting.rows) == 1 else _together(waiting.rows)
            rows = batch.num_rows
            columns, buffers = pack_rows(batch)
        head = Batch(
            session=fetch.session,
            first=fetch.first,
            next=max(fetch.first, waiting.cursor.position),
            end=self._view.end,
            done=None if position is None else position.kept,
            rows=rows,
            columns=tuple(columns),
        )
        failpoints.reach("proxy.batch.before_send")
        if not self._send(waiting.peer, head, owner, buffers):
            return False
        if position is not None:
            position.sent += rows
        return True

    def _send(
        self, peer: bytes, message: FromProxy, owner: str | bytes | None = None, buffers: Sequence[Any] = ()
    ) -> bool:
        """Whether it was taken, or the client is gone, which asks again by another connection."""
        frames = [peer, *encode(message, buffers)]
        try:
            if owner is None or not buffers:
                return self.router.send(frames)
            tracker = self.router.send_tracked(frames)
            if tracker is None:
                return False
            size = sum(memoryview(buffer).nbytes for buffer in buffers)
            self._unsent.add(owner, peer, tracker, size)
            self._used_bytes += size
            return True
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
        return True

    # The loop.

    def step(self) -> bool:
        """Answer what can be answered.

        Returns:
            Whether there is more to do at once.

        Raises:
            LogError: Positions cannot be written.
        """
        busy = False
        self.is_held_up = self.router.stuck = False
        self._read_inbox()
        self._finish_jobs()
        self._used_bytes = self._unsent.bytes()
        for owner in self._owners_to_look_at():
            waiting = self._waiting.get(owner)
            more = waiting is not None and self._try_to_answer(owner, waiting)
            if waiting is not None and self._waiting.get(owner) is waiting and (more or waiting.is_blocked):
                self._active[owner] = None
            busy = busy or more
        self._forget_cursors()
        for log in (self._faults, self._errors, self._losses, self._comings):
            log.flush()
        self.is_held_up = self.is_held_up or self.router.stuck
        return busy or bool(self._requests)

    def _forget_cursors(self) -> None:
        """Close files that no client reads on: a deleted one keeps its room on the disk until then."""
        late = time.monotonic() - PRESENT_SECONDS
        while self._cursors:  # in the order in which they were left
            owner, (_, left) = next(iter(self._cursors.items()))
            if left > late and len(self._cursors) <= _MOST_CURSORS:
                return
            del self._cursors[owner]

    def close(self) -> None:
        """Close the socket, and all files."""
        self._waiting.clear()
        self._cursors.clear()
        self.router.close()

    def _owners_to_look_at(self) -> list[str | bytes]:
        """Those whose FETCH may be answered now; the others wait for messages."""
        active, self._active = list(self._active), {}
        there = self._view.earliest, self._view.end
        if there != self._seen:
            self._seen = there
            return list(self._waiting)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            active.append(heapq.heappop(self._deadlines)[2])
        return list(dict.fromkeys(active))

    def _try_to_answer(self, owner: str | bytes, waiting: _Waiting) -> bool:
        try:
            return self._answer(owner, waiting)
        except DiskFaultError as e:  # the next turn may get it
            self._faults.warn("durable subscriber %r: %s", owner, e)
            waiting.is_blocked = self.is_held_up = True
        except LogError as e:
            self._faults.warn("durable subscriber %r: %s", owner, e)
            del self._waiting[owner]
            self._refuse(waiting.peer, waiting.fetch.session, "log", str(e))
        except zmq.ZMQError:
            raise
        except Exception as e:
            self._waiting.pop(owner, None)
            self._fail(waiting.peer, e, waiting.fetch.session)
        return False

    @property
    def due(self) -> float | None:
        """When a FETCH that waits must be answered, monotonic; None if none waits."""
        while self._deadlines:
            deadline, _, owner = self._deadlines[0]
            waiting = self._waiting.get(owner)
            if waiting is not None and waiting.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def status(self) -> list[dict[str, Any]]:
        """An account of each subscriber, as plain data: of those that are furthest behind, if there are many."""
        now, monotonic = time.time(), time.monotonic()
        accounts = []
        for position in heapq.nsmallest(_MOST_SHOWN_OF_ALL, self._positions, key=lambda p: p.next):
            topics = position.topics[:_MOST_TOPICS_SHOWN]
            accounts.append(
                {
                    "name": position.name,
                    "topics": [printable(topic, _MOST_SHOWN) for topic in topics],
                    "connected": position.asked is not None,
                    "nextId": position.next,
                    "backlog": self._view.end - position.next,
                    "sent": position.sent,
                    "lost": position.lost,
                    "lastAckSeconds": None
                    if position.acknowledged is None
                    else round(now - position.acknowledged, 1),
                    "awaySeconds": 0.0 if position.asked is not None else round(monotonic - position.left, 1),
                    "ageSeconds": round(now - position.created, 1),
                }
            )
        return accounts


_GONE = (
    "the proxy does not know the subscription any more: its log was replaced, or the subscription was removed or has "
    "expired. What was not acknowledged by then may be lost. Open the subscriber again: it begins at its start"
)
_MOVED = "the position was set or removed by hand while the subscriber was away; open it again"


def _taken(name: str) -> str:
    return f"another client has subscribed as {name!r}"


def _are_of_one_client(session: int, other: int) -> bool:
    return bool(client_of(session)) and client_of(session) == client_of(other)


def _without_older(batch: pa.RecordBatch, position: Position | None) -> pa.RecordBatch:
    """Below the snapshot of a position only the newest message of each topic."""
    if position is None or not batch.num_rows or batch.column("id")[0].as_py() >= position.snapshot:
        return batch
    ids = batch.column("id")
    is_live = pc.greater_equal(ids, number(position.snapshot))
    return batch.filter(pc.or_(is_live, pc.is_in(ids, value_set=position.newest)))


def _together(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    schema = batches[0].schema.remove_metadata()
    return pa.concat_batches([batch.replace_schema_metadata(None) for batch in batches]).cast(schema)
