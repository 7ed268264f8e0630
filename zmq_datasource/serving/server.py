"""What a server of durable subscribers decides, as a state machine: no socket, clock, file or thread.

Requests, times, the log's ends, and the results of operations go in. Answers and operations come out (``take``), and
``durable`` does them. A name is in one of these states:

| State | Lease on the disk | Hold | What the log keeps |
| --- | --- | --- | --- |
| unknown | no | no | nothing |
| present: its client has asked within ``present_seconds`` | yes | here | everything from its position on |
| away | yes | free | the same, for ``subscriberExpiry`` |

The rules:

* Between two requests the server keeps only positions. A position is the lease of a named reader of the log. It is on
  the disk before a client learns it.
* The newest OPEN of a name wins. Requests of other sessions are refused as ``taken``, also those of a session that had
  the name before.
* Of each name one FETCH waits at a time, the newest: until there are rows, until its deadline, or until its position
  is on the disk. A lost answer is no fault: the client asks again.
* Of each name one job runs at a time. A job is a generator that yields operations on leases and the log, and gets
  their results. While a name is away, its lease may be dropped, so the job of a client that comes back reads it again.
* A position is written about once a second, or at once if a client waits for it. While the disk refuses, nothing is
  confirmed, and the write is repeated.
* An error in the request of one client refuses that client, and never ends the server.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from zmq_datasource.counters import figures
from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError, ProtocolError
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.log import Lease, SubscriberNotes, subscriber_key
from zmq_datasource.serving.figures import SubscriberFigures
from zmq_datasource.serving.protocol import (
    EARLIEST,
    LAST,
    LATEST,
    MOST_WAIT_MS,
    Batch,
    Fetch,
    Forget,
    Forgotten,
    FromServer,
    Lost,
    Open,
    Opened,
    Refused,
    decode,
)

# How often a position that moves is written, and one that does not, as a sign that its client is there.
_WRITE_SECONDS, _BEAT_SECONDS = 1.0, 10.0
# How soon an operation is repeated that the disk has refused.
_REFUSED_SECONDS = 0.25
# How often deadlines, positions and absences are checked.
_LOOK_SECONDS = 0.1
# How soon the receiver is asked again to seal for topics of which its last chunk had none.
_OTHER_TOPICS_SECONDS = 0.25
# What the figures show of a name: so many topics, and so many characters of a topic.
_MOST_TOPICS_SHOWN, _MOST_CHARACTERS = 10, 60
_GONE = (
    "the subscription is not known: its log was replaced, or it was removed or has expired. Messages that were not "
    "acknowledged by then may be lost. Open the subscriber again: it begins at its start"
)


class Bounds(NamedTuple):
    """How much durable subscribers may ask for.

    Attributes:
        names: The number of names.
        shown: How many names the figures show: those with the largest backlog.
        present_seconds: A client that has asked for nothing for so long is away.
    """

    names: int = 1000
    shown: int = 100
    present_seconds: float = 5.0


BOUNDS = Bounds()


class Operations(Protocol):
    """What the jobs of names need of the disk. Each may raise LogError."""

    def take(self, name: str) -> Lease | None:
        """Hold a name, and return its lease. LogLockedError: the command line drops it at this moment."""

    def write(self, lease: Lease) -> object:
        """Write the lease of a name that is held."""

    def announced(self) -> int:
        """The id at which a new reader begins, or later (``Head.announced``)."""

    def first_since(self, time: int, end: int) -> int:
        """The first id that was received at a time or later; ``end`` if there is none."""

    def newest(self, start: int, end: int) -> pa.Array:
        """The id of the newest message of each topic among the ids from ``start`` to before ``end``, in order."""

    def free(self, name: str) -> None:
        """Free the hold of a name. Its lease stays."""

    def remove(self, name: str) -> None:
        """Delete the lease of a name that is held, and free the hold."""


# The name of an operation, and its arguments.
_Call: TypeAlias = tuple[Any, ...]
_Job: TypeAlias = Generator[_Call, Any, None]


class Do(NamedTuple):
    """Call one of the ``Operations``; then call ``done``."""

    name: str
    verb: str
    arguments: tuple[Any, ...]


class Read(NamedTuple):
    """Read rows for a FETCH; then call ``read`` or ``unread``. A newer one of a name replaces it.

    Attributes:
        start, end: The ids to read; an answer need not have all of them.
        most_bytes: About how many bytes the answer has. It has one row at least, if there is any.
        topics: Only rows with these prefixes; all of them if there are none.
        snapshot, newest: Below the id ``snapshot``, only the rows with these ids.
    """

    name: str
    peer: bytes
    start: int
    end: int
    most_bytes: int
    topics: tuple[bytes, ...]
    snapshot: int
    newest: pa.Array | None


class Rows(NamedTuple):
    """The rows of a BATCH: how many they are, their columns and their buffers (``protocol.pack_rows``)."""

    number: int
    columns: Sequence[str]
    buffers: Sequence[Any]


class Reply(NamedTuple):
    """Send an answer, if the client's queue has room. ``name``: whose FETCH it answers."""

    peer: bytes
    message: FromServer
    name: str | None = None
    buffers: Sequence[Any] = ()


