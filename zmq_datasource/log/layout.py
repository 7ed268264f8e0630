"""The keys of a log's objects, below its directory or bucket."""

from __future__ import annotations

import math
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
    """A chunk, or a part of it that is to be read.

    Attributes:
        first: Its first id. The file may hold lower ids.
        end: The id after its last one. It is the first id of the next chunk; the newest chunk has it in its facts.
        size: Its bytes; 0 for a lost chunk, which has no file.
        sealed_at: The modification time of its object, or the time of its writer's clock, in seconds since the epoch.
        file: Its name; None for a whole chunk as it was sealed, whose name follows from its first id.
        modified: The modification time of its object, by which a reader recognises it; None if any object will do.
    """

    first: int
    end: int
    size: int
    sealed_at: float
    file: str | None = None
    modified: float | None = None

    @property
    def name(self) -> str:
        return self.file or chunk_name(self.first)

    @property
    def is_merged(self) -> bool:
        return self.name.startswith(f"{MERGED_NAME}/")

    def part(self, start: int, end: int) -> Chunk:
        """Its ids in ``[start, end)``, with their share of its bytes: all its messages count as equally long."""
        first, end = max(start, self.first), min(end, self.end)
        size = math.ceil(self.size * (end - first) / (self.end - self.first))
        return self._replace(first=first, end=end, size=size, file=self.name)


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
