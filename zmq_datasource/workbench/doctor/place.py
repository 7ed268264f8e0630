"""Tries whether a directory or a bucket can hold a log, from two processes or over two connections."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal, NamedTuple

from zmq_datasource.errors import KeyTakenError, LogError, LogWriteError
from zmq_datasource.log import BucketStore, Entry, Store
from zmq_datasource.log.files import make_directory, sync_directory, sync_file, writing
from zmq_datasource.options.types import Location

__all__ = ["ROUNDS", "Promise", "SecondProcess", "Verdict", "examine_directory", "examine_storage"]

Verdict = Literal["kept", "broken", "doubtful"]

_SEEN_SECONDS = 5.0
_CHUNK_BYTES = 1 << 20
# No disk forces a MiB in less time than this.
_DOUBTFUL_SYNC_SECONDS = 0.0002
_VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}
_OBJECT_STORES = ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.blobfuse", "fuse.rclone", "fuse.mount-s3")
# How often each step in a bucket is tried.
ROUNDS = 10
# The bucket's clock tells how long a query has been away. It must differ from ours by less than this.
_CLOCK_SECONDS = 60.0


class Promise(NamedTuple):
    """Something that a log needs of a directory or bucket.

    Attributes:
        name: What it is, in a word or two.
        verdict: Whether the place provides it; ``doubtful`` if the trial does not show that.
        detail: What the trial has shown.
    """

    name: str
    verdict: Verdict
    detail: str


# A bucket.


def examine_storage(
    location: Location, open_store: Callable[[Location], Store] = BucketStore, rounds: int = ROUNDS
) -> list[Promise]:
    """Try everything that a log does in a bucket, and delete the objects of the trial.

    A promise that the bucket breaks only now and then may be kept in all rounds.

    Args:
        open_store: Opens the bucket; called twice, as two writers do.
        rounds: How often each step is tried.

    Raises:
        OptionError: The location makes no sense.
        LogError: The bucket cannot be used at all; the error says why.
    """
    store, other = open_store(location), open_store(location)
    keys = [f"doctor-{uuid.uuid4().hex[:8]}-{number}" for number in range(rounds)]
    try:
        return list(_try_bucket(store, other, keys))
    finally:
        for key in keys:
            with suppress(LogError):
                store.delete(key)


def _try_bucket(store: Store, other: Store, keys: list[str]) -> Iterator[Promise]:
    content = os.urandom(_CHUNK_BYTES)
    seconds: list[float] = []
    unlisted = put_twice = outdated = still_listed = 0
    found: Entry | None = None
    store.create()
    for key in keys:
        began = time.monotonic()
        store.put_new(key, [content])
        seconds.append(time.monotonic() - began)
        found = _listed(other, key)
        unlisted += found is None or found.size != len(content)
        try:
            other.put_new(key, [b"other"])
            put_twice += 1
        except KeyTakenError:
            pass
        store.put(key, key.encode())
        with suppress(FileNotFoundError), other.open(key) as file:
            outdated += bytes(file.read()) != key.encode()
        store.delete(key)
        still_listed += _listed(other, key) is not None
    median = statistics.median(seconds) * 1000
    yield Promise("put", "kept", f"1 MiB is there after {median:.0f} ms; so long a chunk takes")
    taken = "an object whose key is taken"
    both = "and two writers would give out the same ids"
    for name, failures, kept, broken in (
        ("put if absent", put_twice, f"refuses {taken}", f"replaced {taken}, {both}"),
        ("listing", unlisted, "shows an object whole as soon as it was put", "did not show one just put"),
        ("replace", outdated, "a read gets what was put last", "gave what had been replaced"),
        ("delete", still_listed, "a listing does not show what was deleted", "showed what was just deleted"),
    ):
        times = f"{failures} of {len(keys)} times it {broken}; a log there would lose messages"
        yield _judged(name, kept, times if failures else None)
    if found is None:
        yield Promise("clock", "doubtful", "cannot be compared with the clock of this machine")
        return
    ahead = abs(found.modified - time.time())
    detail = f"differs by {ahead:.0f} s from that of this machine"
    wrong = f"{detail}: a query that runs elsewhere is taken for dead, or the reverse"
    yield _judged("clock", detail, wrong if ahead >= _CLOCK_SECONDS else None)


def _judged(name: str, kept: str, broken: str | None) -> Promise:
    return Promise(name, "kept", kept) if broken is None else Promise(name, "broken", broken)


def _listed(store: Store, key: str) -> Entry | None:
    return next((found for found in store.list() if found.name == key), None)


# A directory.


def examine_directory(
    location: str, start_second: Callable[[Path], SecondProcess] | None = None
) -> list[Promise]:
    """Try everything that a log does in a directory, and remove the files of the trial.

    Args:
        start_second: Starts the second process; by default ``SecondProcess``.

    Raises:
        LogWriteError: The directory cannot be used at all; the error says why.
    """
    root = Path(location)
    made = [path for path in (root, *root.parents) if not path.exists()]
    with writing(f"trying {root}"):
        make_directory(root)
        directory = root / f".doctor-{uuid.uuid4().hex[:8]}"
        directory.mkdir()
    try:
        with writing(f"trying {root}"):
            return list(_try_directory(directory, start_second or SecondProcess))
    finally:
        for path in (*directory.glob("*"), directory, *made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _try_directory(directory: Path, start_second: Callable[[Path], SecondProcess]) -> Iterator[Promise]:
    kind = file_system_of(directory)
    yield _check_file_system(kind)
    yield _check_fsync(directory, kind)
    second = start_second(directory)
    try:
        yield _check_link(directory)
        yield _check_rename(directory, second)
        yield _check_lock(directory, second)
        yield _check_lock_of_the_dead(directory, second)
    finally:
        second.end()


def file_system_of(directory: Path) -> str:
    """The type of the file system, as the system calls it; empty where that cannot be asked."""
    found, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, type_, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            if len(mount) >= len(found) and directory.resolve().is_relative_to(mount):
                found, kind = mount, type_
    return kind


def _check_file_system(kind: str) -> Promise:
    name = "file system"
    if kind in _VOLATILE:
        return Promise(name, "doubtful", f"{kind} is memory: a restart of the machine takes the log")
    if kind.startswith(_OBJECT_STORES):
        return Promise(name, "broken", f"{kind} shows an object store as files: other processes see no lock")
    if not kind:
        return Promise(name, "doubtful", "of a kind that this system does not tell")
    return Promise(name, "kept", kind)


def _check_fsync(directory: Path, kind: str) -> Promise:
    path = directory / "forced"
    path.write_bytes(os.urandom(_CHUNK_BYTES))
    began = time.monotonic()
    sync_file(path)
    sync_directory(directory)
    seconds = time.monotonic() - began
    detail = f"1 MiB and its name forced to the disk in {seconds * 1000:.1f} ms"
    if seconds < _DOUBTFUL_SYNC_SECONDS and kind not in _VOLATILE:
        detail += ", which no disk does: after a crash chunks may be missing"
        return Promise("fsync", "doubtful", detail)
    return Promise("fsync", "kept", detail)


def _check_link(directory: Path) -> Promise:
    one, two, broken = directory / "one", directory / "two", None
    one.touch()
    try:
        os.link(one, two)
        with suppress(FileExistsError):
            os.link(one, two)
            broken = "a name was given twice; two writers could make the log at once"
    except OSError as e:
        broken = f"a second name for a file: {e.strerror}; a new log cannot be made here"
    return _judged("link", "of two that give a name at once, one wins", broken)


def _check_rename(directory: Path, second: SecondProcess) -> Promise:
    (directory / "whole").write_bytes(b"x" * 4096)
    os.rename(directory / "whole", directory / "named")
    seconds, size = map(float, second.ask("see", "named").split())
    broken = None
    if seconds < 0:
        broken = f"another process did not see a new name within {_SEEN_SECONDS:.0f} s"
    elif size != 4096:
        broken = f"another process saw {size:.0f} of 4096 bytes under a new name"
    return _judged("rename", f"another process saw the file whole after {seconds * 1000:.1f} ms", broken)


def _check_lock(directory: Path, second: SecondProcess) -> Promise:
    broken = None
    with _holding(directory / "lock"):
        if second.ask("lock") == "yes":
            broken = "two processes held one lock; two queries could write one log"
    if broken is None and second.ask("lock") != "yes":
        broken = "a lock that was released stays held; no query could take over"
    return _judged("lock", "one process holds it, and another when it is released", broken)


def _check_lock_of_the_dead(directory: Path, second: SecondProcess) -> Promise:
    broken = None
    if second.ask("hold") != "yes":
        broken = "a second process could not take a lock that is free"
    else:
        second.end()
        if not _becomes_true(lambda: _is_free(directory / "lock"), _SEEN_SECONDS):
            broken = (
                f"is held {_SEEN_SECONDS:.0f} s after its process was killed; a query could not be restarted"
            )
    return _judged("lock of the dead", "is free when its process is killed", broken)


def _is_free(path: Path) -> bool:
    with suppress(BlockingIOError), _holding(path):
        return True
    return False


@contextmanager
def _holding(path: Path) -> Iterator[IO[str]]:
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


class SecondProcess:
    """Another process that uses the directory: do both see the same names, files and locks? It answers lines of text.

    Attributes:
        answer_seconds: How long it may take for an answer.
    """

    answer_seconds = 30.0

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", f"import {__name__} as place; place.answer()", str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def ask(self, *words: str) -> str:
        """Have the second process do something, and return its answer.

        Raises:
            LogWriteError: It has ended, or does not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(*words, file=self._process.stdin, flush=True)
        act = "trying a directory from a second process"
        # On a network file system, taking a lock may hang.
        if not select.select([self._process.stdout], [], [], self.answer_seconds)[0]:
            raise LogWriteError(
                f"{act}: no answer within {self.answer_seconds:.0f} s when asked for {words[0]}"
            )
        answer = self._process.stdout.readline()
        if not answer:
            raise LogWriteError(f"{act}: it ended while asked for {words[0]}")
        return answer.strip()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate(timeout=self.answer_seconds)


def answer() -> None:
    """Run as the second process: answer questions until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the first process, which kills this one
    directory, held = Path(sys.argv[1]), []

    def see(name: str) -> str:
        began = time.monotonic()
        if _becomes_true(lambda: name in os.listdir(directory), _SEEN_SECONDS):
            return f"{time.monotonic() - began} {len((directory / name).read_bytes())}"
        return "-1 0"

    def lock() -> str:
        return "yes" if _is_free(directory / "lock") else "no"

    def hold() -> str:
        held.append(_holding(directory / "lock"))
        try:
            held[-1].__enter__()
            return "yes"
        except BlockingIOError:
            return "no"

    answers: dict[str, Callable[..., str]] = {act.__name__: act for act in (see, lock, hold)}
    for line in sys.stdin:
        word, *arguments = line.split()
        print(answers[word](*arguments), flush=True)


def _becomes_true(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.001)
    return False