class AwaitRows(NamedTuple):
    """A subscriber has found nothing below ``end``, so the receiver should seal what it has."""

    end: int


Action: TypeAlias = Do | Read | Reply | AwaitRows


class _RefusedError(Exception):
    """A request cannot be fulfilled: the ``code`` and the ``reason`` of a REFUSED."""


@dataclass
class _Waiting:
    """A FETCH that is not answered yet.

    Attributes:
        at: All ids from ``fetch.first`` to before this one are of other topics.
        read: What is being read.
        retry_at: When to read again, after a fault of the disk.
    """

    peer: bytes
    fetch: Fetch
    deadline: float
    at: int
    read: Read | None = None
    retry_at: float = 0.0


@dataclass
class _Name:
    """A name, and the position of its client.

    Attributes:
        left: When its client went away.
        next: The first id that the client still needs.
        is_new: Whether it was unknown before, and its client has not fetched yet.
        on_disk: ``state`` as its lease has it.
        snapshot: Below this id the client gets only the messages ``newest``. These are None until they are searched.
        is_known: Whether it has a lease.
        is_held: Whether the server has its hold.
        displaced: The session that had the name before.
        asked: When its client last asked for something; None while it is away.
        request: The OPEN or FORGET that is worked on: the peer, the message, and its topics.
        retry_at: No job but that of a request begins before this time.
    """

    name: str
    left: float
    next: int = 0
    session: int = 0
    is_new: bool = True
    on_disk: tuple[int, int, bool] = (0, 0, True)
    topics: tuple[bytes, ...] = ()
    snapshot: int = 0
    newest: pa.Array | None = None
    is_known: bool = False
    is_held: bool = False
    displaced: int = 0
    asked: float | None = None
    written_at: float = -math.inf
    sent: int = 0
    lost: int = 0
    lost_to: int = 0
    request: tuple[bytes, Open | Forget, tuple[bytes, ...]] | None = None
    waiting: _Waiting | None = None
    job: _Job | None = None
    retry_at: float = 0.0

    @property
    def state(self) -> tuple[int, int, bool]:
        return self.next, self.session, self.is_new

    def take_over(self, lease: Lease) -> bool:
        """Take the position from a lease. False if it has none: an OPEN was not finished."""
        notes = lease.subscriber
        if notes is None or lease.begins:
            return False
        self.next, self.session, self.is_new, self.is_known = lease.next, notes.session, notes.new, True
        self.topics, self.snapshot, self.on_disk = tuple(notes.topics), notes.snapshot, self.state
        return True


