"""Answers requests for the rows of the log from an id on, of some topics, up to a number of bytes.

The rules:

* Between two requests the server keeps only positions (``positions``). Of each client one FETCH waits at a time: until
  there are rows, until its deadline, or until its position is on the disk.
* An answer takes memory until libzmq has handed it to the system. A name has at most two such answers, on two
  connections, because a client that has lost its connection gets its answer on the new one. The answers of all clients
  share ``_MOST_BYTES``, and beyond that each may have ``_LEAST_BYTES``, or one message. So
  memory is bounded, however slowly clients read.
* An error in the request of a client refuses that client, and is logged with its cause. Only an error of the positions,
  of the log's listing or of the socket ends the server.
"""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import zmq

from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.proxy.fetch_protocol import Batch, Fetch, Forget, FromProxy, Lost, Open, Refused, decode
from zmq_datasource.proxy.fetch_wire import FetchWire, Request
from zmq_datasource.proxy.names import NAME_BOUNDS, NameBounds, Names
from zmq_datasource.proxy.positions import Position, Positions
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.proxy.waiting import Cursors, Waiting, WaitingRequests

# Bytes of the answers of all clients that libzmq has not handed to the system, and what each client may have beyond
# that.
_MOST_BYTES, _LEAST_BYTES = 128 << 20, 128 << 10
# About how many bytes one answer has, beside its last message. A batch of the log that is a quarter larger is sent
# whole.
_MOST_BATCH_BYTES = 4 << 20
# How long new requests are read before waiting ones are answered.
_TURN_SECONDS = 0.005


