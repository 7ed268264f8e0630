"""Whether a directory can hold a log: what its file system promises, tried from two processes.

``python -m zmq_datasource.workbench.doctor.directory DIRECTORY`` is the second process. It answers lines of text, so
that it needs nothing of this package but itself.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from zmq_datasource.errors import LogWriteError
from zmq_datasource.log.files import make_directory, sync_directory, sync_file, writing

__all__ = ["Promise", "SecondProcess", "Verdict", "examine_directory", "file_system_of"]

Verdict = Literal["kept", "broken", "doubtful"]

_SEEN_SECONDS = 5.0
_SYNC_BYTES = 1 << 20
# A disk takes longer to force a MiB than memory does.
_DOUBTFUL_SYNC_SECONDS = 0.0002
_VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}
_OBJECT_STORES = ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.blobfuse", "fuse.rclone", "fuse.mount-s3")


@dataclass(frozen=True)
class Promise:
    """What a log needs of a file system, and whether it is kept.

    Attributes:
        name: In a word or two.
        verdict: ``doubtful`` if it cannot be told from here.
        detail: What was seen, and what that means.
    """

    name: str
    verdict: Verdict
    detail: str


class SecondProcess:
    """A second process, which shows whether a directory is one place for two of them.

    Attributes:
        answer_seconds: How long it may take for an answer.
    """

    answer_seconds = 30.0

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", __name__, str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: str) -> str:
        """Have it do something; returns its answer.

        Raises:
            LogWriteError: It has ended, or does not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(*words, file=self._process.stdin, flush=True)
        # A lock may hang on a file system of the network.
        if not select.select([self._process.stdout], [], [], self.answer_seconds)[0]:
            raise LogWriteError(
                f"trying a directory from a second process: no answer within {self.answer_seconds:.0f} s when "
                f"asked for {words[0]}"
            )
        answer = self._process.stdout.readline()
        if not answer:
            raise LogWriteError(
                f"trying a directory from a second process: it ended while asked for {words[0]}"
            )
        return answer.strip()

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate(timeout=self.answer_seconds)


