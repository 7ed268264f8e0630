"""The wire format of vLLM's replay protocol, from the client's side: bytes only.

A request is ``[b"", start]``, where ``start`` is the first wanted sequence as 8 bytes, big-endian. The publisher
sends a reply for each message that it still has from there on. Since vLLM 0.26 (vllm-project/vllm#45177), and in SGLang
0.5.23, a reply is ``[b"", topic, sequence, payload]``; in older versions it is ``[b"", sequence, payload]``. The last
reply has eight 0xFF as sequence, and an empty topic and payload. A DEALER must send and receive the empty frame
itself.

Source: ``_service_replay`` in vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from typing import NamedTuple

from zmq_datasource.messages.framing.fields import UnfitError

# The sequence of a reply that ends a replay.
END = b"\xff" * 8


class Reply(NamedTuple):
    """A replayed message."""

    sequence: int
    topic: bytes | None
    value: bytes


def request(start: int) -> list[bytes]:
    """Encode a request for all messages from the sequence ``start`` on."""
    return [b"", start.to_bytes(8, "big")]


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
