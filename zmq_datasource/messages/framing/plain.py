"""Plain framing: every message fits, and nothing is numbered.

One frame is the value; of several the first is the topic and the last the value, and ``frames``
keeps them all where topic and value alone would not give them back (more than two frames, or
a topic that is not UTF-8).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import frame_at, frame_counts, integers_of, number, only_rows
from zmq_datasource.messages.rows import message_rows, text_of, times_of

__all__ = ["decode_plain"]


def decode_plain(
    raw: pa.ListArray,
    timestamps: Sequence[tuple[int, int]],
    publisher: pa.Array | None = None,
    sequence: pa.Array | None = None,
) -> pa.RecordBatch:
    """Turn raw messages, of one frame or more each, into a batch with ``MESSAGE_SCHEMA``.

    Args:
        timestamps: Runs of messages that were received at the same time, as (microseconds
            since the epoch, number of messages).
        publisher, sequence: Who sent them, and with which numbers, if that is known from elsewhere.
    """
    topic: pa.Array | None = None
    kept: pa.Array | None = None
    counts = frame_counts(raw)
    # What all have in common is not computed for each: for a few messages every call counts.
    fewest, most = pc.min_max(counts).as_py().values()
    if most and most > 1:
        first = raw.offsets[:-1]
        if fewest == 1:
            first = pc.if_else(pc.equal(counts, number(1, pa.int32())), pa.nulls(1, pa.int32())[0], first)
        topic, bad = text_of(raw.values.take(first))
        if bad or most > 2:
            long = pc.greater(counts, number(2, pa.int32()))
            if bad:
                long = pc.or_(long, pc.is_in(pa.arange(0, len(raw)), value_set=integers_of(sorted(bad))))
            kept = only_rows(raw, long)
    return message_rows(
        frame_at(raw, -1),
        times_of(timestamps),
        topic=topic,
        publisher=publisher,
        sequence=sequence,
        frames=kept,
    )
