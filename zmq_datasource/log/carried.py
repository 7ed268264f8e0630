"""What a log carries for its filler: one JSON object with a member for each part.

``counters`` says what was counted, ``sequences`` what the publishers' numbers tell, and where transactions are received
``transactions`` says which are in the log. ``log.state`` keeps the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import msgspec

from zmq_datasource.counters import SourceCounters

__all__ = ["CarriedState", "sections_of"]


def sections_of(saved: bytes) -> dict[str, msgspec.Raw]:
    """The parts of a state, each as JSON text; none of an empty one."""
    return msgspec.json.decode(saved, type=dict[str, msgspec.Raw]) if saved else {}


class CarriedState(ABC):
    """A ``log.state.Carried``: counters, and what else its filler must not forget, in sections of its own.

    Args:
        counters: Kept beside.
    """

    def __init__(self, counters: SourceCounters) -> None:
        self._counters = counters

    @property
    def counters(self) -> SourceCounters:
        """What is counted, and kept beside the sections."""
        return self._counters

    def state(self) -> bytes:
        """All of it, as the log keeps it."""
        return msgspec.json.encode({"counters": self._counters.to_json(), **self._sections()})

    def restore(self, saved: bytes) -> bool:
        """Go on from what was kept.

        Returns:
            Whether that was possible: if it is about messages that were counted in another way, only the counters
            are restored.
        """
        sections = sections_of(saved)
        if not sections:
            return True
        self._counters.restore(msgspec.json.decode(sections["counters"]))
        return self._restore(sections)

    @abstractmethod
    def _sections(self) -> Mapping[str, Any]:
        """The other sections, for JSON."""

    @abstractmethod
    def _restore(self, sections: Mapping[str, msgspec.Raw]) -> bool:
        """Go on from the sections of a state; see ``restore``."""
