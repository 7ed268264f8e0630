"""The keys of a log's objects, below its directory or bucket."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = [
    "DEAD_LETTERS_NAME",
    "END_PREFIX",
    "FORMAT_VERSION",
    "LOCK_NAME",
    "LOCK_WAIT_SECONDS",
    "LOG_NAME",
    "PARTITION",
    "READERS_LOCK_NAME",
    "READERS_NAME",
    "STAGING_NAME",
    "STOPS_NAME",
    "TEMPORARY_PREFIX",
    "TERMS_NAME",
    "Chunk",
    "chunk_name",
    "compact_name",
    "growing_name",
    "parse_chunk_name",
    "parse_growing_name",
    "parse_partition_name",
]

FORMAT_VERSION = 2
# The log partition that every log has, and most logs alone.
PARTITION = 0
LOG_NAME = "log.json"
LOCK_NAME = "writer.lock"
# For so long a process that ends, or was killed a moment ago, may hold a log's lock: through its last drain or write.
LOCK_WAIT_SECONDS = 15.0
READERS_NAME = "readers"
READERS_LOCK_NAME = f"{READERS_NAME}/placing.lock"
STAGING_NAME = "staging"
# Messages that did not fit, where deadLetterLocation is not set.
DEAD_LETTERS_NAME = "dead-letters"
# What was lost when receiving was stopped.
STOPS_NAME = "stops.json"
# On which terms the last writer has received.
TERMS_NAME = "terms.json"
# An object of this name, beside the partitions, tells receivers on executors to end.
END_PREFIX = "end-"
TEMPORARY_PREFIX = "."

_PARTITION_NAME = re.compile(r"0|[1-9][0-9]{0,9}")
# A chunk that is being written group by group; see log.growing.
_GROWING_NAME = re.compile(r"\.open-([0-9]{20})\.arrow")
_CHUNK_NAME = re.compile(r"([0-9]{20})\.arrow")


class Chunk(NamedTuple):
    """One sealed chunk of the log: the ids ``first`` to ``end - 1`` in ``size`` bytes.

    Its name says only ``first``. The end is the first id of the next chunk, and of the newest what its file says.

    ``sealed_at`` is the object's modification time in seconds since the epoch, and ``writer`` the incarnation that has
    given out the ids, where that is known.
    """

    first: int
    end: int
    size: int
    sealed_at: float
    writer: str | None = None

    @property
    def name(self) -> str:
        return chunk_name(self.first)


def chunk_name(first: int) -> str:
    return f"{first:020d}.arrow"


def growing_name(first: int) -> str:
    return f"{TEMPORARY_PREFIX}open-{first:020d}.arrow"


def compact_name(first: int) -> str:
    """Of what is written beside an open chunk to take its place; after a crash nobody needs it."""
    return f"{TEMPORARY_PREFIX}compact-{first:020d}.arrow"


def parse_partition_name(name: str) -> int | None:
    """The number of the log partition in a directory of this name, or None for another directory."""
    return int(name) if _PARTITION_NAME.fullmatch(name) else None


def parse_growing_name(name: str) -> int | None:
    """The first id that the name of an open chunk declares, or None for another file."""
    match = _GROWING_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def parse_chunk_name(name: str) -> int | None:
    """The first id that a chunk's name declares, or None for an object that is no chunk."""
    match = _CHUNK_NAME.fullmatch(name)
    return None if match is None else int(match[1])
