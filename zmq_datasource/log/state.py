"""What the log keeps for its writer beside the rows: opaque text, versioned, checked.

Each chunk carries what has changed (a *delta*) since a *base*, a state file, if there is one. A checksum, which each
chunk has, covers the state and the id after the chunk's last message. So neither a chunk that hides its state nor the
state of an earlier batch passes for what was written. A
state file whose version is above that of the newest chunk stands alone: it was written when
something had changed though no row had come. But one that is about messages which are not in
the log was to be the base of a chunk that a crash prevented, and does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import xxhash

from zmq_datasource.errors import DamagedChunkError, LogFormatError
from zmq_datasource.log.chunk import read_metadata
from zmq_datasource.log.layout import StateFile, chunk_name, newest_chunk, state_files
from zmq_datasource.log.storage import LogStorage

__all__ = [
    "Carried",
    "SavedState",
    "StateRecord",
    "StateRecorder",
    "carried_by",
    "no_saved_state",
    "read_saved_state",
]

_STATE, _VERSION, _BASE, _CHECKSUM = b"state", b"state.version", b"state.base", b"state.xxh3"
_MOST_DIGITS = 18  # of a version
_LISTINGS = 10


class Carried(Protocol):
    """Whose state the log keeps. Called by the receiving thread, when a chunk is cut."""

    @property
    def changed(self) -> bool:
        """Whether there is anything that was not handed over yet."""

    @property
    def large(self) -> bool:
        """Whether the next hand-over should be ``full``."""

    def full(self) -> bytes:
        """The whole state, as UTF-8 text."""

    def delta(self) -> bytes:
        """What has changed since the last ``full``, as UTF-8 text."""


class SavedState(NamedTuple):
    """What was kept last. Both are None in a log without any."""

    version: int = 0
    base: int | None = None
    full: bytes | None = None
    delta: bytes | None = None


class StateRecord(NamedTuple):
    """What is to be kept at one moment: in a state file, in the chunk's metadata, both, or nothing."""

    file: StateFile | None = None
    content: bytes = b""
    metadata: Mapping[bytes, bytes] = MappingProxyType({})


class StateRecorder:
    """Makes records of a changing state, each with a version of its own. Belongs to the receiving thread.

    Args:
        carried: Whose state; without one there is nothing to keep.
    """

    def __init__(self, carried: Carried | None) -> None:
        self._carried = carried
        self._version = 0
        self._base: int | None = None

    def go_on_from(self, saved: SavedState) -> None:
        """Number versions after those that there are."""
        self._version, self._base = saved.version, saved.base

    def record(self, end: int, rows: bool, keep: bool) -> StateRecord:
        """What to keep now. It is about the messages below ``end``, exactly.

        Args:
            rows: Whether a chunk is to carry it.
            keep: Whether to keep a changed state also without one.
        """
        carried = self._carried
        if carried is None:
            return StateRecord(metadata=_chunk_metadata({}, end) if rows else {})
        if not (rows or (keep and carried.changed)):
            return StateRecord()
        record = StateRecord()
        if not rows or carried.large:
            self._version += 1
            self._base = self._version
            record = StateRecord(StateFile(self._version, end), _state_content(self._version, carried.full()))
        if rows:
            self._version += 1
            state = {
                _VERSION: b"%d" % self._version,
                _BASE: b"" if self._base is None else b"%d" % self._base,
                _STATE: carried.delta(),
            }
            record = record._replace(metadata=_chunk_metadata(state, end))
        return record


def _chunk_metadata(state: Mapping[bytes, bytes], end: int) -> dict[bytes, bytes]:
    """What a chunk that ends before the id ``end`` carries as metadata; without a state, too, it has a checksum."""
    return {**state, _CHECKSUM: _checksum(state, end)}


def _state_content(version: int, full: bytes) -> bytes:
    """What a state file holds: a line with its checksum, then the state."""
    return _checksum({_VERSION: str(version).encode(), _BASE: b"", _STATE: full}) + b"\n" + full


def read_saved_state(storage: LogStorage) -> SavedState:
    """What was kept last; the log may be written at the same time.

    Raises:
        DamagedChunkError: It is not what was written.
        LogFormatError: A state file that it needs is missing.
    """
    for _ in range(_LISTINGS - 1):
        try:
            return _read(storage)
        except FileNotFoundError:
            continue  # replaced by a newer one meanwhile
    try:
        return _read(storage)
    except FileNotFoundError as e:
        raise LogFormatError(
            f"reading {e.filename}: the newest chunk needs it, and it is missing; restore it, or give the query a new "
            "walLocation and a new checkpoint"
        ) from e


def no_saved_state(storage: LogStorage) -> SavedState:
    """Nothing, but newer than whatever there is that cannot be used."""
    names = storage.names()
    newest = newest_chunk(names)
    # What a chunk says of its version may itself be damaged.
    said = b"" if newest is None else read_metadata(storage, chunk_name(*newest)).get(_VERSION, b"")
    carried = int(said) if said.isdigit() and len(said) <= _MOST_DIGITS else 0
    return SavedState(max([carried, *(file.version for file in state_files(names))]))


def _read(storage: LogStorage) -> SavedState:
    names = storage.names()
    files, newest = state_files(names), newest_chunk(names)
    carried = _carried(storage, newest)
    end = 0 if newest is None else newest[1]
    alone = [file for file in files if file.version > carried.version and file.end <= end]
    if alone:
        return SavedState(alone[-1].version, alone[-1].version, _read_file(storage, alone[-1]))
    if carried.base is None:
        return carried
    base = next((file for file in files if file.version == carried.base), None)
    if base is None:
        raise FileNotFoundError(2, "no such state", f"state file {carried.base} of {storage.root}")
    return carried._replace(full=_read_file(storage, base))


def _carried(storage: LogStorage, chunk: tuple[int, int] | None) -> SavedState:
    return SavedState() if chunk is None else carried_by(storage, chunk_name(*chunk), chunk[1])


def carried_by(storage: LogStorage, name: str, end: int) -> SavedState:
    """The state that the file of a chunk carries; an empty one if the writer of the chunk had none.

    Args:
        end: The id after the chunk's last message.

    Raises:
        DamagedChunkError: It is not what was written.
        DiskFaultError: It cannot be opened now.
    """
    metadata = read_metadata(storage, name)
    if metadata.get(_CHECKSUM) != _checksum(metadata, end):
        what = "its checksum differs" if _CHECKSUM in metadata else "it has no checksum"
        raise DamagedChunkError.of(
            f"reading the state in chunk {storage.path_of(name)}: {what}; the file was changed after it was written"
        )
    if not metadata.get(_VERSION):
        return SavedState()
    base = int(metadata[_BASE]) if metadata.get(_BASE) else None
    return SavedState(int(metadata[_VERSION]), base, None, metadata[_STATE])


def _read_file(storage: LogStorage, file: StateFile) -> bytes:
    checksum, _, full = storage.read_state(file).partition(b"\n")
    if _state_content(file.version, full) != checksum + b"\n" + full:
        raise DamagedChunkError.of(
            f"reading {storage.path_of(file.name)}: its checksum differs; the file was changed after it "
            "was written"
        )
    return full


def _checksum(metadata: Mapping[bytes, bytes], end: int | None = None) -> bytes:
    """The checksum of a state; in a chunk it also covers the id after the chunk's last message."""
    digest = xxhash.xxh3_64()
    if end is not None:
        digest.update(end.to_bytes(8, "little"))
    for name in (_VERSION, _BASE, _STATE):
        value = metadata.get(name, b"")
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value)
    return digest.hexdigest().encode()
