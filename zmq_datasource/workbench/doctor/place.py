"""Try whether a directory or a bucket can hold a log: everything that a log does there, once."""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zmq_datasource.errors import KeyTakenError, LogError
from zmq_datasource.log import BucketStore, Store
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor.facts import Place

_CHUNK_BYTES = 1 << 20


def examine_bucket(location: Location, open_store: Callable[[Location], Store] = BucketStore) -> Place:
    """Put an object into a bucket, and another one on condition that the key is free. Both are deleted.

    Raises:
        OptionError: The location makes no sense.
    """
    place = Place(location=str(location))
    store, key = open_store(location), f"doctor-{uuid.uuid4().hex[:8]}"
    try:
        store.create()
        began = time.monotonic()
        store.put_new(key, [os.urandom(_CHUNK_BYTES)])
        place = replace(place, put_seconds=time.monotonic() - began)
        # Another connection, as another receiver has. The same content would be taken for a repeated put.
        with suppress(KeyTakenError):
            open_store(location).put_new(key, [b"other"])
            place = replace(place, replaced=True)
    except LogError as e:
        return replace(place, failed=str(e))
    finally:
        with suppress(LogError):
            store.delete(key)
    return place


def examine_directory(location: str, needed_bytes: int) -> Place:
    """Write, force and link files in a directory. All of them are removed, and directories that were made.

    Args:
        needed_bytes: The room that a log may take (``walMaxBytes``).
    """
    root = Path(location)
    place = Place(location=location, needed_bytes=needed_bytes)
    made = [path for path in (root, *root.parents) if not path.exists()]
    directory = root / f".doctor-{uuid.uuid4().hex[:8]}"
    step = "making a directory there"
    try:
        directory.mkdir(parents=True)
        place = replace(place, file_system=_file_system_of(directory), free_bytes=_free_bytes(directory))
        step = "writing a file of 1 MiB and forcing it to the disk"
        place = replace(place, sync_seconds=_sync(directory))
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        return replace(place, failed=f"{step}: {e.strerror or e}", is_full=full)
    else:
        return replace(place, no_links=_try_links(directory))
    finally:
        for path in (*directory.glob("*"), directory, *made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def _file_system_of(directory: Path) -> str:
    """The type of the file system, as the system calls it; empty where that cannot be asked."""
    found, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, type_, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            if len(mount) >= len(found) and directory.resolve().is_relative_to(mount):
                found, kind = mount, type_
    return kind


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _sync(directory: Path) -> float:
    """Force a file and its name to the disk. Returns the seconds that this took."""
    content = os.urandom(_CHUNK_BYTES)
    began = time.monotonic()
    with open(directory / "forced", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.monotonic() - began


def _try_links(directory: Path) -> str:
    """What is wrong with hard links; empty if nothing is."""
    try:
        os.link(directory / "forced", directory / "linked")
        with suppress(FileExistsError):
            os.link(directory / "forced", directory / "linked")
            return "a name was given twice"
    except OSError as e:
        return f"a second name for a file: {e.strerror or e}"
    return ""
