"""The writer's whole state, saved in each chunk: counters, sequences, and which transactions are in the log.

Each chunk has the state after its rows, as bytes that are opaque for the log (``facts``). A change without a row is
only in memory until the next row is written.

A state is one JSON object with a member, or section, for each part: ``counters``, ``sequences``, ``transactions``.
What fills a log has such a state, and figures that are only in memory (``FillerFacts``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import SourceCounters
from zmq_datasource.log.chunk import read_facts
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.sequences import Totals


def sections_of(saved: bytes) -> dict[str, msgspec.Raw]:
    """The sections of a state, each as JSON text; an empty state has none."""
    return msgspec.json.decode(saved, type=dict[str, msgspec.Raw]) if saved else {}


class FillerFacts(NamedTuple):
    """The figures of a filler. A figure that it does not have keeps its default.

    Attributes:
        pending: Messages in memory that are not appended to the log yet.
        pending_bytes: Their bytes.
        appending: Whether some messages are being appended, and counted neither here nor in the log.
        refused: Messages that the log has refused for good. They are lost, and receiving ends.
        left: Whether the sockets were closed with unread messages that no other receiver gets.
        totals: The totals of the publishers' sequences; None if messages are not numbered.
        publishers: How many publishers are known; None as for ``totals``.
        gaps: How many gaps the table of gaps has; None as for ``totals``.
    """

    pending: int = 0
    pending_bytes: int = 0
    appending: bool = False
    refused: int = 0
    left: bool = False
    totals: Totals | None = None
    publishers: int | None = None
    gaps: int | None = None


class CarriedState(ABC):
    """The base class of states: counters, and the sections of a subclass.

    Args:
        counters: The counters, which become the section ``counters``.
    """

    def __init__(self, counters: SourceCounters) -> None:
        self.counters = counters

    def state(self) -> bytes:
        """The whole state, as of the messages that were appended. The receiving thread asks for it at each cut."""
        return msgspec.json.encode({"counters": self.counters.to_json(), **self._sections()})

    def restore(self, saved: bytes) -> None:
        """Continue from a saved state. If the messages were numbered in another way, only the counters continue."""
        if sections := sections_of(saved):
            self.counters.restore(msgspec.json.decode(sections["counters"]))
            self._restore(sections)

    @abstractmethod
    def _sections(self) -> Mapping[str, Any]:
        """The other sections, as values for JSON."""

    @abstractmethod
    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> None:
        """Continue from the sections of a saved state; see ``restore``."""


def read_saved_state(storage: LogStorage) -> bytes:
    """Read the state of the newest chunk; empty if there is none. The log may be written at the same time.

    Raises:
        DamagedChunkError: The chunk or its state is damaged.
        DiskFaultError: The chunk cannot be opened now.
    """

    def read() -> bytes:
        chunk = max(storage.chunks(), default=None)
        return b"" if chunk is None else read_facts(storage, chunk.name).state

    return storage.from_listing(read)
