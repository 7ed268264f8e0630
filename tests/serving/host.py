"""A host for the server's state machine: a log that is a list of topics, a disk of leases, and no time of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa

from zmq_datasource.errors import LogLockedError, LogWriteError
from zmq_datasource.log import Lease, subscriber_key
from zmq_datasource.messages.columns import LOG_SCHEMA
from zmq_datasource.serving.protocol import FromServer, decode, encode, pack_rows
from zmq_datasource.serving.server import BOUNDS, AwaitRows, Bounds, Do, Read, Reply, Rows, Server

EXPIRY = 1e6


def rows_of(ids: Sequence[int], topics: Sequence[bytes]) -> pa.RecordBatch:
    """Rows of the log; the value of a message is its id."""
    columns = {
        "id": pa.array(ids, pa.int64()),
        "topic": pa.array([topic.decode() for topic in topics]),
        "value": pa.array([b"%d" % number for number in ids], pa.binary()),
    }
    return pa.record_batch(
        [columns.get(field.name, pa.nulls(len(ids), field.type)).cast(field.type) for field in LOG_SCHEMA],
        schema=LOG_SCHEMA,
    )


class Host:
    """Does what the server decides, and sends its answers nowhere.

    Args:
        random: Decides how long operations take, and whether the disk refuses.

    Attributes:
        log: The topics of the messages; the id is the place.
        earliest: The ids below are deleted.
        leases: What is on the disk, by key.
        held: The names that are held.
        answers: What the server has answered since they were last taken: the peer, and the frames.
        awaited: For which ends of the log the receiver was asked to seal.
        is_calm: Whether nothing takes time, and nothing is refused.
    """

    def __init__(self, random: Random | None = None, bounds: Bounds = BOUNDS, log_id: str = "log-1") -> None:
        self._random, self._bounds, self._log_id = random or Random(0), bounds, log_id
        self.log: list[bytes] = []
        self.earliest = 0
        self.leases: dict[str, Lease] = {}
        self.held: set[str] = set()
        self.answers: list[tuple[bytes, list[bytes]]] = []
        self.awaited: list[int] = []
        self.is_calm = random is None
        self.refuses = False
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget everything that is not on the disk."""
        self.server = Server(self._log_id, EXPIRY, self._bounds)
        for lease in self.leases.values():
            self.server.restore(lease, self.now)
        self.held.clear()
        self.answers.clear()
        self._jobs: dict[bool, deque[tuple[float, Do]]] = {False: deque(), True: deque()}
        self._reads: dict[str, Read] = {}

    def delete(self, before: int) -> None:
        self.earliest = max(self.earliest, before)

    def tidy(self) -> None:
        """Delete what no lease needs."""
        if self.leases:
            self.delete(min(lease.next for lease in self.leases.values()))

    def lease(self, name: str) -> Lease:
        return self.leases[subscriber_key(name)]

    def send(self, peer: bytes, message: Any, topics: Sequence[bytes] = (), may_use: bool = True) -> None:
        """Give the server a request, and do what it decides."""
        self.receive(peer, [bytes(frame) for frame in encode(message, list(topics))], may_use)

    def receive(self, peer: bytes, frames: list[bytes], may_use: bool = True) -> None:
        self.server.grew(self.earliest, len(self.log), self.now)
        self.server.receive(peer, frames, lambda _: may_use, self.now)
        self.step(self.now)

    def heard(self, peer: bytes) -> list[FromServer]:
        """The answers to a peer since the last call."""
        mine = [frames for to, frames in self.answers if to == peer]
        self.answers = [answer for answer in self.answers if answer[0] != peer]
        return [decode(frames)[0] for frames in mine]  # type: ignore[misc]

    def step(self, now: float) -> None:
        """Let time pass, and do what is due."""
        self.now = now
        self.server.grew(self.earliest, len(self.log), now)
        self.server.wake(now)
        while self._act() or self._work():
            pass

    def _act(self) -> bool:
        actions = self.server.take()
        for action in actions:
            match action:
                case Reply(peer, message, _, buffers):
                    frames = [bytes(memoryview(frame)) for frame in encode(message, buffers)]
                    self.answers.append((peer, frames))
                case Do(_, verb, _):
                    takes = 0.0 if self.is_calm else self._random.choices((0.0, 0.1, 4.0), (60, 38, 2))[0]
                    self._jobs[verb in ("first_since", "newest")].append((self.now + takes, action))
                case Read():
                    self._reads[action.name] = action
                case AwaitRows(end):
                    self.awaited.append(end)
        return bool(actions)

    def _work(self) -> bool:
        """Do operations and reads that are due."""
        for jobs in self._jobs.values():
            if jobs and jobs[0][0] <= self.now:
                _, (name, verb, arguments) = jobs.popleft()
                try:
                    result = getattr(self, f"_{verb}")(*arguments)
                except LogWriteError as e:
                    result = e
                except LogLockedError as e:
                    result = e
                self.server.done(name, result, self.now)
                return True
        if self._reads:
            _, read = self._reads.popitem()
            self._read(read)
            return True
        return False

    def _read(self, read: Read) -> None:
        end = min(read.end, read.start + (100 if self.is_calm else self._random.randint(1, 8)))
        found = [
            n
            for n in range(read.start, end)
            if (not read.topics or self.log[n].startswith(read.topics))
            and (n >= read.snapshot or n in read.newest.to_pylist())
        ]
        rows = rows_of(found, [self.log[n] for n in found])
        self.server.read(read, Rows(len(found), *pack_rows(rows)) if found else None, end, self.now)

    # The disk.

    def _fail(self) -> None:
        if self.refuses or (not self.is_calm and self._random.random() < 0.03):
            raise LogWriteError("no space left")

    def _take(self, name: str) -> Lease | None:
        if not self.is_calm and self._random.random() < 0.01:
            raise LogLockedError("the command line holds it")
        self.held.add(name)
        return self.leases.get(subscriber_key(name))

    def _write(self, lease: Lease) -> None:
        assert lease.name in self.held
        self._fail()
        self.leases[lease.key] = lease

    def _announced(self) -> int:
        return self.earliest

    def _first_since(self, time: int, end: int) -> int:
        return min(time, end)  # a message is as old as its id

    def _newest(self, start: int, end: int) -> pa.Array:
        newest = {self.log[n]: n for n in range(max(start, self.earliest), end)}
        return pa.array(sorted(newest.values()), pa.int64())

    def _free(self, name: str) -> None:
        self.held.discard(name)

    def _remove(self, name: str) -> None:
        self._fail()
        del self.leases[subscriber_key(name)]
        self.held.discard(name)
