"""Frames to message fields, and back: pure functions over bytes, many messages a call.

A *raw message* is what a receive loop collects without looking: ``bytes`` for a message of
one frame, a list of ``bytes`` for more. The common shapes (all of one frame, all of topic
and value) take no Python step per message.

Plain framing: one frame is the value; of several the first is the topic and the last the
value, and ``frames`` keeps them all where topic and value alone would not give them back
(more than two frames, or a topic that is not UTF-8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from zmq_datasource.messages import MESSAGE_SCHEMA

__all__ = ["RawMessage", "decode_plain"]

RawMessage: TypeAlias = bytes | list[bytes]


def decode_plain(messages: Sequence[RawMessage], timestamps: Sequence[int]) -> pa.RecordBatch:
    """Turn raw messages into a batch with ``MESSAGE_SCHEMA``.

    Args:
        messages: One entry a message.
        timestamps: When each was received, in microseconds since the epoch.
    """
    rows = len(messages)
    shapes = {len(m) if isinstance(m, list) else 1 for m in messages}
    frames: pa.Array = pa.nulls(rows, MESSAGE_SCHEMA.field("frames").type)
    if shapes <= {1}:
        topic: pa.Array = pa.nulls(rows, pa.string())
        value = pa.array(messages, pa.binary())
    else:
        topics = [m[0] if isinstance(m, list) else None for m in messages]
        value = pa.array([m[-1] if isinstance(m, list) else m for m in messages], pa.binary())
        topic, bad = _as_text(topics)
        if bad or max(shapes) > 2:
            kept = [
                m if isinstance(m, list) and (len(m) > 2 or row in bad) else None
                for row, m in enumerate(messages)
            ]
            frames = pa.array(kept, MESSAGE_SCHEMA.field("frames").type)
    columns = {
        "topic": topic,
        "value": value,
        "publisher": pa.nulls(rows, pa.string()),
        "sequence": pa.nulls(rows, pa.int64()),
        "timestamp": pa.array(timestamps, pa.int64()).cast(MESSAGE_SCHEMA.field("timestamp").type),
        "frames": frames,
    }
    return pa.RecordBatch.from_pydict(columns, schema=MESSAGE_SCHEMA)


def _as_text(topics: list[bytes | None]) -> tuple[pa.Array, set[int]]:
    """Topics as strings, and the rows whose bytes were not UTF-8."""
    raw = pa.array(topics, pa.binary())
    try:
        return raw.cast(pa.string()), set()
    except pa.ArrowInvalid:
        texts = [None if t is None else t.decode("utf-8", "replace") for t in topics]
        bad = {
            row
            for row, (t, text) in enumerate(zip(topics, texts, strict=True))
            if t is not None and text is not None and text.encode() != t
        }
        return pa.array(texts, pa.string()), bad
