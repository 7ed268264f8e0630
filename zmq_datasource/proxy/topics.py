"""Topics as durable subscribers see them: the first frame of a message, empty if it has only one."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.messages.framing import raw_messages

__all__ = ["matching", "topics_of"]


def topics_of(batch: pa.RecordBatch) -> pa.Array:
    """The topic of each row, as bytes."""
    kept = batch.column("frames")
    if kept.null_count < len(kept):  # where a topic is no text, the column shows something else
        return pc.fill_null(raw_messages(batch).first, b"")
    return pc.fill_null(pc.cast(batch.column("topic"), pa.binary()), b"")


def matching(batch: pa.RecordBatch, prefixes: tuple[bytes, ...]) -> pa.RecordBatch:
    """The rows whose topic begins with one of these; all rows without prefixes."""
    if not prefixes or b"" in prefixes:
        return batch
    topics, mask = topics_of(batch), None
    for prefix in prefixes:
        found = pc.starts_with(topics, prefix)
        mask = found if mask is None else pc.or_(mask, found)
    return batch.filter(mask)
