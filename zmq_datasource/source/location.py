"""Where the log of a feed is."""

from __future__ import annotations

from typing import Any

from zmq_datasource.log.layout import PARTITION
from zmq_datasource.log.storage import LogStorage, default_location
from zmq_datasource.log.stored import storage_at
from zmq_datasource.options import ReadOptions

__all__ = ["log_storage", "where_from"]


def log_storage(options: ReadOptions, partition: int = PARTITION) -> LogStorage:
    """One partition of the log: in ``walLocation``, or this machine's directory for the feed, and in ``walStore``."""
    location, store = options.wal_location, options.wal_store
    if location is None:
        kept = {} if store is None else {"walStore": str(store)}
        return storage_at(default_location(where_from(options) | kept), partition, store)
    return storage_at(location, partition, store)


def where_from(options: ReadOptions) -> dict[str, Any]:
    """What tells feeds apart."""
    return {
        "socketType": options.socket_type,
        "connect": sorted(map(str, options.connect)),
        "bind": sorted(map(str, options.bind)),
        "topics": sorted(options.topics),
    }
