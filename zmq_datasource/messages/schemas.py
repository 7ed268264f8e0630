"""The columns of a message, declared once: for Arrow, for the log and for Spark.

A receiver appends *messages* to the log (``MESSAGE_SCHEMA``). *Rows* that are read from the log have ``partition`` and
``id`` before these columns (``LOG_SCHEMA``). Spark reads the same rows, but ``frames`` only if the user asks for them
(``row_schema``).

``topic`` is text. A topic that is not UTF-8 is text in hex (``rows.name_of``), and ``frames`` keeps the original. In
the log, ``frames`` is null where the other columns give the frames back exactly, so an ordinary message is stored once.
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

# A message must fit an Arrow array with 32-bit offsets and a JVM byte array, with room to spare.
MAX_MESSAGE_BYTES = 1 << 30

# The key in a schema's metadata for the framing that restores the frames; plain, if it is missing.
FRAMING = b"framing"

# The type of a column with all frames of each message.
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
    """The schema of the rows that Spark reads, for Arrow."""
    return LOG_SCHEMA if include_frames else LOG_SCHEMA.remove(LOG_SCHEMA.get_field_index("frames"))


def spark_ddl(include_frames: bool) -> str:
    """The schema of the rows that Spark reads, as DDL."""
    return ", ".join(f"{f.name} {_SPARK_TYPES[f.type]}" for f in row_schema(include_frames))
