"""Whether a bucket can hold a log: what it promises, tried over two connections."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from zmq_datasource.errors import LogError
from zmq_datasource.log import BucketStore, Entry, KeyTakenError, Store
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor.directory import Promise

__all__ = ["examine_storage"]

ROUNDS = 10
_CHUNK_BYTES = 1 << 20
# How long a query has been away is told by the bucket's clock.
_CLOCK_SECONDS = 60.0


def examine_storage(location: Location) -> list[Promise]:
    """Try everything that a log does in a bucket; what was put for that is deleted.

    A promise that is broken one time in many may be kept each time that it is tried.

    Raises:
        OptionError: The location makes no sense.
        LogError: The bucket cannot be used at all; says why.
    """
    store, other = BucketStore(location), BucketStore(location)
    keys = [f"doctor-{uuid.uuid4().hex[:8]}-{number}" for number in range(ROUNDS)]
    try:
        return list(_try(store, other, keys))
    finally:
        for key in keys:
            with suppress(LogError):
                store.delete(key)


def _try(store: Store, other: Store, keys: list[str]) -> Iterator[Promise]:
    content = os.urandom(_CHUNK_BYTES)
    seconds: list[float] = []
    unlisted = twice = old = left = 0
    found: Entry | None = None
    store.create()
    for key in keys:
        began = time.monotonic()
        store.put_new(key, [content])
        seconds.append(time.monotonic() - began)
        found = _listed(other, key)
        unlisted += found is None or found.size != len(content)
        twice += not _is_refused(other, key)
        store.put(key, key.encode())
        old += _content(other, key) != key.encode()
        store.delete(key)
        left += _listed(other, key) is not None
    yield Promise(
        "put",
        "kept",
        f"1 MiB is there after {statistics.median(seconds) * 1000:.0f} ms; so long a chunk takes",
    )
    yield _kept(
        "put if absent",
        twice,
        "refuses an object whose key is taken",
        "replaced an object whose key was taken, and two writers would give out the same ids",
    )
    yield _kept(
        "listing", unlisted, "shows an object whole as soon as it was put", "did not show what was just put"
    )
    yield _kept("replace", old, "a read gets what was put last", "gave what had been replaced")
    yield _kept("delete", left, "a listing does not show what was deleted", "showed what was just deleted")
    yield _clock(found)


def _is_refused(store: Store, key: str) -> bool:
    try:
        store.put_new(key, [b"other"])
    except KeyTakenError:
        return True
    return False


def _kept(name: str, failures: int, kept: str, broken: str) -> Promise:
    if failures:
        return Promise(
            name, "broken", f"{failures} of {ROUNDS} times it {broken}; a log there would lose messages"
        )
    return Promise(name, "kept", kept)


def _clock(found: Entry | None) -> Promise:
    if found is None:
        return Promise("clock", "doubtful", "cannot be compared with the clock of this machine")
    ahead = found.modified - time.time()
    detail = f"differs by {abs(ahead):.0f} s from that of this machine"
    if abs(ahead) >= _CLOCK_SECONDS:
        return Promise(
            "clock", "broken", f"{detail}: a query that runs elsewhere is taken for dead, or the reverse"
        )
    return Promise("clock", "kept", detail)


def _listed(store: Store, key: str) -> Entry | None:
    return next((found for found in store.list() if found.name == key), None)


def _content(store: Store, key: str) -> bytes | None:
    with suppress(FileNotFoundError), store.open(key) as file:
        return bytes(file.read())
    return None
