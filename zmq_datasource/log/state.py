"""The writer's whole state, saved in each chunk: counters, sequences, and which transactions are in the log.

For the log it is opaque bytes. The last batch of a chunk has one entry with it: a checksum, and the compressed state.
The checksum also covers the chunk's end, and a chunk without state has the entry too. So neither a missing state nor
the state of an earlier batch passes for the right one. A change without a row is only in memory until the next row is
written.

A state is one JSON object with a member, or section, for each part: ``counters``, ``sequences``, ``transactions``.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import xxhash

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.chunk import facts_of, read_metadata
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import MOST_LISTINGS, LogStorage

_STATE = b"state"
# The state of 10,000 publishers takes 100 kB and 1.3 ms. zlib takes five times as long for the same size, lz4 half as
# long for twice the size, and higher levels of zstd gain nothing.
_CODEC, _LEVEL = "zstd", 1


class Carried(Protocol):
    """An object with a state that the log keeps. The receiving thread calls ``state`` when it hands rows over."""

    def state(self) -> bytes:
        """The whole state, which describes exactly the messages that were appended so far."""


def sections_of(saved: bytes) -> dict[str, msgspec.Raw]:
    """The sections of a state, each as JSON text; an empty state has none."""
    return msgspec.json.decode(saved, type=dict[str, msgspec.Raw]) if saved else {}


class CarriedState(ABC):
    """The base class of states: counters, and the sections of a subclass.

    Args:
        counters: The counters, which become the section ``counters``.
    """

    def __init__(self, counters: SourceCounters) -> None:
        self._counters = counters

    @property
    def counters(self) -> SourceCounters:
        """The counters."""
        return self._counters

    def state(self) -> bytes:
        """The state, as the log keeps it."""
        return msgspec.json.encode({"counters": self._counters.to_json(), **self._sections()})

    def restore(self, saved: bytes) -> bool:
        """Continue from a saved state.

        Returns:
            Whether all sections were restored. If the messages were numbered in another way, only the counters are.
        """
        sections = sections_of(saved)
        if not sections:
            return True
        self._counters.restore(msgspec.json.decode(sections["counters"]))
        return self._restore(sections)

    @abstractmethod
    def _sections(self) -> Mapping[str, Any]:
        """The other sections, as values for JSON."""

    @abstractmethod
    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> bool:
        """Continue from the sections of a saved state; see ``restore``."""


def state_metadata(state: bytes, end: int) -> dict[bytes, bytes]:
    """The metadata entry of the last batch of a chunk.

    Args:
        state: The state; empty for none.
        end: The id after the last message.
    """
    packed = pa.Codec(_CODEC, _LEVEL).compress(state, asbytes=True) if state else b""
    # Readers of Arrow files in other languages refuse metadata that is not text.
    text = base64.b64encode(packed)
    return {_STATE: _checksum(text, end) + b" " + text}


def state_of(metadata: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The entry of ``state_metadata`` in the metadata of a batch."""
    return {_STATE: metadata[_STATE]} if _STATE in metadata else {}


def read_saved_state(storage: LogStorage, newest: int | None = None) -> bytes:
    """Read the state of the newest chunk; empty if there is none. The log may be written at the same time.

    Args:
        newest: The first id of the newest chunk, if it is known; otherwise the chunks are listed.

    Raises:
        DamagedChunkError: The chunk or its state is damaged.
        DiskFaultError: The chunk cannot be opened now.
    """
    if newest is not None:
        with suppress(FileNotFoundError):  # it was deleted, so there is a newer one
            return _read(storage, newest)
    for _ in range(MOST_LISTINGS):
        chunk = storage.newest_chunk()
        if chunk is None:
            return b""
        with suppress(FileNotFoundError):
            return _read(storage, chunk.first)
    raise LogFormatError(f"reading {storage}: its newest chunk is listed, and cannot be opened")


def _read(storage: LogStorage, first: int) -> bytes:
    name = chunk_name(first)
    metadata = read_metadata(storage, name)
    facts = facts_of(storage, name, metadata)
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
