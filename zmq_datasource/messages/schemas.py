"""The shape of a message, declared once: for Arrow, for the log and for Spark.

A *message* is what a receiver hands to the log, and what the log stores (``MESSAGE_SCHEMA``). A *row* is what
is read from the log, with ``partition`` and ``id`` in front (``LOG_SCHEMA``); Spark sees the same columns,
without ``frames`` unless the user asks for them (``row_schema``).

``topic`` is text. When a topic frame is not UTF-8 its bad bytes show as U+FFFD, and
``frames`` keeps the original. In the log ``frames`` is null wherever the other columns give
it back exactly (``messages.rows``), so that an ordinary message is stored once.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = [
    "FRAMES",
    "FRAMING",
    "LOG_SCHEMA",
    "MAX_MESSAGE_BYTES",
    "MESSAGE_SCHEMA",
    "row_schema",
    "spark_ddl",
]

# One message must fit an Arrow array with 32-bit offsets and a JVM byte array, with room to spare.
MAX_MESSAGE_BYTES = 1 << 30

# In a schema's metadata: the framing by which the frames come back, where it is not plain.
FRAMING = b"framing"

# The type of a column of whole messages.
FRAMES = pa.list_(pa.field("element", pa.binary()))

MESSAGE_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("value", pa.binary()),
        ("publisher", pa.string()),
        ("sequence", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("frames", FRAMES),
    ]
)
LOG_SCHEMA = pa.schema([("partition", pa.int32()), ("id", pa.int64()), *MESSAGE_SCHEMA])

_SPARK_TYPES = {
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.timestamp("us", tz="UTC"): "TIMESTAMP",
    FRAMES: "ARRAY<BINARY>",
}


def row_schema(include_frames: bool) -> pa.Schema:
    """The Arrow schema of the rows that Spark reads."""
    return LOG_SCHEMA if include_frames else LOG_SCHEMA.remove(LOG_SCHEMA.get_field_index("frames"))


def spark_ddl(include_frames: bool) -> str:
    """The same schema as Spark DDL text."""
    return ", ".join(f"{f.name} {_SPARK_TYPES[f.type]}" for f in row_schema(include_frames))
