"""Build rows: record batches with the log's schema, from columns.

``frames`` of a row is null where its other columns give the frames back exactly, so an ordinary message is stored once.
A topic or publisher that is not UTF-8 cannot be restored from text, so its row keeps its frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pyarrow as pa

from zmq_datasource.messages.columns import binary_of, number
from zmq_datasource.messages.schemas import LOG_SCHEMA, MESSAGE_SCHEMA

__all__ = ["message_rows", "number_rows", "text_of", "times_of"]

# For a batch of one message, looking a field up in the schema takes longer than everything else.
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
    """Make a batch with ``MESSAGE_SCHEMA``. A column that is None becomes null in each row.

    Args:
        value, timestamp, topic, publisher, sequence: Columns with the types of the schema.
        frames: The frames of the rows whose other columns do not give them back, and null for the others.
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
    """Make a batch with ``LOG_SCHEMA``: add ``partition``, and contiguous ids from ``first_id`` on."""
    rows = messages.num_rows
    partitions = pa.repeat(number(partition, pa.int32()), rows)
    ids = pa.arange(first_id, first_id + rows)
    schema = LOG_SCHEMA.with_metadata(messages.schema.metadata)
    return pa.RecordBatch.from_arrays([partitions, ids, *messages.columns], schema=schema)


def times_of(timestamps: Sequence[tuple[int, int]]) -> pa.Array:
    """Make a column of times from runs of (microseconds since the epoch, number of messages)."""
    kind = _TYPES["timestamp"]
    times = array("q")
    for time, count in timestamps:
        times += array("q", [time]) * count
    return pa.Array.from_buffers(kind, len(times), [None, pa.py_buffer(times)])


def text_of(topics: pa.Array) -> tuple[pa.Array, set[int]]:
    """Topics as strings, and the rows whose bytes are not UTF-8. These show as U+FFFD."""
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


# A topic that is not UTF-8 is cut after this: each bad byte takes three in the string, and a column holds 2 GiB.
_MOST_SHOWN_BYTES = 1 << 20


def _readable(topic: bytes) -> str:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        return topic[:_MOST_SHOWN_BYTES].decode("utf-8", "replace")
