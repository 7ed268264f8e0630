"""The state machine of the receiving side: in any order of losses, repeats and kills, and message by message."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, cast

import pyarrow as pa
import pytest

from zmq_datasource.acknowledged.attempt_files import AttemptFiles, Stored
from zmq_datasource.acknowledged.protocol import (
    Commit,
    Committed,
    Data,
    End,
    Hello,
    Message,
    Refusal,
    Staged,
    Taken,
    Welcome,
    digest_of,
    encode,
)
from zmq_datasource.acknowledged.reception import Reception, Terms
from zmq_datasource.acknowledged.sender_session import SenderSession
from zmq_datasource.acknowledged.transactions import SILENT_SECONDS, CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError, LogWriteError, SocketError
from zmq_datasource.log import LogWriter, StoredRows
from zmq_datasource.messages.packed import pack_columns

A, B, C = (letter * 32 for letter in "abc")
TIMEOUT, SIZE = 100.0, 1000
TERMS = Terms(TIMEOUT, 1 << 20)


class Disk:
    """The files of attempts in memory; a name is in ``values`` until its file is finished."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.values: dict[str, list[bytes]] = {}

    def append(self, name: str, stored: Stored, rows: pa.RecordBatch) -> Stored:
        if self.world.fault is not None:
            raise self.world.fault
        self.values.setdefault(name, []).extend(rows.column("value").to_pylist())
        return stored._replace(
            messages=stored.messages + 1, rows=stored.rows + len(rows), size=stored.size + SIZE
        )

    def finish(self, name: str, stored: Stored) -> Stored:
        if self.world.fault is not None:
            raise self.world.fault
        self.world.files[name] = stored, self.values[name]
        return stored

    def recover(self) -> Iterator[tuple[str, Stored]]:
        return ((name, stored) for name, (stored, _) in list(self.world.files.items()))

    def read(self, names: list[str]) -> Iterator[tuple[str, int, bytes]]:
        for name in names:
            stored, values = self.world.files[name]
            yield from ((stored.producer, stored.number, value) for value in values)

    def remove(self, name: str) -> None:
        self.world.files.pop(name, None)
        self.values.pop(name, None)


class Log:
    """Keeps what is appended until ``World.write``."""

    full = busy = False
    fault: str | None = None
    failure: LogError | None = None

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: list[Any] = []

    def append_stored(self, rows: StoredRows) -> None:
        if self.failure is not None:
            raise self.failure
        self.rows.append(rows)

    def cut(self) -> Future[int]:
        done: Future[int] = Future()
        self.world.appended.append((self.rows, self.world.transactions.state(), done))
        self.rows = []
        return done


class Pool:
    """Executes at once, or at ``World.release``."""

    def __init__(self, world: World) -> None:
        self.world = world

    def submit(self, act: Callable[..., Stored], *args: Any) -> Future[Stored]:
        done: Future[Stored] = Future()
        self.world.held.append((done, act, args))
        if not self.world.holds:
            self.world.execute()
        return done


