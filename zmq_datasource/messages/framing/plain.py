"""Plain framing: every message fits, and nothing is numbered.

One frame is the value; of several the first is the topic and the last the value, and ``frames``
keeps them all where topic and value alone would not give them back (more than two frames, or
a topic that is not UTF-8).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.columns import integers_of, number
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import message_rows, text_of, times_of

__all__ = ["decode_plain"]


def decode_plain(
    raw: RawMessages,
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
    topic, bad = None, set[int]()
    if raw.first.null_count < len(raw):
        topic, bad = text_of(raw.first)
    kept: pa.Array | None = None
    if bad or raw.middle is not None:
        long = pc.is_in(pa.arange(0, len(raw)), value_set=integers_of(sorted(bad)))
        if raw.middle is not None:
            long = pc.or_(long, pc.greater(pc.list_value_length(raw.middle), number(0, pa.int32())))
        kept = raw.only(long)
    return message_rows(
        raw.last,
        times_of(timestamps),
        topic=topic,
        publisher=publisher,
        sequence=sequence,
        frames=kept,
    )