def examine_directory(location: str) -> list[Promise]:
    """Try everything that a log does in a directory; what was made for that is removed.

    Raises:
        LogWriteError: It cannot be used at all; says why.
    """
    root = Path(location)
    made = [path for path in (root, *root.parents) if not path.exists()]
    with writing(f"trying {root}"):
        make_directory(root)
        directory = root / f".doctor-{uuid.uuid4().hex[:8]}"
        directory.mkdir()
    try:
        with writing(f"trying {root}"):
            return list(_try(directory))
    finally:
        for path in (*directory.glob("*"), directory, *made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _try(directory: Path) -> Iterator[Promise]:
    kind = file_system_of(directory)
    yield _of_kind(kind)
    yield _forced(directory, kind)
    second = SecondProcess(directory)
    try:
        yield _linked(directory)
        yield _seen(directory, second)
        yield _stamped(directory, second)
        yield _locked(directory, second)
        yield _released(directory, second)
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


def _of_kind(kind: str) -> Promise:
    if kind in _VOLATILE:
        return Promise("file system", "doubtful", f"{kind} is memory: a restart of the machine takes the log")
    if kind.startswith(_OBJECT_STORES):
        return Promise(
            "file system", "broken", f"{kind} shows an object store as files: nobody else's lock is seen"
        )
    return Promise(
        "file system", "kept" if kind else "doubtful", kind or "of a kind that this system does not tell"
    )


def _forced(directory: Path, kind: str) -> Promise:
    path = directory / "forced"
    path.write_bytes(os.urandom(_SYNC_BYTES))
    began = time.monotonic()
    sync_file(path)
    sync_directory(directory)
    seconds = time.monotonic() - began
    detail = f"1 MiB and its name forced to the disk in {seconds * 1000:.1f} ms"
    if seconds < _DOUBTFUL_SYNC_SECONDS and kind not in _VOLATILE:
        return Promise(
            "fsync", "doubtful", f"{detail}, which no disk does: after a crash chunks may be missing"
        )
    return Promise("fsync", "kept", detail)


def _linked(directory: Path) -> Promise:
    one, two = directory / "one", directory / "two"
    one.touch()
    try:
        os.link(one, two)
    except OSError as e:
        return Promise(
            "link", "broken", f"a second name for a file: {e.strerror}; a new log cannot be made here"
        )
    with suppress(FileExistsError):
        os.link(one, two)
        return Promise("link", "broken", "a name was given twice; two writers could make the log at once")
    return Promise("link", "kept", "of two that give a name at once, one wins")


def _seen(directory: Path, second: SecondProcess) -> Promise:
    (directory / "whole").write_bytes(b"x" * 4096)
    os.rename(directory / "whole", directory / "named")
    seconds, size = second.ask("see", "named").split()
    if float(seconds) < 0:
        return Promise(
            "rename", "broken", f"another process did not see a new name within {_SEEN_SECONDS:.0f} s"
        )
    if int(size) != 4096:
        return Promise("rename", "broken", f"another process saw {size} of 4096 bytes under a new name")
    return Promise(
        "rename", "kept", f"another process saw the file whole after {float(seconds) * 1000:.1f} ms"
    )


def _stamped(directory: Path, second: SecondProcess) -> Promise:
    before = second.ask("stamp")
    (directory / "later").touch()
    if second.ask("stamped", before) == "yes":
        return Promise(
            "directory times", "kept", "change with its names, so that a reader sees at once what is new"
        )
    return Promise(
        "directory times", "doubtful", "do not change with its names: readers list it once a second"
    )


def _locked(directory: Path, second: SecondProcess) -> Promise:
    with _holding(directory / "lock"):
        if second.ask("lock") == "yes":
            return Promise("lock", "broken", "two processes held one lock; two queries could write one log")
    if second.ask("lock") != "yes":
        return Promise(
            "lock", "broken", "a lock that was released stays held; no other query could take over"
        )
    return Promise("lock", "kept", "one process holds it, and another when it is released")


def _released(directory: Path, second: SecondProcess) -> Promise:
    if second.ask("hold") != "yes":
        return Promise(
            "lock of the dead", "broken", "a second process could not take a lock that nobody holds"
        )
    second.end()
    deadline = time.monotonic() + _SEEN_SECONDS
    while time.monotonic() < deadline:
        with suppress(BlockingIOError), _holding(directory / "lock"):
            return Promise("lock of the dead", "kept", "is free when its process is killed")
        time.sleep(0.01)
    return Promise(
        "lock of the dead",
        "broken",
        f"is held {_SEEN_SECONDS:.0f} s after its process was killed; a query could not be restarted",
    )


@contextmanager
def _holding(path: Path) -> Iterator[IO[str]]:
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


# The second process.


def _see(directory: Path, name: str) -> str:
    began = time.monotonic()
    while time.monotonic() - began < _SEEN_SECONDS:
        if name in os.listdir(directory):
            return f"{time.monotonic() - began} {len((directory / name).read_bytes())}"
        time.sleep(0.001)
    return "-1 0"


def _stamp(directory: Path) -> str:
    found = directory.stat()
    return f"{found.st_mtime_ns}-{found.st_ctime_ns}"


def _has_stamped(directory: Path, before: str) -> str:
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if _stamp(directory) != before:
            return "yes"
        time.sleep(0.001)
    return "no"


def _lock(directory: Path) -> str:
    try:
        with _holding(directory / "lock"):
            return "yes"
    except BlockingIOError:
        return "no"


def _hold(directory: Path) -> str:
    _held.append(open(directory / "lock", "a+", encoding="utf-8"))  # noqa: SIM115 - held until it is killed
    try:
        fcntl.flock(_held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "no"
    return "yes"


_held: list[IO[str]] = []
_ANSWERS: dict[str, Callable[..., str]] = {
    "see": _see,
    "stamp": _stamp,
    "stamped": _has_stamped,
    "lock": _lock,
    "hold": _hold,
}


def _answer() -> None:
    directory = Path(sys.argv[1])
    for line in sys.stdin:
        word, *arguments = line.split()
        print(_ANSWERS[word](directory, *arguments), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever has started this ends it
    _answer()
