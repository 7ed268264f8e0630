"""The receiving side's half of the conversation, without a socket and with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmq_datasource.acknowledged.answers import RefusedError
from zmq_datasource.acknowledged.protocol import (
    Abort,
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
    decode,
    encode,
)
from zmq_datasource.acknowledged.reception import AcceptorTerms, Reception
from zmq_datasource.acknowledged.sessions import SENDER_BOUNDS, SenderBounds, Session, Sessions
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DiskFaultError, LogWriteError
from zmq_datasource.log.chunk_file import FilledFile
from zmq_datasource.log.staged_files import StagedFiles
from zmq_datasource.log.staging import Part
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.packed import pack_columns

ATTEMPT, OTHER = "a" * 32, "b" * 32
TIMEOUT = 100.0


class AtOnce(Executor):
    """Does what it is given before ``submit`` returns, unless it is told to wait."""

    def __init__(self) -> None:
        self.waits = False
        self.left: list[Callable[[], None]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def act() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as e:
                done.set_exception(e)

        self.left.append(act)
        if not self.waits:
            self.do()
        return done

    def do(self) -> None:
        while self.left:
            self.left.pop()()


class Log:
    """A log in memory; what is cut is durable once the test says so."""

    def __init__(self) -> None:
        self.full = False
        self.takes_files = True
        self.rows: list[bytes] = []
        self.files: list[FilledFile] = []
        self.cuts: list[Future[int]] = []
        self.failure: LogWriteError | None = None

    def append_whole(self, batches: Iterable[pa.RecordBatch], filled: FilledFile | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        if filled is not None:
            self.files.append(filled)
        for batch in batches:
            self.rows += batch.column("value").to_pylist()

    def cut(self) -> Future[int]:
        self.cuts.append(Future())
        return self.cuts[-1]

    def sync(self) -> None:
        for cut in self.cuts:
            cut.set_result(len(self.rows))
        self.cuts.clear()


class Side:
    """A reception and what is around it."""

    def __init__(
        self,
        path: Path,
        most_staged_bytes: int = 1 << 20,
        log: Log | None = None,
        kept: bytes = b"",
        most_attempts: int = 1000,
    ) -> None:
        self.now = 0.0
        self.disk, self.log, self.counters = AtOnce(), log or Log(), SourceCounters()
        self.path = path
        self.transactions = CommittedTransactions(self.counters, 10)
        assert self.transactions.restore(kept)
        storage = LogStorage(str(path))
        storage.open_log()
        self.reception = Reception(
            AcceptorTerms(TIMEOUT, most_staged_bytes, most_attempts),
            self.counters,
            storage.staged_files(),
            self.transactions,
            self.log,
            self.disk,
            lambda: 1.0,
        )
        self.reception.recover(self.now)

    def tell(
        self, *messages: Message, rows: pa.RecordBatch | None = None, peer: bytes = b"p"
    ) -> list[Message]:
        """Say something; returns what is answered."""
        for message in messages:
            buffers = [] if rows is None else [bytes(memoryview(b)) for b in pack_columns(rows)[1]]  # type: ignore[arg-type]
            self.reception.take(peer, [bytes(f) for f in encode(message, buffers)], self.now)
        self.reception.cut()
        return self.heard()

    def data(self, *values: bytes, index: int = 0, attempt: str = ATTEMPT, number: int = 0) -> list[Message]:
        rows = pa.record_batch({"value": list(values)})
        message = Data(
            attempt=attempt,
            producer="q",
            number=number,
            partition=0,
            index=index,
            rows=len(values),
            columns=["value"],
        )
        return self.tell(message, rows=rows)

    def end(self, rows: int, messages: int = 1, attempt: str = ATTEMPT, number: int = 0) -> list[Message]:
        return self.tell(
            End(attempt=attempt, producer="q", number=number, partition=0, messages=messages, rows=rows)
        )

    def commit(self, rows: int, attempt: str = ATTEMPT, number: int = 0) -> list[Message]:
        return self.tell(Commit(producer="q", number=number, attempts=[attempt], rows=rows))

    def heard(self) -> list[Message]:
        return [decode(frames)[0] for _, frames in self.reception.answers()]

    def wait(self, seconds: float) -> list[Message]:
        self.now += seconds
        self.reception.look(self.now)
        self.reception.go_on(self.now)
        return self.heard()

    @property
    def files(self) -> list[str]:
        return [file.name for file in (self.path / "0" / "staging").iterdir()]


@pytest.fixture
def side(tmp_path: Path) -> Side:
    return Side(tmp_path)


def codes(answers: list[Message]) -> list[str]:
    return [answer.code for answer in answers if isinstance(answer, Refusal)]


def test_nothing_is_answered_before_it_is_on_the_disk(side: Side) -> None:
    side.disk.waits = True
    (welcome,) = side.tell(Hello(attempt=ATTEMPT, producer="q"))
    assert isinstance(welcome, Welcome)
    assert (welcome.busy, welcome.received, welcome.committed) == (False, 0, None)
    assert side.data(b"a", b"b") == [Taken(attempt=ATTEMPT, received=1)]
    assert side.end(2) == []
    assert side.wait(1) == []
    assert side.reception.busy
    side.disk.do()
    assert side.wait(1) == [Staged(attempt=ATTEMPT, rows=2)]
    assert side.commit(2) == []
    assert side.wait(1) == []
    side.log.sync()
    assert side.wait(1) == [Committed(producer="q", number=0, again=False, by=ATTEMPT)]
    assert (side.log.rows, side.files, side.reception.busy) == ([b"a", b"b"], [], False)


steps = st.lists(st.sampled_from(["H", "D0", "D1", "E", "M", "sync", "restart"]), max_size=25)


@given(steps)
@settings(max_examples=60, deadline=None)
def test_whatever_is_lost_late_or_repeated_a_transaction_counts_once(
    tmp_path_factory: pytest.TempPathFactory, taken: list[str]
) -> None:
    """A sender that says anything at any time, and a receiver that may lose what is only in memory."""
    side = Side(tmp_path_factory.mktemp("log"))
    acts: dict[str, Callable[[], list[Message]]] = {
        "H": lambda: side.tell(Hello(attempt=ATTEMPT, producer="q")),
        "D0": lambda: side.data(b"a"),
        "D1": lambda: side.data(b"b", index=1),
        "E": lambda: side.end(2, messages=2),
        "M": lambda: side.commit(2),
        "sync": lambda: (side.log.sync(), side.wait(0))[1],
    }
    staged = committed = False
    for step in taken:
        if step == "restart":
            side.log.sync()  # the log is not what is tried here
            side.wait(0)
            side = Side(side.path, log=side.log, kept=side.transactions.state())
            continue
        answers = acts[step]() + side.wait(0)
        staged = staged or any(isinstance(answer, Staged) for answer in answers)
        committed = committed or any(isinstance(answer, Committed) for answer in answers)
        assert not committed or side.log.rows == [b"a", b"b"]
    # What was called staged can be committed, and what was committed is so again.
    if staged:
        answers = side.commit(2)
        side.log.sync()
        answers += side.wait(0)
        assert any(isinstance(answer, Committed) for answer in answers)
    assert side.log.rows in ([], [b"a", b"b"])


def test_the_size_of_what_is_staged_is_known_without_asking_the_disk(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise DiskFaultError("Input/output error")

    monkeypatch.setattr(StagedFiles, "size_of", refuse)
    side.data(b"a", b"b")
    assert [type(answer) for answer in [*side.end(2), *side.wait(0)]] == [Staged]
    (file,) = (side.path / "0" / "staging").iterdir()
    assert 0 <= side.reception._staging.bytes - file.stat().st_size <= 4096  # whole blocks


def on_disk(side: Side) -> int:
    return sum(file.stat().st_blocks * 512 for file in (side.path / "0" / "staging").iterdir())


def test_what_is_staged_takes_no_more_of_the_disk_than_it_may(tmp_path: Path) -> None:
    """Of a row with one byte, Arrow makes a file of 2 kB, and the disk makes whole blocks of that."""
    most = 64 << 10
    side = Side(tmp_path, most)
    for number in range(100):
        attempt = f"{number:032x}"
        if codes(side.data(b"x", attempt=attempt, number=number)):
            break
        side.end(1, attempt=attempt, number=number)
        side.wait(0)
    assert number >= 8
    assert on_disk(side) <= most


def test_an_attempt_of_many_small_messages_takes_no_more_of_the_disk_than_it_may(tmp_path: Path) -> None:
    most = 64 << 10
    side = Side(tmp_path, most)
    for index in range(1000):
        if codes(side.data(b"x", index=index)):
            break
        assert on_disk(side) <= most
    assert 50 <= index < 999


def test_the_number_of_staged_attempts_is_bounded(tmp_path: Path) -> None:
    side = Side(tmp_path, most_attempts=3)
    attempts = [f"{number:032x}" for number in range(4)]
    for number, attempt in enumerate(attempts[:3]):
        side.data(b"x", attempt=attempt, number=number)
        side.end(1, attempt=attempt, number=number)
        side.wait(0)
    assert codes(side.data(b"x", attempt=attempts[3], number=3)) == ["no_room"]
    side.commit(1, attempt=attempts[0])
    side.log.sync()
    side.wait(0)
    assert codes(side.data(b"x", attempt=attempts[3], number=3)) == []


def test_an_attempt_that_is_repeated_makes_room_for_itself(tmp_path: Path) -> None:
    side = Side(tmp_path, most_attempts=3)
    for number in range(9):
        attempt = f"{number:032x}"
        assert codes(side.data(b"x", attempt=attempt)) == []
        side.end(1, attempt=attempt)
        side.wait(0)
    assert len(side.files) <= 3


def test_a_restart_reads_of_each_staged_attempt_only_what_it_is(tmp_path: Path) -> None:
    """There may be very many. What a file holds is read, and checked, when it is asked for."""
    side = Side(tmp_path)
    side.data(b"a", b"b")
    side.end(2)
    side.data(b"c", attempt=OTHER, number=1)
    side.end(1, attempt=OTHER, number=1)
    side.wait(0)
    torn = tmp_path / "0" / "staging" / f"{OTHER}.arrow"
    torn.write_bytes(torn.read_bytes()[:-8])
    side = Side(tmp_path)
    assert len(side.files) == 2
    assert side.end(2) == [Staged(attempt=ATTEMPT, rows=2)]
    assert codes(side.end(1, attempt=OTHER, number=1)) == ["unknown"]
    assert len(side.files) == 1


def test_a_message_behind_one_that_is_missing_is_not_taken(side: Side) -> None:
    side.data(b"a")
    assert side.data(b"c", index=2) == [Taken(attempt=ATTEMPT, received=1)]
    assert side.data(b"b", index=1) == [Taken(attempt=ATTEMPT, received=2)]
    assert side.data(b"d", index=3) == [Taken(attempt=ATTEMPT, received=2)]
    assert codes(side.end(2, messages=4)) == ["protocol"]


def test_a_sender_that_falls_silent_is_let_go_of_and_so_is_what_nobody_commits(side: Side) -> None:
    side.data(b"a")
    side.end(1)
    assert side.wait(0) == [Staged(attempt=ATTEMPT, rows=1)]
    side.data(b"b", attempt=OTHER, number=1)
    side.wait(TIMEOUT)
    assert len(side.files) == 2  # its producer is at work
    side.wait(1)
    assert side.files == []
    assert codes(side.commit(1)) == ["unknown"]
    assert codes(side.data(b"c", index=1, attempt=OTHER, number=1)) == ["unknown"]


@pytest.mark.parametrize("staged", [True, False])
def test_nobody_is_silent_who_is_not_listened_to(staged: bool, side: Side) -> None:
    side.data(b"a")
    if staged:
        side.end(1)
        side.wait(0)
    side.now += 2 * TIMEOUT  # a full log
    side.reception.keep_alive_while_paused(side.now)
    assert side.wait(TIMEOUT) == []
    assert codes(side.end(1)) == []
    side.wait(0)
    assert side.commit(1) == []


@pytest.mark.parametrize("staged", [True, False])
def test_who_is_gone_is_let_go_of_though_there_are_pauses_all_the_time(staged: bool, side: Side) -> None:
    """A log that is as full as it may be pauses many times a second."""
    side.data(b"a")
    if staged:
        side.end(1)
        side.wait(0)
    for _ in range(4):
        assert len(side.files) == 1
        side.wait(TIMEOUT / 3)
        side.now += 1
        side.reception.keep_alive_while_paused(side.now)
    side.wait(0)
    assert side.files == []


def test_what_is_said_again_is_answered_as_before_and_done_once(side: Side) -> None:
    side.data(b"a")
    assert side.data(b"a") == [Taken(attempt=ATTEMPT, received=1)]
    assert side.end(1) + side.end(1) == []
    assert side.wait(0) == [Staged(attempt=ATTEMPT, rows=1)]
    assert side.end(1) == [Staged(attempt=ATTEMPT, rows=1)]
    assert side.data(b"a") == []  # a copy that was long on its way
    assert len(side.files) == 1
    assert side.commit(1) + side.commit(1) == []
    side.log.sync()
    assert [type(answer) for answer in side.wait(0)] == [Committed, Committed]
    (again,) = side.commit(1)
    assert isinstance(again, Committed)
    assert again.again
    assert codes(side.data(b"a")) == ["unknown"]


def test_a_commit_ends_what_other_attempts_have_left_at_it(side: Side) -> None:
    side.data(b"a")
    side.end(1)
    side.wait(0)
    side.data(b"a", attempt=OTHER)
    side.data(b"later", attempt="c" * 32, number=1)
    side.commit(1)
    side.log.sync()
    side.wait(0)
    assert codes(side.data(b"b", attempt=OTHER, index=1)) == ["unknown"]
    assert codes(side.data(b"b", attempt="c" * 32, number=1, index=1)) == []


def test_a_commit_is_not_answered_while_the_log_is_full_and_done_when_it_is_asked_again(side: Side) -> None:
    side.data(b"a")
    side.end(1)
    side.wait(0)
    side.log.full = True
    assert side.commit(1) + side.commit(1) + side.wait(1) == []
    side.log.full = False
    assert side.wait(1) + side.commit(1) == []
    side.log.sync()
    assert len(side.wait(1)) == 1
    assert side.log.rows == [b"a"]


def test_who_finds_no_room_leaves_what_it_had_to_the_others(tmp_path: Path) -> None:
    side = Side(tmp_path, most_staged_bytes=3000)
    side.data(b"x" * 1000)
    assert codes(side.data(b"x" * 3000, index=1)) == ["no_room"]
    assert side.files == []
    assert codes(side.data(b"x" * 1000, attempt=OTHER)) == []


def test_an_answer_that_is_due_is_given_though_the_log_fails_after_it(side: Side) -> None:
    for number, attempt in enumerate((ATTEMPT, OTHER)):
        side.data(b"%d" % number, attempt=attempt, number=number)
        side.end(1, attempt=attempt, number=number)
        side.wait(0)
        side.commit(1, attempt=attempt, number=number)
    first, second = side.log.cuts
    first.set_result(1)
    second.set_exception(LogWriteError("no space left"))
    with pytest.raises(LogWriteError):
        side.reception.go_on(side.now)
    assert side.heard() == [Committed(producer="q", number=0, again=False, by=ATTEMPT)]


def test_what_is_being_committed_is_not_aborted(side: Side) -> None:
    side.data(b"a")
    side.end(1)
    side.wait(0)
    side.commit(1)
    assert len(side.tell(Abort(producer="q", number=0, attempts=[ATTEMPT]))) == 1
    assert len(side.files) == 1  # the log may fail, and the sender may ask again
    side.log.sync()
    assert side.wait(0) == [Committed(producer="q", number=0, again=False, by=ATTEMPT)]


def test_a_sender_aborts_its_own_attempts_alone_and_others_cost_no_time(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.data(b"a")
    side.end(1)
    side.wait(0)
    monkeypatch.setattr(StagedFiles, "remove", lambda *_: pytest.fail("it looks for a file"))
    strangers = [f"{number:032x}" for number in range(1000)]
    for producer, number in (("other", 0), ("q", 1)):
        side.tell(Abort(producer=producer, number=number, attempts=[*strangers, ATTEMPT]))
    assert len(side.files) == 1
    monkeypatch.undo()
    side.tell(Abort(producer="q", number=0, attempts=[ATTEMPT]))
    assert not side.files


def test_bytes_that_are_no_message_are_refused_and_counted(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    side.reception.take(b"p", [b"hello"], 0.0)
    (refusal,) = side.heard()
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.attempt) == ("protocol", None)
    assert f"refused a message of the transaction protocol: {refusal.reason}" in caplog.text
    side.tell(Staged(attempt=ATTEMPT, rows=1))
    assert side.counters.malformed == 2


def test_a_refusal_goes_to_who_has_sent_and_names_its_attempt(side: Side) -> None:
    side.data(b"1", attempt=ATTEMPT)
    side.end(1)
    side.reception.take(
        b"peer",
        [
            bytes(f)
            for f in encode(
                Data(
                    attempt=ATTEMPT, producer="q", number=0, partition=0, index=1, rows=1, columns=["value"]
                ),
                [b"", b""],
            )
        ],
        side.now,
    )
    ((peer, frames),) = side.reception.answers()
    refusal, _ = decode(frames)
    assert peer == b"peer"
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.attempt) == ("protocol", ATTEMPT)
    assert refusal.reason == "data message 1 of an attempt after its end"


def test_data_of_another_transaction_under_the_same_attempt_is_refused(side: Side) -> None:
    side.data(b"1")
    (refusal,) = side.data(b"2", index=1, number=1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "data message 1 of an attempt at something else"


# Who may send.


def session(number: int, now: float = 0.0) -> Session:
    return Session(b"peer %d" % number, f"{number:032x}", Part("q", number, 0), now)


def test_a_connection_sends_one_attempt_at_a_time() -> None:
    everyone = Sessions()
    everyone.add(session(0))
    everyone.add(session(1))
    first, second = everyone
    assert everyone.must_leave(first.peer, 0.0) is first
    second.finishing = Future()
    assert everyone.must_leave(second.peer, 0.0) is None, "it has sent its end"


def test_where_all_wait_for_the_disk_nobody_makes_place() -> None:
    everyone = Sessions(SenderBounds(places=1))
    everyone.add(session(0))
    next(iter(everyone)).finishing = Future()
    assert everyone.is_full(1e6)
    with pytest.raises(RefusedError, match="1 senders are at work already") as refused:
        everyone.must_leave(b"new", 1e6)
    assert refused.value.code == "busy"


def test_who_is_not_silent_for_long_enough_keeps_the_only_place() -> None:
    everyone = Sessions(SenderBounds(places=1))
    everyone.add(session(0, now=1000.0))
    with pytest.raises(RefusedError):
        everyone.must_leave(b"new", 1000.0 + SENDER_BOUNDS.silent_seconds - 1)
    assert everyone.is_full(1000.0 + SENDER_BOUNDS.silent_seconds - 1)
    assert everyone.must_leave(b"new", 1000.0 + SENDER_BOUNDS.silent_seconds) is not None
    assert not everyone.is_full(1000.0 + SENDER_BOUNDS.silent_seconds)


def test_a_session_whose_file_is_being_forced_keeps_its_place() -> None:
    everyone = Sessions(SenderBounds(places=2))
    everyone.add(session(0))
    assert everyone.must_leave(b"new", 0.0) is None
    everyone.add(session(1, now=1.0))
    first, second = everyone
    first.finishing = Future()
    assert everyone.must_leave(b"new", 1.0 + SENDER_BOUNDS.silent_seconds) is second