class Server:
    """Durable subscribers of one log. Each method takes the present time, in monotonic seconds.

    Args:
        log_id: The log's id.
        expiry: Seconds after which the lease of a name that is away counts no more.
        bounds: How much clients may ask for.
    """

    def __init__(self, log_id: str, expiry: float, bounds: Bounds = BOUNDS) -> None:
        self._log_id, self._expiry, self._bounds = log_id, float(expiry), bounds
        self._beat_seconds = min(_BEAT_SECONDS, self._expiry / 3)
        self._earliest = self._end = 0
        self._all: dict[str, _Name] = {}
        self._actions: list[Action] = []
        self._now = self._next_look = 0.0
        self._awaited = -1
        self._others_until = 0.0  # until then the receiver is not asked to seal for certain topics
        self._faults = LimitedLog(__name__, "faults of durable subscribers")
        self._news = LimitedLog(__name__, "times that a durable subscriber has opened its name")

    # What happens.

    def restore(self, lease: Lease, now: float) -> None:
        """Take over a position of an earlier server, at the start."""
        it = _Name(lease.name, now)
        if it.take_over(lease):
            self._all[lease.name] = it

    def receive(
        self, peer: bytes, frames: Sequence[bytes], may_use: Callable[[str], bool], now: float
    ) -> None:
        """Take a request from a peer.

        Args:
            may_use: Whether the peer may use a name.
        """
        self._now, session = now, None
        try:
            message, topics = decode(frames)
            if not isinstance(message, (Open, Fetch, Forget)):
                raise ProtocolError(f"{type(message).__name__}, which only a server sends")
            name, session = message.name, message.session
            if not may_use(name):
                raise _RefusedError("forbidden", f"the name {name!r} belongs to another key (allowedClients)")
            match message:
                case Open():
                    self._read_open(peer, message, tuple(map(bytes, topics)), self._all.get(name))
                case Fetch():
                    self._read_fetch(peer, message, self._all.get(name))
                case Forget():
                    self._read_forget(peer, message, self._all.get(name))
        except Exception as e:
            self._refuse(peer, session, e)

    def grew(self, earliest: int, end: int, now: float) -> None:
        """The log now has the ids from ``earliest`` to before ``end``."""
        if (earliest, end) == (self._earliest, self._end):
            return
        self._now, self._earliest, self._end = now, earliest, end
        self._others_until = now + _OTHER_TOPICS_SECONDS  # unless one of these rows is sent
        for it in list(self._all.values()):
            if it.waiting is not None:
                self._advance(it)

    def read(self, read: Read, rows: Rows | None, next_id: int, now: float) -> None:
        """A Read has found these rows below ``next_id``; None if it has found none so far."""
        self._now, it = now, self._all.get(read.name)
        if it is None or (waiting := it.waiting) is None or waiting.read is not read:
            return
        waiting.read, waiting.at = None, next_id
        if rows is not None:
            it.sent += rows.number
            self._others_until = now
            head, columns = self._head(it, waiting), tuple(rows.columns)
            self._answer(it, Batch(**head, next=next_id, rows=rows.number, columns=columns), rows.buffers)
        self._advance(it)

    def unread(self, read: Read, error: Exception, now: float) -> None:
        """A Read has failed: for now, because its chunks are deleted, or because one is damaged."""
        self._now, it = now, self._all.get(read.name)
        if it is None or (waiting := it.waiting) is None or waiting.read is not read:
            return
        waiting.read = None
        if isinstance(error, DiskFaultError):
            waiting.retry_at = now + _REFUSED_SECONDS
            self._faults.warn("durable subscriber %r: %s", it.name, error)
        elif waiting.at >= self._earliest:
            it.waiting = None
            self._refuse(waiting.peer, waiting.fetch.session, error)
        self._advance(it)

    def done(self, name: str, result: Any, now: float) -> None:
        """An operation has this result, or has raised this error."""
        self._now, it = now, self._all[name]
        assert it.job is not None
        self._run_job(it, it.job, result)

    def listed(self, keys: set[str], now: float) -> None:
        """These are the keys of all leases. Names that are away, and have none any more, are forgotten."""
        self._now = now
        for it in list(self._all.values()):
            if it.is_known and not it.is_held and it.job is None and subscriber_key(it.name) not in keys:
                it.is_known = False
                self._advance(it)

    def wake(self, now: float) -> None:
        """Do what is due at this time."""
        self._now = now
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        for it in list(self._all.values()):
            if it.asked is not None and now - it.asked >= self._bounds.present_seconds:
                it.left, it.asked = it.asked, None
            self._advance(it)
        self._faults.flush()
        self._news.flush()

    def close(self, now: float) -> None:
        """Write all positions, and free the names. Requests are not taken any more."""
        self._now = now
        for it in list(self._all.values()):
            it.asked, it.request, it.waiting = None, None, None
            self._advance(it)

    # What to do.

    def take(self) -> list[Action]:
        """What is to be done, in this order, since the last call."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def is_busy(self) -> bool:
        """Whether operations are under way."""
        return any(it.job is not None for it in self._all.values())

    def accounts(self, now: float) -> Iterator[dict[str, Any]]:
        """The figures of each name; of many, only those with the largest backlog."""
        known = [it for it in self._all.values() if it.is_known]
        for it in heapq.nsmallest(self._bounds.shown, known, key=lambda it: it.next):
            away = 0.0 if it.asked is not None else round(now - it.left, 1)
            counted = it.asked is not None, it.next, self._end - it.next, it.sent, it.lost, away
            topics = [printable(t, _MOST_CHARACTERS) for t in it.topics[:_MOST_TOPICS_SHOWN]]
            yield {"name": it.name, "topics": topics, **figures(SubscriberFigures(*counted))}

    # Requests.

    def _read_open(self, peer: bytes, request: Open, topics: tuple[bytes, ...], it: _Name | None) -> None:
        if it is not None and it.request is not None:
            if it.request[1].session == request.session:
                it.request = (peer, *it.request[1:])  # the client may have a new connection
            return
        if it is not None and it.is_known and it.displaced == request.session:
            raise _taken(request)  # it comes after a newer one
        if request.log not in (None, self._log_id):
            raise self._another_log(f"the ids that you have saved are of log {request.log}")
        if it is None:
            if len(self._all) >= (most := self._bounds.names):
                reason = f"there are {most} subscriptions; end some with FORGET, or lower subscriberExpiry"
                raise _RefusedError("full", reason)
            it = self._all[request.name] = _Name(request.name, self._now)
        if it.is_held and it.session == it.on_disk[1] == request.session:
            self._opened(it, peer)  # the same OPEN again
        else:
            it.request = peer, request, topics
            self._advance(it)

    def _another_log(self, why: str) -> _RefusedError:
        here = f"this is log {self._log_id} with the ids {self._earliest} to {self._end - 1}"
        advice = (
            "Continue at the server of your log; or drop your saved ids, and open the subscriber without them"
        )
        return _RefusedError("another-log", f"{why}, and {here}. {advice}")

    def _read_fetch(self, peer: bytes, fetch: Fetch, it: _Name | None) -> None:
        if it is None or not it.is_known:
            if it is None or it.request is None:
                raise _RefusedError("gone", _GONE)
            return  # it is being opened
        if it.session != fetch.session:
            if it.request is not None and it.request[1].session == fetch.session:
                return
            raise _taken(fetch)
        if fetch.first > self._end:
            raise self._another_log(f"the id {fetch.first} is beyond the end of this log")
        it.asked, it.is_new, it.next = self._now, False, max(it.next, fetch.done)
        deadline = self._now + min(fetch.wait, MOST_WAIT_MS) / 1000
        it.waiting = _Waiting(peer, fetch, deadline, fetch.first)
        self._advance(it)

    def _read_forget(self, peer: bytes, request: Forget, it: _Name | None) -> None:
        if it is None or not it.is_known:
            self._reply(peer, Forgotten(session=request.session))
        elif it.session != request.session:
            raise _taken(request)
        elif it.request is None:
            it.request = peer, request, it.topics
            self._advance(it)

    # Answers.

    def _advance(self, it: _Name) -> None:
        """Begin the next job of a name, and answer its FETCH, if that is possible."""
        if it.job is None and (job := self._next_job(it)) is not None:
            it.job = job
            self._run_job(it, job, None)  # which calls this again when the job has ended
        if it.waiting is not None and (it.is_held or it.job is None):
            self._try_to_answer(it, it.waiting)
        if not it.is_known and it.job is None and it.request is None:
            self._all.pop(it.name, None)

    def _try_to_answer(self, it: _Name, waiting: _Waiting) -> None:
        fetch, now, at = waiting.fetch, self._now, waiting.at
        is_over = now >= waiting.deadline
        if not it.is_known or it.session != fetch.session:
            it.waiting = None
            error = _taken(fetch) if it.is_known else _RefusedError("gone", _GONE)
            self._refuse(waiting.peer, fetch.session, error)
        elif not it.is_held or waiting.read is not None or now < waiting.retry_at:
            return  # the lease or the rows are being read
        elif fetch.confirm and it.on_disk[0] < it.next:
            return  # it is being written
        elif at < self._earliest:
            if at == fetch.first:
                it.lost, it.lost_to = it.lost + self._earliest - max(at, it.lost_to), self._earliest
                what = "durable subscriber %r: the ids %d to %d were deleted before it had them (walMaxBytes)"
                self._faults.warn(what, it.name, at, self._earliest - 1)
                self._answer(it, Lost(**self._head(it, waiting), next=self._earliest))
            else:
                self._answer(it, Batch(**self._head(it, waiting), next=at))
        elif fetch.max_bytes and at < self._end and not (is_over and at > fetch.first):
            if at >= it.snapshot or it.newest is not None:
                wanted = self._end, fetch.max_bytes, it.topics, it.snapshot, it.newest
                waiting.read = Read(it.name, waiting.peer, at, *wanted)
                self._actions.append(waiting.read)
        elif is_over:
            # Without rows, so that the client goes on from ``next``. If it repeated this FETCH instead, the search for
            # its topics would begin again.
            self._answer(it, Batch(**self._head(it, waiting), next=at))
        elif fetch.max_bytes and self._awaited < self._end and not (it.topics and now < self._others_until):
            self._awaited = self._end
            self._actions.append(AwaitRows(self._end))

    def _head(self, it: _Name, waiting: _Waiting) -> dict[str, Any]:
        place = {"first": waiting.fetch.first, "end": self._end, "done": it.on_disk[0]}
        return {"session": it.session, "log": self._log_id, **place}

    def _answer(self, it: _Name, message: Batch | Lost, buffers: Sequence[Any] = ()) -> None:
        assert it.waiting is not None
        self._actions.append(Reply(it.waiting.peer, message, it.name, buffers))
        it.waiting = None

    def _reply(self, peer: bytes, message: FromServer) -> None:
        self._actions.append(Reply(peer, message))

    def _opened(self, it: _Name, peer: bytes) -> None:
        it.asked = self._now
        place = {"next": it.next, "end": self._end}
        self._reply(peer, Opened(session=it.session, log=self._log_id, new=it.is_new, **place))

    def _refuse(self, peer: bytes, session: int | None, error: Exception) -> None:
        """Log the error in a request, and refuse the client."""
        if isinstance(error, _RefusedError):
            code, reason = error.args
        elif isinstance(error, (LogError, ProtocolError)):
            code, reason = "log" if isinstance(error, LogError) else "protocol", str(error)
            self._faults.warn("refused a durable subscriber: %s", error)
        else:
            what = f"an unexpected error of the server ({type(error).__name__})"
            code, reason = "internal", f"{what}, which its log explains"
            self._faults.fault("refused a durable subscriber: %s: %r", what, error, error=error)
        self._reply(peer, Refused(code=code, reason=reason, session=session))

    # Jobs.

    def _next_job(self, it: _Name) -> _Job | None:
        now, waiting = self._now, it.waiting
        if it.request is not None:
            _, message, topics = it.request
            return self._open(it, message, topics) if isinstance(message, Open) else self._forget(it)
        if not it.is_known or now < it.retry_at:
            return None
        if not it.is_held:
            return None if waiting is None else self._come_back(it)
        if it.asked is None:
            return self._leave(it)
        if waiting is not None and it.newest is None and waiting.at < it.snapshot and waiting.fetch.max_bytes:
            return self._search(it)
        since = now - it.written_at
        must_confirm = waiting is not None and waiting.fetch.confirm
        is_due = it.state != it.on_disk and (must_confirm or since >= _WRITE_SECONDS)
        return self._write(it) if is_due or since >= self._beat_seconds else None

    def _run_job(self, it: _Name, job: _Job, result: Any) -> None:
        """Go on with a job, with the result of its last operation."""
        try:
            verb, *arguments = job.throw(result) if isinstance(result, Exception) else job.send(result)
        except Exception as e:
            it.job = None
            if not isinstance(e, StopIteration):
                self._fail(it, e)
            self._advance(it)
        else:
            self._actions.append(Do(it.name, verb, tuple(arguments)))

    def _fail(self, it: _Name, error: Exception) -> None:
        request, it.request = it.request, None
        it.retry_at = self._now + _REFUSED_SECONDS
        if request is not None and not isinstance(error, LogLockedError):
            self._refuse(request[0], request[1].session, error)
        elif isinstance(error, LogError):  # it is repeated, by the client or here
            self._faults.warn("durable subscriber %r: %s", it.name, error)
        else:
            self._faults.fault("durable subscriber %r: %r", it.name, error, error=error)

    def _open(self, it: _Name, request: Open, topics: tuple[bytes, ...]) -> _Job:
        """Give a name to the client that has sent this OPEN, and write its lease."""
        was_held = it.is_held
        lease = yield "take", it.name
        try:
            if lease is None or not (it.is_known or it.take_over(lease)):
                it.is_known, it.is_new, it.displaced = False, True, 0
                it.next, it.snapshot = yield from self._place(it, request, topics)
            elif it.session != request.session:
                it.displaced = it.session
            it.session, it.topics, it.newest = request.session, topics, None
            yield from self._write(it)
        except Exception:
            if not was_held:
                yield "free", it.name
            raise
        it.is_known = it.is_held = True
        new = " (new)" if it.is_new else ""
        self._news.info("durable subscriber %r is present, from id %d on%s", it.name, it.next, new)
        if it.request is not None:
            peer, it.request = it.request[0], None
            self._opened(it, peer)

    def _place(
        self, it: _Name, request: Open, topics: tuple[bytes, ...]
    ) -> Generator[_Call, Any, tuple[int, int]]:
        """Where a new name begins, and its snapshot."""
        if request.since is None and isinstance(request.start, int) and request.start > self._end:
            raise self._another_log(f"start={request.start} is beyond the end of this log")
        # As each new reader: first a lease that needs everything, then what the writer has announced.
        notes = SubscriberNotes(request.session, list(topics))
        yield "write", Lease(it.name, 0, self._expiry, begins=True, subscriber=notes)
        announced = yield ("announced",)
        if request.since is not None:
            found = yield "first_since", request.since, self._end
            return max(announced, found), 0
        begin = max(announced, self._earliest)
        places = {EARLIEST: (begin, 0), LATEST: (self._end, 0), LAST: (begin, self._end)}
        return places[request.start] if isinstance(request.start, str) else (request.start, 0)

    def _come_back(self, it: _Name) -> _Job:
        """Hold the name of a client that was away, unless its lease was dropped meanwhile."""
        lease = yield "take", it.name
        if lease is not None and lease.subscriber is not None and lease.subscriber.session == it.session:
            it.is_held = True
        else:
            it.is_known = False
            yield "free", it.name

    def _leave(self, it: _Name) -> _Job:
        """Write the position of a client that is away, and free its name."""
        if it.state != it.on_disk:
            yield from self._write(it)
        it.is_held = False
        yield "free", it.name

    def _forget(self, it: _Name) -> _Job:
        if not it.is_held:
            yield "take", it.name
        it.is_held = it.is_known = False
        yield "remove", it.name
        if it.request is not None:
            (peer, message, _), it.request = it.request, None
            self._reply(peer, Forgotten(session=message.session))

    def _search(self, it: _Name) -> _Job:
        it.newest = yield "newest", it.next, it.snapshot

    def _write(self, it: _Name) -> _Job:
        """Write the lease of a name that is held."""
        it.written_at, state = self._now, it.state
        snapshot = it.snapshot if it.next < it.snapshot else 0
        notes = SubscriberNotes(it.session, list(it.topics), snapshot=snapshot, new=it.is_new)
        yield "write", Lease(it.name, it.next, self._expiry, subscriber=notes)
        it.on_disk = state


def _taken(request: Open | Fetch | Forget) -> _RefusedError:
    return _RefusedError("taken", f"another client has subscribed as {request.name!r}")
