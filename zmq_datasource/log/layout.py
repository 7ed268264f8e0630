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
# How often a listing is repeated. An object that was listed may be deleted before it is opened.
MOST_LISTINGS = 10
READERS_NAME = "readers"
MERGED_NAME = "merged"

_NAME = re.compile(rf"(?:{MERGED_NAME}/([0-9]{{20}})-)?([0-9]{{20}})\.arrow")


class Chunk(NamedTuple):
    """One sealed chunk.

    Attributes:
        first: Its first id. A merged chunk may hold lower ids, which are deleted.
        end: The id after its last one. It is the first id of the next chunk; the newest chunk has it in its facts.
        size: Its bytes; 0 for a lost chunk, which has no file.
        sealed_at: The modification time of its object, or the time of its writer's clock, in seconds since the epoch.
        merged: The name of a merged chunk; None for a chunk as it was sealed.
        modified: The modification time of its object, by which a reader recognises it; None if any object will do.
    """

    first: int
    end: int
    size: int
    sealed_at: float
    merged: str | None = None
    modified: float | None = None

    @property
    def name(self) -> str:
        return self.merged or chunk_name(self.first)


def chunk_name(first: int) -> str:
    return f"{first:020d}.arrow"


def merged_name(first: int, end: int) -> str:
    """The name of a merged chunk. Names are in the order of ends, so the first one after an id holds that id."""
    return f"{MERGED_NAME}/{end:020d}-{first:020d}.arrow"


def key_of(name: str) -> str:
    """The key of a chunk."""
    return name if name.startswith(f"{MERGED_NAME}/") else f"{CHUNKS_NAME}/{name}"


def parse_name(name: str) -> tuple[int, int | None] | None:
    """The first id in the name of a chunk, and the end in that of a merged one; None for another object."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[2]), None if match[1] is None else int(match[1]))


def first_id_in(name: str) -> int:
    """The id of the first row in the file of a chunk with this name."""
    ids = parse_name(name)
    assert ids is not None, name
    return ids[0]
