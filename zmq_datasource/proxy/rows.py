"""Messages on their way through the proxy, as columns; to rows of the log, and back."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import raw_of
from zmq_datasource.messages.framing import decode_plain

__all__ = ["Frame", "Messages", "messages_of", "rows_of"]

# Bytes, or where they are many a zmq.Frame: libzmq's own buffer, which Python's types do not know as one.
Frame: TypeAlias = Any


class Messages(NamedTuple):
    """Messages in their order, as columns of frames.

    Attributes:
        topics: The first frame; None if it is the only one.
        values: The last frame.
        others: All frames of those messages that have more than two, by their place.
    """

    topics: list[bytes | None]
    values: list[Frame]
    others: dict[int, list[Frame]]

    def __len__(self) -> int:
        return len(self.values)

    def frames(self, at: int) -> list[Frame]:
        """One message as it came."""
        if at in self.others:
            return self.others[at]
        topic = self.topics[at]
        return [self.values[at]] if topic is None else [topic, self.values[at]]

    def copied(self, at: int) -> list[bytes]:
        """The same, of Python's own bytes."""
        return [bytes(memoryview(frame)) for frame in self.frames(at)]

    def take(self, places: list[int]) -> Messages:
        """The messages at these positions."""
        others = {new: self.others[old] for new, old in enumerate(places) if old in self.others}
        return Messages([self.topics[at] for at in places], [self.values[at] for at in places], others)


def rows_of(messages: Messages, timestamp: int) -> pa.RecordBatch:
    """A batch with ``MESSAGE_SCHEMA``, as plain framing makes it.

    Args:
        timestamp: When they were received, in microseconds since the epoch.
    """
    return decode_plain(
        raw_of([messages.copied(at) for at in range(len(messages))]), [(timestamp, len(messages))]
    )


def _values(values: list[Frame]) -> pa.Array:
    if set(map(type, values)) == {bytes}:
        return pa.array(values, pa.binary())
    # Large ones: copied once, into a buffer of the right size.
    offsets = pa.array([0, *accumulate(map(len, values))], pa.int32())
    data = pa.py_buffer(b"".join(values))
    return pa.Array.from_buffers(pa.binary(), len(values), [None, offsets.buffers()[1], data])


def messages_of(batch: pa.RecordBatch) -> Messages:
    """The messages of rows of a log."""
    kept = batch.column("frames")
    others = {}
    if kept.null_count < len(kept):
        others = {row: frames for row, frames in enumerate(kept.to_pylist()) if frames is not None}
    return Messages(
        pc.cast(batch.column("topic"), pa.binary()).to_pylist(), batch.column("value").to_pylist(), others
    )
