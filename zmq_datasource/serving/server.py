"""What a server of durable subscribers decides, as a state machine: no socket, clock, file or thread.

Requests, times, the log's ends, and the results of operations go in. Answers and operations come out (``take``), and
``durable`` does them. The rules:

* A position is the lease of a named reader of the log. It is on the disk before a client learns it. It is written about
  once a second, or at once if a client waits for it. While the disk refuses, nothing is confirmed, and the write is
  repeated.
* Only the server of a log writes these leases, so it knows them all. While a client is *present* (it has asked within
  ``PRESENT_SECONDS``) its lease is written every ten seconds, too. A name that is away is forgotten when its lease has
  been dropped, by the log's writer or the command line.
* The newest OPEN of a name wins. Requests of other sessions are refused as ``taken``.
* Of each name one FETCH waits at a time, the newest: until there are rows, until its deadline, or until its position
  is on the disk. A lost answer is no fault: the client asks again.
* Of each name one job runs at a time. A job is a generator that yields operations on leases and the log, and gets
  their results. ``wake`` repeats what the disk has refused.
* An error in the request of one client refuses that client, and never ends the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from zmq_datasource.counters import figures
from zmq_datasource.errors import DiskFaultError, LogError, ProtocolError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import Lease, SubscriberNotes
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.serving.figures import SubscriberFigures
from zmq_datasource.serving.protocol import (
    EARLIEST,
    LAST,
    LATEST,
    MOST_WAIT_SECONDS,
    Batch,
    Fetch,
    FromServer,
    Open,
    Opened,
    PackedRows,
    Refused,
    decode,
)

# How often a position that moves is written, and one that does not, as a sign that its client is there.
_WRITE_SECONDS, _BEAT_SECONDS = 1.0, 10.0
# How soon the receiver is asked again to seal, after rows of other topics.
_OTHER_TOPICS_SECONDS = 0.25
# How long after its last request a client is present; and how many names there may be.
PRESENT_SECONDS, MOST_NAMES = 5.0, 1000
_GONE = (
    "the subscription is not known: its log was replaced, or it was removed or has expired. Messages that were not "
    "acknowledged by then may be lost. Open the subscriber again: it begins at its start"
)
# An operation on the disk:
#     "begin", lease: write the first lease of a name; the result is the id at which a new reader begins, or later
#     "write", lease: write the lease of a name
#     "find newest", start, end, newest: note the ids of the newest messages (``reading.LogRows.find_newest``)
_Call: TypeAlias = tuple[Any, ...]
_Job: TypeAlias = Generator[_Call, Any, None]


class Do(NamedTuple):
    """Do an operation for a name; then call ``done`` with its result or its LogError."""

    name: str
    operation: _Call


class Read(NamedTuple):
    """Read rows for a FETCH from ``waiting.at`` on, as far as there is time; then call ``read``.

    A newer one of a name replaces it. Its ids end before ``end``. Below the id ``notes.snapshot`` it wants only those
    in ``newest``.
    """

    name: str
    waiting: Waiting
    end: int
    notes: SubscriberNotes
    newest: pa.Array | None


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


class _Opening(NamedTuple):
    """An OPEN that is not answered yet."""

    peer: bytes
    message: Open
    topics: tuple[bytes, ...]


@dataclass
class Waiting:
    """A FETCH that is not answered yet.

    Attributes:
        at: All ids from ``fetch.first`` to before this one are of other topics.
        read: What is being read.
        await_at: When the receiver may be asked to seal.
    """

    peer: bytes
    fetch: Fetch
    deadline: float
    at: int
    read: Read | None = None
    await_at: float = 0.0


@dataclass
class _Name:
    """A name, and the position of its client.

    Attributes:
        asked: When its client last asked for something.
        notes: What its lease says of the client; None until it has a lease.
        next: The first id that the client still needs.
        on_disk: ``next`` as its lease has it.
        is_listed: Whether its lease was seen.
        newest: Below ``notes.snapshot`` the client gets only the messages with these ids; None until they are searched.
        request: The newest OPEN.
        waiting: The newest FETCH.
    """

    name: str
    asked: float
    notes: SubscriberNotes | None = None
    next: int = 0
    on_disk: int = 0
    is_listed: bool = False
    newest: pa.Array | None = None
    written_at: float = -math.inf
    request: _Opening | None = None
    waiting: Waiting | None = None
    job: _Job | None = None


class Server:
    """Durable subscribers of one log. Each method takes the present time, in monotonic seconds.

    Args:
        log_id: The log's id.
        expiry: Seconds after which the lease of a name that is away counts no more.
    """

    def __init__(self, log_id: str, expiry: float) -> None:
        self._log_id, self._expiry = log_id, float(expiry)
        self._beat_seconds = min(_BEAT_SECONDS, self._expiry / 3)
        self._earliest = self._end = 0
        self._all: dict[str, _Name] = {}
        self._actions: list[Action] = []
        self._now = 0.0
        self._awaited = -1
        self._faults = LimitedLog(__name__, "faults of durable subscribers")

    # What happens.

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
            if not isinstance(message, (Open, Fetch)):
                raise ProtocolError(f"{type(message).__name__}, which only a server sends")
            session = message.session
            if not may_use(message.name):
                why = f"the name {message.name!r} belongs to another key (allowedClients)"
                raise _RefusedError("forbidden", why)
            if isinstance(message, Open):
                self._read_open(_Opening(peer, message, tuple(map(bytes, topics))))
            else:
                self._read_fetch(peer, message)
        except Exception as e:
            self._refuse(peer, session, e)

    def wake(self, leases: Iterable[tuple[Lease, float]], now: float) -> None:
        """Do what is due, take over the positions of an earlier server, and forget those that were dropped.

        Called before all else, and then about ten times a second.

        Args:
            leases: Those of the log, as seen a moment ago, and for how many seconds each has been silent.
        """
        self._now, found = now, set()
        for lease, silent in leases:
            if lease.subscriber is not None and not lease.begins:  # otherwise an OPEN was not finished
                found.add(lease.name)
                if lease.name not in self._all:
                    position = lease.next, lease.next
                    self._all[lease.name] = _Name(lease.name, now - silent, lease.subscriber, *position)
                self._all[lease.name].is_listed = True
        for it in list(self._all.values()):
            self._advance(it)
            is_idle = it.job is None and now - it.asked >= PRESENT_SECONDS
            if it.is_listed and it.name not in found and is_idle:
                del self._all[it.name]
        self._faults.flush()

    def grew(self, earliest: int, end: int, now: float) -> None:
        """The log now has the ids from ``earliest`` to before ``end``."""
        if (earliest, end) == (self._earliest, self._end):
            return
        self._now, self._earliest, self._end = now, earliest, end
        for it in list(self._all.values()):
            if it.waiting is not None:
                self._advance(it)

    def read(self, read: Read, rows: PackedRows | Exception | None, next_id: int, now: float) -> None:
        """A Read has found these rows below ``next_id``, none so far, or an error."""
        self._now, it, waiting = now, self._all.get(read.name), read.waiting
        if it is None or it.waiting is not waiting:
            return  # there is a newer FETCH
        waiting.read = None
        if isinstance(rows, DiskFaultError):
            self._faults.warn("durable subscriber %r: %s", it.name, rows)
            return  # ``wake`` repeats it
        if not isinstance(rows, Exception):
            waiting.at, waiting.await_at = next_id, now + _OTHER_TOPICS_SECONDS
            if rows is not None:
                self._answer(it, waiting, next_id, rows)
        elif waiting.at >= self._earliest:  # otherwise its rows are deleted
            self._refuse_fetch(it, rows)
        self._advance(it)

    def done(self, name: str, result: Any, now: float) -> None:
        """An operation has this result, or has raised this error."""
        self._now, it = now, self._all[name]
        assert it.job is not None
        self._run_job(it, it.job, result)

    # What to do.

    def take(self) -> list[Action]:
        """What is to be done, in this order, since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def accounts(self, now: float) -> Iterator[dict[str, Any]]:
        """The figures of each name. Any thread may ask."""
        for it in list(self._all.values()):
            if it.notes is not None:
                silent = now - it.asked
                lost = max(0, self._earliest - it.next)
                away = 0.0 if silent < PRESENT_SECONDS else round(silent, 1)
                counted = it.next, self._end - it.next - lost, lost, away
                yield {"name": it.name, **figures(SubscriberFigures(*counted))}

    # Requests.

    def _read_open(self, request: _Opening) -> None:
        message, it = request.message, self._all.get(request.message.name)
        if message.log not in (None, self._log_id):
            raise self._another_log(f"the ids that you have saved are of log {message.log}")
        if it is None:
            if len(self._all) >= MOST_NAMES:
                advice = "drop some (zmq-datasource log readers drop), or lower subscriberExpiry"
                raise _RefusedError("full", f"there are {MOST_NAMES} subscriptions; {advice}")
            it = self._all[message.name] = _Name(message.name, self._now)
        if it.notes is not None and it.request is None and it.notes.session == message.session:
            self._opened(it, it.notes, request.peer)  # the same OPEN again
            return
        if (before := it.request) is not None and before.message.session != message.session:
            self._refuse(before.peer, before.message.session, _taken(message))
        it.request = request  # of the same session, the client may have a new connection
        self._advance(it)

    def _another_log(self, why: str) -> _RefusedError:
        advice = (
            "Continue at the server of your log; or drop your saved ids, and open the subscriber without them"
        )
        return _RefusedError("another-log", f"{why}, and this is log {self._log_id}. {advice}")

    def _read_fetch(self, peer: bytes, fetch: Fetch) -> None:
        it = self._all.get(fetch.name)
        if it is None:
            raise _RefusedError("gone", _GONE)
        if it.notes is not None and it.notes.session != fetch.session:
            raise _taken(fetch)
        if fetch.first > self._end:
            raise self._another_log(f"the id {fetch.first} is beyond its end, {self._end}")
        deadline = self._now + (MOST_WAIT_SECONDS if fetch.max_bytes else 0.0)
        it.asked, it.waiting = self._now, Waiting(peer, fetch, deadline, fetch.first)
        self._advance(it)

    # Answers.

    def _advance(self, it: _Name) -> None:
        """Answer the FETCH of a name, and begin its next job, if that is possible."""
        if it.waiting is not None and it.notes is not None:
            self._try_to_answer(it, it.waiting, it.notes)
        if it.job is None and (job := self._next_job(it)) is not None:
            it.job = job
            self._run_job(it, job, None)  # which calls this again when the job has ended
        if it.job is None and it.notes is None and it.request is None:
            self._all.pop(it.name, None)

    def _try_to_answer(self, it: _Name, waiting: Waiting, notes: SubscriberNotes) -> None:
        fetch, now, at = waiting.fetch, self._now, waiting.at
        if notes.session != fetch.session:
            self._refuse_fetch(it, _taken(fetch))
            return
        it.next = max(it.next, fetch.done)
        is_over = now >= waiting.deadline
        if waiting.read is not None:
            return  # the rows are being read
        if fetch.confirm and it.on_disk < it.next:
            return  # the position is being written
        if at < self._earliest:
            self._answer(it, waiting, self._earliest, lost=self._earliest - at)
        elif fetch.max_bytes and at < self._end and not (is_over and at > fetch.first):
            if at >= notes.snapshot or it.newest is not None:
                waiting.read = Read(it.name, waiting, self._end, notes, it.newest)
                self._actions.append(waiting.read)
        elif is_over:
            # Without rows, so that the client goes on from ``next``. If it repeated this FETCH instead, the search for
            # its topics would begin again.
            self._answer(it, waiting, at)
        elif fetch.max_bytes and self._awaited < self._end and now >= waiting.await_at:
            self._awaited = self._end
            self._actions.append(AwaitRows(self._end))

    def _answer(
        self, it: _Name, waiting: Waiting, next_id: int, packed: PackedRows = (0, (), ()), lost: int = 0
    ) -> None:
        rows, columns, buffers = packed
        message = Batch(
            session=waiting.fetch.session,
            log=self._log_id,
            first=waiting.fetch.first,
            next=next_id,
            done=it.on_disk,
            lost=lost,
            rows=rows,
            columns=tuple(columns),
        )
        self._actions.append(Reply(waiting.peer, message, it.name, buffers))
        it.waiting = None

    def _opened(self, it: _Name, notes: SubscriberNotes, peer: bytes) -> None:
        it.asked = self._now
        self._reply(peer, Opened(session=notes.session, log=self._log_id, next=it.next, new=notes.new))

    def _reply(self, peer: bytes, message: FromServer) -> None:
        self._actions.append(Reply(peer, message))

    def _refuse_fetch(self, it: _Name, error: Exception) -> None:
        if it.waiting is not None:
            self._refuse(it.waiting.peer, it.waiting.fetch.session, error)
            it.waiting = None

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
        now, waiting, notes = self._now, it.waiting, it.notes
        if it.request is not None:
            return self._open(it, it.request)
        if notes is None:
            return None
        wants_rows = waiting is not None and waiting.fetch.max_bytes > 0
        if wants_rows and it.newest is None and it.next < notes.snapshot:
            return self._search(it, notes.snapshot)
        since = now - it.written_at
        must_confirm = waiting is not None and waiting.fetch.confirm
        is_due = it.next != it.on_disk and (must_confirm or since >= _WRITE_SECONDS)
        must_beat = now - it.asked < PRESENT_SECONDS and since >= self._beat_seconds
        return self._write(it, notes) if is_due or must_beat else None

    def _run_job(self, it: _Name, job: _Job, result: Any) -> None:
        """Go on with a job, with the result of its last operation."""
        try:
            operation = job.throw(result) if isinstance(result, Exception) else job.send(result)
        except StopIteration:
            it.job = None
            self._advance(it)
        except Exception as e:
            it.job = None  # ``wake`` repeats it
            if isinstance(e, LogError):
                self._faults.warn("durable subscriber %r: %s", it.name, e)
            else:
                self._faults.fault("durable subscriber %r: %r", it.name, e, error=e)
        else:
            self._actions.append(Do(it.name, operation))

    def _open(self, it: _Name, request: _Opening) -> _Job:
        """Give a name to the client that has sent this OPEN, and write its lease."""
        message, known, refusal = request.message, it.notes, None
        try:
            snapshot, is_new = 0, True
            if known is None:
                it.next, snapshot = yield from self._place(it.name, request)
            else:
                snapshot, is_new = known.snapshot, known.new and known.session == message.session
            topics = list(request.topics)
            yield from self._write(it, SubscriberNotes(message.session, topics, snapshot, is_new))
        except Exception as e:
            refusal = e
        now = it.request
        if now is None or now.message.session != message.session:
            return  # there is a newer OPEN
        it.request = None
        if refusal is not None:
            self._refuse(now.peer, message.session, refusal)
        elif it.notes is not None:
            self._opened(it, it.notes, now.peer)

    def _place(self, name: str, request: _Opening) -> Generator[_Call, Any, tuple[int, int]]:
        """Where a new name begins, and its snapshot."""
        start = request.message.start
        if isinstance(start, int) and start > self._end:
            raise self._another_log(f"start={start} is beyond its end, {self._end}")
        # As each new reader: first a lease that needs everything, then what the writer has announced.
        notes = SubscriberNotes(request.message.session, list(request.topics))
        announced = yield "begin", Lease(name, 0, self._expiry, begins=True, subscriber=notes)
        begin = max(announced, self._earliest)
        places = {EARLIEST: (begin, 0), LATEST: (self._end, 0), LAST: (begin, self._end)}
        return places[start] if isinstance(start, str) else (start, 0)

    def _search(self, it: _Name, snapshot: int) -> _Job:
        at, newest = it.next, dict[bytes | None, int]()
        while at < snapshot:
            at = yield "find newest", at, snapshot, newest
        it.newest = integers_of(sorted(newest.values()))

    def _write(self, it: _Name, notes: SubscriberNotes) -> _Job:
        it.written_at, next_id = self._now, it.next
        yield "write", Lease(it.name, next_id, self._expiry, subscriber=notes)
        it.notes, it.on_disk = notes, next_id


def _taken(request: Open | Fetch) -> _RefusedError:
    return _RefusedError("taken", f"another client has subscribed as {request.name!r}")