class World:
    """The machine with a disk and a log in memory. ``kill`` leaves only what was durable.

    Attributes:
        holds: Whether the ends of files wait until ``release``.
        fault: Why the disk takes no rows now.
        files: The staged attempts: what they have, and their values.
        log: The committed transactions with their values, in the order of the log.
    """

    def __init__(self, terms: Terms = TERMS, limit: int = 10) -> None:
        self.terms, self.limit = terms, limit
        self.now = 0.0
        self.holds = False
        self.fault: Exception | None = None
        self.files: dict[str, tuple[Stored, list[bytes]]] = {}
        self.log: list[tuple[str, int, list[bytes]]] = []
        self.saved = b""
        self.kill()

    def kill(self) -> None:
        self.counters = SourceCounters()
        self.transactions = CommittedTransactions(self.counters, self.limit)
        self.transactions.restore(self.saved)
        self.held: list[tuple[Future[Stored], Callable[..., Stored], Any]] = []
        self.appended: list[tuple[list[StoredRows], bytes, Future[int]]] = []
        self.disk, self.writer = Disk(self), Log(self)
        self.machine = Reception(
            self.terms,
            self.transactions,
            self.counters,
            cast("AttemptFiles", self.disk),
            cast("LogWriter", self.writer),
            cast("Executor", Pool(self)),
        )
        self.machine.recover(self.now)

    def run(self) -> list[tuple[bytes, Message]]:
        """Let the machine go on. Returns the answers."""
        self.machine.go_on(self.now)
        answers = [(answer.peer, answer.message) for answer in self.machine.answers]
        self.machine.answers.clear()
        return answers

    def execute(self, at: int = 0) -> None:
        done, act, args = self.held.pop(at)
        try:
            done.set_result(act(*args))
        except Exception as e:
            done.set_exception(e)

    def release(self) -> list[Message]:
        self.execute()
        return self.answers()

    def write(self) -> None:
        """Write the oldest chunk."""
        rows, self.saved, done = self.appended.pop(0)
        for stored in rows:
            found: list[Any] = list(stored.read())
            self.log.append((*found[0][:2], [value for *_, value in found]))
        done.set_result(0)

    # Message by message.

    def answers(self) -> list[Message]:
        return [answer for _, answer in self.run()]

    def tell(self, *messages: Message, peer: bytes = b"p", buffers: Any = ()) -> list[Message]:
        for message in messages:
            self.machine.receive(peer, [bytes(f) for f in encode(message, buffers)], self.now)
        return self.answers()

    def data(
        self, *values: bytes, index: int = 0, attempt: str = A, number: int = 0, **more: Any
    ) -> list[Message]:
        peer = more.pop("peer", b"p")
        part = {"producer": "q", "partition": 0, **more}
        columns, buffers = pack_columns(pa.record_batch({"value": list(values)}))
        message = Data(attempt=attempt, number=number, index=index, rows=len(values), columns=columns, **part)
        return self.tell(message, buffers=buffers, peer=peer)

    def end(self, rows: int = 1, messages: int = 1, attempt: str = A) -> list[Message]:
        return self.tell(End(attempt=attempt, messages=messages, rows=rows))

    def stage(self, value: bytes = b"a", attempt: str = A, number: int = 0, **more: Any) -> None:
        """An attempt of one row that is staged."""
        assert self.data(value, attempt=attempt, number=number, **more) == [
            Taken(attempt=attempt, received=1)
        ]
        assert self.end(attempt=attempt) == [Staged(attempt=attempt, rows=1)]

    def commit(
        self,
        attempt: str = A,
        number: int = 0,
        rows: int = 1,
        digest: str | None = None,
        producer: str = "q",
        peer: bytes = b"p",
    ) -> list[Message]:
        asked = Commit(producer=producer, number=number, attempts=[attempt], rows=rows, digest=digest)
        return self.tell(asked, peer=peer)

    def committed(self, producer: str, number: int = 0) -> list[str]:
        """Stage, commit and write a transaction; the codes of refusals."""
        attempt = uuid.uuid4().hex
        refused = codes(self.data(b"x", attempt=attempt, number=number, producer=producer))
        if not refused:
            self.end(attempt=attempt)
            self.commit(attempt, number, producer=producer)
            self.write()
            assert len(self.answers()) == 1
        return refused

    def wait(self, seconds: float) -> list[Message]:
        """Let time pass in which messages are received."""
        self.now += seconds
        self.machine.check_timeouts(self.now)
        return self.answers()


CAUSES = {
    "conflict": "it is in the log with|the log already has",
    "no_room": "have reached walMaxBytes",
    "too_large": "the most for a log in a bucket",
    "storage": "Input/output error",
    "producers": "maxPublishers=",
    "forbidden": "belongs to another key",
}


def codes(answers: list[Message]) -> list[str]:
    """Why messages were refused."""
    found = []
    for answer in answers:
        if isinstance(answer, Refusal):
            why = [cause for cause, text in CAUSES.items() if re.search(text, answer.reason)]
            found += ["unknown"] if answer.code == "unknown" else why or ["protocol"]
    return found


# In any order.


