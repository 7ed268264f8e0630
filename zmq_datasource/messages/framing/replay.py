"""The wire format of vLLM's replay protocol, for both sides: bytes only.

A request is ``[b"", start]``, where ``start`` is the first wanted sequence as 8 bytes, big-endian. The publisher
sends a reply for each message that it still has from there on. Since vLLM 0.26 (vllm-project/vllm#45177), and in SGLang
0.5.23, a reply is ``[b"", topic, sequence, payload]``; in older versions it is ``[b"", sequence, payload]``. The last
reply has eight 0xFF as sequence, and an empty topic and payload. A DEALER must send and receive the empty frame
itself.

A proxy understands more: ``start`` may have 16 bytes, the start and end of a half-open range. And its replies have all
frames of a message: those between topic and payload stand between sequence and payload.

Source: ``_service_replay`` in vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zmq_datasource.messages.framing.fields import UnfitError

# The sequence of a reply that ends a replay.
END = b"\xff" * 8
# A proxy sends topics to clients whose routing id begins with this (docs/proxy.md): a request cannot ask for topics.
TOPIC_WANTED = b"topic:"


class Reply(NamedTuple):
    """A replayed message."""

    sequence: int
    topic: bytes | None
    value: bytes


def request(start: int) -> list[bytes]:
    """Encode a request for all messages from the sequence ``start`` on."""
    return [b"", start.to_bytes(8, "big")]


def read_request(frames: Sequence[bytes]) -> tuple[int, int | None]:
    """Decode a request into its first sequence, and the end of its range (None if it has none).

    Raises:
        UnfitError: The frames are not a request of this protocol.
    """
    if len(frames) != 2 or frames[0] or len(frames[1]) not in (8, 16):
        sizes = ", ".join(str(len(frame)) for frame in frames)
        raise UnfitError(
            f"a request for a replay has frames of 0 and of 8 or 16 bytes, not of {sizes or 'none'}"
        )
    start, end = frames[1][:8], frames[1][8:]
    return int.from_bytes(start, "big"), int.from_bytes(end, "big") if end else None


def reply(number: int, frames: Sequence[bytes], with_topic: bool) -> list[bytes]:
    """Encode the reply for a message."""
    topic, *others = frames if len(frames) > 1 else (b"", *frames)
    return [b"", *([topic] if with_topic else []), number.to_bytes(8, "big"), *others]


def end_of_replay(with_topic: bool) -> list[bytes]:
    """Encode the last reply."""
    return [b"", *([b""] if with_topic else []), END, b""]


def read_reply(frames: list[bytes]) -> Reply | None:
    """Decode a reply; None is the end of a replay.

    Raises:
        UnfitError: The frames are not a reply of this protocol.
    """
    parts = frames[1:] if frames[0] == b"" and len(frames) > 2 else frames
    if len(parts) not in (2, 3):
        raise UnfitError(f"a reply has {len(frames)} frames, 3 or 4 expected")
    topic = parts[0] if len(parts) == 3 else None
    number, value = parts[-2:]
    if len(number) != 8:
        raise UnfitError(f"the sequence of a reply has {len(number)} bytes, 8 expected")
    if number == END and not value:
        return None
    sequence = int.from_bytes(number, "big")
    if sequence >= 2**63:
        raise UnfitError(f"the sequence {sequence} is outside 0 to {2**63 - 1}")
    return Reply(sequence, topic, value)
