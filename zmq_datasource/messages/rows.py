"""The one builder of rows: columns in, a batch of the log's messages out.

``frames`` of a row is null where its other columns give the frames back exactly, so that an ordinary message is
stored once: with plain framing wherever a message is its value, or its topic and its value. A topic or publisher
that is not UTF-8 does not come back from text, so such a row keeps its frames; the builder is given which they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pyarrow as pa

from zmq_datasource.messages.columns import binary_of, number
from zmq_datasource.messages.schemas import LOG_SCHEMA, MESSAGE_SCHEMA

__all__ = ["message_rows", "number_rows", "text_of", "times_of"]

# Kept, because asking the schema takes longer than all else for a batch of one message.
_TYPES = {field.name: field.type for field in MESSAGE_SCHEMA}


def message_rows(
    value: pa.Array,
    timestamp: pa.Array,
    *,
    topic: pa.Array | None = None,
    publisher: pa.Array | None = None,
    sequence: pa.Array | None = None,
    frames: pa.Array | None = None,
) -> pa.RecordBatch:
    """A batch with ``MESSAGE_SCHEMA``; a column that is None is null in each row.

    Args:
        value, timestamp, topic, publisher, sequence: Columns of the schema's types.
        frames: For each row its frames where the other columns do not give them back, None where they do; None if
            they do in every row.
    """
    given = {
        "topic": topic,
        "value": value,
        "publisher": publisher,
        "sequence": sequence,
        "timestamp": timestamp,
        "frames": frames,
    }
    rows = len(value)
    columns = [pa.nulls(rows, kind) if given[name] is None else given[name] for name, kind in _TYPES.items()]
    return pa.RecordBatch.from_arrays(columns, schema=MESSAGE_SCHEMA)


def number_rows(messages: pa.RecordBatch, partition: int, first_id: int) -> pa.RecordBatch:
    """Put ``partition`` and contiguous ids from ``first_id`` on in front of ``messages``."""
    rows = messages.num_rows
    partitions = pa.repeat(number(partition, pa.int32()), rows)
    ids = pa.arange(first_id, first_id + rows)
    schema = LOG_SCHEMA.with_metadata(messages.schema.metadata)
    return pa.RecordBatch.from_arrays([partitions, ids, *messages.columns], schema=schema)


def times_of(timestamps: Sequence[tuple[int, int]]) -> pa.Array:
    """Runs of (microseconds since the epoch, number of messages) as a column."""
    kind = _TYPES["timestamp"]
    times = array("q")
    for time, count in timestamps:
        times += array("q", [time]) * count
    return pa.Array.from_buffers(kind, len(times), [None, pa.py_buffer(times)])


def text_of(topics: pa.Array) -> tuple[pa.Array, set[int]]:
    """Topics as strings, and the rows whose bytes were not UTF-8."""
    try:
        return topics.cast(pa.string()), set()
    except pa.ArrowInvalid:
        given = topics.to_pylist()
        texts = [None if t is None else _readable(t) for t in given]
        bad = {
            row
            for row, (t, text) in enumerate(zip(given, texts, strict=True))
            if t is not None and text is not None and text.encode() != t
        }
        return binary_of([None if text is None else text.encode() for text in texts]).cast(pa.string()), bad


# Of a topic that is no text, so much is shown: bad bytes become three each, and a column holds 2 GiB.
_MOST_SHOWN_BYTES = 1 << 20


def _readable(topic: bytes) -> str:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        return topic[:_MOST_SHOWN_BYTES].decode("utf-8", "replace")