class Senders:
    """Two producers with the real sessions of senders, and a network that loses, delays and repeats.

    Each commits three transactions, of two parts or of one. A task may run twice. A driver may die at any time; then it
    sends the transaction again, perhaps in other parts.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World()
        self.is_calm = False
        self.sessions: dict[bytes, SenderSession] = {}
        self.inboxes: dict[bytes, list[list[bytes]]] = {}
        self.network: list[
            tuple[bytes, bool, list[bytes]]
        ] = []  # peer, whether it goes to the receiver, frames
        self.acknowledged: set[tuple[str, int]] = set()
        self.producers = [self.produce(name) for name in "xy"]

    def produce(self, producer: str) -> Iterator[None]:
        for number in range(3):
            values = [b"%s %d %d" % (producer.encode(), number, row) for row in range(4)]
            while (producer, number) not in self.acknowledged:
                parts = self.random.choice(([values], [values[:2], values[2:]], [values[:1], values[1:]]))
                try:
                    yield from self.send(producer, number, parts)
                except SocketError:  # the batch is repeated
                    continue

    def send(self, producer: str, number: int, parts: list[list[bytes]]) -> Iterator[None]:
        attempts, committed, digest = [], False, 0
        for partition, values in enumerate(parts):
            tries = []
            for _ in range(self.random.choice((1, 1, 2))):  # a speculative task
                task = self.session(producer, number, partition)
                task.greet(self.world.now)
                yield from self.answered(task)
                committed = task.committed is not None and task.committed >= number
                if not committed:
                    for value in values:
                        batch = pa.record_batch({"value": [value]})
                        size, frames = task.pack(batch)
                        task.send_packed(size, frames, 1, self.world.now)
                        yield from self.answered(task)
                    task.end(self.world.now)
                    yield from self.answered(task)
                    tries.append(task.attempt)
            attempts += [self.random.choice(tries)] if tries else []
            digest += digest_of(pa.record_batch({"value": values}))
        driver = self.session(producer, number, 0)
        rows = sum(map(len, parts))
        driver.commit(attempts, rows, digest, self.world.now)
        yield from self.answered(driver)
        self.acknowledged.add((producer, number))

    def session(self, producer: str, number: int, partition: int) -> SenderSession:
        session = SenderSession(producer, number, partition, 20.0, "the receiver")
        peer = self.random.randbytes(8)
        self.sessions[peer], self.inboxes[peer] = session, []
        return session

    def answered(self, session: SenderSession) -> Iterator[None]:
        inbox = next(self.inboxes[peer] for peer, it in self.sessions.items() if it is session)
        while session.waiting:
            if not self.is_calm and self.random.random() < 0.005:
                raise SocketError("the driver dies")
            yield
            while inbox:
                session.receive(inbox.pop(0), self.world.now)
            session.wake(self.world.now)

    def step(self) -> None:
        world, roll = self.world, self.random.random() if not self.is_calm else self.random.uniform(0.1, 1)
        world.holds = not self.is_calm
        if roll < 0.02:
            world.kill()
        elif roll < 0.04 and self.sessions:
            self.random.choice(list(self.sessions.values())).reconnected(world.now)
        elif roll < 0.1 and self.network:
            del self.network[self.random.randrange(len(self.network))]  # lost
        elif roll < 0.15:
            world.now += self.random.choice((0.1, 3.0))
            world.machine.check_timeouts(world.now)
        elif roll < 0.25 and world.held:
            world.execute(self.random.randrange(len(world.held)))
        elif roll < 0.3 and world.appended:
            world.write()
        elif roll < 0.7 and self.network:
            self.deliver(self.random.randrange(min(len(self.network), 8)))
        else:
            self.producers = [it for it in self.producers if self.goes_on(it)]
        self.network += [(peer, False, [bytes(f) for f in encode(message)]) for peer, message in world.run()]
        for peer, session in self.sessions.items():
            while session.outbox:
                self.network.append((peer, True, [bytes(f) for f in session.outbox.popleft()]))

    def goes_on(self, producer: Iterator[None]) -> bool:
        return self.random.random() < 0.3 or next(producer, self) is None

    def deliver(self, at: int) -> None:
        peer, is_request, frames = self.network[at]
        if self.is_calm or self.random.random() < 0.9:  # else it comes again
            del self.network[at]
        if is_request:
            self.world.machine.receive(peer, frames, self.world.now)
        else:
            self.inboxes[peer].append(frames)


@pytest.mark.parametrize("tens", range(10))
def test_each_transaction_is_in_the_log_once_in_any_order_of_losses_repeats_and_kills(tens: int) -> None:
    for seed in range(20 * tens, 20 * tens + 20):
        senders = Senders(seed)
        for _ in range(600):
            senders.step()
            known = {(producer, number) for producer, number, _ in senders.world.log}
            assert senders.acknowledged <= known, f"seed {seed}: acknowledged and lost"
        senders.is_calm = True
        for _ in range(20_000):
            if not senders.producers:
                break
            senders.step()
        assert not senders.producers, f"seed {seed} does not come to an end"
        for name in "xy":
            found = [
                (number, sorted(rows)) for producer, number, rows in senders.world.log if producer == name
            ]
            wanted = [(n, [b"%s %d %d" % (name.encode(), n, row) for row in range(4)]) for n in range(3)]
            assert found == wanted, f"seed {seed}"
        assert not senders.world.files


# Message by message.


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_is_answered_before_it_is_on_the_disk(world: World) -> None:
    world.holds = True
    assert world.tell(Hello(attempt=A, producer="q")) == [Welcome(attempt=A, committed=None, by=None)]
    assert world.data(b"a", b"b") == [Taken(attempt=A, received=1)]
    assert world.end(2) == []
    assert world.release() == [Staged(attempt=A, rows=2)]
    assert world.commit(rows=2) == []
    world.write()
    assert world.answers() == [Committed(producer="q", number=0, again=False, by=A)]
    assert (world.log, world.files) == ([("q", 0, [b"a", b"b"])], {})


def test_what_is_said_again_is_answered_as_before_and_done_once(world: World) -> None:
    taken, staged = Taken(attempt=A, received=1), Staged(attempt=A, rows=1)
    assert world.data(b"a") == world.data(b"a") == [taken]
    world.holds = True
    assert world.end() == world.end() == []
    assert world.release() == world.end() == [staged]
    assert world.data(b"a") == [taken]
    assert world.commit() + world.commit(peer=b"again") == []
    world.write()
    assert world.run() == [(b"again", Committed(producer="q", number=0, again=False, by=A))]
    assert world.commit() == [Committed(producer="q", number=0, again=True, by=A)]
    assert codes(world.data(b"a")) == ["unknown"]


def test_a_message_after_a_missing_one_is_not_taken(world: World) -> None:
    world.data(b"a")
    assert codes(world.data(b"c", index=2)) == ["protocol"]
    assert world.data(b"b", index=1) == [Taken(attempt=A, received=2)]
    assert codes(world.end(2, messages=4)) == ["protocol"]


def test_messages_that_do_not_fit_are_refused_with_a_reason(world: World) -> None:
    world.data(b"1")
    (refusal,) = world.data(b"2", index=1, number=1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "data message 1 for another part than that of its attempt"
    world.end()
    (refusal,) = world.data(b"2", index=1)
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.attempt) == ("refused", A)
    assert refusal.reason == "data message 1 of an attempt after its end"
    assert codes(world.tell(Staged(attempt=A, rows=1))) == ["protocol"]
    world.machine.receive(b"other", [b"hello"], 0.0)
    ((peer, answer),) = world.run()
    assert (peer, codes([answer])) == (b"other", ["protocol"])
    assert world.counters.malformed == 4
    world.machine.receive(
        b"p", [bytes(f) for f in encode(Hello(attempt=B, producer="q"))], 0.0, lambda _: False
    )
    assert codes(world.answers()) == ["forbidden"]


def test_data_that_makes_no_rows_leaves_its_attempt_as_it_was(world: World) -> None:
    bad = Data(attempt=A, producer="q", number=0, partition=0, index=0, rows=1, columns=["value"])
    assert codes(world.tell(bad, buffers=[b"", b""])) == ["protocol"]
    world.stage()


# Commits.


def test_the_rows_are_in_the_order_of_the_partitions(world: World) -> None:
    world.stage(b"b", A, partition=1)
    world.stage(b"a", B, partition=0)
    world.tell(Commit(producer="q", number=0, attempts=[A, B], rows=2))
    world.write()
    assert world.log == [("q", 0, [b"a", b"b"])]


def test_a_commit_discards_other_attempts_at_the_transaction(world: World) -> None:
    world.stage()
    world.data(b"a", attempt=B)
    world.data(b"later", attempt=C, number=1, peer=b"other")
    world.commit()
    world.write()
    world.answers()
    assert codes(world.data(b"b", attempt=B, index=1)) == ["unknown"]
    assert codes(world.data(b"b", attempt=C, number=1, index=1)) == []


def test_other_rows_under_a_number_that_is_being_committed_are_refused(world: World) -> None:
    """Two drivers of one query commit at the same moment."""
    for attempt, number, value in ((C, 2, b"c"), (A, 3, b"a"), (B, 3, b"b")):
        world.stage(value, attempt, number)
    one, other = "1" * 16, "2" * 16
    assert world.commit(A, 3, digest=one) == []
    assert codes(world.commit(B, 3, digest=other)) == ["conflict"]
    assert codes(world.commit(C, 2, digest=one)) == ["conflict"]
    assert world.commit(A, 3, digest=one) == []
    world.write()
    assert world.answers() == [Committed(producer="q", number=3, again=False, by=A)]
    assert world.log == [("q", 3, [b"a"])]
    assert codes(world.data(b"d", attempt="d" * 32, number=2)) == ["conflict"]
    assert codes(world.commit(B, 3, digest=other)) == ["conflict"]


def test_a_commit_of_other_rows_than_are_staged_is_refused(world: World) -> None:
    world.stage()
    assert codes(world.commit(rows=2)) == ["unknown"]
    assert codes(world.commit(B)) == ["unknown"]
    assert codes(world.tell(Commit(producer="q", number=0, attempts=[A, A], rows=1))) == ["unknown"]
    assert codes(world.tell(Commit(producer="q", number=0, attempts=[], rows=0))) == ["unknown"]


def test_a_commit_waits_while_the_log_is_full_or_its_disk_refuses(world: World) -> None:
    world.stage()
    world.writer.full = True
    assert world.commit() + world.commit() == []
    world.wait(TIMEOUT)
    assert world.commit() == []  # the sender is not silent
    world.wait(TIMEOUT)
    world.writer.full, world.writer.fault = False, "it is away"
    assert world.commit() == []
    world.writer.fault = None
    assert world.commit() == []
    world.write()
    assert len(world.answers()) == 1


def test_data_of_a_transaction_that_is_being_committed_waits_for_its_end(world: World) -> None:
    """The disk is slow: its sender has given the commit up, and sends the transaction again."""
    world.stage()
    assert world.commit() == []
    assert world.data(b"a", attempt=B, peer=b"again") == world.data(b"a", attempt=B, peer=b"again") == []
    world.write()
    world.answers()
    assert codes(world.data(b"a", attempt=B, peer=b"again")) == ["unknown"]
    assert [rows for *_, rows in world.log] == [[b"a"]]


def test_commits_share_a_chunk_while_the_disk_has_enough_to_do(world: World) -> None:
    """Each chunk has the last transactions of all producers: 1,200 commits at once took 430 MB."""
    world.writer.busy = True
    for attempt, producer in ((A, "one"), (B, "two")):
        world.stage(attempt=attempt, producer=producer)
        assert world.commit(attempt, producer=producer) == []
    assert world.machine.busy
    assert not world.appended
    world.writer.busy = False
    assert world.answers() == []
    world.write()
    assert [answer.by for answer in cast("list[Committed]", world.answers())] == [A, B]
    assert not world.machine.busy


def test_a_chunk_with_many_bytes_does_not_wait_for_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zmq_datasource.acknowledged.reception._ENOUGH_BYTES", SIZE)
    world.writer.busy = True
    world.stage()
    world.commit()
    assert world.appended


def test_a_commit_is_not_refused_because_the_log_has_failed(world: World) -> None:
    """The receiver ends. Another one may take its place, and the sender asks that one."""
    world.stage()
    world.writer.failure = LogLockedError("another process has the log")
    assert world.commit() == []


def test_a_transaction_that_is_too_large_for_one_object_is_refused() -> None:
    world = World(TERMS._replace(most_transaction_bytes=2 * SIZE))
    for index in range(3):
        world.data(b"x", index=index)
    world.end(3, messages=3)
    assert codes(world.commit(rows=3)) == ["too_large"]


# Silence, and room.


def test_attempts_without_a_commit_are_discarded(world: World) -> None:
    world.stage()
    world.wait(TIMEOUT)
    world.data(b"b", attempt=B, number=1)
    world.wait(1)
    assert (list(world.disk.values), world.files) == ([B], {})
    assert codes(world.commit()) == ["unknown"]
    world.wait(TIMEOUT)
    assert not world.disk.values


def test_an_attempt_that_is_forgotten_while_it_is_forced_to_the_disk_leaves_no_file(world: World) -> None:
    world.stage(attempt=B)
    world.data(b"a")
    world.holds = True
    world.end()
    world.commit(B)
    world.write()
    assert len(world.answers()) == 1
    assert world.release() == []
    assert not world.files


def test_staged_attempts_are_bounded_in_bytes_and_number() -> None:
    world = World(TERMS._replace(most_staged_bytes=40 * SIZE))
    for index in range(100):
        if codes(world.data(b"x", index=index)):
            break
    assert index == 40
    assert not world.files
    world = World(TERMS._replace(most_attempts=3))
    for number in range(9):  # attempts at one part: a later one replaces those before
        world.stage(attempt=f"{number:032x}")
    assert len(world.files) <= 3
    world.kill()
    for number in range(1, 4):
        refused = codes(world.data(b"x", attempt=f"a{number:031x}", number=number, peer=b"%d" % number))
    assert refused == ["no_room"]


def test_what_a_disk_refuses_for_now_is_not_answered_and_loses_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.data(b"a")
    world.fault = DiskFaultError("No space left on device")
    assert world.data(b"b", index=1) == world.data(b"c", attempt=B, number=1, peer=b"other") == []
    assert world.end() == []
    assert "No space left on device; the sender asks again" in caplog.text
    world.fault = None
    assert world.data(b"b", index=1) == [Taken(attempt=A, received=2)]
    assert world.end(2, messages=2) == [Staged(attempt=A, rows=2)]
    assert world.data(b"c", attempt=B, number=1) == [Taken(attempt=B, received=1)]


def test_what_a_disk_refuses_for_good_is_refused(world: World) -> None:
    world.data(b"a")
    world.data(b"b", attempt=B, number=1)
    world.fault = LogWriteError("Input/output error")
    assert codes(world.end()) == codes(world.data(b"b", attempt=B, number=1, index=1)) == ["storage"]
    assert not world.disk.values


# Producers that are many.


def test_named_producers_are_not_forgotten_for_anonymous_ones() -> None:
    world = World(limit=3)
    assert world.committed("shop") == []
    for number in range(50):
        assert world.committed(f"anonymous-producer-{number}") == []
    world.kill()
    assert world.transactions.last("shop") is not None
    assert world.transactions.last("anonymous-producer-47") is None


def test_a_producer_that_is_forgotten_at_once_learns_that_its_own_transaction_is_committed() -> None:
    """Two Producers without a name commit at the same moment, and there is one place."""
    world = World(limit=1)
    names = {A: "anonymous-one", B: "anonymous-two"}
    for attempt, producer in names.items():
        world.stage(attempt=attempt, producer=producer)
        world.commit(attempt, producer=producer)
    for attempt, producer in names.items():
        world.write()
        assert world.answers() == [Committed(producer=producer, number=0, again=False, by=attempt)]


def test_a_producer_for_which_there_is_no_room_is_refused_before_it_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two queries and one place: the first driver may have died between the answer and Spark's commit."""
    world = World(limit=1)
    assert world.committed("first") == []
    assert world.committed("second") == world.committed("anonymous-one") == ["producers"]
    assert world.committed("first", 1) == []
    world.wait(SILENT_SECONDS - 1)
    world.tell(Hello(attempt=C, producer="first"))
    world.committed("first", 2)
    world.wait(SILENT_SECONDS - 1)
    assert world.committed("second") == ["producers"]
    world.kill()  # it was silent for so long by the receiver's own time, which is in the log
    world.wait(0)
    world.wait(2)
    assert world.committed("second") == ["producers"], "the log knows the time of its last chunk"
    world.wait(SILENT_SECONDS)
    assert world.committed("second") == []
    assert "forgetting the last transaction of producer first, which was silent for 7 days" in caplog.text
