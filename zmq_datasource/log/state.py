"""The writer's whole state, saved in each chunk: counters, sequences, and which transactions are in the log.

Each chunk has the state after its rows, as bytes that are opaque for the log (``facts``). A change without a row is
only in memory until the next row is written.

A state is one JSON object with a member, or section, for each part: ``counters``, ``sequences``, ``transactions``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import LogStorage


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
        """The whole state, as of the messages that were appended. The receiving thread asks for it at each cut."""
        return msgspec.json.encode({"counters": self._counters.to_json(), **self._sections()})

    def restore(self, saved: bytes) -> None:
        """Continue from a saved state. If the messages were numbered in another way, only the counters continue."""
        if sections := sections_of(saved):
            self._counters.restore(msgspec.json.decode(sections["counters"]))
            self._restore(sections)

    @abstractmethod
    def _sections(self) -> Mapping[str, Any]:
        """The other sections, as values for JSON."""

    @abstractmethod
    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> None:
        """Continue from the sections of a saved state; see ``restore``."""


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
            return read_facts(storage, chunk_name(newest)).state

    def read() -> bytes:
        chunk = max(storage.chunks(), default=None)
        return b"" if chunk is None else read_facts(storage, chunk.name).state

    return storage.from_listing(read)
