"""Where the log of a feed is."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zmq_datasource.errors import LogError
from zmq_datasource.log import (
    DEAD_LETTERS_NAME,
    PARTITION,
    DirectoryStore,
    LogStorage,
    Store,
    bucket_at,
)
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Location

__all__ = ["dead_letters_beside", "default_location", "log_storage", "where_from"]


def log_storage(options: ReadOptions, partition: int = PARTITION) -> LogStorage:
    """One partition of the log: in ``walStore``, in ``walLocation``, or in this machine's directory for the feed."""
    return LogStorage(_store(options), partition)


def _store(options: ReadOptions) -> Store:
    if options.wal_store is not None:
        return bucket_at(options.wal_store)
    return DirectoryStore(options.wal_location or default_location(where_from(options)), options.wal_sync)


def default_location(identity: Mapping[str, Any]) -> str:
    """The directory of a feed's log on this machine when the user names none.

    Args:
        identity: What tells feeds apart (socket type, endpoints, topics), as plain data.

    Raises:
        LogError: The parent directory in the temporary directory is not ours alone.
    """
    parent = Path(tempfile.gettempdir(), f"zmq_datasource-{os.getuid()}")
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LogError(
            f"using {parent} for message logs: it must be a directory that only you can enter; "
            "correct or remove it, or set walLocation"
        )
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return str(parent / hashlib.sha256(text.encode()).hexdigest()[:16])


def dead_letters_beside(options: ReadOptions, storage: LogStorage) -> Location:
    """Where messages go that do not fit, if the user names no place: beside the chunks of their partition."""
    key = storage.key(DEAD_LETTERS_NAME)
    if options.wal_store is None:
        return Location(storage.store.path_of(key))
    address, mark, parameters = options.wal_store.plain.partition("?")
    return Location(f"{address.rstrip('/')}/{key}{mark}{parameters}")


def where_from(options: ReadOptions) -> dict[str, Any]:
    """What tells feeds apart."""
    return {
        "socketType": options.socket_type,
        "connect": sorted(map(str, options.connect)),
        "bind": sorted(map(str, options.bind)),
        "topics": sorted(options.topics),
    }
