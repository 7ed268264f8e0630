"""Faults of the disk and the clock of one process, turned on and off by another one.

The two share a page of memory. ``install`` puts the faults between the standard library and the package, before
the package is imported: nothing in the package knows of it. What was written and not forced to the disk is noted,
so that ``lose_power`` can take it away when the process has been killed.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import mmap
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

__all__ = ["DISK_FAULTS", "STORE_FAULTS", "Faults", "install", "install_store", "lose_power"]

# Of a store: each change is refused, each request takes long, each put arrives and its answer is lost.
STORE_FAULTS = ("read-only", "slow-store", "lost-answer")
# ``lie``: what is forced to the disk is not.
DISK_FAULTS = ("none", "enospc", "eio", "emfile", "slow", "lie", *STORE_FAULTS)
_PAGE = struct.Struct("<Bd")
_SLOW_SECONDS = 0.4


class Faults:
    """What is wrong with a process' disk and clock; shared by whoever opens the same path."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_PAGE.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)

    @property
    def disk(self) -> str:
        return DISK_FAULTS[_PAGE.unpack_from(self._page)[0]]

    @disk.setter
    def disk(self, fault: str) -> None:
        _PAGE.pack_into(self._page, 0, DISK_FAULTS.index(fault), self.clock)

    @property
    def clock(self) -> float:
        """Seconds by which the clock is ahead."""
        return float(_PAGE.unpack_from(self._page)[1])

    @clock.setter
    def clock(self, seconds: float) -> None:
        _PAGE.pack_into(self._page, 0, _PAGE.unpack_from(self._page)[0], seconds)

    def meet(self, act: str) -> None:
        """What the disk has to say to an act: ``open``, ``write``, ``fsync``, ``rename`` or ``read rows``."""
        match self.disk:
            case "enospc" if act in ("open", "write", "fsync"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "eio" if act in ("write", "fsync", "read rows"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "emfile" if act == "open":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            case "slow" if act == "fsync":
                time.sleep(_SLOW_SECONDS)


def install(page: Path, root: Path) -> None:
    """Put this process' disk, below ``root``, and its clock under the weather."""
    faults = Faults(page)
    below = f"{root}{os.sep}"

    def concerns(path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(below)  # type: ignore[arg-type]

    real_open, real_fsync, real_rename, real_time = builtins.open, os.fsync, os.rename, time.time
    real_os_open, real_pwritev = os.open, os.pwritev
    notes = os.open(_notes(page), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(*words: object) -> None:
        os.write(notes, json.dumps(words).encode() + b"\n")

    class File(io.FileIO):
        def write(self, content: Any) -> int:
            note("written", str(self.name))
            try:
                faults.meet("write")
            except OSError:
                # What a full disk takes before it says so is there, and torn.
                super().write(memoryview(content).cast("B")[: memoryview(content).nbytes // 2])
                raise
            return super().write(content)

    def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not concerns(path):
            return real_open(path, mode, *args, **kwargs)
        faults.meet("open" if faults.disk == "emfile" or "r" not in mode else "read")
        if mode == "wb":
            return File(path, "w")
        return real_open(path, mode, *args, **kwargs)

    def os_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if concerns(path):
            faults.meet("open" if faults.disk == "emfile" else "read")
        return real_os_open(path, *args, **kwargs)

    def pwritev(descriptor: int, parts: Any, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if concerns(path):
            note("written", path)
            try:
                faults.meet("write")
            except OSError:
                content = b"".join(parts)
                real_pwritev(descriptor, [content[: len(content) // 2]], offset)
                raise
        return real_pwritev(descriptor, parts, offset)

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        if concerns(path + os.sep):
            faults.meet("fsync")
            if faults.disk == "lie":
                return
            note("forced", path, os.fstat(number).st_size)
        real_fsync(descriptor)

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if concerns(source):
            faults.meet("rename")
            note("renamed", str(source), str(target))
        real_rename(source, target, **kwargs)

    builtins.open = io.open = open_  # type: ignore[assignment]
    os.fsync, os.rename, os.open, os.pwritev = fsync, rename, os_open, pwritev
    time.time = lambda: real_time() + faults.clock

    import pyarrow as pa  # noqa: PLC0415 - only now

    real_file = pa.OSFile

    def os_file(path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if not concerns(path):
            return real_file(path, mode, **kwargs)
        faults.meet("open" if mode == "wb" or faults.disk == "emfile" else "read")
        return pa.PythonFile(File(path, "w") if mode == "wb" else _Rows(path, faults), mode=mode[0])

    pa.OSFile = os_file


class _Rows(io.FileIO):
    """A file that Arrow reads."""

    def __init__(self, path: str, faults: Faults) -> None:
        super().__init__(path)
        self._faults = faults

    def read(self, size: int = -1) -> bytes:
        self._faults.meet("read rows")
        return super().read(-1 if size is None else size)


class _Store:
    """pyarrow's local file system, in the place of object storage that has faults."""

    def __init__(self, system: Any, faults: Faults) -> None:
        self._system, self._faults = system, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def _meet(self, changes: bool) -> None:
        if self._faults.disk == "slow-store":
            time.sleep(_SLOW_SECONDS)
        if self._faults.disk == "read-only" and changes:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def get_file_info(self, about: Any) -> Any:
        self._meet(changes=False)
        return self._system.get_file_info(about)

    def create_dir(self, *args: Any, **kwargs: Any) -> None:
        self._meet(changes=True)
        self._system.create_dir(*args, **kwargs)

    def delete_file(self, path: str) -> None:
        self._meet(changes=True)
        self._system.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._meet(changes=True)
        self._system.move(source, target)
        if self._faults.disk == "lost-answer":
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def install_store(page: Path) -> None:
    """Put what this process keeps in a store (a ``file://`` URI) under the weather of a page of its own."""
    from pyarrow import fs  # noqa: PLC0415

    faults, real = Faults(page), fs.FileSystem

    class FileSystem:
        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            system, path = real.from_uri(uri)
            return (_Store(system, faults) if uri.startswith("file://") else system), path

    fs.FileSystem = FileSystem


def _notes(page: Path) -> Path:
    return page.with_suffix(".disk")


def lose_power(page: Path, chance: random.Random) -> None:
    """Take from the disk of a process that was killed what it had not forced there: ends of files, and names."""
    notes = _notes(page)
    if not notes.exists():
        return
    torn: dict[str, int] = {}  # path: how much of it is sure
    sure: dict[str, int] = {}
    renamed: list[tuple[str, str]] = []
    for line in notes.read_text().splitlines():
        match json.loads(line):
            case ["written", path]:
                torn[path] = sure.get(path, 0)
            case ["forced", path, size]:
                torn.pop(path, None)
                sure[path] = size
                renamed = [(old, new) for old, new in renamed if str(Path(new).parent) != path]
            case ["renamed", old, new]:
                renamed.append((old, new))
                for kept in (torn, sure):
                    kept.pop(new, None)
                    if old in kept:
                        kept[new] = kept.pop(old)
    for path, least in torn.items():
        if os.path.isfile(path):
            os.truncate(path, chance.randint(min(least, os.path.getsize(path)), os.path.getsize(path)))
    for old, new in reversed(renamed):
        if os.path.exists(new) and chance.random() < 0.5:
            os.rename(new, old)
    notes.unlink()
