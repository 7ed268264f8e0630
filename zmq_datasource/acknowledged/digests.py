"""The digest of a transaction's rows, which shows whether a repeated transaction is the same. Pure.

docs/protocol.md specifies it. The digest of a row is a chain over its frames (topic and value, value alone, or all of
``frames``): XXH3-64 of each frame, seeded with the hash of the frame before it, and with 0 for the first. The digest of
many rows is the sum modulo 2^64. So it depends neither on the order of the rows nor on the tasks and messages that
carry them, both of which may differ when Spark repeats a batch. Unlike an exclusive or, a sum counts a repeated row
twice.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_intdigest

from zmq_datasource.messages.columns import as_binary

__all__ = ["as_text", "digest_of", "digest_of_rows"]

_MODULUS = 1 << 64


def digest_of(batch: pa.RecordBatch) -> int:
    """The digest of a batch with the columns ``value`` and perhaps ``topic``, or ``frames``."""
    if "frames" in batch.schema.names:
        return sum(map(_chain, batch.column("frames").to_pylist())) % _MODULUS
    values = as_binary(batch.column("value")).to_pylist()
    topic = batch.column("topic") if "topic" in batch.schema.names else None
    if topic is None or topic.null_count == len(topic):
        return sum(map(xxh3_64_intdigest, values)) % _MODULUS
    topics = as_binary(topic).to_pylist()
    seeds = [0 if topic is None else xxh3_64_intdigest(topic) for topic in topics]
    return sum(map(xxh3_64_intdigest, values, seeds)) % _MODULUS


def digest_of_rows(batch: pa.RecordBatch) -> int:
    """The digest of rows as the receiver stages them (``messages.schemas.MESSAGE_SCHEMA``)."""
    frames = batch.column("frames")
    if frames.null_count == len(frames):
        return digest_of(batch.select(["topic", "value"]))
    whole = frames.is_valid()
    rest = digest_of(batch.filter(pc.invert(whole)).select(["topic", "value"]))
    return (digest_of(batch.filter(whole).select(["frames"])) + rest) % _MODULUS


def as_text(digest: int) -> str:
    """16 hexadecimal digits, because some JSON readers round numbers beyond 2^53."""
    return f"{digest % _MODULUS:016x}"


def _chain(frames: list[bytes]) -> int:
    digest = 0
    for frame in frames:
        digest = xxh3_64_intdigest(frame, digest)
    return digest
