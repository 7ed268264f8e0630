"""Build record batches from columns: messages (``MESSAGE_SCHEMA``), and rows of the log (``LOG_SCHEMA``).

``frames`` of a row is null where its other columns give the frames back exactly, so an ordinary message is stored once.
A topic or publisher that is not UTF-8 is text in hex, and its row keeps its frames.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from zmq_datasource.messages.columns import LOG_SCHEMA, MESSAGE_SCHEMA, binary_of

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


def number_rows(messages: pa.RecordBatch, first_id: int) -> pa.RecordBatch:
    """Make a batch with ``LOG_SCHEMA``: add contiguous ids from ``first_id`` on."""
    ids = pa.arange(first_id, first_id + messages.num_rows)
    schema = LOG_SCHEMA.with_metadata(messages.schema.metadata)
    return pa.RecordBatch.from_arrays([ids, *messages.columns], schema=schema)


def messages_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The messages of ``number_rows``, without their ids."""
    schema = MESSAGE_SCHEMA.with_metadata(rows.schema.metadata)
    return pa.RecordBatch.from_arrays(rows.columns[1:], schema=schema)


def times_of(timestamps: Sequence[tuple[int, int]]) -> pa.Array:
    """Make a column of times from runs of (microseconds since the epoch, number of messages)."""
    kind = _TYPES["timestamp"]
    times = array("q")
    for time, count in timestamps:
        times += array("q", [time]) * count
    return pa.Array.from_buffers(kind, len(times), [None, pa.py_buffer(times)])


def text_of(names: pa.Array) -> tuple[pa.Array, set[int]]:
    """Topics or publishers as strings, and the rows whose strings are in hex (``name_of``)."""
    try:
        texts = names.cast(pa.string())
        if not pc.any(pc.starts_with(texts, _HEX)).as_py():
            return texts, set()
    except pa.ArrowInvalid:  # one of them is not UTF-8
        pass
    given = names.to_pylist()
    encoded = [None if name is None else name_of(name).encode() for name in given]
    in_hex = {row for row, (name, text) in enumerate(zip(given, encoded, strict=True)) if text != name}
    return binary_of(encoded).cast(pa.string()), in_hex


_HEX = "hex:"
# A longer name is cut after this, because a column holds 2 GiB; its digest keeps it distinct from others.
_MOST_HEX_BYTES = 1 << 10


def name_of(name: bytes) -> str:
    """A topic or a publisher as text, which differs for different bytes.

    UTF-8 stays as it is. Other bytes become ``hex:`` and their hexadecimal digits, and so does a text that begins with
    ``hex:``. After 1,024 bytes, ``+`` and the XXH3-128 of all bytes take the place of the rest.
    """
    try:
        text = name.decode()
    except UnicodeDecodeError:
        pass
    else:
        if not text.startswith(_HEX):
            return text
    rest = "" if len(name) <= _MOST_HEX_BYTES else f"+{xxhash.xxh3_128_hexdigest(name)}"
    return f"{_HEX}{name[:_MOST_HEX_BYTES].hex()}{rest}"
