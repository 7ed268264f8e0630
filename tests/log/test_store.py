"""The store of a log: one contract for a directory and for a bucket."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support import REPOSITORY, wait_for
from tests.support.s3 import S3Server
from zmq_datasource.errors import DiskFaultError, LogLockedError
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.store import Entry, Holding, KeyTakenError, Store
from zmq_datasource.options.types import Location

KEY = "0/00000000000000000000.arrow"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3") / "held") as running_server:
        yield running_server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> BucketStore:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    return BucketStore(Location(server.location(f"logs/{uuid.uuid4().hex}")))


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "bucket":
        made: Store = request.getfixturevalue("bucket")
    else:
        made = DirectoryStore(tmp_path / "log")
    made.create("0", "readers")
    return made


def content(store: Store, key: str = KEY) -> bytes:
    with store.open(key) as file:
        return bytes(file.read())


def names(store: Store, prefix: str) -> set[str]:
    return {entry.name for entry in store.list(prefix)}


# What is put.


def test_a_new_object_is_its_parts_in_their_order(store: Store) -> None:
    store.put_new(KEY, [b"abc", pa.py_buffer(b"defg"), b"", b"h"])
    assert content(store) == b"abcdefgh"


def test_a_taken_key_is_refused_and_keeps_its_content(store: Store) -> None:
    store.put_new(KEY, [b"first"])
    for other in (b"other", b"firs", b"first and more", b""):
        with pytest.raises(KeyTakenError, match=r"0/00000000000000000000\.arrow"):
            store.put_new(KEY, [other])
    assert content(store) == b"first"


def test_a_put_whose_answer_was_lost_finds_its_own_object(store: Store) -> None:
    large = os.urandom(3 << 20)
    store.put_new(KEY, [large])
    store.put_new(KEY, [large[:1000], pa.py_buffer(large[1000:])])
    with pytest.raises(KeyTakenError):
        store.put_new(KEY, [large[:-1], b"?" if large[-1:] != b"?" else b"!"])


def test_a_key_can_be_taken_again_when_it_was_deleted(store: Store) -> None:
    store.put_new(KEY, [b"first"])
    store.delete(KEY)
    store.put_new(KEY, [b"second"])
    assert content(store) == b"second"


def test_an_object_can_be_replaced(store: Store) -> None:
    for text in (b'{"next": 1}', b'{"next": 2, "more": 3}', b"{}"):
        store.put("readers/a.json", text)
        assert content(store, "readers/a.json") == text


def test_one_directory_above_a_key_is_made(store: Store) -> None:
    store.put_new("0/staging/one", [b"1"])
    store.put("readers/more/two", b"2")
    assert (content(store, "0/staging/one"), content(store, "readers/more/two")) == (b"1", b"2")


# What is read.


def test_an_object_that_is_not_there_is_a_file_not_found(store: Store) -> None:
    for whole in (True, False):
        with pytest.raises(FileNotFoundError):
            store.open(KEY, whole)
        with pytest.raises(FileNotFoundError):
            store.open("7/no-such-directory", whole)


@pytest.mark.parametrize("size", [0, 1, 100_000, 5 << 20])
@pytest.mark.parametrize("whole", [True, False])
def test_an_object_is_read_at_any_place(store: Store, size: int, whole: bool) -> None:
    data = os.urandom(size)
    store.put_new(KEY, [data])
    with store.open(KEY, whole) as file:
        assert file.size() == size
        for begin in (0, size // 2, max(0, size - 10), size):
            file.seek(begin)
            assert file.read(1000) == data[begin : begin + 1000]
        file.seek(0)
        assert file.read() == data


def test_an_arrow_file_is_read(store: Store) -> None:
    table = pa.table({"a": list(range(300_000)), "b": [str(n) for n in range(300_000)]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    store.put_new(KEY, [sink.getvalue()])
    for whole in (True, False):
        with store.open(KEY, whole) as file:
            assert pa.ipc.open_file(file).read_all() == table


def test_a_list_shows_one_directory(store: Store) -> None:
    before = time.time()
    store.put_new(KEY, [b"123"])
    store.put("log.json", b"{}")
    store.put("0/staging/x", b"{}")
    listed = {entry.name: entry for entry in store.list("0")}
    assert listed.keys() == {"00000000000000000000.arrow", "staging"}
    chunk = listed["00000000000000000000.arrow"]
    assert (chunk.size, chunk.is_directory) == (3, False)
    assert chunk.modified == pytest.approx(before, abs=60)
    assert listed["staging"] == Entry("staging", 0, 0.0, True)
    assert {"log.json", "0"} <= names(store, "")
    assert next(entry for entry in store.list() if entry.name == "0").is_directory


def test_a_directory_that_is_not_there_has_nothing(store: Store) -> None:
    assert list(store.list("7")) == []
    assert list(store.list("0/staging")) == []


def test_a_deleted_object_is_gone_and_can_be_deleted_again(store: Store) -> None:
    store.put_new(KEY, [b"123"])
    store.delete(KEY)
    store.delete(KEY)
    store.delete("7/no-such-directory")
    assert names(store, "0") == set()


def test_a_store_can_be_pickled(store: Store) -> None:
    store.put_new(KEY, [b"123"])
    copy = pickle.loads(pickle.dumps(store))
    assert content(copy) == b"123"
    assert (str(copy), copy.path_of(KEY)) == (str(store), store.path_of(KEY))


def test_a_path_names_the_location_and_the_key(store: Store) -> None:
    assert store.path_of(KEY) == f"{store}/{KEY}"


def test_create_keeps_what_is_there(store: Store) -> None:
    assert store.exists()
    store.put_new(KEY, [b"123"])
    store.create("0", "readers", "1")
    assert content(store) == b"123"
    store.put_new("1/00000000000000000000.arrow", [b"4"])


# A key that is held.


def test_one_holder_at_a_time(store: Store) -> None:
    assert store.holder("0/writer.lock") is None
    assert store.note("0/writer.lock") == ""
    hold = store.hold("0/writer.lock", 0.0, "PULL tcp://a")
    found = store.holder("0/writer.lock")
    assert found is not None
    assert str(os.getpid()) in found.who
    assert found.note == "PULL tcp://a" == store.note("0/writer.lock")
    with pytest.raises(LogLockedError, match=f"process {os.getpid()} on "):
        pickle.loads(pickle.dumps(store)).hold("0/writer.lock", 0.0)
    assert hold.lost is None
    hold.release()
    assert store.holder("0/writer.lock") is None
    assert store.note("0/writer.lock") == "PULL tcp://a"
    store.hold("0/writer.lock", 5.0).release()
    assert store.note("0/writer.lock") == ""


HOLDER = """
import pickle, sys, time
store = pickle.loads(bytes.fromhex(sys.argv[1]))
hold = store.hold("0/writer.lock", float(sys.argv[2]), sys.argv[3])
print("held", flush=True)
while hold.lost is None:
    time.sleep(0.1)
