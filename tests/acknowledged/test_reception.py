"""The receiving side without a socket, with a clock that the test moves."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zmq_datasource.acknowledged.attempt_files import AttemptFiles
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
    as_text,
    decode,
    digest_of,
    encode,
)
from zmq_datasource.acknowledged.reception import AcceptorTerms, Reception
from zmq_datasource.acknowledged.sessions import SENDER_BOUNDS, AttemptSession, SenderBounds, Sessions
from zmq_datasource.acknowledged.staging import StagedFile
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DiskFaultError, LogWriteError, RefusedError
from zmq_datasource.log import StoredRows
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.packed import pack_columns

ATTEMPT, OTHER = "a" * 32, "b" * 32
TIMEOUT, RETRY = 100.0, 60.0


class AtOnce(Executor):
    """Runs each task before ``submit`` returns, unless ``waits`` is true."""

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
    """A log in memory. Its chunks are durable when the test calls ``sync``."""

    def __init__(self) -> None:
        self.full = False
        self.rows: list[bytes] = []
        self.cuts: list[Future[int]] = []
        self.failure: LogWriteError | None = None

    def append_stored(self, rows: StoredRows) -> None:
        if self.failure is not None:
            raise self.failure
        for batch in rows.read():
            self.rows += batch.column("value").to_pylist()

    def cut(self) -> Future[int]:
        self.cuts.append(Future())
        return self.cuts[-1]

    def sync(self) -> None:
        for cut in self.cuts:
            cut.set_result(len(self.rows))
        self.cuts.clear()


class Side:
    """A reception with its disk and its log."""

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
            AcceptorTerms(TIMEOUT, most_staged_bytes, most_attempts, RETRY),
            self.counters,
            AttemptFiles(storage.directory),
            self.transactions,
            self.log,
            self.disk,
            lambda: 1.0,
        )
        self.reception.recover(self.now)

    def tell(
        self, *messages: Message, rows: pa.RecordBatch | None = None, peer: bytes = b"p"
    ) -> list[Message]:
        """Send messages. Returns the answers."""
        for message in messages:
            buffers = [] if rows is None else [bytes(memoryview(b)) for b in pack_columns(rows)[1]]  # type: ignore[arg-type]
            self.reception.receive(peer, [bytes(f) for f in encode(message, buffers)], self.now)
        self.reception.cut()
        return self.answers()

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

    def stage(self, value: bytes = b"a", attempt: str = ATTEMPT, number: int = 0) -> None:
        """An attempt of one row that is staged."""
        self.data(value, attempt=attempt, number=number)
        self.end(1, attempt=attempt, number=number)
        self.wait(0)

    def commit(
        self, rows: int, attempt: str = ATTEMPT, number: int = 0, digest: str | None = None
    ) -> list[Message]:
        return self.tell(Commit(producer="q", number=number, attempts=[attempt], rows=rows, digest=digest))

    def answers(self) -> list[Message]:
        return [decode(frames)[0] for _, frames in self.reception.answers()]

    def wait(self, seconds: float) -> list[Message]:
        self.now += seconds
        self.reception.check_timeouts(self.now)
        self.reception.answer_completed(self.now)
        return self.answers()

    @property
    def files(self) -> list[str]:
        return [file.name for file in (self.path / "chunks" / "staging").iterdir()]


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
def test_a_transaction_counts_once_in_any_order_of_loss_delay_and_repetition(
    tmp_path_factory: pytest.TempPathFactory, taken: list[str]
) -> None:
    """The sender sends any message at any time, and the receiver may restart."""
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
            side.log.sync()  # the log itself loses nothing
            side.wait(0)
            side = Side(side.path, log=side.log, kept=side.transactions.state())
            continue
        answers = acts[step]() + side.wait(0)
        staged = staged or any(isinstance(answer, Staged) for answer in answers)
        committed = committed or any(isinstance(answer, Committed) for answer in answers)
        assert not committed or side.log.rows == [b"a", b"b"]
    # A staged attempt can be committed, and a committed one again.
    if staged:
        answers = side.commit(2)
        side.log.sync()
        answers += side.wait(0)
        assert any(isinstance(answer, Committed) for answer in answers)
    assert side.log.rows in ([], [b"a", b"b"])


def on_disk(side: Side) -> int:
    return sum(file.stat().st_blocks * 512 for file in (side.path / "chunks" / "staging").iterdir())


def test_staged_attempts_and_one_of_many_messages_are_bounded_on_disk(tmp_path: Path) -> None:
    """A row of one byte becomes a file of 2 kB in Arrow, which takes whole blocks on disk."""
    most = 64 << 10
    side = Side(tmp_path / "attempts", most)
    for number in range(100):
        attempt = f"{number:032x}"
        if codes(side.data(b"x", attempt=attempt, number=number)):
            break
        side.end(1, attempt=attempt, number=number)
        side.wait(0)
    assert number >= 8
    assert on_disk(side) <= most
    side = Side(tmp_path / "messages", most)
    for index in range(1000):
        if codes(side.data(b"x", index=index)):
            break
        assert on_disk(side) <= most
    assert 50 <= index < 999


def test_the_number_of_staged_attempts_is_bounded(tmp_path: Path) -> None:
    side = Side(tmp_path, most_attempts=3)
    attempts = [f"{number:032x}" for number in range(4)]
    for number, attempt in enumerate(attempts[:3]):
        side.stage(b"x", attempt, number)
    assert codes(side.data(b"x", attempt=attempts[3], number=3)) == ["no_room"]
    side.commit(1, attempt=attempts[0])
    side.log.sync()
    side.wait(0)
    assert codes(side.data(b"x", attempt=attempts[3], number=3)) == []


def test_a_repeated_attempt_replaces_the_one_before(tmp_path: Path) -> None:
    side = Side(tmp_path, most_attempts=3)
    for number in range(9):
        attempt = f"{number:032x}"
        assert codes(side.data(b"x", attempt=attempt)) == []
        side.end(1, attempt=attempt)
        side.wait(0)
    assert len(side.files) <= 3


def test_a_restart_finds_the_attempts_that_are_whole(tmp_path: Path) -> None:
    side = Side(tmp_path)
    side.data(b"a", b"b")
    side.end(2)
    side.data(b"c", attempt=OTHER, number=1)
    side.end(1, attempt=OTHER, number=1)
    side.wait(0)
    torn = tmp_path / "chunks" / "staging" / OTHER
    torn.write_bytes(torn.read_bytes()[:-8])
    (torn.parent / ("c" * 32)).write_bytes(b"")
    os.mkfifo(torn.parent / ("d" * 32))
    (torn.parent / f".{'e' * 32}").write_bytes(b"of a crashed writer")
    side = Side(tmp_path)
    assert side.end(2) == [Staged(attempt=ATTEMPT, rows=2)]
    assert codes(side.end(1, attempt=OTHER, number=1)) == ["unknown"]
    assert len(side.files) == 1


def test_a_message_after_a_missing_one_is_not_taken(side: Side) -> None:
    side.data(b"a")
    assert side.data(b"c", index=2) == [Taken(attempt=ATTEMPT, received=1)]
    assert side.data(b"b", index=1) == [Taken(attempt=ATTEMPT, received=2)]
    assert side.data(b"d", index=3) == [Taken(attempt=ATTEMPT, received=2)]
    assert codes(side.end(2, messages=4)) == ["protocol"]


def test_silent_senders_and_attempts_without_a_commit_are_discarded(side: Side) -> None:
    side.data(b"a")
    side.end(1)
    assert side.wait(0) == [Staged(attempt=ATTEMPT, rows=1)]
    side.data(b"b", attempt=OTHER, number=1)
    side.wait(TIMEOUT)
    assert len(side.files) == 2  # its producer is sending
    side.wait(1)
    assert side.files == []
    assert codes(side.commit(1)) == ["unknown"]
    assert codes(side.data(b"c", index=1, attempt=OTHER, number=1)) == ["unknown"]


@pytest.mark.parametrize("staged", [True, False])
def test_timeouts_stand_still_while_nothing_is_received(staged: bool, side: Side) -> None:
    side.data(b"a")
    if staged:
        side.end(1)
        side.wait(0)
    side.now += 2 * TIMEOUT  # a full log
    side.reception.extend_timeouts(side.now)
    assert side.wait(TIMEOUT) == []
    assert codes(side.end(1)) == []
    side.wait(0)
    assert side.commit(1) == []


@pytest.mark.parametrize("staged", [True, False])
def test_silent_senders_are_discarded_in_spite_of_many_pauses(staged: bool, side: Side) -> None:
    """A log that is as full as it may be pauses many times a second."""
    side.data(b"a")
    if staged:
        side.end(1)
        side.wait(0)
    for _ in range(4):
        assert len(side.files) == 1
        side.wait(TIMEOUT / 3)
        side.now += 1
        side.reception.extend_timeouts(side.now)
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


def test_a_commit_discards_other_attempts_at_the_transaction(side: Side) -> None:
    side.stage()
    side.data(b"a", attempt=OTHER)
    side.data(b"later", attempt="c" * 32, number=1)
    side.commit(1)
    side.log.sync()
    side.wait(0)
    assert codes(side.data(b"b", attempt=OTHER, index=1)) == ["unknown"]
    assert codes(side.data(b"b", attempt="c" * 32, number=1, index=1)) == []


def test_other_rows_under_a_number_that_is_being_committed_are_refused(side: Side) -> None:
    """Two drivers of one query commit at the same moment."""
    older = "c" * 32
    for attempt, number, value in ((older, 2, b"c"), (ATTEMPT, 3, b"a"), (OTHER, 3, b"b")):
        side.stage(value, attempt, number)
    digests = {value: as_text(digest_of(pa.record_batch({"value": [value]}))) for value in (b"a", b"b", b"c")}
    assert side.commit(1, ATTEMPT, 3, digests[b"a"]) == []
    assert codes(side.commit(1, OTHER, 3, digests[b"b"])) == ["conflict"]
    assert codes(side.commit(1, older, 2, digests[b"c"])) == ["conflict"]
    assert side.commit(1, ATTEMPT, 3, digests[b"a"]) == []
    side.log.sync()
    assert side.wait(0) == [Committed(producer="q", number=3, again=False, by=ATTEMPT)] * 2
    assert side.log.rows == [b"a"]
    assert codes(side.data(b"d", attempt="d" * 32, number=2)) == ["conflict"]
    assert "d" * 32 not in side.files


def test_a_commit_waits_while_the_log_is_full(side: Side) -> None:
    side.stage()
    side.log.full = True
    assert side.commit(1) + side.commit(1) + side.wait(1) == []
    side.log.full = False
    assert side.wait(1) + side.commit(1) == []
    side.log.sync()
    assert len(side.wait(1)) == 1
    assert side.log.rows == [b"a"]


def test_an_attempt_without_room_frees_what_it_had(tmp_path: Path) -> None:
    side = Side(tmp_path, most_staged_bytes=3000)
    side.data(b"x" * 1000)
    assert codes(side.data(b"x" * 3000, index=1)) == ["no_room"]
    assert side.files == []
    assert codes(side.data(b"x" * 1000, attempt=OTHER)) == []


def test_a_commit_is_answered_if_the_log_fails_only_after_it(side: Side) -> None:
    for number, attempt in enumerate((ATTEMPT, OTHER)):
        side.stage(b"%d" % number, attempt, number)
        side.commit(1, attempt=attempt, number=number)
    first, second = side.log.cuts
    first.set_result(1)
    second.set_exception(LogWriteError("no space left"))
    with pytest.raises(LogWriteError):
        side.reception.answer_completed(side.now)
    assert side.answers() == [Committed(producer="q", number=0, again=False, by=ATTEMPT)]


def test_an_attempt_that_is_being_committed_is_not_aborted(side: Side) -> None:
    side.stage()
    side.commit(1)
    assert len(side.tell(Abort(producer="q", number=0, attempts=[ATTEMPT]))) == 1
    assert len(side.files) == 1  # the log may fail, and the sender may ask again
    side.log.sync()
    assert side.wait(0) == [Committed(producer="q", number=0, again=False, by=ATTEMPT)]


def test_a_sender_aborts_only_its_own_attempts(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    side.stage()
    monkeypatch.setattr(AttemptFiles, "remove", lambda *_: pytest.fail("a file is removed"))
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
    side.reception.receive(b"p", [b"hello"], 0.0)
    (refusal,) = side.answers()
    assert isinstance(refusal, Refusal)
    assert (refusal.code, refusal.attempt) == ("protocol", None)
    assert f"refused a message of the transaction protocol: {refusal.reason}" in caplog.text
    side.tell(Staged(attempt=ATTEMPT, rows=1))
    assert side.counters.malformed == 2


def test_a_refusal_goes_to_the_sender_and_names_the_attempt(side: Side) -> None:
    side.data(b"1", attempt=ATTEMPT)
    side.end(1)
    side.reception.receive(
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
    assert side.wait(0) == [Staged(attempt=ATTEMPT, rows=1)]


def test_data_of_another_transaction_under_the_same_attempt_is_refused(side: Side) -> None:
    side.data(b"1")
    (refusal,) = side.data(b"2", index=1, number=1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "data message 1 for another part than that of its attempt"


# A disk that refuses.


class Disk:
    """Refuses to write staged rows while ``fault`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault: LogWriteError | None = None
        append = AttemptFiles.append

        def append_or_refuse(files: AttemptFiles, attempt: str, size: int, *rows: Any) -> int:
            if self.fault is not None:
                append(files, attempt, size, *rows)  # and it is in the file, which is then cut
                raise self.fault
            return append(files, attempt, size, *rows)

        monkeypatch.setattr(AttemptFiles, "append", append_or_refuse)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def committed(side: Side, rows: int, messages: int) -> list[bytes]:
    """End and commit the attempt; the rows that are in the log then."""
    side.end(rows, messages=messages)
    assert side.wait(0) == [Staged(attempt=ATTEMPT, rows=rows)]
    side.commit(rows)
    side.log.sync()
    assert [type(answer) for answer in side.wait(0)] == [Committed]
    return side.log.rows


def test_a_sender_waits_for_a_full_disk_and_loses_nothing(
    side: Side, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    side.data(b"a")
    disk.fault = DiskFaultError("No space left on device")
    assert codes(side.data(b"b", index=1)) == ["busy"]
    assert codes(side.data(b"c", attempt=OTHER, number=1)) == ["busy"]
    for _ in range(50):
        assert side.wait(1) == []
    (welcome,) = side.tell(Hello(attempt=ATTEMPT, producer="q"))
    assert isinstance(welcome, Welcome)
    assert (welcome.busy, welcome.received) == (True, 1)
    assert codes(side.data(b"b", index=1)) == ["busy"]
    disk.fault = None
    assert side.wait(1) == [Taken(attempt=ATTEMPT, received=2)]
    assert side.data(b"b", index=1) == [Taken(attempt=ATTEMPT, received=2)]
    assert committed(side, 2, messages=2) == [b"a", b"b"]
    warnings = [
        r.message for r in caplog.records if "staging rows" in r.message or "again after" in r.message
    ]
    assert warnings == [
        "staging rows: No space left on device; trying again for up to 60 s",
        "the disk stages rows again after 51.0 s",
    ]


def test_data_is_refused_when_the_disk_has_refused_for_too_long(side: Side, disk: Disk) -> None:
    disk.fault = DiskFaultError("No space left on device")
    assert codes(side.data(b"a")) == ["busy"]
    assert codes(side.wait(RETRY + 1)) == ["storage"]
    assert codes(side.data(b"a")) == ["storage"]
    assert codes(side.data(b"b", attempt=OTHER, number=1)) == ["storage"]
    assert side.files == []
    disk.fault = None
    assert side.data(b"a") == [Taken(attempt=ATTEMPT, received=1)]
    disk.fault = DiskFaultError("No space left on device")
    assert codes(side.data(b"b", index=1)) == ["busy"], "it has taken rows meanwhile"


def test_a_disk_that_refuses_for_good_refuses_the_data_at_once(side: Side, disk: Disk) -> None:
    disk.fault = LogWriteError("Permission denied")
    assert codes(side.data(b"a")) == ["storage"]
    assert side.files == []


def test_a_sender_that_aborts_while_the_disk_refuses_gives_its_place_back(side: Side, disk: Disk) -> None:
    disk.fault = DiskFaultError("No space left on device")
    assert codes(side.data(b"a")) == ["busy"]
    side.tell(Abort(producer="q", number=0, attempts=[ATTEMPT]))
    assert not side.reception.attempts.sessions
    disk.fault = None
    assert side.data(b"b", attempt=OTHER) == [Taken(attempt=OTHER, received=1)]


# Sessions.


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., AttemptSession]:
    files = AttemptFiles(tmp_path)

    def new(number: int, now: float = 0.0) -> AttemptSession:
        attempt = f"{number:032x}"
        return AttemptSession(b"peer %d" % number, attempt, now, StagedFile(files, attempt, "q", number, 0))

    return new


def test_a_session_gives_its_place_up_only_when_it_is_silent_for_long_and_not_while_it_waits_for_the_disk(
    session: Callable[..., AttemptSession],
) -> None:
    everyone = Sessions(SenderBounds(places=2))
    everyone.add(session(0))
    assert everyone.to_replace(b"new", 0.0) is None, "there is another place"
    everyone.add(session(1, now=1.0))
    first, second = everyone
    first.finishing = Future()
    silent = 1.0 + SENDER_BOUNDS.silent_seconds
    assert everyone.is_full(silent - 1)
    with pytest.raises(RefusedError, match="2 senders are sending already") as refused:
        everyone.to_replace(b"new", silent - 1)
    assert refused.value.code == "busy"
    assert not everyone.is_full(silent)
    assert everyone.to_replace(b"new", silent) is second
    second.finishing = Future()
    assert everyone.is_full(1e6)


def test_a_connection_sends_one_attempt_at_a_time(session: Callable[..., AttemptSession]) -> None:
    everyone = Sessions()
    everyone.add(session(0))
    everyone.add(session(1))
    first, second = everyone
    assert everyone.to_replace(first.peer, 0.0) is first
    second.finishing = Future()
    assert everyone.to_replace(second.peer, 0.0) is None, "it has sent its end"
