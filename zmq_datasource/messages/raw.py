"""Messages as they came from a socket, and as they go to one: columns of their frames.

Most messages are a value, or a topic and a value, with something between them in some protocols. So the first and the
last frame are columns of their own, and a message costs nothing more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import binary_of, integers_of, number, only_rows
from zmq_datasource.messages.schemas import FRAMES

__all__ = ["RawMessage", "RawMessages", "raw_of"]

# One of them as Python's bytes, for who looks at messages one by one: of a single frame, or a list of frames.
RawMessage: TypeAlias = bytes | list[bytes]

_ONE = number(1, pa.int32())


@dataclass(frozen=True)
class RawMessages:
    """Columns of equal length.

    Attributes:
        first: Binary; null where the last frame is the only one.
        last: Binary, without nulls.
        middle: Lists of the frames between them (``FRAMES``); None if no message has any.
    """

    first: pa.Array
    last: pa.Array
    middle: pa.ListArray | None = None

    @classmethod
    def of_lists(cls, lists: pa.ListArray) -> RawMessages:
        """From lists of frames, of one or more each."""
        frames, offsets, counts = lists.values, lists.offsets, pc.list_value_length(lists)
        begins, ends = offsets[:-1], pc.subtract(offsets[1:], _ONE)
        several = pc.greater(counts, _ONE)
        if not several.true_count:
            return cls(pa.nulls(len(lists), pa.binary()), frames.take(ends))
        first = frames.take(pc.if_else(several, begins, pa.nulls(1, pa.int32())[0]))
        middle = None
        if pc.max(counts).as_py() > 2:
            places = pa.arange(offsets[0].as_py(), offsets[-1].as_py()).cast(pa.int32())
            outer = pc.is_in(places, value_set=pa.concat_arrays([begins, ends]))
            middle = _lists(
                frames.take(places.filter(pc.invert(outer))),
                pc.max_element_wise(pc.subtract(counts, number(2, pa.int32())), number(0, pa.int32())),
            )
        return cls(first, frames.take(ends), middle)

    def __len__(self) -> int:
        return len(self.last)

    def counts(self) -> pa.Array:
        """How many frames each message has (32 bits)."""
        counts = pc.add(self.first.is_valid().cast(pa.int32()), _ONE)
        return counts if self.middle is None else pc.add(counts, pc.list_value_length(self.middle))

    def frame(self, place: int) -> pa.Array:
        """One frame of each message, which has to have it; negative places count from the end."""
        between = self._between()
        if place == -1 or not len(self) or self.first.null_count == len(self):
            return self.last
        if self.first.null_count or between is None:
            return self._frame_of_any(place)
        if place < 0:
            place += between + 2
        if place in (0, between + 1):
            return self.last if place else self.first
        assert self.middle is not None, "there is something between"
        if between == 1 and len(self.middle.values) == len(self):
            return self.middle.values
        return self.middle.values.take(pc.add(self.middle.offsets[:-1], number(place - 1, pa.int32())))

    def _between(self) -> int | None:
        """How many frames each message has between first and last; None if they differ."""
        if self.middle is None:
            return 0
        fewest, most = pc.min_max(pc.list_value_length(self.middle)).as_py().values()
        return fewest if fewest == most else None

    def _frame_of_any(self, place: int) -> pa.Array:
        """One frame of messages that are not alike."""
        if place == 0:
            return self.first.fill_null(self.last)
        lists = self.lists()
        begins = lists.offsets[:-1] if place >= 0 else lists.offsets[1:]
        return lists.values.take(pc.add(begins, number(place, pa.int32())))

    def lists(self) -> pa.ListArray:
        """All frames of each message (``FRAMES``)."""
        rows = pa.arange(0, len(self))
        columns, owners = [self.first.drop_null(), self.last], [rows.filter(self.first.is_valid()), rows]
        if self.middle is not None:
            columns.insert(1, self.middle.flatten())
            owners.insert(1, pc.list_parent_indices(self.middle))
        # Each message's frames behind one another, in the order of the columns: which sorting keeps.
        order = pc.array_sort_indices(pa.concat_arrays(owners))
        return _lists(pa.concat_arrays(columns).take(order), self.counts())

    def only(self, rows: Collection[int] | pa.Array) -> pa.ListArray:
        """All frames of these messages, by their places or a mask; null for the others."""
        return only_rows(self.lists(), rows)

    def message(self, row: int) -> list[bytes]:
        """One message's frames."""
        first, middle = self.first[row].as_py(), [] if self.middle is None else self.middle[row].as_py()
        return [*([] if first is None else [first]), *middle, self.last[row].as_py()]

    def take(self, rows: pa.Array) -> RawMessages:
        """The messages at these places."""
        return self._each(lambda column: column.take(rows))

    def filter(self, mask: pa.Array) -> RawMessages:
        """The messages for which this holds."""
        return self._each(lambda column: column.filter(mask))

    def _each(self, act: Callable[[pa.Array], pa.Array]) -> RawMessages:
        return RawMessages(act(self.first), act(self.last), None if self.middle is None else act(self.middle))


def _lists(frames: pa.Array, counts: pa.Array) -> pa.ListArray:
    ends = pa.concat_arrays([integers_of([0]).cast(pa.int32()), pc.cumulative_sum(counts)])
    return pa.Array.from_buffers(FRAMES, len(counts), [None, ends.buffers()[1]], children=[frames])


def raw_of(messages: Sequence[RawMessage]) -> RawMessages:
    """Raw messages from Python's."""
    lists = [[message] if isinstance(message, bytes) else message for message in messages]
    middle = None
    if any(len(frames) > 2 for frames in lists):
        between = [frame for frames in lists for frame in frames[1:-1]]
        counts = integers_of([max(0, len(frames) - 2) for frames in lists]).cast(pa.int32())
        middle = _lists(binary_of(between), counts)
    return RawMessages(
        binary_of([frames[0] if len(frames) > 1 else None for frames in lists]),
        binary_of([frames[-1] for frames in lists]),
        middle,
    )
