"""Fields to Arrow, and frames back from what the log keeps.

``frames`` of a row is null where the other columns give the frames back exactly, so that an
ordinary message is stored once. How they do is said by the batch itself, in its schema's
metadata (``framing``), and so by each chunk of the log: a reader needs no options for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.framing.fields import Fields, RawMessage
from zmq_datasource.messages.framing.presets import whole_layout
from zmq_datasource.messages.rows import frames_of_rows, message_rows, text_of, times_of
from zmq_datasource.messages.schemas import FRAMES, FRAMING, LOG_SCHEMA, row_schema

__all__ = ["make_batch", "name_of", "to_rows"]

_MOST_SHOWN_BYTES = 1 << 10


def make_batch(
    framing: str,
    fields: Fields,
    messages: Sequence[RawMessage],
    timestamps: Sequence[tuple[int, int]],
    endpoints: Sequence[tuple[str, int]] | None = None,
) -> pa.RecordBatch:
    """A batch with ``MESSAGE_SCHEMA``, a row for each message in ``fields``.

    Args:
        messages: All messages that were decoded.
        timestamps: When those were received; see ``decode_plain``.
        endpoints: In the same way, where they came from: their publisher, if they name none.
    """
    topic, bad = None, set[int]()
    if fields.topics is not None:
        topic, bad = text_of(fields.topics)
    publisher = None
    if fields.publishers is not None:
        publisher, unreadable = _names(fields.publishers)
        bad |= unreadable
    elif endpoints is not None:
        publisher = _origins(fields, endpoints)
    batch = message_rows(
        pa.array(fields.values, pa.binary()),
        _times(fields, timestamps),
        topic=topic,
        publisher=publisher,
        sequence=None if fields.sequences is None else pa.array(fields.sequences, pa.int64()),
        frames=_kept_frames(framing, fields, messages, bad),
    )
    return (
        batch if whole_layout(framing) is None else batch.replace_schema_metadata({FRAMING: framing.encode()})
    )


def _names(publishers: Sequence[bytes]) -> tuple[pa.Array, set[int]]:
    """Publishers as strings, and the rows whose bytes were not UTF-8: those show in hex, to stay distinct."""
    raw = pa.array(publishers, pa.binary())
    try:
        return raw.cast(pa.string()), set()
    except pa.ArrowInvalid:
        texts = [name_of(name) for name in publishers]
        bad = {
            row
            for row, (name, text) in enumerate(zip(publishers, texts, strict=True))
            if text.encode() != name
        }
        return pa.array(texts, pa.string()), bad


def _origins(fields: Fields, endpoints: Sequence[tuple[str, int]]) -> pa.Array:
    """The endpoint of each message."""
    if len({endpoint for endpoint, _ in endpoints}) == 1:
        return pa.repeat(pa.scalar(endpoints[0][0], pa.string()), len(fields))
    everyone = pa.concat_arrays([pa.repeat(pa.scalar(name, pa.string()), count) for name, count in endpoints])
    return everyone if fields.rows is None else everyone.take(pa.array(fields.rows, pa.int64()))


def name_of(name: bytes) -> str:
    """A publisher's name as text; in hex, cut where it is long, if it is no UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return f"0x{name[:_MOST_SHOWN_BYTES].hex()}"


def _times(fields: Fields, timestamps: Sequence[tuple[int, int]]) -> pa.Array:
    times = times_of(timestamps)
    return times if fields.rows is None else times.take(pa.array(fields.rows, pa.int64()))


def _kept_frames(
    framing: str, fields: Fields, messages: Sequence[RawMessage], bad: set[int]
) -> list[list[bytes] | None] | None:
    """The frames of the rows whose other columns do not give them back."""
    if whole_layout(framing) is not None:
        return frames_of_rows(bad, len(fields), lambda at: _frames_of(messages[fields.row(at)]))
    if fields.values is messages and fields.topics is None:  # each of one frame
        return None
    kept: list[list[bytes] | None] = []
    for at in range(len(fields)):
        message = _frames_of(messages[fields.row(at)])
        topic = None if fields.topics is None else fields.topics[at]
        plain = [fields.values[at]] if topic is None else [topic, fields.values[at]]
        kept.append(None if message == plain and at not in bad else message)
    return kept


def _frames_of(message: RawMessage) -> list[bytes]:
    return message if isinstance(message, list) else [message]


def to_rows(batch: pa.RecordBatch, include_frames: bool) -> pa.RecordBatch:
    """A batch of the log as Spark wants it: without ``frames``, or with all of them filled in."""
    if not include_frames:
        return batch.select(row_schema(False).names).replace_schema_metadata(None)
    return batch.set_column(
        batch.schema.get_field_index("frames"), LOG_SCHEMA.field("frames"), _all_frames(batch)
    ).replace_schema_metadata(None)


def _all_frames(batch: pa.RecordBatch) -> pa.Array:
    stored = batch.column("frames")
    if stored.null_count == 0:
        return stored
    layout = whole_layout((batch.schema.metadata or {}).get(FRAMING, b"").decode())
    without = batch if stored.null_count == len(stored) else batch.filter(pc.is_null(stored))
    topics = pc.cast(without.column("topic"), pa.binary()).to_pylist()
    values = without.column("value").to_pylist()
    if layout is None:  # plain
        frames = [[v] if t is None else [t, v] for t, v in zip(topics, values, strict=True)]
    else:
        publishers = pc.cast(without.column("publisher"), pa.binary()).to_pylist()
        frames = layout.frames_of(topics, publishers, without.column("sequence").to_pylist(), values)
    if without is not batch:
        missing = iter(frames)
        frames = [next(missing) if kept is None else kept for kept in stored.to_pylist()]
    return pa.array(frames, FRAMES)
