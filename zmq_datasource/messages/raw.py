"""Raw messages: the frames of messages, in columns, as a socket receives and sends them.

Most messages are a value, or a topic and a value; some protocols have frames between them. So the first and the last
frame have columns of their own, and most messages need no lists of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import FRAMES, binary_of, integers_of, number, only_rows

# A message as Python objects: the bytes of a single frame, or a list of frames.
RawMessage: TypeAlias = bytes | list[bytes]

_ONE = number(1, pa.int32())


@dataclass(frozen=True)
class RawMessages:
    """The frames of messages, in columns of equal length.

    Attributes:
        first: The first frame (binary); null if the message has only one frame.
        last: The last frame (binary, without nulls).
        middle: Lists of the frames between them (``FRAMES``); None if no message has any.
    """

    first: pa.Array
    last: pa.Array
    middle: pa.ListArray | None = None

    @classmethod
    def of_lists(cls, lists: pa.ListArray) -> RawMessages:
        """Make raw messages from lists of frames. Each list has one frame or more."""
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
        """The number of frames of each message (32 bits)."""
        counts = pc.add(self.first.is_valid().cast(pa.int32()), _ONE)
        return counts if self.middle is None else pc.add(counts, pc.list_value_length(self.middle))

    def frame(self, place: int) -> pa.Array:
        """The frame at this place of each message. Each message must have it; negative places count from the end."""
        between = self._between()
        if place == -1 or not len(self) or self.first.null_count == len(self):
            return self.last
        if self.first.null_count or between is None:
            return self._frame_of_any(place)
        if place < 0:
            place += between + 2
        if place in (0, between + 1):
            return self.last if place else self.first
        assert self.middle is not None, "another place needs frames between first and last"
        if between == 1 and len(self.middle.values) == len(self):
            return self.middle.values
        return self.middle.values.take(pc.add(self.middle.offsets[:-1], number(place - 1, pa.int32())))

    def _between(self) -> int | None:
        """The number of frames between first and last, if it is the same for all messages; else None."""
        if self.middle is None:
            return 0
        fewest, most = pc.min_max(pc.list_value_length(self.middle)).as_py().values()
        return fewest if fewest == most else None

    def _frame_of_any(self, place: int) -> pa.Array:
        """``frame`` for messages with different numbers of frames."""
        if place == 0:
            return self.first.fill_null(self.last)
        lists = self.lists()
        begins = lists.offsets[:-1] if place >= 0 else lists.offsets[1:]
        return lists.values.take(pc.add(begins, number(place, pa.int32())))

    def lists(self) -> pa.ListArray:
        """The list of all frames of each message (``FRAMES``)."""
        rows = pa.arange(0, len(self))
        columns, owners = [self.first.drop_null(), self.last], [rows.filter(self.first.is_valid()), rows]
        if self.middle is not None:
            columns.insert(1, self.middle.flatten())
            owners.insert(1, pc.list_parent_indices(self.middle))
        # A stable sort by owner puts each message's frames together, in the order of the columns.
        order = pc.array_sort_indices(pa.concat_arrays(owners))
        return _lists(pa.concat_arrays(columns).take(order), self.counts())

    def only(self, rows: Collection[int] | pa.Array) -> pa.ListArray:
        """``lists``, with null for all messages except ``rows``, which are given by place or as a mask."""
        return only_rows(self.lists(), rows)

    def message(self, row: int) -> list[bytes]:
        """The frames of one message."""
        first, middle = self.first[row].as_py(), [] if self.middle is None else self.middle[row].as_py()
        return [*([] if first is None else [first]), *middle, self.last[row].as_py()]

    def split_topics(self, delimiter: bytes) -> RawMessages:
        """Split each message of one frame at the first delimiter into two frames: topic and value.

        A message without the delimiter keeps its one frame.
        """
        found = pc.greater_equal(pc.find_substring(self.last, delimiter), number(0, pa.int32()))
        splits = pc.and_(self.first.is_null(), found)
        if not splits.true_count:
            return self
        pairs = pc.split_pattern(self.last.filter(splits), delimiter, max_splits=1).flatten()
        places = pa.arange(0, len(pairs), 2)
        topics, values = pairs.take(places), pairs.take(pc.add(places, number(1)))
        first = pc.replace_with_mask(self.first, splits, topics)
        return RawMessages(first, pc.replace_with_mask(self.last, splits, values), self.middle)

    def take(self, rows: pa.Array) -> RawMessages:
        """Select messages by place."""
        return self._each(lambda column: column.take(rows))

    def filter(self, mask: pa.Array) -> RawMessages:
        """Select messages by a mask."""
        return self._each(lambda column: column.filter(mask))

    def _each(self, act: Callable[[pa.Array], pa.Array]) -> RawMessages:
        return RawMessages(act(self.first), act(self.last), None if self.middle is None else act(self.middle))


def _lists(frames: pa.Array, counts: pa.Array) -> pa.ListArray:
    ends = pa.concat_arrays([integers_of([0]).cast(pa.int32()), pc.cumulative_sum(counts)])
    return pa.Array.from_buffers(FRAMES, len(counts), [None, ends.buffers()[1]], children=[frames])


def raw_of(messages: Sequence[RawMessage]) -> RawMessages:
    """Make raw messages from Python objects."""
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
