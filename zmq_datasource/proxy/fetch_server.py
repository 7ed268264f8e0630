"""Answers requests for rows of the log: what follows an id, of these topics, up to so many bytes.

Durable subscribers ask so for what comes after their position, and replays for a range of ids. The rules:

* The server keeps positions (``positions``), and nothing else between two requests. Of each client one FETCH waits at
  a time: until there are rows, until its time is over, or until the position is on the disk that it confirms.
* A name, or the connection of a replay, has at most two answers that libzmq has not handed to the system yet, on two
  connections: a client whose network is gone has its answer by a new connection. So memory is bounded, whatever
  clients do: the answers of all clients share ``_MOST_BYTES``, and beyond that each may have ``_LEAST_BYTES``, or one
  message.
* An error at one client's request refuses that client, and is logged with its cause. Only an error of the positions
  or of the socket ends the server.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import zmq

from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.proxy.fetch_protocol import Batch, Fetch, Forget, FromProxy, Lost, Open, Refused
from zmq_datasource.proxy.fetch_wire import FetchWire
from zmq_datasource.proxy.names import Names, moved
from zmq_datasource.proxy.positions import Position, Positions
from zmq_datasource.proxy.router import Request
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.proxy.waiting import Cursors, Owner, Waiting, WaitingRequests

__all__ = ["FetchServer"]

# Bytes that the answers of all clients may have on their way to the system, and what each may have beyond that.
_MOST_BYTES, _LEAST_BYTES = 128 << 20, 128 << 10
# What one answer has at most, beside its last message.
_MOST_BATCH_BYTES = 4 << 20
# For taking requests, until those that wait get their turn.
_TURN_SECONDS = 0.005
_MOST_REPLAYS = 64


class FetchServer:
    """Use it in one thread.

    Args:
        wire: Where its clients are, and how they ask.
        view: The log.
        positions: Of the names that are known.

    Attributes:
        names: Which session has which name.
        waiting: Requests that are not answered yet.
        is_held_up: Whether an answer waits for a client to take the one before, of which no event tells.
    """

    is_held_up = False

    def __init__(self, wire: FetchWire, view: LogView, positions: Positions) -> None:
        self.wire = wire
        self._view = view
        self._positions = positions
        self.names = Names(view, positions)
        self._requests: deque[Request] = deque()
        self.waiting = WaitingRequests()
        self._cursors = Cursors(view)
        self._used_bytes = 0
        self._faults = LimitedLog(__name__, "faults of durable subscribers and replays")
        self._errors = LimitedLog(__name__, "unexpected errors at durable subscribers and replays")
        self._losses = LimitedLog(
            __name__, "times that messages were deleted before a durable subscriber had them"
        )

    def step(self) -> bool:
        """Answer what can be answered.

        Returns:
            Whether there is more to do at once.

        Raises:
            LogError: Positions cannot be written.
        """
        answers = self.wire.router.answers
        self.is_held_up = answers.stuck = False
        self._read_inbox()
        self._finish_jobs()
        self._used_bytes = answers.bytes
        busy = False
        for owner, waiting in self.waiting.to_look_at(self._view):
            more = self._try_to_answer(owner, waiting)
            if self.waiting.get(owner) is waiting and (more or waiting.is_blocked):
                self.waiting.activate(owner)
            busy = busy or more
        self._cursors.forget_late()
        for log in (self._faults, self._errors, self._losses, self.names):
            log.flush()
        self.is_held_up = self.is_held_up or answers.stuck
        return busy or bool(self._requests)

    def close(self) -> None:
        """Close the socket, and all files."""
        self.waiting, self._cursors = WaitingRequests(), Cursors(self._view)
        self.wire.router.close()

    # Requests.

    def _read_inbox(self) -> None:
        if not self._requests:
            self._requests.extend(self.wire.router.inbox())
        deadline = time.monotonic() + _TURN_SECONDS
        while self._requests and time.monotonic() < deadline:
            request = self._requests.popleft()
            try:
                self._take(request)
            except Exception as e:  # if it is the log's, the client asks again
                self._fail(request.peer, "a request", e, again=LogError)

    def _take(self, request: Request) -> None:
        peer, (message, frames) = request.peer, self.wire.read(request.frames)
        topics = tuple(frames)
        if isinstance(message, (Open, Fetch, Forget)):
            name = message.name
            if name is not None and not request.may_use(name):
                reason = f"the name {name!r} belongs to another key (allowedClients of the proxy)"
                self._say(peer, Refused(code="forbidden", reason=reason, session=message.session))
                return
        match message:
            case Open():
                self._say(peer, self.names.open(peer, message, topics))
            case Fetch(name=None):
                self._replay(peer, message, topics)
            case Fetch():
                self._fetch(peer, message)
            case Forget():
                self._say(peer, self.names.forget(peer, message))
            case _:
                raise ProtocolError(f"{type(message).__name__}, which only a proxy sends")

    def _finish_jobs(self) -> None:
        for job in self.names.done_jobs():
            peer, wanted, _ = job
            try:
                self._say(peer, self.names.result(job))
            except Exception as e:  # if the command line looks at the name, the client asks again
                self._fail(peer, _said(wanted.name), e, wanted.session, again=LogLockedError)
            self.waiting.activate(wanted.name)  # a session that has lost the name hears of it

    def _fetch(self, peer: bytes, fetch: Fetch) -> None:
        assert fetch.name is not None
        position = self.names.position_of(fetch)
        if isinstance(position, Refused):
            if not self.names.is_busy(fetch.name):  # else it is asked again
                self._say(peer, position)
            return
        if fetch.first > self._view.end:
            reason = (
                f"first {fetch.first} is beyond the log's end {self._view.end}: it came from another log; open the "
                "subscriber again"
            )
            self._say(peer, Refused(code="ahead", reason=reason, session=fetch.session))
            return
        before = self.waiting.get(fetch.name)
        coming_back = self.names.arrive(position, fetch, None if before is None else before.coming_back)
        self._wait(fetch.name, peer, fetch, position.topics, coming_back)

    def _replay(self, peer: bytes, fetch: Fetch, topics: tuple[bytes, ...]) -> None:
        replays = sum(isinstance(owner, bytes) for owner in self.waiting)
        if self.waiting.get(peer) is None and replays >= _MOST_REPLAYS:
            self._faults.warn("a replay is refused: %d others are served", replays)
            reason = f"{replays} others are served; ask again later"
            self._say(peer, Refused(code="busy", reason=reason, session=fetch.session))
            return
        self._wait(peer, peer, fetch, topics)

    def _wait(
        self,
        owner: Owner,
        peer: bytes,
        fetch: Fetch,
        topics: tuple[bytes, ...],
        coming_back: Future[bool] | None = None,
    ) -> None:
        cursor = self._cursors.take(owner, fetch.first)
        self.waiting.put(owner, Waiting(peer, fetch, topics, cursor, coming_back))

    # Answers.

    def _try_to_answer(self, owner: Owner, waiting: Waiting) -> bool:
        try:
            return self._answer(owner, waiting)
        except Exception as e:
            if self._fail(waiting.peer, _said(owner), e, waiting.fetch.session, again=DiskFaultError):
                self.waiting.remove(owner)
            else:  # the next turn may get it
                waiting.is_blocked = self.is_held_up = True
        return False

    def _answer(self, owner: Owner, waiting: Waiting) -> bool:
        """Answer a FETCH if that is possible now; returns whether there is more to do at once."""
        fetch = waiting.fetch
        waiting.is_blocked = True
        position: Position | None = None
        if isinstance(owner, str):
            found = self.names.position_of(fetch)
            if isinstance(found, Refused):
                if not self.names.is_busy(owner):  # else its end tells who has the name
                    self.waiting.remove(owner)
                    self._say(waiting.peer, found)
                return False
            position = found
            if waiting.coming_back is not None and not self._is_back(waiting, position):
                return False
            if fetch.confirm and not position.is_kept:
                self._positions.keep()
                return False
        on_the_way = self.wire.router.answers.connections_of(owner)
        if waiting.peer in on_the_way or len(on_the_way) > 1:
            self.is_held_up = True
            return False
        done = None if position is None else position.kept
        head: dict[str, Any] = {
            "session": fetch.session,
            "first": fetch.first,
            "end": self._view.end,
            "done": done,
        }
        if not waiting.rows and (lost := self._lost(waiting.cursor, position)) is not None:
            if position is not None and not position.is_kept:
                self._positions.keep()  # a client that has heard of it comes back after it, and it would not be counted
            else:
                self._send(owner, waiting, Lost(**head, next=lost))
            return False
        waiting.is_blocked = False
        room = min(_MOST_BATCH_BYTES, max(_LEAST_BYTES, _MOST_BYTES - self._used_bytes))
        if waiting.read(self._view.end, room, position):
            return True
        if waiting.rows or time.monotonic() >= waiting.deadline or waiting.is_at_end(self._view.end):
            rows = waiting.batch()
            count = 0 if rows is None else rows.num_rows
            batch = Batch(**head, next=max(fetch.first, waiting.cursor.position), rows=count)
            failpoints.reach("proxy.batch.before_send")
            if self._send(owner, waiting, batch, rows) and position is not None:
                position.sent += count
        return False

    def _is_back(self, waiting: Waiting, position: Position) -> bool:
        """Whether a client that was away has its name again."""
        coming, fetch = waiting.coming_back, waiting.fetch
        assert coming is not None
        if not coming.done():
            return False
        try:
            is_back = coming.result()
        except LogError as e:  # it asks again
            self._faults.warn("%s: %s", _said(position.name), e)
            self.waiting.remove(position.name)
            return False
        if not is_back:
            self.waiting.remove(position.name)
            self._say(waiting.peer, moved(fetch))
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
                "%s: the ids %d to %d were deleted before it had them (walMaxBytes)",
                _said(position.name),
                first,
                earliest - 1,
            )
        return earliest

    def _send(
        self, owner: Owner, waiting: Waiting, answer: Batch | Lost, rows: pa.RecordBatch | None = None
    ) -> bool:
        """Send the answer to a FETCH; False if the client's queue has no room, or the client is gone."""
        try:
            sent = self.wire.send(waiting.peer, answer, owner, rows)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self.waiting.remove(owner)  # it asks again by another connection
            return False
        if not sent:
            waiting.is_blocked = True
            return False
        self.waiting.remove(owner)
        self._cursors.leave(owner, waiting.cursor)
        if (following := self.wire.after(waiting.fetch, answer)) is not None:
            self._wait(owner, waiting.peer, following, waiting.topics)
        return True

    def _say(self, peer: bytes, answer: FromProxy | None) -> None:
        """Send an answer without rows, if there is one. A client that does not get it asks again."""
        try:
            if answer is not None:
                self.wire.send(peer, answer)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise

    def _fail(
        self, peer: bytes, what: str, error: Exception, session: int | None = None, *, again: type[LogError]
    ) -> bool:
        """Refuse a client because of an error at its request; False if it is one after which it is tried again.

        Raises:
            zmq.ZMQError: The error is the socket's.
        """
        if isinstance(error, zmq.ZMQError):
            raise error
        if isinstance(error, (LogError, ProtocolError)):
            self._faults.warn("%s: %s", what, error)
            if isinstance(error, again):
                return False
            code, reason = "log" if isinstance(error, LogError) else "protocol", str(error)
        else:  # the client begins again, from its position
            self._errors.fault("%s: an unexpected error: %r", what, error, error=error)
            reason = f"an unexpected error of the proxy ({type(error).__name__}), which its log explains"
            code = "internal"
        self._say(peer, Refused(code=code, reason=reason, session=session))
        return True


def _said(owner: Owner) -> str:
    return f"durable subscriber {owner!r}" if isinstance(owner, str) else "a replay"
