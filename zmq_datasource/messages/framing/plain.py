"""Plain framing: every message fits, and nothing is numbered.

One frame is the value; of several the first is the topic and the last the value, and ``frames``
keeps them all where topic and value alone would not give them back (more than two frames, or
a topic that is not UTF-8). The common shapes (all of one frame, all of topic and value) take
no Python step per message.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from zmq_datasource.messages.framing.fields import RawMessage
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA

__all__ = ["decode_plain", "text_of", "times_of"]


def decode_plain(messages: Sequence[RawMessage], timestamps: Sequence[tuple[int, int]]) -> pa.RecordBatch:
    """Turn raw messages into a batch with ``MESSAGE_SCHEMA``.

    Args:
        messages: One entry a message.
        timestamps: Runs of messages that were received at the same time, as (microseconds
            since the epoch, number of messages).
    """
    rows = len(messages)
    topic: pa.Array = pa.nulls(rows, pa.string())
    frames: pa.Array = pa.nulls(rows, MESSAGE_SCHEMA.field("frames").type)
    try:
        value = pa.array(messages, pa.binary())  # each of one frame
    except pa.ArrowException:
        value = pa.array([m[-1] if isinstance(m, list) else m for m in messages], pa.binary())
        topic, bad = text_of([m[0] if isinstance(m, list) else None for m in messages])
        kept = [
            m if isinstance(m, list) and (len(m) > 2 or row in bad) else None
            for row, m in enumerate(messages)
        ]
        frames = pa.array(kept, frames.type)
    columns = [
        topic,
        value,
        pa.nulls(rows, pa.string()),  # publisher and sequence: plain framing has none
        pa.nulls(rows, pa.int64()),
        times_of(timestamps),
        frames,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def times_of(timestamps: Sequence[tuple[int, int]]) -> pa.Array:
    """Runs of (microseconds since the epoch, number of messages) as a column."""
    kind = MESSAGE_SCHEMA.field("timestamp").type
    times = [pa.repeat(pa.scalar(time, pa.int64()), count) for time, count in timestamps]
    return pa.concat_arrays(times).cast(kind) if times else pa.nulls(0, kind)


def text_of(topics: Sequence[bytes | None]) -> tuple[pa.Array, set[int]]:
    """Topics as strings, and the rows whose bytes were not UTF-8."""
    raw = pa.array(topics, pa.binary())
    try:
        return raw.cast(pa.string()), set()
    except pa.ArrowInvalid:
        texts = [None if t is None else _readable(t) for t in topics]
        bad = {
            row
            for row, (t, text) in enumerate(zip(topics, texts, strict=True))
            if t is not None and text is not None and text.encode() != t
        }
        return pa.array(texts, pa.string()), bad


# Of a topic that is no text, so much is shown: bad bytes become three each, and a column holds 2 GiB.
_MOST_SHOWN_BYTES = 1 << 20


def _readable(topic: bytes) -> str:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        return topic[:_MOST_SHOWN_BYTES].decode("utf-8", "replace")
