"""The log of a feed: where it is, which feed it has, and on which terms a process receives into it.

Processes that receive the same feed may have different terms: one keeps messages for less time, or asks no publisher
for missing messages. These are the rules:

* The writer notes beside the log which feed it receives, and on which terms. The next writer compares
  them with its own, and logs the differences as a warning. A query that follows logs which of its options have no
  effect. If a query is refused because of another feed, the error names the options that differ.
* A query records its ``walRetention``, and whether it has a ``replayEndpoint``, with its position. While the position
  exists, its retention applies to each writer. Of the running queries, one with a ``replayEndpoint`` receives.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zmq_datasource.errors import DiskFaultError, LogError, LogLockedError
from zmq_datasource.log import (
    TERMS_NAME,
    DirectoryStore,
    LogStorage,
    ReaderTerms,
    bucket_at,
)
from zmq_datasource.options import ReadOptions, StreamReadOptions
from zmq_datasource.options.parser import ZmqOptions, describe
from zmq_datasource.options.types import Duration, Topics

_log = logging.getLogger(__name__)

# The framing options that decide which rows a message becomes.
_ROWS_BY = (
    *("framing", "topic_delimiter", "topic_frame", "publisher_frame", "value_frame"),
    *("sequence_at", "sequence_by", "sequence_start", "deduplicate"),
)
# The options that say which feed it is.
_FEED = ("socket_type", "connect", "bind", "topics", *_ROWS_BY)
# The terms: options in which two receivers of one feed may differ. Those of ``_TERMS`` also have an effect in a query
# that follows, the others only in the process that receives.
_TERMS = ("wal_retention", "replay_endpoint")
_RECEIVER_ALONE = (
    *("wal_max_bytes", "when_full", "on_malformed", "max_publishers"),
    *("rcvhwm", "connect_timeout", "allowed_clients", "zmq"),
    *("wal_flush_interval", "replay_from"),
)


def log_storage(options: ReadOptions) -> LogStorage:
    """The feed's log: in ``walStore``, in ``walLocation``, or in the default directory of the feed."""
    if options.wal_store is not None:
        return LogStorage(bucket_at(options.wal_store))
    location = options.wal_location or default_location(_sockets_of(options))
    return LogStorage(DirectoryStore(location))


def default_location(identity: Mapping[str, Any]) -> str:
    """The directory of a feed's log if no option names one: below the temporary directory of this machine.

    Args:
        identity: Plain data that differs between feeds (socket type, endpoints, topics).

    Raises:
        LogError: Other users can enter the parent directory.
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


def _sockets_of(options: ReadOptions) -> dict[str, Any]:
    """Where the feed's messages come from."""
    return {
        "socketType": options.socket_type,
        "connect": sorted(map(str, options.connect)),
        "bind": sorted(map(str, options.bind)),
        "topics": sorted(options.topics),
    }


def feed_of(options: StreamReadOptions) -> str:
    """Identify a feed by a line of text: it covers where messages come from, and which rows they become."""
    framing = {name: str(getattr(options, name)) for name in _ROWS_BY}
    text = json.dumps({**_sockets_of(options), **framing}, sort_keys=True, separators=(",", ":"))
    return f"feed {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def terms_of(options: StreamReadOptions) -> ReaderTerms | None:
    """The terms that a query records with its position; None if it does not receive."""
    if not options.has_endpoints:
        return None
    return ReaderTerms(float(options.wal_retention), bool(options.replay_endpoint))


def compare_terms(storage: LogStorage, options: StreamReadOptions) -> None:
    """Note this writer's feed and terms, and log how they differ from the last writer's.

    Call it with the log's lock.

    Raises:
        LogError: The note cannot be read or written.
    """
    ours = _texts(options, (*_TERMS, *_RECEIVER_ALONE, *_FEED))
    theirs = _noted(storage)
    if theirs == ours:
        return
    if differences := _differences(ours, theirs, "before"):
        _log.warning(
            "%s was last received with other options; those of this process apply: %s", storage, differences
        )
    storage.write_json(TERMS_NAME, ours)


def warn_of_terms(storage: LogStorage, options: StreamReadOptions) -> None:
    """Log which options of this query have no effect, because the process that receives has other values.

    Raises:
        LogError: The note cannot be read.
    """
    if differences := _differences(_texts(options, _RECEIVER_ALONE), _noted(storage), "there"):
        _log.warning(
            "%s is received by another process with other options, and those apply: %s", storage, differences
        )


def has_feed(storage: LogStorage, options: StreamReadOptions) -> bool:
    """Whether the writer of the log has noted the same feed; False if that cannot be read now."""
    with suppress(DiskFaultError):  # the next attempt to open the log waits for the disk
        return storage.feed() == feed_of(options)
    return False


def naming_other_feed(
    refused: LogLockedError, storage: LogStorage, options: StreamReadOptions
) -> LogLockedError:
    """The same error, with the options in which this feed differs from the last writer's, if they are known."""
    with suppress(LogError):
        if differences := other_feed(storage, options):
            return LogLockedError(f"{refused}. It receives another feed: {differences}")
    return refused


def other_feed(storage: LogStorage, options: StreamReadOptions) -> str:
    """Name the options that make this feed another one than that of the last writer; empty if that is not known.

    Raises:
        LogError: The note cannot be read.
    """
    return _differences(_texts(options, _FEED), _noted(storage), "there")


def _noted(storage: LogStorage) -> dict[str, str]:
    note = storage.read_json(TERMS_NAME)
    return note if isinstance(note, dict) else {}


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str], whose: str) -> str:
    return ", ".join(
        f"{name}={text or 'not set'} ({whose}: {theirs[name] or 'not set'})"
        for name, text in ours.items()
        if name in theirs and theirs[name] != text
    )


def _texts(options: StreamReadOptions, fields: Iterable[str]) -> dict[str, str]:
    """These options as text, by name, without secrets."""
    names = {option.field: option.name for option in describe(type(options))} | {"zmq": "zmq.*"}
    return {names[field]: _text(getattr(options, field)) for field in fields}


def _text(value: object) -> str:
    if isinstance(value, Duration):
        return f"{value:g}s"
    if isinstance(value, ZmqOptions):
        return repr(ZmqOptions(sorted(value.items())))  # without secrets
    if isinstance(value, Topics):
        return ",".join(value)
    return "" if value is None else str(value)


def is_replayed(storage: LogStorage) -> bool:
    """Whether the last writer asks publishers for missing messages.

    Raises:
        LogError: The note cannot be read.
    """
    return bool(_noted(storage).get("replayEndpoint"))
