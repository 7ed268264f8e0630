"""The state machine of the receiving side: in any order of losses, repeats and kills, and message by message."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from zmq_datasource.acknowledged.attempt_files import Stored
from zmq_datasource.acknowledged.protocol import (
    Abort,
    Aborted,
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
    as_text,
    digest_of,
    digest_of_rows,
    encode,
    rows_of,
)
from zmq_datasource.acknowledged.reception import (
    Act,
    Answer,
    Append,
    Asked,
    Check,
    Finish,
    Reception,
    Remove,
    Terms,
    Write,
)
from zmq_datasource.acknowledged.sender_session import SenderSession
from zmq_datasource.acknowledged.transactions import SILENT_SECONDS, CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import (
    DamagedChunkError,
    DiskFaultError,
    LogWriteError,
    ProtocolError,
    SocketError,
)
from zmq_datasource.messages.packed import pack_columns

A, B, C = (letter * 32 for letter in "abc")
TIMEOUT, RETRY, SIZE = 100.0, 60.0, 1000
TERMS = Terms(TIMEOUT, 1 << 20, retry_seconds=RETRY)


class World:
    """The machine with a disk and a log in memory. ``kill`` leaves only what was durable.

    Attributes:
        holds: The kinds of acts that wait until ``release``.
        fault: Why the disk takes no rows now.
        files: The staged attempts: what they have, and their values.
        log: The committed transactions with their values, in the order of the log.
    """

    def __init__(self, terms: Terms = TERMS, limit: int = 10) -> None:
        self.terms, self.limit = terms, limit
        self.now = 0.0
        self.holds: tuple[type[Act], ...] = ()
        self.fault: Exception | None = None
        self.files: dict[str, tuple[Stored, list[bytes]]] = {}
        self.log: list[tuple[str, int, list[bytes]]] = []
        self.saved = b""
        self.kill()

    def kill(self) -> None:
        self.counters = SourceCounters()
        self.transactions = CommittedTransactions(self.counters, self.limit)
        self.transactions.restore(self.saved)
        self.machine = Reception(self.terms, self.transactions, self.counters)
        self.held: list[Act] = []
        self.values: dict[str, list[bytes]] = {}
        self.appended: list[tuple[Asked, bytes, list[bytes]]] = []
        for name, (stored, _) in self.files.items():
            self.machine.recover(name, stored, self.now)
        self.run()

    def run(self) -> list[tuple[bytes, Message]]:
        """Do what the machine asks for. Returns the answers."""
        answers = []
        while self.machine.acts:
            act = self.machine.acts.popleft()
            if isinstance(act, Answer):
                answers.append((act.peer, act.message))
            elif isinstance(act, self.holds):
                self.held.append(act)
            else:
                self.do(act)
        return answers

    def do(self, act: Act) -> None:
        machine = self.machine
        match act:
            case Write(attempt, data, buffers):
                if self.fault is not None:
                    machine.failed(act, self.fault, self.now)
                    return
                rows, before = rows_of(data, buffers, 0), attempt.stored
                self.values.setdefault(attempt.name, []).extend(rows.column("value").to_pylist())
                stored = before._replace(messages=before.messages + 1, rows=before.rows + len(rows))
                digest = before.digest + digest_of_rows(rows)
                machine.written(attempt, stored._replace(digest=digest, size=before.size + SIZE))
            case Finish(attempt) if self.fault is not None:
                machine.failed(act, self.fault, self.now)
            case Finish(attempt):
                self.files[attempt.name] = attempt.stored, self.values[attempt.name]
                machine.finished(attempt, attempt.stored, self.now)
            case Check(asked):
                if any(name not in self.files for name in asked.names):
                    machine.failed(act, DamagedChunkError("a file is damaged"), self.now)
                else:
                    machine.checked(asked)
            case Append(asked):
                machine.appended(asked)
                rows = [value for name in asked.names for value in self.files[name][1]]
                self.appended.append((asked, self.transactions.state(), rows))
            case Remove(name):
                self.files.pop(name, None)
                self.values.pop(name, None)

    def release(self, at: int = 0) -> list[Message]:
        self.do(self.held.pop(at))
        return self.answers()

    def write(self) -> None:
        """Write the oldest transaction that was appended to the log."""
        asked, self.saved, rows = self.appended.pop(0)
        self.log.append((asked.producer, asked.transaction.number, rows))
        self.machine.durable(asked)

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

    def end(
        self, rows: int = 1, messages: int = 1, attempt: str = A, number: int = 0, **more: Any
    ) -> list[Message]:
        part = {"producer": "q", "partition": 0, **more}
        return self.tell(End(attempt=attempt, number=number, messages=messages, rows=rows, **part))

    def stage(self, value: bytes = b"a", attempt: str = A, number: int = 0, **more: Any) -> None:
        """An attempt of one row that is staged."""
        assert self.data(value, attempt=attempt, number=number, **more) == [
            Taken(attempt=attempt, received=1)
        ]
        assert self.end(attempt=attempt, number=number, **more) == [Staged(attempt=attempt, rows=1)]

    def commit(
        self, attempt: str = A, number: int = 0, rows: int = 1, digest: str | None = None, producer: str = "q"
    ) -> list[Message]:
        return self.tell(
            Commit(producer=producer, number=number, attempts=[attempt], rows=rows, digest=digest)
        )

    def committed(self, producer: str, number: int = 0) -> list[str]:
        """Stage, commit and write a transaction; the codes of refusals."""
        attempt = uuid.uuid4().hex
        refused = codes(self.data(b"x", attempt=attempt, number=number, producer=producer))
        if not refused:
            self.end(attempt=attempt, number=number, producer=producer)
            self.commit(attempt, number, producer=producer)
            self.write()
            assert len(self.answers()) == 1
        return refused

    def wait(self, seconds: float) -> list[Message]:
        """Let time pass in which messages are received."""
        self.now += seconds
        self.machine.check_timeouts(self.now)
        return self.answers()


def codes(answers: list[Message]) -> list[str]:
    return [answer.code for answer in answers if isinstance(answer, Refusal)]


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
                        task.wait_for_room(size, self.world.now)
                        yield from self.answered(task)
                        task.send_packed(size, frames, 1)
                    task.wait_until_taken(self.world.now)
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
        world.holds = () if self.is_calm else (Finish, Check, Append)
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
            world.do(world.held.pop(self.random.randrange(len(world.held))))
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
    world.holds = (Write, Finish, Check, Append)
    assert world.tell(Hello(attempt=A, producer="q")) == [
        Welcome(attempt=A, received=0, committed=None, by=None)
    ]
    assert world.data(b"a", b"b") == []
    assert world.release() == [Taken(attempt=A, received=1)]
    assert world.end(2) == []
    assert world.release() == [Staged(attempt=A, rows=2)]
    assert world.commit(rows=2) == world.release() == world.release() == []
    world.write()
    assert world.answers() == [Committed(producer="q", number=0, again=False, by=A)]
    assert (world.log, world.files) == ([("q", 0, [b"a", b"b"])], {})


def test_what_is_said_again_is_answered_as_before_and_done_once(world: World) -> None:
    taken, staged = Taken(attempt=A, received=1), Staged(attempt=A, rows=1)
    assert world.data(b"a") == world.data(b"a") == [taken]
    world.holds = (Finish,)
    assert world.end() == world.end() == []
    assert world.release() == world.end() == [staged]
    assert world.data(b"a") == [taken]
    assert world.commit() + world.commit() == []
    world.write()
    assert world.answers() == [Committed(producer="q", number=0, again=False, by=A)] * 2
    assert world.commit() == [Committed(producer="q", number=0, again=True, by=A)]
    assert codes(world.data(b"a")) == ["unknown"]


def test_a_message_after_a_missing_one_is_not_taken(world: World) -> None:
    world.data(b"a")
    assert world.data(b"c", index=2) == [Taken(attempt=A, received=1)]
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
    assert (refusal.code, refusal.attempt) == ("protocol", A)
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
    with pytest.raises(ProtocolError):  # as the link finds out
        rows_of(bad, [b"", b""], 0)
    world.holds = (Write,)
    world.tell(bad, buffers=[b"", b""])
    world.machine.failed(world.held.pop(), ProtocolError("no rows"), world.now)
    assert codes(world.answers()) == ["protocol"]
    world.holds = ()
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
    digests = {value: as_text(digest_of(pa.record_batch({"value": [value]}))) for value in (b"a", b"b", b"c")}
    world.holds = (Check,)
    assert world.commit(C, 2, digest=digests[b"c"]) + world.commit(A, 3, digest=digests[b"a"]) == []
    assert codes(world.commit(B, 3, digest=digests[b"b"])) == ["conflict"]
    assert world.release(1) == []
    assert codes(world.release()) == ["conflict"], "the older one is checked after the newer one was appended"
    assert codes(world.commit(B, 3, digest=digests[b"b"])) == ["conflict"]
    assert codes(world.commit(C, 2, digest=digests[b"c"])) == ["conflict"]
    assert world.commit(A, 3, digest=digests[b"a"]) == []
    world.write()
    assert world.answers() == [Committed(producer="q", number=3, again=False, by=A)] * 2
    assert world.log == [("q", 3, [b"a"])]
    assert codes(world.data(b"d", attempt="d" * 32, number=2)) == ["conflict"]


def test_a_commit_of_other_rows_than_are_staged_is_refused(world: World) -> None:
    world.stage()
    assert codes(world.commit(rows=2)) == ["unknown"]
    assert codes(world.commit(digest="0" * 16)) == ["protocol"]
    assert codes(world.commit(B)) == ["unknown"]
    assert codes(world.tell(Commit(producer="q", number=0, attempts=[A, A], rows=1))) == ["unknown"]
    assert codes(world.tell(Commit(producer="q", number=0, attempts=[], rows=0))) == ["unknown"]


def test_a_damaged_part_makes_the_transaction_unknown_and_it_is_sent_again(world: World) -> None:
    world.stage(b"a", A, partition=0)
    world.stage(b"b", B, partition=1)
    del world.files[B]
    both = Commit(producer="q", number=0, attempts=[A, B], rows=2)
    assert codes(world.tell(both)) == ["unknown"]
    assert not world.files
    world.stage()
    assert world.commit() == []
    world.write()
    assert world.log == [("q", 0, [b"a"])]


def test_a_commit_waits_while_the_log_is_full_or_the_disk_refuses(world: World) -> None:
    world.stage()
    world.machine.log_is_full = True
    assert world.commit() + world.commit() == []
    world.machine.log_is_full = False
    world.holds = (Check,)
    assert world.commit() == []
    world.machine.failed(world.held.pop(), DiskFaultError("it is away"), world.now)
    assert world.answers() == []
    world.holds = ()
    assert world.commit() == []
    world.write()
    assert len(world.answers()) == 1


def test_a_transaction_that_is_too_large_for_one_object_is_refused() -> None:
    world = World(TERMS._replace(most_transaction_bytes=2 * SIZE))
    for index in range(3):
        world.data(b"x", index=index)
    world.end(3, messages=3)
    assert codes(world.commit(rows=3)) == ["too_large"]


def test_an_unexpected_error_refuses_the_message_and_the_commit_may_be_repeated(world: World) -> None:
    world.stage()
    world.holds = (Append,)
    world.commit()
    world.machine.failed(world.held.pop(), ZeroDivisionError(), world.now)
    (refusal,) = world.answers()
    assert isinstance(refusal, Refusal)
    assert (refusal.code, "ZeroDivisionError" in refusal.reason) == ("internal", True)
    assert world.counters.internal_errors == 1
    world.holds = ()
    world.commit()
    world.write()
    assert world.log == [("q", 0, [b"a"])]


# Aborts, silence, and room.


def test_a_sender_aborts_only_its_own_attempts_and_none_that_is_being_committed(world: World) -> None:
    world.stage()
    for producer, number in (("other", 0), ("q", 1)):
        world.tell(Abort(producer=producer, number=number, attempts=["0" * 32, A]))
    world.commit()
    assert world.tell(Abort(producer="q", number=0, attempts=[A])) == [Aborted(producer="q", number=0)]
    assert A in world.files  # the log may fail, and the sender may ask again
    world.write()
    world.answers()
    world.stage(attempt=B, number=1)
    world.tell(Abort(producer="q", number=1, attempts=[B]))
    assert not world.files


def test_an_attempt_that_is_aborted_while_it_is_forced_to_the_disk_leaves_no_file(world: World) -> None:
    world.holds = (Finish,)
    world.data(b"a")
    world.end()
    world.tell(Abort(producer="q", number=0, attempts=[A]))
    assert world.release() == []
    assert not world.files


def test_silent_senders_and_attempts_without_a_commit_are_discarded(world: World) -> None:
    world.stage()
    world.data(b"b", attempt=B, number=1)
    world.wait(TIMEOUT)
    assert world.files  # its producer is sending
    assert world.machine.receiving == 1
    world.wait(1)
    assert (world.machine.receiving, world.files) == (0, {})
    assert codes(world.commit()) == ["unknown"]


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


def test_a_connection_sends_one_attempt_at_a_time(world: World) -> None:
    world.data(b"1", attempt=A)
    world.data(b"2", attempt=B, number=1)
    assert codes(world.end(attempt=A)) == ["unknown"]
    world.holds = (Finish,)
    world.end(attempt=B, number=1)
    world.data(b"3", attempt=C, number=2)
    assert world.release() == [Staged(attempt=B, rows=1)]


# A disk that refuses.


def test_a_sender_waits_for_a_full_disk_and_loses_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.data(b"a")
    world.fault = DiskFaultError("No space left on device")
    assert codes(world.data(b"b", index=1)) == ["busy"]
    assert codes(world.data(b"c", attempt=B, number=1, peer=b"other")) == ["busy"]
    world.now += RETRY - 1
    (welcome,) = world.tell(Hello(attempt=A, producer="q"))
    assert isinstance(welcome, Welcome)
    assert welcome.received == 1, "so that it sends the data again"
    assert codes(world.data(b"b", index=1)) == ["busy"]
    world.fault = None
    assert world.data(b"b", index=1) == [Taken(attempt=A, received=2)]
    assert "No space left on device; its senders try again for up to 60 s" in caplog.text
    assert "the disk takes the rows of attempts again" in caplog.text


def test_the_end_of_an_attempt_waits_for_a_full_disk(world: World) -> None:
    world.data(b"a")
    world.fault = DiskFaultError("No space left on device")
    assert codes(world.end()) == ["busy"]
    world.fault = LogWriteError("Input/output error")
    assert codes(world.end()) == ["storage"]
    world.fault = None
    world.stage()
    world.data(b"b", attempt=B, number=1)
    world.holds, world.fault = (Finish,), DiskFaultError("No space left on device")
    world.end(attempt=B, number=1)
    world.tell(Abort(producer="q", number=1, attempts=[B]))
    assert codes(world.release()) == ["busy"]
    assert (world.machine.receiving, B in world.values) == (0, False)


def test_data_is_refused_when_the_disk_has_refused_for_too_long_or_for_good(world: World) -> None:
    world.fault = DiskFaultError("No space left on device")
    assert codes(world.data(b"a")) == ["busy"]
    world.now += RETRY
    assert codes(world.data(b"a")) == ["storage"]
    world.fault = None
    assert world.data(b"a") == [Taken(attempt=A, received=1)]
    world.fault = DiskFaultError("No space left on device")
    assert codes(world.data(b"b", index=1)) == ["busy"], "it has taken rows meanwhile"
    world.fault = LogWriteError("Permission denied")
    assert codes(world.data(b"b", index=1)) == ["storage"]
    assert world.machine.receiving == 0


# Producers that are many.


def test_named_producers_are_not_forgotten_for_anonymous_ones() -> None:
    world = World(limit=3)
    assert world.committed("shop") == []
    for number in range(50):
        assert world.committed(f"anonymous-producer-{number}") == []
    world.kill()
    assert world.transactions.last("shop") is not None
    assert world.transactions.last("anonymous-producer-47") is None


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
