"""The keys of a log's objects, below its directory or bucket."""

from __future__ import annotations

import re
from typing import NamedTuple

FORMAT_VERSION = 3
# The directory of the chunks, so that listing them lists nothing else.
CHUNKS_NAME = "chunks"
LOG_NAME = "log.json"
HEAD_NAME = "head"
LOCK_NAME = "writer.lock"
# How long to wait for the lock of a process that is ending: it may drain its sockets, or finish a write.
LOCK_WAIT_SECONDS = 15.0
READERS_NAME = "readers"
# No reader has this name: it has a dot, and does not begin with ``subscriber.``.
READERS_LOCK_NAME = f"{READERS_NAME}/all.records.lock"
STAGING_NAME = "staging"
# The options with which the last writer has received.
TERMS_NAME = "terms.json"
TEMPORARY_PREFIX = "."

# An open chunk; see ``open_chunk``.
_GROWING_NAME = re.compile(r"\.open-([0-9]{20})\.arrow")
_CHUNK_NAME = re.compile(r"([0-9]{20})\.arrow")


class Chunk(NamedTuple):
    """One sealed chunk.

    Attributes:
        first: Its first id, which is its name.
        end: The id after its last one. It is the first id of the next chunk; the newest chunk has it in its facts.
        size: Its bytes.
        sealed_at: The modification time of its object, or the time of its writer's clock, in seconds since the epoch.
        writer: The incarnation of the writer that has given out its ids; None if that is not known.
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


def open_chunk_name(first: int) -> str:
    return f"{TEMPORARY_PREFIX}open-{first:020d}.arrow"


def compact_name(first: int) -> str:
    """The name of the compact copy of an open chunk. After a crash the copy is not used."""
    return f"{TEMPORARY_PREFIX}compact-{first:020d}.arrow"


def parse_open_chunk_name(name: str) -> int | None:
    """The first id in the name of an open chunk; None for another file."""
    match = _GROWING_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def parse_chunk_name(name: str) -> int | None:
    """The first id in the name of a chunk; None for another object."""
    match = _CHUNK_NAME.fullmatch(name)
    return None if match is None else int(match[1])
