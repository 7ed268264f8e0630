"""Makes record batches of fields, and restores frames from stored rows.

``frames`` of a row is null where the other columns give the frames back exactly, so an ordinary message is stored once.
The metadata (``framing``) of the schema says how to restore the frames, in a batch and in each chunk of the log: a
reader needs no options for that. Without that metadata, the framing is plain: one frame is the value; of
several the first is the topic, and the last the value. A framing that this release does not know is refused.

The row of a message that does not fit its framing has the frames and the time; its other columns are null.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import LogFormatError
from zmq_datasource.messages.columns import (
    FRAMING,
    LOG_SCHEMA,
    all_true,
    integers_of,
    number,
    only_rows,
    row_schema,
    text,
)
from zmq_datasource.messages.framing.fields import Fields
from zmq_datasource.messages.framing.layout import messages_of
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import message_rows, text_of, times_of
from zmq_datasource.options import PRESETS


def decode_plain(
    raw: RawMessages,
    timestamps: Sequence[tuple[int, int]],
    publisher: pa.Array | None = None,
    sequence: pa.Array | None = None,
) -> pa.RecordBatch:
    """Make a batch with ``MESSAGE_SCHEMA`` from messages with plain framing, which every message fits.

    ``frames`` keeps a message that topic and value do not give back: it has more than two frames, or its topic is not
    UTF-8.

    Args:
        timestamps: When the messages were received: runs of (microseconds since the epoch, number of messages).
        publisher, sequence: The columns of these names, if they are known from elsewhere.
    """
    topic, bad = None, set[int]()
    if raw.first.null_count < len(raw):
        topic, bad = text_of(raw.first)
    frames: pa.Array | None = None
    if bad or raw.middle is not None:
        kept = pc.is_in(pa.arange(0, len(raw)), value_set=integers_of(sorted(bad)))
        if raw.middle is not None:
            kept = pc.or_(kept, pc.greater(pc.list_value_length(raw.middle), number(0, pa.int32())))
        frames = raw.only(kept)
    return message_rows(
        raw.last,
        times_of(timestamps),
        topic=topic,
        publisher=publisher,
        sequence=sequence,
        frames=frames,
    )


def make_batch(
    framing: str,
    fields: Fields,
    raw: RawMessages,
    timestamps: Sequence[tuple[int, int]],
    endpoints: Sequence[tuple[str, int]] | None = None,
    keep_malformed: bool = False,
) -> pa.RecordBatch:
    """Make a batch with ``MESSAGE_SCHEMA`` that has a row for each message in ``fields``, in their order.

    Args:
        raw: All decoded messages.
        timestamps: When they were received; see ``decode_plain``.
        endpoints: Where they were received, in the same form: the publishers, if the framing has no such field.
        keep_malformed: Whether the messages that do not fit are rows, too.
    """
    times = times_of(timestamps)
    topic, bad = None, set[int]()
    if fields.topics is not None:
        topic, bad = text_of(fields.topics)
    publisher = None
    if fields.publishers is not None:
        publisher, in_hex = text_of(fields.publishers)
        bad |= in_hex
    elif endpoints is not None:
        publisher = _origins(fields, endpoints)
    batch = message_rows(
        fields.values,
        fields.of(times),
        topic=topic,
        publisher=publisher,
        sequence=fields.sequences,
        frames=_kept_frames(framing, fields, raw, bad),
    )
    if keep_malformed and fields.malformed:
        batch = _with_malformed(batch, fields, raw, times)
    return batch.replace_schema_metadata({FRAMING: framing.encode()} if _is_exact(framing) else None)


def _is_exact(framing: str) -> bool:
    """Whether the fields of messages with this framing give back their frames."""
    preset = PRESETS.get(framing)
    return preset is not None and preset.layout is not None


def _with_malformed(
    batch: pa.RecordBatch, fields: Fields, raw: RawMessages, times: pa.Array
) -> pa.RecordBatch:
    """Add a row for each message that does not fit, at the place where it was received."""
    places = integers_of([malformed.row for malformed in fields.malformed])
    values = pa.nulls(len(places), pa.binary())
    unfit = message_rows(values, times.take(places), frames=raw.take(places).lists())
    order = pc.array_sort_indices(pa.concat_arrays([fields.of(pa.arange(0, len(raw))), places]))
    return pa.concat_batches([batch, unfit]).take(order)


def _origins(fields: Fields, endpoints: Sequence[tuple[str, int]]) -> pa.Array:
    """The endpoint of each message."""
    if len({endpoint for endpoint, _ in endpoints}) == 1:
        return pa.repeat(text(endpoints[0][0]), len(fields))
    return fields.of(pa.concat_arrays([pa.repeat(text(name), count) for name, count in endpoints]))


def _kept_frames(framing: str, fields: Fields, raw: RawMessages, bad: set[int]) -> pa.Array | None:
    """The frames of the rows whose other columns do not give them back."""
    if _is_exact(framing):
        return only_rows(fields.of(raw.lists()), bad) if bad else None
    plain = pc.equal(fields.of(raw.counts()), number(fields.plain_frames, pa.int32()))
    if bad:
        plain = pc.and_not(plain, pc.is_in(pa.arange(0, len(fields)), value_set=integers_of(sorted(bad))))
    return None if all_true(plain) else only_rows(fields.of(raw.lists()), pc.invert(plain))


def to_rows(batch: pa.RecordBatch, include_frames: bool) -> pa.RecordBatch:
    """Make the rows that Spark reads from a batch of the log, with or without the frames of each message."""
    if not include_frames:
        return batch.select(row_schema(False).names).replace_schema_metadata(None)
    return batch.set_column(
        batch.schema.get_field_index("frames"), LOG_SCHEMA.field("frames"), raw_messages(batch).lists()
    ).replace_schema_metadata(None)


def raw_messages(batch: pa.RecordBatch) -> RawMessages:
    """Restore the messages of stored rows, frame by frame as they were received."""
    stored = batch.column("frames")
    if stored.null_count == 0:
        return RawMessages.of_lists(stored)
    if stored.null_count == len(stored):
        return _of_fields(batch)
    # The stored frames of all rows, and behind them the restored frames of the rows that have none stored.
    missing = pc.is_null(stored)
    frames = _of_fields(batch.filter(missing)).lists()
    places = pc.subtract(pc.cumulative_sum(missing.cast(pa.int64())), number(1))
    both = pa.concat_arrays([stored, frames])
    return RawMessages.of_lists(
        both.take(pc.if_else(missing, pc.add(places, number(len(stored))), pa.arange(0, len(stored))))
    )


def _of_fields(batch: pa.RecordBatch) -> RawMessages:
    topics = pc.cast(batch.column("topic"), pa.binary())
    values = batch.column("value")
    framing = (batch.schema.metadata or {}).get(FRAMING, b"").decode()
    if not framing:  # plain
        return RawMessages(topics, values)
    preset = PRESETS.get(framing)
    if preset is None or preset.layout is None:
        raise LogFormatError(
            f"restoring the frames of messages with framing={framing}, which this release does not know; read this log "
            "with the release that wrote it, or without includeFrames"
        )
    publishers = pc.cast(batch.column("publisher"), pa.binary())
    return messages_of(preset.layout, topics, publishers, batch.column("sequence"), values)