print("lost", hold.lost, flush=True)
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_holder_of_this_machine_is_followed_at_once(store: Store) -> None:
    with running(HOLDER, pickle.dumps(store).hex(), "5", "a note") as process:
        assert line_of(process) == "held"
        found = store.holder("0/writer.lock")
        assert found is not None
        assert f"process {process.pid} on " in found.who
        assert found.note == "a note"
        process.kill()
        process.wait()
        began = time.monotonic()
        assert store.note("0/writer.lock") == "a note"
        store.hold("0/writer.lock", 5.0, "another").release()
        assert time.monotonic() - began < 5


RACER = """
import pickle, sys
from zmq_datasource.log.store import KeyTakenError
store, mine = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2].encode()
print("ready", flush=True)
for line in sys.stdin:
    try:
        store.put_new(f"0/{line.strip()}", [mine])
        print("mine", flush=True)
    except KeyTakenError:
        print("taken", flush=True)
"""


def test_of_two_processes_that_put_a_new_key_at_once_exactly_one_succeeds(store: Store) -> None:
    pickled = pickle.dumps(store).hex()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, pickled, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        for name in ("a", "b")
    ]
    try:
        assert [line_of(racer) for racer in racers] == ["ready", "ready"]
        for turn in range(200):
            for racer in racers if turn % 2 else reversed(racers):
                assert racer.stdin is not None
                racer.stdin.write(f"{turn}\n")
            answers = [line_of(racer) for racer in racers]
            assert sorted(answers) == ["mine", "taken"], turn
            assert content(store, f"0/{turn}") == (b"a", b"b")[answers.index("mine")]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


# A directory.


def test_a_directory_has_private_files(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    store.put_new(KEY, [b"1"])
    store.put("log.json", b"{}")
    for path in (tmp_path / "log" / KEY, tmp_path / "log" / "log.json"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_away_is_not_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "log")
    assert not store.exists()
    store.create("0", "readers")
    for emptied in (False, True):
        (tmp_path / "log").rename(tmp_path / f"away-{emptied}")
        if emptied:
            (tmp_path / "log").mkdir()
        for use in (
            lambda: store.put_new(KEY, [b"1"]),
            lambda: store.put("readers/a.json", b"{}"),
            lambda: store.hold("0/writer.lock", 0.0),
        ):
            with pytest.raises(DiskFaultError, match="Mount or restore it"):
                use()
        if not emptied:
            for use in (lambda: store.list("0"), lambda: store.open(KEY), lambda: store.delete(KEY)):
                with pytest.raises(DiskFaultError, match="Mount or restore it"):
                    use()
            (tmp_path / "away-False").rename(tmp_path / "log")
    assert not any((tmp_path / "log").iterdir())


def test_what_a_killed_process_left_in_a_directory_is_hidden_and_can_be_removed(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    store.put_new(KEY, [b"1"])
    (tmp_path / "log" / "0" / f".put-{'0' * 32}").write_bytes(b"half")
    (tmp_path / "log" / "0" / ".open-1.arrow").write_bytes(b"not a temporary file")
    assert names(store, "0") == {"00000000000000000000.arrow"}
    store.clean("0")
    assert set(os.listdir(tmp_path / "log" / "0")) == {"00000000000000000000.arrow", ".open-1.arrow"}
    store.clean("7")


def test_a_directory_notices_that_another_host_holds_its_lock(tmp_path: Path) -> None:
    """A shared file system has given the lock to it, and this host was cut off meanwhile."""
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    hold = store.hold("0/writer.lock", 0.0)
    assert hold.lost is None
    (tmp_path / "log" / "0" / "writer.lock").write_bytes(b"process 7 on another\nnote\n123\n")
    wait_for(lambda: hold.lost == "process 7 on another", "the loss")
    hold.release()


def test_a_stopped_holder_of_a_directory_keeps_it(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    with running(HOLDER, pickle.dumps(store).hex(), "5", "") as process:
        assert line_of(process) == "held"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(LogLockedError, match=f"process {process.pid} on "):
            store.hold("0/writer.lock", 0.3)
        assert store.holder("0/writer.lock") == Holding(store.holder("0/writer.lock").who, "")  # type: ignore[union-attr]
