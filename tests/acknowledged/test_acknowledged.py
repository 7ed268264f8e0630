"""Transactions over real sockets into real logs are there whole and once, after any kill or repetition."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.support import (
    Socket,
    free_endpoint,
    log_rows,
    stop_sooner,
    stream_options,
    wait_for,
    write_options,
)
from tests.support.middlebox import Middlebox
from zmq_datasource.acknowledged.acceptor import Acceptor
from zmq_datasource.acknowledged.protocol import Data, decode
from zmq_datasource.acknowledged.reception import AcceptorTerms, Reception
from zmq_datasource.acknowledged.sessions import SenderBounds
from zmq_datasource.acknowledged.uplink import Uplink
from zmq_datasource.errors import DiskFaultError, NoPeerError, RowError, SendTimeoutError, TransactionError
from zmq_datasource.log.local_files import StagedFiles
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source import ingest as ingest_module
from zmq_datasource.source.ingest import Ingest

pytestmark = pytest.mark.spark  # no Spark, but slow processes and kills
Context = zmq.Context[Socket]


@pytest.fixture(autouse=True)
def _stop_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_sooner(monkeypatch)


@contextmanager
def receiving(location: Path, endpoint: str, **options: Any) -> Iterator[Ingest]:
    options = {"socketType": "ROUTER", "bind": endpoint, "walRetention": "0s", **options}
    ingest = Ingest(stream_options(walLocation=location, **options))
    ingest.start()
    try:
        yield ingest
    finally:
        ingest.stop()


def accept_with(
    monkeypatch: pytest.MonkeyPatch,
    senders: SenderBounds,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Give the receivers that are started from now on these bounds and this clock."""
    monkeypatch.setattr(ingest_module, "AcceptorTerms", partial(AcceptorTerms, senders=senders))

    class Clocked(Acceptor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, clock=clock)

    monkeypatch.setattr(ingest_module, "Acceptor", Clocked)


def uplink(endpoint: str, number: int = 0, partition: int = 0, producer: str = "q", **options: Any) -> Uplink:
    options = {"sendTimeout": "20s", "zmq_reconnect_ivl": 20, **options}
    return Uplink(
        write_options(socketType="DEALER", connect=endpoint, **options), producer, number, partition
    )


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch({"value": list(values)})


def stage(endpoint: str, *values: str, **which: Any) -> str:
    """Send and stage rows. Returns the attempt."""
    with uplink(endpoint, **which) as link:
        assert not link.greet()
        link.send(rows(*values))
        link.finish()
        return link.session.attempt


def commit(endpoint: str, attempts: list[str], count: int, **which: Any) -> bool:
    with uplink(endpoint, **which) as link:
        return link.commit(attempts, count)


def values(location: Path) -> list[str]:
    try:
        return [value.decode() for value in log_rows(location).column("value").to_pylist()]
    except ValueError:  # no chunk yet
        return []


