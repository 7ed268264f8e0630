"""The store of a log: one contract for a directory and for a bucket."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pytest

from tests.support import REPOSITORY, at_failpoints, wait_for
from tests.support.bucket_server import BucketServer
from tests.support.middlebox import Middlebox
from zmq_datasource.errors import (
    DiskFaultError,
    KeyTakenError,
    LogLockedError,
    LogWriteError,
    OptionError,
)
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.store import Store
from zmq_datasource.options.types import Location

T = TypeVar("T")

KEY = "0/00000000000000000000.arrow"


@pytest.fixture
def bucket(bucket: str) -> BucketStore:
    return BucketStore(Location(bucket))


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


# What is read.


def test_an_object_that_is_not_there_is_a_file_not_found(store: Store) -> None:
    for key in (KEY, "7/no-such-directory"):
        with pytest.raises(FileNotFoundError):
            store.open(key)


@pytest.mark.parametrize("size", [0, 1, 100_000, 5 << 20])
def test_an_object_is_read_at_any_place(store: Store, size: int) -> None:
    data = os.urandom(size)
    store.put_new(KEY, [data])
    with store.open(KEY) as file:
        assert file.size() == size
        for begin in (0, size // 2, max(0, size - 10), size):
            file.seek(begin)
            assert file.read(1000) == data[begin : begin + 1000]
        file.seek(0)
        assert file.read() == data


def test_a_list_shows_no_chunk_without_those_that_were_put_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that gets two names while it is listed may show the second one alone."""
    keys = [f"0/{n:020d}.arrow" for n in range(4)]
    store, scandir = DirectoryStore(tmp_path), os.scandir
    store.create("0")
    store.put_new(keys[0], [b"0"])

    @contextmanager
    def torn(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        monkeypatch.undo()
        for key in keys[1:3]:
            store.put_new(key, [b"new"])
        with scandir(path) as found:
            yield (entry for entry in found if not keys[1].endswith(entry.name))

    monkeypatch.setattr(os, "scandir", torn)
    assert names(store, "0") == {keys[0].removeprefix("0/")}
    assert names(store, "0") == {key.removeprefix("0/") for key in keys[:3]}

    @contextmanager
    def deleted(path: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        monkeypatch.undo()
        store.put_new(keys[3], [b"new"])
        for key in keys[:3]:
            store.delete(key)
        with scandir(path) as found:
            yield found

    monkeypatch.setattr(os, "scandir", deleted)
    assert names(store, "0") == {keys[3].removeprefix("0/")}


def test_a_list_shows_one_directory(store: Store) -> None:
    before = time.time()
    store.put_new(KEY, [b"123"])
    store.put("log.json", b"{}")
    listed = {entry.name: entry for entry in store.list("0")}
    assert listed.keys() == {"00000000000000000000.arrow"}
    chunk = listed["00000000000000000000.arrow"]
    assert chunk.size == 3
    assert chunk.modified == pytest.approx(before, abs=60)
    assert "log.json" in names(store, "")


def test_a_key_may_have_any_characters(store: Store) -> None:
    name = "a b%2F+ü?&=#~.json"
    store.put(f"readers/{name}", b"{}")
    assert names(store, "readers") == {name}
    assert content(store, f"readers/{name}") == b"{}"
    store.delete(f"readers/{name}")
    assert names(store, "readers") == set()


# A key that is held.


def test_one_holder_at_a_time(store: Store) -> None:
    assert store.holder("0/writer.lock") is None
    hold = store.hold("0/writer.lock", 0.0)
    assert str(os.getpid()) in (store.holder("0/writer.lock") or "")
    with pytest.raises(LogLockedError, match=f"process {os.getpid()} on "):
        pickle.loads(pickle.dumps(store)).hold("0/writer.lock", 0.0)
    assert hold.lost is None
    hold.release()
    assert store.holder("0/writer.lock") is None
    began = time.monotonic()
    for _ in range(3):  # a key that was released is taken at once
        store.hold("0/writer.lock", 0.0).release()
    assert time.monotonic() - began < 1.5


LOOKER = """
import pickle, sys
store = pickle.loads(bytes.fromhex(sys.argv[1]))
print("looking", flush=True)
while True:
    store.holder("0/writer.lock")
"""


def test_a_process_that_asks_who_holds_a_key_refuses_it_to_none(store: Store) -> None:
    store.hold("0/writer.lock", 0.0).release()
    with running(LOOKER, pickle.dumps(store).hex()) as process:
        assert line_of(process) == "looking"
        for _ in range(3000 if isinstance(store, DirectoryStore) else 10):
            store.hold("0/writer.lock", 0.0).release()


HOLDER = """
import pickle, sys, time
store = pickle.loads(bytes.fromhex(sys.argv[1]))
hold = store.hold("0/writer.lock", float(sys.argv[2]))
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


RACER = """
import pickle, sys
from zmq_datasource.errors import KeyTakenError
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


def test_a_directory_that_is_away_has_nothing_takes_nothing_and_is_not_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("0", "readers")
    store.put("readers/a.json", b"{}")
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
        store.delete("readers/a.json")
        assert (store.list("readers"), store.find("readers/a.json")) == ([], None)
        with pytest.raises(FileNotFoundError):
            store.open("readers/a.json")
        if not emptied:
            (tmp_path / "away-False").rename(tmp_path / "log")
    assert not any((tmp_path / "log").iterdir())


def test_a_directory_notices_that_another_host_holds_its_lock(tmp_path: Path) -> None:
    """A shared file system has given the lock to it, and this host was cut off meanwhile."""
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    hold = store.hold("0/writer.lock", 0.0)
    assert hold.lost is None
    (tmp_path / "log" / "0" / "writer.lock").write_bytes(b"process 7 on another\nnote\n123\n")
    wait_for(lambda: hold.lost == "process 7 on another", "the loss")
    hold.release()


# Faults.


def reaching(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Do something at a failpoint, once."""
    left = [act]

    def reach(reached: str) -> None:
        if reached == name and left:
            left.pop()()

    at_failpoints(monkeypatch, reach)


def refuse(code: int = errno.EIO) -> None:
    raise OSError(code, os.strerror(code))


def steps(store: Store, *names: str) -> list[str]:
    """The failpoints of a store, of those that these steps have."""
    of_directory = {"before_write", "after_write", "after_sync", "before_link", "after_link", "after_unlink"}
    of_directory |= {"before_rename", "after_rename", "before_delete", "after_delete"}
    of_bucket = {"before_put", "after_put", "before_delete", "after_delete"}
    own = of_directory if isinstance(store, DirectoryStore) else of_bucket
    return [f"log.store.{name}" for name in names if name in own]


def test_a_new_object_that_was_refused_at_any_step_is_put_by_the_next_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = steps(
        store,
        *("before_write", "after_write", "after_sync", "before_link", "after_link", "after_unlink"),
        *("before_put", "after_put"),
    )
    for number, point in enumerate(points):
        key, mine = f"0/{number}", [b"mine", b"%d" % number]
        with monkeypatch.context() as patch:
            reaching(patch, point, refuse)
            with pytest.raises(DiskFaultError, match=f"0/{number}: "):
                store.put_new(key, mine)
        store.put_new(key, mine)
        assert content(store, key) == b"".join(mine)
        with pytest.raises(KeyTakenError):
            store.put_new(key, [b"other"])
    assert names(store, "0") == {str(number) for number in range(len(points))}


def test_an_object_is_the_old_or_the_new_one_wherever_its_replacement_was_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = steps(
        store,
        "before_write",
        "after_write",
        "after_sync",
        "before_rename",
        "after_rename",
        "before_put",
        "after_put",
    )
    store.put("readers/a", b"0")
    for number, point in enumerate(points):
        with monkeypatch.context() as patch:
            reaching(patch, point, refuse)
            with pytest.raises(DiskFaultError, match="readers/a: "):
                store.put("readers/a", b"%d" % (number + 1))
        assert content(store, "readers/a") in (b"%d" % number, b"%d" % (number + 1))
        store.put("readers/a", b"%d" % (number + 1))
        assert content(store, "readers/a") == b"%d" % (number + 1)


def test_a_deletion_that_was_refused_is_done_by_the_next_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for point in steps(store, "before_delete", "after_delete"):
        store.put("readers/a", b"0")
        with monkeypatch.context() as patch:
            reaching(patch, point, refuse)
            with pytest.raises(DiskFaultError, match="readers/a: "):
                store.delete("readers/a")
        store.delete("readers/a")
        assert names(store, "readers") == set()


KILLED = """
import os, pickle, signal, sys
from zmq_datasource.host import failpoints
def reach(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
failpoints.reach = reach
store = pickle.loads(bytes.fromhex(sys.argv[1]))
store.put_new(sys.argv[3], [b"mine", b"and more"])
"""


def test_a_new_object_of_a_process_that_was_killed_is_whole_or_not_there(store: Store) -> None:
    points = steps(store, "after_write", "after_sync", "before_link", "after_link", "before_put", "after_put")
    for number, point in enumerate(points):
        key = f"0/{number}"
        with running(KILLED, pickle.dumps(store).hex(), point, key) as process:
            assert process.wait(60) == -signal.SIGKILL
        assert (str(number) in names(store, "0")) == (point in steps(store, "after_link", "after_put"))
        store.put_new(key, [b"mineand more"])
        assert content(store, key) == b"mineand more"
    if isinstance(store, DirectoryStore):
        store.tidy_up("0")
        assert names(store, "0") == set(os.listdir(store.root / "0"))


def test_a_full_disk_takes_a_small_object_in_place_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("readers")
    store.put("readers/a", b'{"next": 10}')
    reaching(monkeypatch, "log.store.after_write", lambda: refuse(errno.ENOSPC))
    store.put("readers/a", b'{"next": 9}')
    assert content(store, "readers/a") == b'{"next": 9} '
    reaching(monkeypatch, "log.store.after_write", lambda: refuse(errno.ENOSPC))
    with pytest.raises(DiskFaultError, match="free space there"):
        store.put("readers/b", b"{}")


def test_a_file_system_without_hard_links_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = DirectoryStore(tmp_path / "log")
    store.create("0")
    monkeypatch.setattr(os, "link", lambda *_: refuse(errno.EPERM))
    with pytest.raises(LogWriteError, match=r"set walLocation to a directory .* with hard links") as raised:
        store.put_new(KEY, [b"1"])
    assert not isinstance(raised.value, DiskFaultError)


def repeated(call: Callable[[], T], seconds: float = 60.0) -> T:
    """Repeat a call as the users of a store do."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except DiskFaultError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_a_fault_within_some_seconds(
    server: BucketServer, bucket: BucketStore
) -> None:
    bucket.put_new(KEY, [b"123"])
    bucket.put_new("0/large", [os.urandom(4 << 20)])
    with Middlebox(server.endpoint) as box, ThreadPoolExecutor(8) as pool:
        path = str(bucket).rpartition("bucket/")[2]
        far = BucketStore(Location(server.location(path, box.endpoint)))
        assert content(far) == b"123"
        box.bytes_per_second, before = 1 << 20, box.bytes
        half = pool.submit(far.open, "0/large")
        wait_for(lambda: box.bytes > before + (1 << 20), "half of it")
        box.black_hole = True
        began = time.monotonic()
        calls = [
            half,
            pool.submit(far.put_new, "0/other", [b"123"]),
            pool.submit(far.put, "readers/a", b"123"),
            pool.submit(far.open, KEY),
            pool.submit(far.list, "0"),
            pool.submit(far.delete, KEY),
            pool.submit(far.hold, "0/writer.lock", 0.0),
        ]
        for call in calls:
            assert isinstance(call.exception(60), DiskFaultError)
        assert time.monotonic() - began < 15
        box.clear()
        repeated(lambda: far.put_new("0/other", [b"123"]))


def test_a_large_object_that_is_deleted_while_it_is_read_is_a_file_not_found(bucket: BucketStore) -> None:
    bucket.put_new(KEY, [os.urandom(2 << 20)])
    with bucket.open(KEY) as file:
        bucket.delete(KEY)
        file.seek(0)
        with pytest.raises(FileNotFoundError):
            file.read(10)


def test_a_bucket_that_is_not_there_is_a_lasting_error_without_a_secret(server: BucketServer) -> None:
    location = server.location("log").replace("any:any@bucket", "the-key:the-secret@no-bucket")
    store = BucketStore(Location(location))
    for use in (
        store.create,
        lambda: store.list("0"),
        lambda: store.open(KEY),
        lambda: store.put_new(KEY, [b"1"]),
        lambda: store.put("log.json", b"1"),
    ):
        with pytest.raises(LogWriteError, match="bucket") as raised:
            use()
        assert not isinstance(raised.value, DiskFaultError)
        assert "the-" not in f"{raised.value} {raised.value!r} {store!r} {store} {store.path_of(KEY)}"


def test_a_bucket_without_obstore_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(OptionError, match=r'pip install "zmq_datasource\[bucket\]"'):
        BucketStore(Location("s3://bucket/log"))


# A bucket that is held.

SILENT_SECONDS = 3.0


@pytest.fixture(name="impatient")
def _impatient(bucket: BucketStore) -> BucketStore:
    """A bucket where a holder is silent sooner than in operation."""
    return BucketStore(bucket.location, SILENT_SECONDS)


def test_a_killed_holder_of_a_bucket_is_followed_after_its_silence(impatient: BucketStore) -> None:
    bucket = impatient
    with running(HOLDER, pickle.dumps(bucket).hex(), "5") as process:
        assert line_of(process) == "held"
        found = content(bucket, "0/writer.lock")
        wait_for(lambda: content(bucket, "0/writer.lock") != found, "a refresh")
        process.kill()
        with pytest.raises(LogLockedError, match=f"process {process.pid} on "):
            bucket.hold("0/writer.lock", 0.5)
        began = time.monotonic()
        hold = bucket.hold("0/writer.lock", 25.0)
        assert SILENT_SECONDS - 1 < time.monotonic() - began < SILENT_SECONDS + 5
        assert hold.lost is None
        hold.release()


def test_a_stopped_holder_loses_a_bucket_and_notices(impatient: BucketStore) -> None:
    bucket = impatient
    with running(HOLDER, pickle.dumps(bucket).hex(), "5") as process:
        assert line_of(process) == "held"
        process.send_signal(signal.SIGSTOP)
        hold = bucket.hold("0/writer.lock", 25.0)
        process.send_signal(signal.SIGCONT)
        assert line_of(process).startswith(f"lost process {os.getpid()} on ")
        assert hold.lost is None
        hold.release()


def test_a_late_refresh_does_not_replace_the_next_holder(
    impatient: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder stalls after it has seen its record, and before it refreshes it."""
    bucket, key = impatient, "0/writer.lock"
    hold = bucket.hold(key, 0.0)
    taken = threading.Event()

    def take(reached: str) -> None:
        if (
            reached == "log.store.before_put"
            and threading.current_thread().name == "zmq-log-hold"
            and not taken.is_set()
        ):
            taken.set()
            bucket.put(key, b"of another process")

    at_failpoints(monkeypatch, take)
    wait_for(lambda: hold.lost, "the loss")
    assert content(bucket, key) == b"of another process"
    hold.release()
    assert content(bucket, key) == b"of another process"
