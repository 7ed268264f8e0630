"""The wire of vLLM's replay protocol, of both sides: bytes only.

A request is ``[b"", start]``, ``start`` the first wanted sequence as 8 bytes, big-endian. Each message that the
publisher still has from there on is a reply: since vLLM 0.26 (vllm-project/vllm#45177) ``[b"", topic, sequence,
payload]``, in older ones and in SGLang ``[b"", sequence, payload]``. The end has eight 0xFF as sequence, and an empty
topic and payload. A DEALER sends and receives the empty frame itself.

A proxy knows two things more: ``start`` may be 16 bytes, the start and end of a half-open range; and between sequence
and payload a reply has the other frames of the message, if it has more than topic and payload.

Source: ``_service_replay`` in vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zmq_datasource.messages.framing.fields import UnfitError

__all__ = ["END", "TOPIC_WANTED", "Reply", "end_of_replay", "read_reply", "read_request", "reply", "request"]

# The sequence of a reply that ends a replay.
END = b"\xff" * 8
# A client whose routing id begins so gets replies with topics from a proxy (docs/proxy.md); the protocol has no place
# where to ask for them.
TOPIC_WANTED = b"topic:"


class Reply(NamedTuple):
    """One message again; ``sequence`` None is the end of a replay."""

    sequence: int | None
    topic: bytes | None
    value: bytes


def request(start: int) -> list[bytes]:
    """The frames that ask for all messages from ``start`` on."""
    return [b"", start.to_bytes(8, "big")]


def read_request(frames: Sequence[bytes]) -> tuple[int, int | None]:
    """Read a request: the first sequence, and the one after the last if the request has it.

    Raises:
        UnfitError: The frames are no request of this protocol.
    """
    if len(frames) != 2 or frames[0] or len(frames[1]) not in (8, 16):
        sizes = ", ".join(str(len(frame)) for frame in frames)
        raise UnfitError(
            f"a request for a replay has frames of 0 and of 8 or 16 bytes, not of {sizes or 'none'}"
        )
    start, end = frames[1][:8], frames[1][8:]
    return int.from_bytes(start, "big"), int.from_bytes(end, "big") if end else None


def reply(number: int, frames: Sequence[bytes], with_topic: bool) -> list[bytes]:
    """The frames that repeat a message."""
    topic, *others = frames if len(frames) > 1 else (b"", *frames)
    return [b"", *([topic] if with_topic else []), number.to_bytes(8, "big"), *others]


def end_of_replay(with_topic: bool) -> list[bytes]:
    """The frames that end a replay."""
    return [b"", *([b""] if with_topic else []), END, b""]


def read_reply(frames: list[bytes]) -> Reply:
    """Read a publisher's answer to a replay request.

    Raises:
        UnfitError: The frames are no reply of this protocol.
    """
    parts = frames[1:] if frames[0] == b"" and len(frames) > 2 else frames
    if len(parts) not in (2, 3):
        raise UnfitError(f"a reply has {len(frames)} frames, 3 or 4 expected")
    topic = parts[0] if len(parts) == 3 else None
    number, value = parts[-2:]
    if len(number) != 8:
        raise UnfitError(f"the sequence of a reply has {len(number)} bytes, 8 expected")
    if number == END and not value:
        return Reply(None, topic, value)
    sequence = int.from_bytes(number, "big")
    if sequence >= 2**63:
        raise UnfitError(f"the sequence {sequence} is outside 0 to {2**63 - 1}")
    return Reply(sequence, topic, value)
