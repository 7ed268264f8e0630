"""Try whether a directory or a bucket can hold a log: what a log does there, once."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from zmq_datasource.errors import KeyTakenError, LogError
from zmq_datasource.log import BucketStore, Store
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor.facts import Place


def examine_bucket(location: Location, open_store: Callable[[Location], Store] = BucketStore) -> Place:
    """Put an object into a bucket, and another one on condition that the key is free. Both are deleted.

    Raises:
        OptionError: The location makes no sense.
    """
    store, key = open_store(location), f"doctor-{uuid.uuid4().hex[:8]}"
    try:
        store.create()
        store.put_new(key, [b"one"])
        # Another connection, as another receiver has. The same content would be taken for a repeated put.
        with suppress(KeyTakenError):
            open_store(location).put_new(key, [b"other"])
            return Place(location=str(location), replaced=True)
    except LogError as e:
        return Place(location=str(location), failed=str(e))
    finally:
        with suppress(LogError):
            store.delete(key)
    return Place(location=str(location))


def examine_directory(location: str) -> Place:
    """Force a file to the disk, and give it a second name, which must then be taken. Removes what it has made."""
    root = Path(location)
    made = [path for path in (root, *root.parents) if not path.exists()]
    directory = root / f".doctor-{uuid.uuid4().hex[:8]}"
    first, second = directory / "first", directory / "second"
    step = "making a directory there"
    try:
        directory.mkdir(parents=True)
        step = "writing a file and forcing it to the disk"
        with first.open("wb") as file:
            file.write(b"one")
            file.flush()
            os.fsync(file.fileno())
        step = "giving a file a second name (a hard link)"
        os.link(first, second)
        with suppress(FileExistsError):
            os.link(first, second)
            return Place(location=location, replaced=True)
    except OSError as e:
        return Place(location=location, failed=f"{step}: {e.strerror or e}")
    finally:
        for path in (first, second, directory, *made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
    return Place(location=location)
