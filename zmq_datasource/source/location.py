"""Where the log of a feed is."""

from __future__ import annotations

from typing import Any

from zmq_datasource.log import (
    DEAD_LETTERS_NAME,
    PARTITION,
    DirectoryStore,
    LogStorage,
    Store,
    bucket_at,
    default_location,
)
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Location

__all__ = ["dead_letters_beside", "log_storage", "where_from"]


def log_storage(options: ReadOptions, partition: int = PARTITION) -> LogStorage:
    """One partition of the log: in ``walStore``, in ``walLocation``, or in this machine's directory for the feed."""
    return LogStorage(_store(options), partition)


def _store(options: ReadOptions) -> Store:
    if options.wal_store is not None:
        return bucket_at(options.wal_store)
    return DirectoryStore(options.wal_location or default_location(where_from(options)), options.wal_sync)


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
