"""Whether object storage can hold a log: what it promises, tried over two connections."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from zmq_datasource.errors import LogError
from zmq_datasource.host.object_store import ObjectStore, StoredObject
from zmq_datasource.log.stored import object_store_at
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor.directory import Promise

__all__ = ["examine_storage"]

_ROUNDS = 10
_CHUNK_BYTES = 1 << 20
# Whether a query runs elsewhere is told by the storage's clock.
_CLOCK_SECONDS = 60.0


def examine_storage(location: Location) -> list[Promise]:
    """Try everything that a log does in object storage; what was put for that is deleted.

    A promise that is broken one time in many may be kept each time that it is tried.

    Raises:
        OptionError: The location makes no sense.
        LogError: The storage cannot be used at all; says why.
    """
    store, other = object_store_at(location), object_store_at(location)
    keys = [f"doctor-{uuid.uuid4().hex[:8]}-{number}" for number in range(_ROUNDS)]
    try:
        return list(_try(store, other, keys))
    finally:
        for key in keys:
            with suppress(LogError):
                store.delete(key)


def _try(store: ObjectStore, other: ObjectStore, keys: list[str]) -> Iterator[Promise]:
    content = os.urandom(_CHUNK_BYTES)
    seconds: list[float] = []
    unlisted = old = left = 0
    found: StoredObject | None = None
    store.make_root()
    for key in keys:
        began = time.monotonic()
        store.put(key, content)
        seconds.append(time.monotonic() - began)
        found = _listed(other, key)
        unlisted += found is None or found.size != len(content)
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
        "listing", unlisted, "shows an object whole as soon as it was put", "did not show what was just put"
    )
    yield _kept("replace", old, "whoever reads gets what was put last", "gave what had been replaced")
    yield _kept("delete", left, "a listing does not show what was deleted", "showed what was just deleted")
    yield _clock(found)


def _kept(name: str, failures: int, kept: str, broken: str) -> Promise:
    if failures:
        return Promise(
            name, "broken", f"{failures} of {_ROUNDS} times it {broken}; a log there would lose messages"
        )
    return Promise(name, "kept", kept)


def _clock(found: StoredObject | None) -> Promise:
    if found is None:
        return Promise("clock", "doubtful", "cannot be compared with the clock of this machine")
    ahead = found.modified - time.time()
    detail = f"differs by {abs(ahead):.0f} s from that of this machine"
    if abs(ahead) >= _CLOCK_SECONDS:
        return Promise(
            "clock", "broken", f"{detail}: a query that runs elsewhere is taken for dead, or the reverse"
        )
    return Promise("clock", "kept", detail)


def _listed(store: ObjectStore, key: str) -> StoredObject | None:
    return next((found for found in store.objects("") if found.key == key), None)


def _content(store: ObjectStore, key: str) -> bytes | None:
    with suppress(FileNotFoundError):
        return store.get(key)
    return None
