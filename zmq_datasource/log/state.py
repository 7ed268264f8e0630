"""What the log keeps for its writer beside the rows: opaque bytes, whole in each chunk, with a checksum.

The last batch of a chunk has one entry for it: the checksum, then the state, compressed. The checksum also covers the
id after the chunk's last message, and a chunk whose writer had no state has it, too. So neither a chunk that hides its
state nor the state of an earlier batch passes for what was written. The newest chunk has all there is to know; what has
changed without a row since is in memory until the next row.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import pyarrow as pa
import xxhash

from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.chunk import facts_of, read_metadata
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import LogStorage

__all__ = ["Carried", "read_saved_state", "state_metadata", "state_of"]

_STATE = b"state"
# Of the state of 10,000 publishers: 100 kB in 1.3 ms; zlib takes five times as long for the same size, lz4 half as long
# for twice the size, and more effort of zstd gains nothing.
_CODEC, _LEVEL = "zstd", 1
_LISTINGS = 10


class Carried(Protocol):
    """Whose state the log keeps. Called by the receiving thread, when rows are handed over."""

    def state(self) -> bytes:
        """The whole state; it is about the messages that were appended so far, exactly."""


def state_metadata(state: bytes, end: int) -> dict[bytes, bytes]:
    """What the last batch of a chunk or a group carries.

    Args:
        state: Empty if the writer has none.
        end: The id after the last message.
    """
    packed = pa.Codec(_CODEC, _LEVEL).compress(state, asbytes=True) if state else b""
    # Readers of Arrow files in other languages refuse metadata that is no text.
    text = base64.b64encode(packed)
    return {_STATE: _checksum(text, end) + b" " + text}


def state_of(metadata: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry that ``state_metadata`` made, among the metadata of a batch."""
    return {_STATE: metadata[_STATE]} if _STATE in metadata else {}


def read_saved_state(storage: LogStorage, newest: int | None = None) -> bytes:
    """What the newest chunk carries; empty if there is nothing. The log may be written at the same time.

    Args:
        newest: The first id of the newest chunk, where it is known; else the chunks are listed.

    Raises:
        DamagedChunkError: It is not what was written.
        DiskFaultError: It cannot be opened now.
    """
    if newest is not None:
        with suppress(FileNotFoundError):  # there is a newer one since, and it was deleted
            return _read(storage, newest)
    for _ in range(_LISTINGS):
        chunk = storage.newest_chunk()
        if chunk is None:
            return b""
        with suppress(FileNotFoundError):
            return _read(storage, chunk.first)
    raise LogFormatError(f"reading {storage}: its newest chunk is listed, and is not there")


def _read(storage: LogStorage, first: int) -> bytes:
    name = chunk_name(first)
    metadata = read_metadata(storage, name)
    facts = facts_of(storage, first, metadata)
    found = metadata.get(_STATE)
    checksum, _, text = (found or b"").partition(b" ")
    if checksum != _checksum(text, facts.end):
        what = "there is none" if found is None else "its checksum differs"
        raise DamagedChunkError.of(
            f"reading the state in chunk {storage.path_of(name)}: {what}; the file was changed after it was written"
        )
    if not text:
        return b""
    packed = pa.BufferReader(base64.b64decode(text))
    state: bytes = pa.CompressedInputStream(packed, _CODEC).read()
    return state


def _checksum(text: bytes, end: int) -> bytes:
    return xxhash.xxh3_64_hexdigest(end.to_bytes(8, "little") + text).encode()