class FetchServer:
    """Answers durable subscribers. Use it in one thread.

    Args:
        wire: The socket.
        view: The log.
        positions: The positions of all names.
        bounds: How much durable subscribers may ask for.

    Attributes:
        names: Which session has which name.
        waiting: The requests that are not answered yet.
        must_recheck: Whether an answer waits for the client's queue or for a file. No event reports either.
        asked_end: A subscriber has asked for what follows this id, and found nothing.
    """

    must_recheck = False
    asked_end = -1

    def __init__(
        self, wire: FetchWire, view: LogView, positions: Positions, bounds: NameBounds = NAME_BOUNDS
    ) -> None:
        self.wire = wire
        self._view = view
        self._positions = positions
        self.names = Names(view, positions, bounds)
        self.waiting = WaitingRequests()
        self._cursors = Cursors(view)
        self._used_bytes = 0
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._errors = LimitedLog(__name__, "unexpected errors at durable subscribers")
        self._losses = LimitedLog(
            __name__, "times that messages were deleted before a durable subscriber had them"
        )

    def step(self) -> bool:
        """Take requests, and answer those that can be answered. Called in each round.

        Returns:
            Whether there is more to do at once.

        Raises:
            zmq.ZMQError: The socket has failed.
        """
        answers = self.wire.answers
        self.must_recheck = answers.stuck = False
        self.wire.receive()
        self._read_requests()
        self._finish_jobs()
        self._used_bytes = answers.bytes
        is_busy = False
        for name, waiting in self.waiting.due(self._view):
            has_more = self._try_to_answer(name, waiting)
            if self.waiting.get(name) is waiting and (has_more or waiting.is_blocked):
                self.waiting.activate(name)
            is_busy = is_busy or has_more
        self._cursors.drop_old()
        for log in (self._faults, self._errors, self._losses, self.names):
            log.flush()
        self.must_recheck = self.must_recheck or answers.stuck
        return is_busy or bool(self.wire.requests)

    def close(self) -> None:
        """Close the socket and all files."""
        self.waiting, self._cursors = WaitingRequests(), Cursors(self._view)
        self.wire.close()

    # Requests.

    def _read_requests(self) -> None:
        requests = self.wire.requests
        deadline = time.monotonic() + _TURN_SECONDS
        while requests and time.monotonic() < deadline:
            request = requests.popleft()
            try:
                self._read(request)
            except Exception as e:
                self._refuse(request.peer, "a request", e, passing=LogError)

    def _read(self, request: Request) -> None:
        peer, (message, frames) = request.peer, decode(request.frames)
        if isinstance(message, (Open, Fetch, Forget)) and not request.may_use(message.name):
            reason = f"the name {message.name!r} belongs to another key (allowedClients of the proxy)"
            self._reply(peer, Refused(code="forbidden", reason=reason, session=message.session))
            return
        match message:
            case Open():
                self._reply(peer, self.names.open(peer, message, tuple(frames)))
            case Fetch():
                self._read_fetch(peer, message)
            case Forget():
                self._reply(peer, self.names.forget(peer, message))
            case _:
                raise ProtocolError(f"{type(message).__name__}, which only a proxy sends")

    def _read_fetch(self, peer: bytes, fetch: Fetch) -> None:
        if fetch.first > self._view.end and isinstance(self.names.position_of(fetch), Position):
            reason = (
                f"first {fetch.first} is beyond the log's end {self._view.end}: it is an id of another log; open the "
                "subscriber again"
            )
            self._reply(peer, Refused(code="ahead", reason=reason, session=fetch.session))
            return
        self._wait_or_reply(peer, fetch, self.names.fetch(peer, fetch))

    def _finish_jobs(self) -> None:
        for job in self.names.done_jobs():
            request = job.request
            # For a FETCH each error of the log is temporary: the client asks again. For OPEN and FORGET only a lock
            # of the command line is.
            passing = LogError if isinstance(request, Fetch) else LogLockedError
            try:
                self._wait_or_reply(job.peer, request, self.names.result(job))
            except Exception as e:
                self._refuse(job.peer, _text_of(request.name), e, request.session, passing=passing)
            self.waiting.activate(request.name)  # a session that has lost the name is refused

    def _wait_or_reply(
        self, peer: bytes, request: Open | Fetch | Forget, answer: Position | FromProxy | None
    ) -> None:
        """Let a FETCH wait for its rows, or send the answer."""
        if isinstance(answer, Position):
            assert isinstance(request, Fetch)
            cursor = self._cursors.at(request.name, request.first)
            self.waiting.put(request.name, Waiting(peer, request, tuple(answer.notes.topics), cursor))
        else:
            self._reply(peer, answer)

    # Answers.

    def _try_to_answer(self, name: str, waiting: Waiting) -> bool:
        try:
            return self._answer(name, waiting)
        except Exception as e:
            session = waiting.fetch.session
            if self._refuse(waiting.peer, _text_of(name), e, session, passing=DiskFaultError):
                self.waiting.remove(name)
            else:
                waiting.is_blocked = self.must_recheck = True
        return False

    def _answer(self, name: str, waiting: Waiting) -> bool:
        """Answer a FETCH if that is possible now; return whether there is more to do at once."""
        fetch, position = waiting.fetch, self.names.position_of(waiting.fetch)
        waiting.is_blocked = True
        if not isinstance(position, Position):
            if position is not None:
                self.waiting.remove(name)
                self._reply(waiting.peer, position)
            return False
        if fetch.confirm and not position.is_on_disk:
            self._positions.write_now()
            return False
        on_the_way = self.wire.answers.connections_of(name)
        if waiting.peer in on_the_way or len(on_the_way) > 1:
            self.must_recheck = True
            return False
        head: dict[str, Any] = {
            "session": fetch.session,
            "first": fetch.first,
            "end": self._view.end,
            "done": position.next_on_disk,
        }
        if not waiting.rows and (lost := self._count_lost(waiting.cursor, position)) is not None:
            if not position.is_on_disk:
                # LOST waits until the count is on the disk: the client then continues behind these ids, so they are not
                # counted again if a crash loses the count.
                self._positions.write_now()
            else:
                self._send(name, waiting, Lost(**head, next=lost))
            return False
        waiting.is_blocked = False
        room = min(_MOST_BATCH_BYTES, max(_LEAST_BYTES, _MOST_BYTES - self._used_bytes))
        if waiting.read(self._view.end, room, position):
            return True
        if not waiting.rows and fetch.max_bytes and waiting.cursor.position >= self._view.end:
            self.asked_end = self._view.end
        if waiting.rows or time.monotonic() >= waiting.deadline:
            rows = waiting.batch()
            count = 0 if rows is None else rows.num_rows
            batch = Batch(**head, next=max(fetch.first, waiting.cursor.position), rows=count)
            failpoints.reach("proxy.batch.before_send")
            if self._send(name, waiting, batch, rows) and count:
                position.note(sent=position.notes.sent + count)
        return False

    def _count_lost(self, cursor: Cursor, position: Position) -> int | None:
        """If the log no longer has the next rows, count them, and return the id behind them; otherwise None."""
        first = cursor.position
        earliest = self._view.earliest
        if first >= earliest:
            return None
        notes = position.notes
        if notes.lost_to < earliest:
            position.note(lost=notes.lost + earliest - max(first, notes.lost_to), lost_to=earliest)
            self._losses.warn(
                "%s: the ids %d to %d were deleted before it had them (walMaxBytes)",
                _text_of(position.name),
                first,
                earliest - 1,
            )
        return earliest

    def _send(
        self, name: str, waiting: Waiting, answer: Batch | Lost, rows: pa.RecordBatch | None = None
    ) -> bool:
        """Send the answer to a FETCH; False if the client's queue has no room, or the client is gone."""
        try:
            is_sent = self.wire.send(waiting.peer, answer, name, rows)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self.waiting.remove(name)  # it asks again on another connection
            return False
        if not is_sent:
            waiting.is_blocked = True
            return False
        if rows is not None:
            self._used_bytes += rows.nbytes  # the next answers of this round have less room
        self.waiting.remove(name)
        self._cursors.keep(name, waiting.cursor)
        return True

    def _reply(self, peer: bytes, answer: FromProxy | None) -> None:
        """Send an answer without rows, if there is one. If it is lost, the client asks again."""
        try:
            if answer is not None:
                self.wire.send(peer, answer)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise

    def _refuse(
        self,
        peer: bytes,
        what: str,
        error: Exception,
        session: int | None = None,
        *,
        passing: type[LogError],
    ) -> bool:
        """Log an error in a request, and refuse the client; return whether it was refused.

        Args:
            passing: Temporary errors: the client is not refused. The client or the server tries the request again.

        Raises:
            zmq.ZMQError: It is the socket's error.
        """
        if isinstance(error, zmq.ZMQError):
            raise error
        if isinstance(error, (LogError, ProtocolError)):
            self._faults.warn("%s: %s", what, error)
            if isinstance(error, passing):
                return False
            code, reason = "log" if isinstance(error, LogError) else "protocol", str(error)
        else:
            self._errors.fault("%s: an unexpected error: %r", what, error, error=error)
            reason = f"an unexpected error of the proxy ({type(error).__name__}), which its log explains"
            code = "internal"
        self._reply(peer, Refused(code=code, reason=reason, session=session))
        return True


def _text_of(name: str) -> str:
    return f"durable subscriber {name!r}"
