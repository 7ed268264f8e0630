"""A host for the server's state machine: a log that is a list of topics, a disk of leases, and no time of its own."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa

from zmq_datasource.errors import LogWriteError
from zmq_datasource.log import Lease, subscriber_key
from zmq_datasource.messages.columns import LOG_SCHEMA
from zmq_datasource.serving.protocol import FromServer, decode, encode, pack_rows
from zmq_datasource.serving.server import AwaitRows, Do, Read, Reply, Server

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
        answers: What the server has answered since they were last taken: the peer, and the frames.
        awaited: For which ends of the log the receiver was asked to seal.
        is_calm: Whether nothing takes time, and nothing is refused.
    """

    def __init__(self, random: Random | None = None, log_id: str = "log-1") -> None:
        self._random, self._log_id = random or Random(0), log_id
        self.log: list[bytes] = []
        self.earliest = 0
        self.leases: dict[str, Lease] = {}
        self.answers: list[tuple[bytes, list[bytes]]] = []
        self.awaited: list[int] = []
        self.is_calm = random is None
        self.refuses = False
        self.now = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget everything that is not on the disk."""
        self.server = Server(self._log_id, EXPIRY)
        self.answers.clear()
        self._jobs: list[tuple[float, Do]] = []
        self._reads: dict[str, Read] = {}
        self._wake()

    def _wake(self) -> None:
        self.server.wake([(lease, 0.0) for lease in self.leases.values()], self.now)

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
        self._wake()
        while self._act() or self._work():
            pass

    def _act(self) -> bool:
        actions = self.server.take()
        for action in actions:
            match action:
                case Reply(peer, message, _, buffers):
                    frames = [bytes(memoryview(frame)) for frame in encode(message, buffers)]
                    self.answers.append((peer, frames))
                case Do():
                    takes = 0.0 if self.is_calm else self._random.choices((0.0, 0.1, 4.0), (60, 38, 2))[0]
                    self._jobs.append((self.now + takes, action))
                case Read():
                    self._reads[action.name] = action
                case AwaitRows(end):
                    self.awaited.append(end)
        return bool(actions)

    def _work(self) -> bool:
        """Do operations and reads that are due."""
        for job in self._jobs:
            at, (name, (verb, *arguments)) = job
            if at <= self.now:
                self._jobs.remove(job)
                try:
                    result = getattr(self, "_" + verb.replace(" ", "_"))(*arguments)
                except LogWriteError as e:
                    result = e
                self.server.done(name, result, self.now)
                return True
        if self._reads:
            _, read = self._reads.popitem()
            self._read(read)
            return True
        return False

    def _read(self, read: Read) -> None:
        start, topics = read.waiting.at, tuple(read.notes.topics)
        end = min(read.end, start + (100 if self.is_calm else self._random.randint(1, 8)))
        found = [
            n
            for n in range(start, end)
            if (not topics or self.log[n].startswith(topics))
            and (n >= read.notes.snapshot or n in read.newest.to_pylist())
        ]
        rows = rows_of(found, [self.log[n] for n in found])
        self.server.read(read, pack_rows(rows) if found else None, end, self.now)

    # The disk.

    def _fail(self) -> None:
        if self.refuses or (not self.is_calm and self._random.random() < 0.03):
            raise LogWriteError("no space left")

    def _write(self, lease: Lease) -> None:
        self._fail()
        self.leases[lease.key] = lease

    def _begin(self, lease: Lease) -> int:
        self._write(lease)
        return self.earliest

    def _find_newest(self, start: int, end: int, newest: dict[bytes | None, int]) -> int:
        for n in range(max(start, self.earliest), end)[:3]:  # a step
            newest[self.log[n]] = n
        return min(max(start, self.earliest) + 3, end)
