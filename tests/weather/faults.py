"""Faults of the disk and the clock of one process, turned on and off by another one.

The two share a page of memory. ``install`` puts the faults between the standard library and the package, before
the package is imported: nothing in the package knows of it. What was written and not forced to the disk is noted,
so that ``lose_power`` can take it away when the process has been killed.
"""

from __future__ import annotations

import builtins
import errno
import glob
import io
import json
import mmap
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

__all__ = ["DISK_FAULTS", "SLOW_SECONDS", "STORE_FAULTS", "Faults", "install", "lose_power"]

# Of a bucket: each change is refused, each request takes long, each change is done and its answer is lost.
STORE_FAULTS = ("read-only", "slow-store", "lost-answer")
DISK_FAULTS = ("none", "enospc", "eio", "emfile", "slow", *STORE_FAULTS)
_PAGE = struct.Struct("<Bd")
SLOW_SECONDS = 0.4


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
        """What the disk has to say to an act: ``open``, ``write``, ``fsync``, ``link``, ``rename`` or ``read rows``."""
        match self.disk:
            case "enospc" if act in ("open", "write", "fsync", "link"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            case "eio" if act in ("write", "fsync", "link", "read rows"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            case "emfile" if act == "open":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            case "slow" if act == "fsync":
                time.sleep(SLOW_SECONDS)


def install(page: Path, root: Path) -> None:
    """Put this process' disk, below ``root``, and its clock under the weather."""
    disk, real_time = _Disk(page, root), time.time
    time.time = lambda: real_time() + disk.faults.clock
    _install_contents(disk)
    _install_names(disk)


class _Disk:
    """What is below one directory, and the notes of what is done there."""

    def __init__(self, page: Path, root: Path) -> None:
        self.faults = Faults(page)
        self._below = f"{root}{os.sep}"
        self._notes = os.open(_notes(page), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def has(self, path: object) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._below)  # type: ignore[arg-type]

    def note(self, *words: object) -> None:
        os.write(self._notes, json.dumps(words).encode() + b"\n")

    def meet(self, act: str, path: object) -> None:
        """What the disk has to say to an act. A full one has room for a head once the older one is deleted."""
        if self.faults.disk == "enospc" and f"{self._below}head" in str(path):
            if act == "open" and len(glob.glob(f"{self._below}head/*.json")) > 1:
                self.faults.meet(act)
        else:
            self.faults.meet(act)

    def meet_opening(self, path: object, creates: bool) -> None:
        """What the disk has to say if a file is opened."""
        self.meet("open" if creates or self.faults.disk == "emfile" else "read", path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


class _Written(io.FileIO):
    """A file that is written."""

    def __init__(self, file: int | str, disk: _Disk) -> None:
        super().__init__(file, "w")
        self._disk = disk

    def write(self, content: Any) -> int:
        path = _path_of(self.fileno())
        self._disk.note("written", path)
        try:
            self._disk.meet("write", path)
        except OSError:
            # What a full disk takes before it says so is there, and torn.
            super().write(memoryview(content).cast("B")[: memoryview(content).nbytes // 2])
            raise
        return super().write(content)


def _install_contents(disk: _Disk) -> None:
    """What is written, forced to the disk, and read by Arrow."""
    real_open, real_pwrite, real_fsync = builtins.open, os.pwrite, os.fsync

    def open_(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_number = isinstance(path, int)
        if not disk.has(_path_of(path) if is_number else path):
            return real_open(path, mode, *args, **kwargs)
        if not is_number:
            disk.meet_opening(path, "r" not in mode)
        return _Written(path, disk) if mode == "wb" else real_open(path, mode, *args, **kwargs)

    def pwrite(descriptor: int, content: Any, offset: int) -> int:
        path = _path_of(descriptor)
        if disk.has(path):
            disk.note("written", path)
            try:
                disk.meet("write", path)
            except OSError:
                half = memoryview(content).cast("B")
                real_pwrite(descriptor, half[: len(half) // 2], offset)
                raise
        return real_pwrite(descriptor, content, offset)

    def fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        path = _path_of(number)
        if disk.has(path + os.sep):
            disk.meet("fsync", path)
            disk.note("forced", path, os.fstat(number).st_size)
        real_fsync(descriptor)

    builtins.open = io.open = open_  # type: ignore[assignment]
    os.pwrite, os.fsync = pwrite, fsync

    import pyarrow as pa  # noqa: PLC0415 - only now

    real_file = pa.OSFile

    def os_file(path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if not disk.has(path):
            return real_file(path, mode, **kwargs)
        disk.meet_opening(path, mode == "wb")
        return pa.PythonFile(_Written(path, disk) if mode == "wb" else _Rows(path, disk.faults), mode=mode[0])

    pa.OSFile = os_file


def _install_names(disk: _Disk) -> None:
    """What gives a file a name."""
    real_open, real_link, real_rename = os.open, os.link, os.rename

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if disk.has(path):
            disk.meet_opening(path, bool(flags & os.O_CREAT) and not os.path.exists(path))
        return real_open(path, flags, *args, **kwargs)

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        if disk.has(source):
            disk.meet("link", target)
        real_link(source, target, **kwargs)
        if disk.has(source):
            disk.note("renamed", str(source), str(target), None)

    def rename(source: Any, target: Any, **kwargs: Any) -> None:
        if disk.has(source):
            disk.faults.meet("rename")
            # A small record, which is there again if the disk loses the new name.
            is_record = str(target).endswith(".json") and os.path.exists(target)
            replaced = Path(target).read_text() if is_record else None
            disk.note("renamed", str(source), str(target), replaced)
        real_rename(source, target, **kwargs)

    os.open, os.link, os.rename = open_, link, rename


class _Rows(io.FileIO):
    """A file that Arrow reads."""

    def __init__(self, path: str, faults: Faults) -> None:
        super().__init__(path)
        self._faults = faults

    def read(self, size: int = -1) -> bytes:
        self._faults.meet("read rows")
        return super().read(-1 if size is None else size)


def _notes(page: Path) -> Path:
    return page.with_suffix(".disk")


def lose_power(page: Path, chance: random.Random) -> None:
    """Take from the disk of a process that was killed what it had not forced there: ends of files, and names."""
    notes = _notes(page)
    if not notes.exists():
        return
    torn: dict[str, int] = {}  # path: how much of it is sure
    sure: dict[str, int] = {}
    renamed: list[tuple[str, str, str | None]] = []
    for line in notes.read_text().splitlines():
        match json.loads(line):
            case ["written", path]:
                torn[path] = sure.get(path, 0)
            case ["forced", path, size]:
                torn.pop(path, None)
                sure[path] = size
                renamed = [each for each in renamed if str(Path(each[1]).parent) != path]
            case ["renamed", old, new, replaced]:
                renamed.append((old, new, replaced))
                for kept in (torn, sure):
                    kept.pop(new, None)
                    if old in kept:
                        kept[new] = kept.pop(old)
    for path, least in torn.items():
        # The process lives for another moment, and would notice that its lock has changed.
        if os.path.isfile(path) and not path.endswith(".lock"):
            os.truncate(path, chance.randint(min(least, os.path.getsize(path)), os.path.getsize(path)))
    for old, new, replaced in reversed(renamed):
        if os.path.exists(new) and chance.random() < 0.5:
            if os.path.exists(old) and os.path.samefile(
                old, new
            ):  # linked, and the first name is not deleted yet
                os.unlink(new)
            else:
                os.rename(new, old)
                if replaced is not None:
                    Path(new).write_text(replaced)
    notes.unlink()
