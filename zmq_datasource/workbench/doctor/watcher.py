"""What the publisher's numbers tell of one endpoint. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa
from msgspec.structs import replace

from zmq_datasource.errors import OptionError
from zmq_datasource.messages.framing import Fields, make_framing
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.sequences import Keys, SequenceTracker, runs_of
from zmq_datasource.workbench.doctor.facts import Numbers

__all__ = ["Key", "SequenceWatcher", "parse_framing"]

Key: TypeAlias = tuple[bytes, ...]

_COUNTERS, _GAPS = 100_000, 100_000


def parse_framing(given: dict[str, str]) -> ReadOptions:
    """The source's options with a framing that was found; what cannot be counted with them is not."""
    try:
        return parse(ReadOptions, given)
    except OptionError:  # a filter leaves some of what the publisher counts over
        return parse(ReadOptions, {**given, "sequenceBy": "none"})


def _keys(by: Sequence[str], fields: Fields) -> Keys:
    """For each message, which counter it belongs to; all are of one endpoint."""
    columns = {"publisher": fields.publishers, "topic": fields.topics, "endpoint": None}
    return Keys.joined([_parts(columns[name]) for name in by])


def _parts(column: pa.Array | None) -> Keys:
    return Keys([b""]) if column is None else Keys.of(column.fill_null(b""))


class SequenceWatcher:
    """Follows the numbers of one endpoint, once its framing is known.

    Args:
        options: Of the source, its framing included.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._framing = make_framing(options)
        numbering = options.numbering
        self.by: Sequence[str] = () if numbering is None else numbering.by
        self._start = 0 if numbering is None else numbering.start
        # What was sent before the first message seen is kept apart from what was lost.
        self.tracker = (
            None if numbering is None else SequenceTracker(numbering._replace(whole=False), _COUNTERS, _GAPS)
        )
        self.first: dict[Key, int] = {}
        self.last: dict[Key, int] = {}
        self.malformed = 0

    def follow(self, messages: Sequence[RawMessage]) -> list[tuple[Key, int]]:
        """Track messages in their order; return their counters and numbers."""
        if self._framing is None or not messages:
            return []
        fields = self._framing.decode(raw_of(messages))
        self.malformed += len(fields.malformed)
        if self.tracker is None or fields.sequences is None or not len(fields):
            return []
        keys = _keys(self.by, fields)
        self.tracker.track(runs_of(keys, fields.sequences), lambda _: 0)
        codes = [0] * len(fields) if keys.codes is None else keys.codes.to_pylist()
        numbered = [
            (keys.names[code], number)
            for code, number in zip(codes, fields.sequences.to_pylist(), strict=True)
        ]
        for key, number in numbered:
            self.first.setdefault(key, number)
            self.last[key] = number
        return numbered

    @property
    def missed_first(self) -> int:
        """Messages of the beginning that were sent before the first that came."""
        return sum(max(0, number - self._start) for number in self.first.values())

    @property
    def lost_and_gaps(self) -> tuple[int, int]:
        """Messages that are missing, and in how many gaps."""
        if self.tracker is None:
            return 0, 0
        return self.tracker.totals.lost, sum(1 for gap in self.tracker.gaps if gap.healed is None)

    def has_of(self, other: SequenceWatcher) -> int:
        """How many of the messages that the other misses have come here."""
        if self.tracker is None or other.tracker is None:
            return 0
        found = 0
        for gap in other.tracker.gaps:
            key = gap.key
            if gap.healed is not None or not isinstance(key, tuple) or key not in self.first:
                continue
            first, last = max(gap.first, self.first[key]), min(gap.last, self.last[key])
            missing_here = sum(
                max(0, min(last, own.last) - max(first, own.first) + 1) for own in self.tracker.missing(key)
            )
            found += max(0, last - first + 1 - missing_here)
        return found

    def tell(self, numbers: Numbers) -> Numbers:
        """The same with what is known by now."""
        if self.tracker is None:
            return replace(numbers, malformed=self.malformed)
        totals = self.tracker.totals
        lost, gaps = self.lost_and_gaps
        return replace(
            numbers,
            judged=bool(self.last),
            counters=len(self.last),
            missed_first=self.missed_first,
            lost=lost,
            gaps=gaps,
            duplicates=totals.duplicates,
            late=totals.late,
            restarts=totals.restarts,
            malformed=self.malformed,
        )
