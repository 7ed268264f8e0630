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
from zmq_datasource.messages.rows import message_rows, text_of, times_of

__all__ = ["decode_plain"]


def decode_plain(
    messages: Sequence[RawMessage],
    timestamps: Sequence[tuple[int, int]],
    publisher: pa.Array | None = None,
    sequence: pa.Array | None = None,
) -> pa.RecordBatch:
    """Turn raw messages into a batch with ``MESSAGE_SCHEMA``.

    Args:
        messages: One entry a message.
        timestamps: Runs of messages that were received at the same time, as (microseconds
            since the epoch, number of messages).
        publisher, sequence: Who sent them, and with which numbers, if that is known from elsewhere.
    """
    topic: pa.Array | None = None
    kept: list[list[bytes] | None] | None = None
    try:
        value = pa.array(messages, pa.binary())  # each of one frame
    except pa.ArrowException:
        value = pa.array([m[-1] if isinstance(m, list) else m for m in messages], pa.binary())
        topic, bad = text_of([m[0] if isinstance(m, list) else None for m in messages])
        kept = [
            m if isinstance(m, list) and (len(m) > 2 or row in bad) else None
            for row, m in enumerate(messages)
        ]
    return message_rows(
        value, times_of(timestamps), topic=topic, publisher=publisher, sequence=sequence, frames=kept
    )
