"""The small JSON objects of a log: the head of the writer, and the leases of readers, each with its checksum."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TypeVar

import msgspec
import xxhash

from zmq_datasource.errors import RESTORE, LogFormatError
from zmq_datasource.log.store import Store

T = TypeVar("T", bound=msgspec.Struct)


def encode_record(record: msgspec.Struct) -> bytes:
    """The content of a record's object."""
    return msgspec.json.encode(_signed(record))


def read_object(store: Store, key: str) -> bytes | None:
    """The content of a small object; None if there is none."""
    with suppress(FileNotFoundError), store.open(key) as file:
        return bytes(file.read())
    return None


def read_record(store: Store, key: str, kind: type[T], what: str, hint: str = "") -> T | None:
    """Read a record; None if there is none.

    Args:
        what: What it is, for the error.
        hint: What else than restoring it helps, for the error.

    Raises:
        DiskFaultError: It cannot be read now.
        LogFormatError: It is damaged.
    """
    content = read_object(store, key)
    if content is None:
        return None
    try:
        found = json.loads(content)
        record = msgspec.convert(found, kind)
        if found != _signed(record):
            raise ValueError("its checksum differs; the file was changed after it was written")
    except (msgspec.ValidationError, ValueError, RecursionError) as e:
        raise LogFormatError(f"reading {store.path_of(key)}: it is not {what} ({e}). {RESTORE}{hint}") from e
    return record


def _signed(record: msgspec.Struct) -> dict[str, object]:
    content: dict[str, object] = msgspec.to_builtins(record)
    return content | {"xxh3": xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())}
