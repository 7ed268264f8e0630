"""The shape of a message, declared once: for Arrow, for the log and for Spark.

A *message* is what a receiver hands to the log (``MESSAGE_SCHEMA``). The log puts
``partition`` and ``id`` in front (``LOG_SCHEMA``); Spark sees the same columns, without
``frames`` unless the user asks for them (``row_schema``).

``topic`` is text. When a topic frame is not UTF-8 its bad bytes show as U+FFFD, and
``frames`` keeps the original. In the log ``frames`` is null wherever topic and value give
it back exactly, so that an ordinary message is stored once; ``with_frames`` fills it in.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

__all__ = [
    "LOG_SCHEMA",
    "MAX_MESSAGE_BYTES",
    "MESSAGE_SCHEMA",
    "number_rows",
    "row_schema",
    "spark_ddl",
    "to_rows",
]

# One message must fit an Arrow array with 32-bit offsets and a JVM byte array, with room to spare.
MAX_MESSAGE_BYTES = 1 << 30

_FRAMES = pa.list_(pa.field("element", pa.binary()))

MESSAGE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("value", pa.binary()),
        ("publisher", pa.string()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("frames", _FRAMES),
    ]
)
LOG_SCHEMA = pa.schema([("partition", pa.int32()), ("id", pa.int64()), *MESSAGE_SCHEMA])

_SPARK_TYPES = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
    _FRAMES: "ARRAY<BINARY>",
}


def row_schema(include_frames: bool) -> pa.Schema:
    """The Arrow schema of the rows that Spark reads."""
    return LOG_SCHEMA if include_frames else LOG_SCHEMA.remove(LOG_SCHEMA.get_field_index("frames"))


def spark_ddl(include_frames: bool) -> str:
    """The same schema as Spark DDL text."""
    return ", ".join(f"{f.name} {_SPARK_TYPES[f.type]}" for f in row_schema(include_frames))


def number_rows(messages: pa.RecordBatch, partition: int, first_id: int) -> pa.RecordBatch:
    """Put ``partition`` and contiguous ids from ``first_id`` on in front of ``messages``."""
    rows = messages.num_rows
    partitions = pa.repeat(pa.scalar(partition, pa.int32()), rows)
    ids = pa.arange(first_id, first_id + rows)
    return pa.RecordBatch.from_arrays([partitions, ids, *messages.columns], schema=LOG_SCHEMA)


def to_rows(batch: pa.RecordBatch, include_frames: bool) -> pa.RecordBatch:
    """A batch of the log as Spark wants it: without ``frames``, or with all of them filled in."""
    if not include_frames:
        return batch.select(row_schema(False).names)
    return batch.set_column(
        batch.schema.get_field_index("frames"), LOG_SCHEMA.field("frames"), _all_frames(batch)
    )


def _all_frames(batch: pa.RecordBatch) -> pa.Array:
    stored, topic, value = batch.column("frames"), batch.column("topic"), batch.column("value")
    if stored.null_count == 0:
        return stored
    rebuilt = [
        frames if frames is not None else [v] if t is None else [t, v]
        for frames, t, v in zip(
            stored.to_pylist(),
            pc.cast(topic, pa.binary()).to_pylist(),
            value.to_pylist(),
            strict=True,
        )
    ]
    return pa.array(rebuilt, _FRAMES)
