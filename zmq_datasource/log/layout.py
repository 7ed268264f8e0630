"""The names in a log directory."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import NamedTuple

__all__ = [
    "CLAIMS_NAME",
    "DEAD_LETTERS_NAME",
    "FORMAT_VERSION",
    "LOCK_NAME",
    "LOCK_WAIT_SECONDS",
    "LOG_NAME",
    "PARTITION",
    "READERS_LOCK_NAME",
    "READERS_NAME",
    "STAGING_NAME",
    "STOPS_NAME",
    "SUBSCRIPTIONS_NAME",
    "TEMPORARY_PREFIX",
    "TERMS_NAME",
    "Chunk",
    "StateFile",
    "chunk_name",
    "compact_name",
    "damaged_name",
    "end_name",
    "end_of_damaged",
    "growing_name",
    "newest_chunk",
    "parse_chunk_name",
    "parse_growing_name",
    "parse_partition_name",
    "parse_pending_name",
    "parse_state_name",
    "parse_stored_log_name",
    "pending_name",
    "state_files",
    "stored_log_name",
]

FORMAT_VERSION = 1
# The log partition that every log has, and most logs alone.
PARTITION = 0
LOG_NAME = "log.json"
LOCK_NAME = "writer.lock"
# For so long a process that ends, or was killed a moment ago, may hold a log's lock: through its last drain or write.
LOCK_WAIT_SECONDS = 15.0
READERS_LOCK_NAME = "readers.lock"
STAGING_NAME = "staging"
# The claims of those who have had this machine's part of a log in object storage.
CLAIMS_NAME = "claims"
READERS_NAME = "readers"
# Messages that did not fit, where deadLetterLocation is not set.
DEAD_LETTERS_NAME = "dead-letters"
SUBSCRIPTIONS_NAME = "subscriptions.json"
# What was lost when receiving was stopped.
STOPS_NAME = "stops.json"
# On which terms the last writer has received.
TERMS_NAME = "terms.json"
TEMPORARY_PREFIX = "."

_PARTITION_NAME = re.compile(r"0|[1-9][0-9]{0,9}")
# A chunk that is being written group by group; see log.growing.
_GROWING_NAME = re.compile(r"\.open-([0-9]{20})\.arrow")
_CHUNK_NAME = re.compile(r"([0-9]{20})-([0-9]{20})\.arrow")
# A chunk that is written here, and not yet in object storage; see log.stored.
_PENDING_NAME = re.compile(r"\.pending-([0-9]{10}-[0-9a-f]{16})-([0-9]{20}-[0-9]{20}\.arrow)")
# What says the id of a log in object storage.
_STORED_LOG_NAME = re.compile(r"log-([0-9]+)-([0-9a-f]{32})\.json")
_DAMAGED_NAME = re.compile(rf"{_CHUNK_NAME.pattern}\.[0-9a-f]{{8}}\.damaged")
_STATE_PREFIX = "state-"
_STATE_NAME = re.compile(_STATE_PREFIX + r"([0-9]{20})-([0-9]{20})\.json")


class Chunk(NamedTuple):
    """One file of the log: the ids ``first`` to ``end - 1`` in ``size`` bytes on disk.

    ``sealed_at`` is the file's modification time in seconds since the epoch.
    """

    first: int
    end: int
    size: int
    sealed_at: float

    @property
    def name(self) -> str:
        return chunk_name(self.first, self.end)


def chunk_name(first: int, end: int) -> str:
    return f"{first:020d}-{end:020d}.arrow"


def growing_name(first: int) -> str:
    return f"{TEMPORARY_PREFIX}open-{first:020d}.arrow"


def compact_name(first: int) -> str:
    """Of what is written beside an open chunk to take its place; after a crash nobody needs it."""
    return f"{TEMPORARY_PREFIX}compact-{first:020d}.arrow"


def end_name(token: str) -> str:
    """Of the file, beside the partitions, by which receivers on executors are told to end."""
    return f"{TEMPORARY_PREFIX}end-{token}"


def parse_partition_name(name: str) -> int | None:
    """The number of the log partition in a directory of this name, or None for another directory."""
    return int(name) if _PARTITION_NAME.fullmatch(name) else None


def parse_growing_name(name: str) -> int | None:
    """The first id that the name of an open chunk declares, or None for another file."""
    match = _GROWING_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def pending_name(claim: str, chunk: str) -> str:
    """Of a chunk that is written here by the writer with this claim, and not yet in object storage."""
    return f"{TEMPORARY_PREFIX}pending-{claim}-{chunk}"


def parse_pending_name(name: str) -> tuple[str, str] | None:
    """The claim and the chunk's name, or None for another file."""
    match = _PENDING_NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def stored_log_name(log_id: str) -> str:
    """Of the object that says the id of a log."""
    return f"log-{FORMAT_VERSION}-{log_id}.json"


def parse_stored_log_name(name: str) -> tuple[int, str] | None:
    """The format version and the id of a log in object storage, or None for another object."""
    match = _STORED_LOG_NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def parse_chunk_name(name: str) -> tuple[int, int] | None:
    """The ids that a chunk's name declares, or None for a file that is no chunk."""
    match = _CHUNK_NAME.fullmatch(name)
    if match is None:
        return None
    first, end = int(match[1]), int(match[2])
    return (first, end) if first < end else None


def damaged_name(name: str) -> str:
    """Of a file that cannot be used: nobody reads it, and it replaces no other one."""
    return f"{name.removeprefix(TEMPORARY_PREFIX)}.{uuid.uuid4().hex[:8]}.damaged"


def end_of_damaged(names: Iterable[str]) -> int:
    """The id after the last one that a chunk had which cannot be used any more; 0 without any.

    Where it was the only one, the ids go on there, or they would be given twice.
    """
    return max((int(match[2]) for match in map(_DAMAGED_NAME.fullmatch, names) if match), default=0)


def newest_chunk(names: Iterable[str]) -> tuple[int, int] | None:
    """The highest ids that a chunk's name declares, or None if there is no chunk."""
    # Their order is that of their ids; so few names are looked at.
    return next(filter(None, map(parse_chunk_name, sorted(names, reverse=True))), None)


class StateFile(NamedTuple):
    """A state file: how new it is, and the end of the messages that it is about."""

    version: int
    end: int

    @property
    def name(self) -> str:
        return f"{_STATE_PREFIX}{self.version:020d}-{self.end:020d}.json"


def parse_state_name(name: str) -> StateFile | None:
    """What a state file's name declares, or None for another file."""
    match = _STATE_NAME.fullmatch(name)
    return None if match is None else StateFile(int(match[1]), int(match[2]))


def state_files(names: Iterable[str]) -> list[StateFile]:
    """The state files among other files, oldest first."""
    found = (parse_state_name(name) for name in names if name.startswith(_STATE_PREFIX))
    return sorted(file for file in found if file is not None)