def test_a_transaction_appears_when_it_is_committed(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest:
        second = stage(endpoint, "c", "d", partition=1)
        first = stage(endpoint, "a", "b", partition=0)
        assert ingest.seal() == 0
        assert not commit(endpoint, [second, first], 4)
        assert ingest.seal() == 4
        assert values(tmp_path) == ["a", "b", "c", "d"]  # in the order of partitions
        assert not any((tmp_path / "0" / "staging").iterdir())
    table = log_rows(tmp_path)
    assert set(table.column("publisher").to_pylist()) == {"q"}
    assert set(table.column("sequence").to_pylist()) == {0}


def test_a_full_disk_holds_a_sender_back_for_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, write, refusals = free_endpoint(), StagedFiles.write, itertools.count()
    is_full_until = time.monotonic() + 1.5

    def refuse_at_first(*arguments: Any) -> int:
        if time.monotonic() < is_full_until:
            next(refusals)
            raise DiskFaultError("No space left on device")
        return write(*arguments)

    monkeypatch.setattr(StagedFiles, "write", refuse_at_first)
    with receiving(tmp_path, endpoint), uplink(endpoint, sendTimeout="500ms") as link:
        assert not link.greet()
        for value in "abc":
            link.send(rows(value))
        link.finish()
        assert not link.commit([link.session.attempt], 3)
    assert next(refusals) > 1
    assert values(tmp_path) == ["a", "b", "c"]


def test_a_commit_that_is_repeated_has_no_effect(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        assert not commit(endpoint, [attempt], 1)
        assert commit(endpoint, [attempt], 1)
    with receiving(tmp_path, endpoint):
        assert commit(endpoint, [attempt], 1)
        with uplink(endpoint) as link:
            assert link.greet()  # a repeated batch sends nothing
            link.count(pa.record_batch({"value": pa.array([b"abc", b"d"])}))
            assert link.session.bytes == 4 + 3 * 4  # as the first time: with their offsets
        with uplink(endpoint, number=1) as link:
            assert not link.greet()
    assert values(tmp_path) == ["a"]


def test_staged_attempts_survive_a_restart_of_the_receiver(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a", "b")
    with receiving(tmp_path, endpoint):
        assert not commit(endpoint, [attempt], 2)
    assert values(tmp_path) == ["a", "b"]


def test_only_the_attempts_that_a_commit_names_are_committed(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        stage(endpoint, "failed later")
        winner = stage(endpoint, "a")
        commit(endpoint, [winner], 1)
        assert not any((tmp_path / "0" / "staging").iterdir())
    assert values(tmp_path) == ["a"]


def test_an_aborted_attempt_is_gone(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        with uplink(endpoint) as link:
            link.abort([attempt])
        with pytest.raises(TransactionError, match="1 of 1 attempts are not staged here"):
            commit(endpoint, [attempt], 1)
    assert values(tmp_path) == []


@pytest.mark.parametrize(
    ("which", "count", "says"),
    [
        ({"number": 5}, 1, "not staged here|attempts"),
        ({"producer": "other"}, 1, "attempts"),
        ({}, 2, "committing 2 rows, 1 are staged"),
    ],
)
def test_a_commit_of_attempts_that_are_not_staged_is_refused(
    which: dict[str, Any], count: int, says: str, tmp_path: Path
) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        with pytest.raises(TransactionError, match=says):
            commit(endpoint, [attempt], count, **which)
        assert not commit(endpoint, [attempt], 1)


def test_attempts_without_a_commit_are_discarded_after_the_timeout(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint, transactionTimeout="1s"):
        stage(endpoint, "a")
        wait_for(
            lambda: not any((tmp_path / "0" / "staging").iterdir()), "the staged attempt to be discarded"
        )


def test_transactions_that_are_committed_together_share_a_chunk(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest:
        attempts = [stage(endpoint, str(n), producer=f"p{n}") for n in range(20)]
        links = [uplink(endpoint, producer=f"p{n}").__enter__() for n in range(20)]
        threads = [
            threading.Thread(target=link.commit, args=([attempt], 1))
            for link, attempt in zip(links, attempts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for link in links:
            link.__exit__(None, None, None)
        assert len(list(ingest.storage.chunks())) <= 20
        for n in range(20):
            assert commit(endpoint, [attempts[n]], 1, producer=f"p{n}")
    assert sorted(values(tmp_path), key=int) == [str(n) for n in range(20)]


def test_a_slow_sync_of_one_attempt_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    finish, go_on, forcing = StagedFiles.finish, threading.Event(), threading.Event()

    def slowly(self: StagedFiles, attempt: str) -> None:
        if not forcing.is_set():
            forcing.set()
            go_on.wait(20)
        finish(self, attempt)

    monkeypatch.setattr(StagedFiles, "finish", slowly)
    with receiving(tmp_path, endpoint):
        staging = threading.Thread(target=stage, args=(endpoint, "slow"), kwargs={"producer": "slow"})
        staging.start()
        assert forcing.wait(30)
        commit(endpoint, [stage(endpoint, "a")], 1)
        assert staging.is_alive()
        go_on.set()
        staging.join(20)
    assert values(tmp_path) == ["a"]


def test_a_sender_has_at_most_two_data_messages_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    stalled = threading.Event()
    receive = Reception.receive

    def receive_slowly(self: Reception, peer: bytes, frames: Sequence[bytes], *given: Any) -> None:
        message, _ = decode(frames)
        if isinstance(message, Data) and message.index:
            stalled.wait(20)
        receive(self, peer, frames, *given)

    monkeypatch.setattr(Reception, "receive", receive_slowly)
    big = pa.record_batch({"value": [b"x" * 100_000] * 100})
    with receiving(tmp_path, endpoint), uplink(endpoint) as link:
        link.greet()
        sending = threading.Thread(target=link.send, args=(big,))
        sending.start()
        wait_for(lambda: len(link.session.kept) == 2, "two messages to be on the way")
        sending.join(0.3)
        assert sending.is_alive()
        assert len(link.session.kept) == 2
        stalled.set()
        sending.join(20)
        link.finish()
        link.commit([link.session.attempt], 100)
    assert log_rows(tmp_path).num_rows == 100


def test_a_sender_without_a_place_waits_and_sends_its_rows_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept_with(monkeypatch, SenderBounds(places=1))
    endpoint = free_endpoint()
    big = pa.record_batch({"value": [b"x" * 100_000] * 50})
    with receiving(tmp_path, endpoint), uplink(endpoint) as first:
        first.greet()
        first.send(big)

        def second() -> None:
            with uplink(endpoint, producer="second") as link:
                link.greet()
                link.send(big)
                link.finish()
                link.commit([link.session.attempt], 50)

        waiting = threading.Thread(target=second)
        waiting.start()
        wait_for(lambda: "1 senders are sending already" in caplog.text, "a refusal")
        first.finish()
        first.commit([first.session.attempt], 50)
        waiting.join(20)
        assert not waiting.is_alive()
    assert log_rows(tmp_path).num_rows == 100


def test_a_full_log_delays_a_commit(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint, walMaxBytes="100k") as ingest:
        big = ["x" * 60_000]
        commit(endpoint, [stage(endpoint, *big, number=0)], 1, number=0)
        commit(endpoint, [stage(endpoint, *big, number=1)], 1, number=1)
        assert ingest.log.full
        late = threading.Thread(
            target=lambda: commit(endpoint, [stage(endpoint, "late", number=2)], 1, number=2)
        )
        late.start()
        late.join(0.3)
        assert late.is_alive()
        ingest.log.commit(2)
        late.join(20)
        assert not late.is_alive()
    assert values(tmp_path)[-1] == "late"


def test_a_transaction_larger_than_the_log_is_refused(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    big = pa.record_batch({"value": [b"x" * 10_000] * 500})
    with receiving(tmp_path, endpoint, walMaxBytes="1m"), uplink(endpoint) as link:
        link.greet()
        with pytest.raises(TransactionError, match="walMaxBytes"):
            for _ in range(10):
                link.send(big)
                link.finish()


def test_a_row_too_large_is_refused_here(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint), uplink(endpoint) as link:
        link.session.most_frame_bytes = 1000
        link.greet()
        with pytest.raises(RowError, match="1000 at most"):
            link.send(rows("x" * 2000))


def test_a_missing_receiver_is_an_error_that_names_the_endpoint() -> None:
    with (
        pytest.raises(NoPeerError, match="Start the receiver"),
        uplink(free_endpoint(), connectTimeout="200ms"),
    ):
        pass


def test_a_receiver_that_has_gone_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with (
        uplink_of_a_lost_receiver(tmp_path, endpoint) as link,
        pytest.raises(SendTimeoutError, match="can be repeated"),
    ):
        link.finish()


@contextmanager
def uplink_of_a_lost_receiver(tmp_path: Path, endpoint: str) -> Iterator[Uplink]:
    with uplink_after_start(tmp_path, endpoint, sendTimeout="300ms") as link:
        yield link


@contextmanager
def uplink_after_start(tmp_path: Path, endpoint: str, **options: Any) -> Iterator[Uplink]:
    """An uplink with rows on their way, whose receiver has stopped."""
    link = uplink(endpoint, **options)
    with receiving(tmp_path, endpoint):
        link.__enter__()
        link.greet()
        link.send(rows("a"))
        wait_for(lambda: (link.run_once(0.01), not link.session.kept)[1], "all data to be taken")
    try:
        yield link
    finally:
        link.__exit__(None, None, None)


def test_after_a_restart_of_the_receiver_the_next_attempt_succeeds(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with uplink_after_start(tmp_path, endpoint) as link, receiving(tmp_path, endpoint):
        with pytest.raises(TransactionError):
            link.finish()
        commit(endpoint, [stage(endpoint, "a")], 1)
    assert values(tmp_path) == ["a"]


def test_noise_is_refused_and_does_not_disturb_others(context: Context, tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest:
        noisy = context.socket(zmq.DEALER)
        noisy.connect(endpoint)
        for frames in ([b"x"], [b""] * 5, [b"ZDS\x02D", b"{}"], [b"ZDS\x02W", b"{}"], [b"ZDS\x02H", b"\xff"]):
            noisy.send_multipart(frames)
        assert noisy.poll(5000)
        assert noisy.recv_multipart()[0] == b"ZDS\x02X"
        attempt = stage(endpoint, "a")
        assert not commit(endpoint, [attempt], 1)
        assert ingest.counters.malformed == 5


# The network.


def test_an_attempt_continues_after_its_connection_breaks(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    batch = pa.record_batch({"value": [b"%07d" % n + b"x" * 993 for n in range(2000)]})
    with receiving(tmp_path, endpoint), Middlebox(endpoint) as box, uplink(box.endpoint) as link:
        link.greet()
        for turn in range(6):
            link.send(batch)
            if turn % 2:
                box.reset()
        link.finish()
        box.reset()
        assert not link.commit([link.session.attempt], 12_000)
    got = log_rows(tmp_path).column("value").to_pylist()
    assert got == batch.column("value").to_pylist() * 6


# A crash between any two durable steps.


def photographed(monkeypatch: pytest.MonkeyPatch, log: Path, album: Path) -> list[Path]:
    """Copies of the log after each step on the disk, as after a crash of the receiver."""
    photos: list[Path] = []

    def then_photographed(step: Callable[..., None]) -> Callable[..., None]:
        def done(*args: Any) -> None:
            step(*args)
            photo = album / str(len(photos))
            shutil.copytree(log, photo)
            photos.append(photo)

        return done

    for owner, name in ((StagedFiles, "finish"), (StagedFiles, "remove"), (LogStorage, "put_chunk")):
        monkeypatch.setattr(owner, name, then_photographed(getattr(owner, name)))
    return photos


def test_a_crash_at_any_step_leaves_all_of_a_transaction_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    photos = photographed(monkeypatch, tmp_path / "log", tmp_path / "album")
    attempts: list[list[str]] = []
    with receiving(tmp_path / "log", endpoint):
        for number in range(3):
            staged = [stage(endpoint, f"{number}a", f"{number}b", number=number, partition=p) for p in (0, 1)]
            attempts.append(staged)
            commit(endpoint, staged, 4, number=number)
    monkeypatch.undo()
    assert len(photos) > 10
    whole = [f"{number}{letter}" for number in range(3) for letter in "abab"]
    for photo in photos:
        got = values(photo)
        assert got == whole[: len(got)]
        assert len(got) % 4 == 0
        # The sender repeats its transaction until it is committed.
        endpoint = free_endpoint()
        with receiving(photo, endpoint, walSync=False):
            for number in range(max(len(got) // 4 - 1, 0), 3):
                with uplink(endpoint, number=number) as link:
                    done = link.greet()
                if done:
                    continue
                try:
                    commit(endpoint, attempts[number], 4, number=number)
                except TransactionError:
                    again = [
                        stage(endpoint, f"{number}a", f"{number}b", number=number, partition=p)
                        for p in (0, 1)
                    ]
                    commit(endpoint, again, 4, number=number)
        assert values(photo) == whole, photo


def test_a_commit_is_not_answered_before_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    write, go_on = LogStorage.put_chunk, threading.Event()
    writing = threading.Event()

    def slowly(*args: Any) -> None:
        writing.set()
        go_on.wait(20)
        write(*args)

    monkeypatch.setattr(LogStorage, "put_chunk", slowly)
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        asking = threading.Thread(target=commit, args=(endpoint, [attempt], 1))
        asking.start()
        assert writing.wait(30)
        with uplink(endpoint) as link:
            assert not link.greet()
        go_on.set()
        asking.join(20)
        with uplink(endpoint) as link:
            assert link.greet()


def test_a_transaction_with_a_damaged_part_is_refused_as_a_whole(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        first, second = stage(endpoint, "a", partition=0), stage(endpoint, "b", partition=1)
        path = tmp_path / "0" / "staging" / f"{second}.arrow"
        content = path.read_bytes()
        path.write_bytes(content.replace(b"b", b"c"))
        with pytest.raises(TransactionError):
            commit(endpoint, [first, second], 2)
        assert values(tmp_path) == []
        again = stage(endpoint, "b", partition=1)
        assert not commit(endpoint, [first, again], 2)
    assert values(tmp_path) == ["a", "b"]


def test_the_receiver_starts_in_spite_of_an_unreadable_staged_file(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
    (tmp_path / "0" / "staging" / f"{attempt}.arrow").write_bytes(b"")
    with receiving(tmp_path, endpoint):
        with pytest.raises(TransactionError, match="not staged here"):
            commit(endpoint, [attempt], 1)
        commit(endpoint, [stage(endpoint, "a")], 1)
    assert values(tmp_path) == ["a"]


@pytest.mark.parametrize(("attempts", "count"), [([], 0), ([], 5), (["twice"], 2)])
def test_a_commit_of_no_attempt_or_of_one_twice_is_refused(
    attempts: list[str], count: int, tmp_path: Path
) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        with pytest.raises(TransactionError, match="none, or one of them twice"):
            commit(endpoint, [attempt, attempt] if attempts else [], count)
        with uplink(endpoint) as link:
            assert not link.greet()
        assert not commit(endpoint, [attempt], 1)


def test_a_commit_with_fewer_rows_than_the_batch_had_is_refused(tmp_path: Path) -> None:
    """The log was replaced between two tasks, the first of which has sent nothing because the batch was committed."""
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a", partition=1)
        with pytest.raises(TransactionError, match="committing 2 rows, 1 are staged"):
            commit(endpoint, [attempt], 2)
    assert values(tmp_path) == []


def test_without_faults_every_message_is_sent_once(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    batch = pa.record_batch({"value": [b"x" * 1000] * 10_000})
    with receiving(tmp_path, endpoint), Middlebox(endpoint) as box, uplink(box.endpoint) as link:
        link.greet()
        link.send(batch)
        link.finish()
        link.commit([link.session.attempt], 10_000)
        assert box.bytes < 1.2 * link.session.bytes


def test_a_task_that_gives_up_leaves_no_staged_rows(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint) as ingest:
        with pytest.raises(KeyError), uplink(endpoint) as link:
            link.greet()
            link.send(rows("a"))
            wait_for(lambda: (link.run_once(0.01), not link.session.kept)[1], "all data to be taken")
            raise KeyError
        acceptor = ingest.filler
        assert isinstance(acceptor, Acceptor)
        wait_for(lambda: not acceptor.reception.attempts.sessions, "the session to end")
        assert not any((tmp_path / "0" / "staging").iterdir())


def test_columns_with_64_bit_offsets_are_sent(tmp_path: Path) -> None:
    """Spark makes them with spark.sql.execution.arrow.useLargeVarTypes."""
    endpoint = free_endpoint()
    frames = pa.record_batch({"frames": pa.array([[b"abc"], [b"t", b"v"]], pa.list_(pa.large_binary()))})
    texts = pa.record_batch({"value": pa.array(["d"], pa.large_string())})
    with receiving(tmp_path, endpoint), uplink(endpoint) as link:
        link.greet()
        link.send(frames)
        link.send(texts)
        link.finish()
        link.commit([link.session.attempt], 3)
    assert values(tmp_path) == ["abc", "v", "d"]


def test_large_rows_among_small_ones_are_sent(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    batch = pa.record_batch({"value": [b"x" * 4_000_000] * 6 + [b"y"] * 20_000})
    with receiving(tmp_path, endpoint), uplink(endpoint) as link:
        link.greet()
        link.send(batch)
        link.finish()
        link.commit([link.session.attempt], batch.num_rows)
    assert log_rows(tmp_path).num_rows == batch.num_rows


def test_a_stop_answers_the_commits_that_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_endpoint()
    write = LogStorage.put_chunk
    writing = threading.Event()

    def slowly(*args: Any) -> None:
        writing.set()
        time.sleep(0.3)
        write(*args)

    monkeypatch.setattr(LogStorage, "put_chunk", slowly)
    answered: list[bool] = []
    with receiving(tmp_path, endpoint):
        attempt = stage(endpoint, "a")
        asking = threading.Thread(target=lambda: answered.append(commit(endpoint, [attempt], 1)))
        asking.start()
        assert writing.wait(30)
    asking.join(20)
    assert answered == [False]
