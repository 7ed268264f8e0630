"""Rows of a log back to the frames that were received."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.framing import RawMessage

__all__ = ["frames_of"]


def frames_of(batch: pa.RecordBatch) -> list[RawMessage]:
    """What each message of a batch came as: bytes for one frame, a list for several."""
    values = batch.column("value").to_pylist()
    topics = pc.cast(batch.column("topic"), pa.binary()).to_pylist()
    messages: list[RawMessage] = [
        value if topic is None else [topic, value] for topic, value in zip(topics, values, strict=True)
    ]
    kept = batch.column("frames")
    if kept.null_count < len(kept):
        for row, frames in enumerate(kept.to_pylist()):
            if frames is not None:
                messages[row] = frames
    return messages
