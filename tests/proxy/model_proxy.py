"""A model of a proxy as its durable subscribers see it, without sockets, files or a clock."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pyarrow as pa

from zmq_datasource.messages.packed import pack_columns
from zmq_datasource.proxy.fetch_protocol import (
    Batch,
    Fetch,
    Lost,
    Open,
    Opened,
    Refused,
    client_of,
    decode,
    encode,
)

__all__ = ["ModelProxy", "rows"]

MOST_WAIT_SECONDS = 1.0


def rows(messages: Iterable[tuple[int, bytes | None, bytes]]) -> tuple[tuple[str, ...], list[bytes]]:
    """The columns and the buffers of a BATCH with these messages: id, topic and value."""
    numbers, topics, values = zip(*messages, strict=True)
    batch = pa.record_batch({"topic": pa.array(topics, pa.binary()), "value": pa.array(values, pa.binary())})
    columns, buffers = pack_columns(batch)
    ids = b"".join(number.to_bytes(8, "little") for number in numbers)
    return tuple(columns), [ids, *(bytes(memoryview(buffer)) for buffer in buffers)]  # type: ignore[arg-type]


class Name:
    """One subscriber's position: in memory, and on the disk."""

    def __init__(self, session: int, topics: tuple[bytes, ...], position: int) -> None:
        self.session, self.topics = session, topics
        self.next = self.kept = position
        self.is_here = True


class Waiting:
    """A FETCH without an answer."""

    def __init__(self, connection: int, fetch: Fetch, now: float) -> None:
        self.connection, self.fetch = connection, fetch
        self.deadline = now + min(fetch.wait / 1000, MOST_WAIT_SECONDS)


class ModelProxy:
    """Its log is a list of topics; the value of a message is its id.

    Attributes:
        answers: What it has to say: the connection, and the frames.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.log: list[bytes] = []
        self.earliest = 0
        self.names: dict[str, Name] = {}
        self.answers: list[tuple[int, list[bytes]]] = []
        self._waiting: dict[str, Waiting] = {}

    def delete(self, before: int) -> None:
        self.earliest = max(self.earliest, before)

    def restart(self) -> None:
        """Forget everything that is not on the disk."""
        self._waiting.clear()
        self.answers.clear()
        for name in self.names.values():
            name.next, name.is_here = name.kept, False

    def write_positions(self) -> None:
        for name in self.names.values():
            name.kept = name.next

    def _say(self, connection: int, message: object, buffers: Iterable[bytes] = ()) -> None:
        self.answers.append((connection, [bytes(frame) for frame in encode(message, list(buffers))]))

    def receive(self, connection: int, frames: list[bytes], now: float) -> None:
        message, topics = decode(frames)
        if isinstance(message, Open):
            self._open(connection, message, tuple(topics))
        elif isinstance(message, Fetch):
            self._fetch(connection, message, now)

    def _open(self, connection: int, wanted: Open, topics: tuple[bytes, ...]) -> None:
        known = self.names.get(wanted.name)
        is_new = known is None
        if known is not None and client_of(known.session) == client_of(wanted.session) > 0:
            if wanted.session < known.session:
                self._refuse(connection, wanted.session, "taken")
                return
            if wanted.session == known.session and known.is_here:
                self._say(
                    connection,
                    Opened(session=known.session, next=known.next, end=len(self.log), new=False),
                )
                return
        if known is None or wanted.seek:
            known = self.names[wanted.name] = Name(wanted.session, topics, self._place(wanted))
        known.session, known.topics, known.is_here = wanted.session, topics, True
        known.kept = known.next
        self._waiting.pop(wanted.name, None)
        self._say(connection, Opened(session=known.session, next=known.next, end=len(self.log), new=is_new))

    def _place(self, wanted: Open) -> int:
        if isinstance(wanted.start, int):
            return min(wanted.start, len(self.log))
        return self.earliest if wanted.start == "earliest" else len(self.log)

    def _refuse(self, connection: int, session: int, code: str) -> None:
        self._say(connection, Refused(code=code, reason=f"it is {code}", session=session))

    def _fetch(self, connection: int, fetch: Fetch, now: float) -> None:
        known = self.names.get(fetch.name)
        if known is None:
            self._refuse(connection, fetch.session, "gone")
        elif known.session != fetch.session:
            self._refuse(connection, fetch.session, "taken")
        elif fetch.first > len(self.log):
            self._refuse(connection, fetch.session, "ahead")
        else:
            known.is_here, known.next = True, max(known.next, fetch.done)
            self._waiting[fetch.name] = Waiting(connection, fetch, now)

    def step(self, now: float) -> None:
        """Answer the requests that can be answered."""
        for name, waiting in list(self._waiting.items()):
            if self._is_answered(self.names[name], waiting, now):
                del self._waiting[name]

    def _is_answered(self, name: Name, waiting: Waiting, now: float) -> bool:
        fetch = waiting.fetch
        if fetch.confirm and name.kept < name.next:
            return False
        end = len(self.log)
        if fetch.first < self.earliest:
            self._say(
                waiting.connection,
                Lost(session=name.session, first=fetch.first, next=self.earliest, end=end, done=name.kept),
            )
            return True
        most, after = self._random.randint(1, 4), fetch.first
        found: list[tuple[int, bytes | None, bytes]] = []
        look_to = min(end, fetch.first + self._random.randint(1, 8))
        while fetch.max_bytes and after < look_to and len(found) < most:
            if not name.topics or self.log[after].startswith(name.topics):
                found.append((after, self.log[after], b"%d" % after))
            after += 1
        if not found and now < waiting.deadline:
            return False
        columns, buffers = rows(found) if found else ((), [])
        head = Batch(
            session=name.session,
            first=fetch.first,
            next=after,
            end=end,
            done=name.kept,
            rows=len(found),
            columns=columns,
        )
        self._say(waiting.connection, head, buffers)
        return True
