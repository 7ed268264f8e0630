"""The wire of vLLM's replay protocol: bytes only.

A request is ``[b"", start]``, ``start`` the first wanted sequence as 8 bytes, big-endian. For each
message that the publisher still has from there on, a reply ``[b"", sequence, payload]``, or in
other versions ``[b"", topic, sequence, payload]``; then the end, with eight 0xFF as sequence and an
empty payload. A DEALER sends and receives the empty frame itself.

Source: ``_service_replay`` in vllm/distributed/kv_events.py, which SGLang has taken over.
"""

from __future__ import annotations

from typing import NamedTuple

from zmq_datasource.messages.framing.fields import UnfitError

__all__ = ["END", "TOPIC_WANTED", "Reply", "read_reply", "request"]

# The sequence of a reply that ends a replay.
END = b"\xff" * 8
# A proxy tells the topics of what it replays to clients whose routing id begins so (docs/proxy.md).
TOPIC_WANTED = b"topic:"


class Reply(NamedTuple):
    """One message again; ``sequence`` None is the end of a replay."""

    sequence: int | None
    topic: bytes | None
    value: bytes


def request(start: int) -> list[bytes]:
    """The frames that ask for all messages from ``start`` on."""
    return [b"", start.to_bytes(8, "big")]


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
