"""The envelope of what a log carries for its filler: one JSON object, as a full state and as what has changed since.

``counters`` says what was counted, ``sequences`` what the publishers' numbers tell (null without any), and where
transactions are received ``transactions`` says which are in the log. ``log.state`` keeps the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from zmq_datasource.counters import SourceCounters

__all__ = ["CarriedState", "Envelope"]


class Envelope(NamedTuple):
    """A carried state that was read again; both are None in a log without any.

    Attributes:
        base: The last full state.
        changes: What has changed since.
    """

    base: dict[str, Any] | None
    changes: dict[str, Any] | None

    @classmethod
    def of(cls, full: bytes | None, delta: bytes | None) -> Envelope:
        """Read what ``log.state`` has kept."""
        return cls(*(None if text is None else msgspec.json.decode(text) for text in (full, delta)))

    @property
    def latest(self) -> dict[str, Any] | None:
        """Where the values are that are always said in full."""
        return self.changes or self.base


class CarriedState(ABC):
    """A ``log.state.Carried``: counters, and what else its filler must not forget, in sections of its own.

    Args:
        counters: Kept beside.
    """

    def __init__(self, counters: SourceCounters) -> None:
        self._counters = counters
        self._changed = False
        self._base_is_foreign = False  # then what changes does not add to what was kept

    @property
    def counters(self) -> SourceCounters:
        """What is counted, and kept beside the sections."""
        return self._counters

    @property
    def changed(self) -> bool:
        """Whether there is anything that was not handed over yet."""
        return self._changed

    @property
    def large(self) -> bool:
        """Whether the next hand-over should be ``full``."""
        return self._base_is_foreign or self._much_has_changed()

    def full(self) -> bytes:
        """The whole state, as the log keeps it."""
        self._base_is_foreign = False
        return self._encode(self._all())

    def delta(self) -> bytes:
        """What has changed since the last ``full``."""
        return self._encode(self._changes())

    def _encode(self, sections: Mapping[str, Any]) -> bytes:
        self._changed = False
        return msgspec.json.encode({"counters": self._counters.to_json(), **sections})

    def restore(self, full: bytes | None, delta: bytes | None) -> bool:
        """Go on from what was kept.

        Returns:
            Whether that was possible: if it is about messages that were counted in another way, only the counters
            are restored.
        """
        envelope = Envelope.of(full, delta)
        if envelope.latest is None:
            return True
        self._counters.restore(envelope.latest["counters"])
        return self._restore(envelope)

    @abstractmethod
    def _much_has_changed(self) -> bool:
        """Whether all of it is better kept than what has changed."""

    @abstractmethod
    def _all(self) -> Mapping[str, Any]:
        """The sections in full; what changes from now on is the next ``_changes``."""

    @abstractmethod
    def _changes(self) -> Mapping[str, Any]:
        """The sections, with what has changed since the last ``_all``."""

    @abstractmethod
    def _restore(self, envelope: Envelope) -> bool:
        """Go on from the sections of an envelope that is not empty; see ``restore``."""
