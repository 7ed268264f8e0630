"""Damage at rest: what a disk, a copy or a person does to the files of a log, and the rule that judges it.

The rule: after any damage a reader gets the same rows, or an error of the package that names the file and, where
messages are concerned, their ids. It never gets fewer rows, never an id twice, and never an id with two values.

``do`` damages one file, ``Damage.is_named_in`` judges an error, ``read_log`` reads a whole log as a batch query does.
``machine`` draws damage into the weather. ``KNOWN_HOLES`` lists what the package does not keep yet.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zmq_datasource.options import BatchReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.batch_reader import ZmqLogReader

__all__ = [
    "KINDS",
    "KNOWN_HOLES",
    "VICTIMS",
    "Damage",
    "do",
    "find",
    "pick",
    "read_log",
]

KINDS = ("flip", "cut", "empty", "delete")

_SUBSCRIBER = "readers/subscriber.*.json"
# Files of each victim, below the directory of a log; in the weather that of a bucket has the same names.
VICTIMS: Mapping[str, tuple[str, ...]] = {
    # The rows of a chunk; a flip hits what precedes the footer.
    "chunk": ("chunks/[0-9]*.arrow",),
    "merged": ("merged/*.arrow",),
    # The state of the writer, which the newest chunk carries with its last batch.
    "state": ("chunks/[0-9]*.arrow",),
    "position": ("readers/*.json",),
    # Of a durable subscriber; it is no position of a query.
    "subscriber": (_SUBSCRIBER,),
    # The record of the log's writer. Each change is a new file.
    "head": ("head/*.json",),
    "log.json": ("log.json",),
}

# Damage that the package does not notice, as "kind victim". The drawn weather leaves it out.
KNOWN_HOLES: Mapping[str, str] = {
    "delete subscriber": "a durable subscriber whose record is lost begins again, as new: no other file knows of it",
    "delete newest chunk": "a lost newest chunk is missed only by a reader that has read further",
}

_CHUNK = re.compile(r"(?:[0-9]{20}-)?([0-9]{20})\.arrow")
# At the end of an Arrow file: the length of the footer, and the magic.
_LENGTH_BYTES, _MAGIC_BYTES = 4, 6
# What a message begins with, and the name of the facts among the metadata of a batch, which have the state.
_CONTINUATION, _FACTS_KEY = b"\xff" * 4, b"\5\0\0\0chunk\0"


class Damage(NamedTuple):
    """One damage that was done to one file.

    Attributes:
        victim: A key of ``VICTIMS``.
        before: The content of the file before.
        after: The content afterwards; None if the file was deleted.
        place: The byte and the bit that were flipped, or the size that was left.
    """

    kind: str
    victim: str
    path: Path
    before: bytes
    after: bytes | None
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path.parent.name}/{self.path.name}{f' {self.place}' if self.place else ''}"

    @property
    def first(self) -> int | None:
        """The first id of the messages in the file; None for another file than a sealed chunk."""
        match = _CHUNK.fullmatch(self.path.name)
        return None if match is None else int(match[1])

    @property
    def is_there(self) -> bool:
        """Whether the file is still as the damage left it."""
        try:
            return self.path.read_bytes() == self.after
        except FileNotFoundError:
            return self.after is None

    def heal(self) -> None:
        """Give the file its content of before the damage.

        A deleted head stays away if there is another one: the next writer could not know of it.
        """
        if self.victim == "head" and self.after is None and any(self.path.parent.glob("[0-9]*.json")):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _overwrite(self.path, self.before)

    def is_named_in(self, message: str) -> bool:
        """Whether an error tells what is damaged: the file, or the first of its ids, or for ``log.json`` its log."""
        if self.path.name in message:
            return True
        if self.victim == "log.json":
            return "/".join(self.path.parent.parts[-2:]) in message  # that of a bucket begins elsewhere
        if self.first is None:
            # Nothing tells that a position was there: the error names the messages that it costs.
            return re.search(r"\bids? (below )?[0-9]+", message) is not None
        return re.search(rf"\b{self.first}\b", message) is not None


def find(root: Path, victim: str) -> list[Path]:
    """The files of a victim below a root, in the order of their names."""
    found = {path for glob in VICTIMS[victim] for path in root.glob(glob)}
    if victim == "position":
        found -= set(root.glob(_SUBSCRIBER))
    return sorted(
        found,
        key=lambda path: (path.name, str(path)),
    )


def pick(root: Path, kind: str, victim: str, chance: random.Random) -> Path | None:
    """One file of a victim, or None; of chunks every second time the newest, which no query may have read yet."""
    found = find(root, victim)
    if victim == "state":
        # The rest of the newest chunk is damaged as a chunk.
        found = [path for path in found if kind == "flip"][-1:]
    if victim == "chunk" and f"{kind} newest chunk" in KNOWN_HOLES:
        found = found[:-1]
    if not found:
        return None
    return found[-1] if chance.random() < 0.5 else chance.choice(found)


def do(kind: str, victim: str, path: Path, chance: random.Random) -> Damage | None:
    """Damage a file in place. Returns None if there is nothing to damage: the file is empty."""
    before = path.read_bytes()
    if not before:
        return None
    place, after = "", None
    match kind:
        case "flip":
            place, after = _flip(before, chance.choice(_region(before, victim)), chance.randrange(8))
        case "cut":
            size = chance.randrange(len(before))
            place, after = f"to {size} of {len(before)} bytes", before[:size]
        case "empty":
            after = b""
        case "delete":
            after = None
        case _:
            raise ValueError(kind)
    if after is None:
        path.unlink()
    else:
        _overwrite(path, after)
    return Damage(kind, victim, path, before, after, place)


def _flip(content: bytes, byte: int, bit: int) -> tuple[str, bytes]:
    """Content with one bit flipped, and the place in words."""
    changed = bytearray(content)
    changed[byte] ^= 1 << bit
    return f"byte {byte} of {len(content)}, bit {bit}", bytes(changed)


def _footer_of(content: bytes) -> range:
    """The bytes of an Arrow file's footer, which has the schema with its metadata, and the places of the batches."""
    end = len(content) - _LENGTH_BYTES - _MAGIC_BYTES
    length = int.from_bytes(content[end : end + _LENGTH_BYTES], "little")
    return range(max(end - length, 0), len(content))


def _state_of(content: bytes) -> range:
    """The bytes of the message of a chunk's last batch that say what it is, and carry the state."""
    start = content.rindex(_CONTINUATION, 0, content.rindex(_FACTS_KEY))
    return range(start, start + 8 + int.from_bytes(content[start + 4 : start + 8], "little"))


def _region(content: bytes, victim: str) -> range:
    """Where a flip hits: in a chunk its rows or its state, elsewhere anything."""
    if not content.startswith(b"ARROW1"):
        return range(len(content))
    return _state_of(content) if victim == "state" else range(_footer_of(content).start)


def _overwrite(path: Path, content: bytes) -> None:
    """Change a file in place, as a disk does: open descriptors see it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, len(content))
        os.pwrite(descriptor, content, 0)
    finally:
        os.close(descriptor)


def read_log(**options: str) -> Iterator[tuple[int, bytes]]:
    """The id and value of every message of a log, as a batch query reads it.

    Raises:
        LogError: The log is damaged; see the message.
    """
    reader = ZmqLogReader(parse(BatchReadOptions, options))
    for partition in reader.partitions():
        for batch in reader.read(partition):
            for row in batch.select(["id", "value"]).to_pylist():
                yield row["id"], row["value"]
