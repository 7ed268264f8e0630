"""Make the framing that the options name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, cast

from zmq_datasource.messages.framing.fields import Fields
from zmq_datasource.messages.framing.formats import DafkaFraming, JupyterFraming
from zmq_datasource.messages.framing.layout import BinarySequence, JsonSequence, Layout, SequenceField
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import FramingOptions, Numbering

__all__ = ["Framing", "make_framing", "subscriptions", "whole_layout"]


class Framing(Protocol):
    """Finds the fields of raw messages."""

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields of one message or more. Raises nothing for any bytes."""


_FIXED = {
    # topic, publisher, uint64 sequence, value; a message without the value announces that the publisher has ended
    "sequenced": Layout(4, topic=0, publisher=1, sequence=BinarySequence(2, low=0), value=3, ends=True),
    # topic, uint64 sequence, payload: vllm/distributed/kv_events.py
    "vllm": Layout(3, topic=0, sequence=BinarySequence(1, low=0), value=2),
    # topic, body, uint32 little-endian counter of the topic: Bitcoin Core's doc/zmq.md
    "bitcoin": Layout(3, topic=0, sequence=BinarySequence(2, width=4, endian="little"), value=1),
    # key, int64 sequence, uuid, properties, body: kvmsg of the ZeroMQ guide, RFC 12 (CHP)
    "clone": Layout(
        5,
        topic=0,
        sequence=BinarySequence(1, signed=True),
        value=4,
        controls=frozenset((b"HUGZ", b"KTHXBAI")),
    ),
}


def make_framing(options: FramingOptions) -> Framing | None:
    """Make the framing; None for plain framing, whose messages have no fields to find."""
    match options.framing:
        case "plain":
            return None
        case "jupyter":
            return JupyterFraming()
        case "dafka":
            return DafkaFraming()
        case "custom":
            return _custom(options)
    return _bounded(_FIXED[options.framing], options.numbering)


def whole_layout(framing: str) -> Layout | None:
    """The layout that restores frames from fields; None if the fields are only a part of the frames."""
    layout = _FIXED.get(framing)
    return layout if layout is not None and layout.whole else None


def _bounded(layout: Layout, numbering: Numbering | None) -> Layout:
    """Limit the layout's sequence to the numbers that a counter can have."""
    if numbering is None or numbering.end is None:
        return layout
    assert isinstance(layout.sequence, BinarySequence)
    return replace(layout, sequence=replace(layout.sequence, low=numbering.start, high=numbering.end))


def subscriptions(framing: str, topics: Sequence[str]) -> list[bytes]:
    """The subscriptions of a SUB that wants topics with these prefixes."""
    prefixes = [topic.encode() for topic in topics]
    if framing == "dafka" and b"" not in prefixes:  # a letter is in front of the topic
        return [kind + prefix for prefix in prefixes for kind in (b"M", b"H")]
    return prefixes


def _custom(options: FramingOptions) -> Layout:
    frame = options.sequence_frame
    numbering = options.numbering
    low, high = -(2**63), 2**63 - 1
    if numbering is not None and numbering.end is not None:
        low, high = numbering.start, numbering.end
    sequence: SequenceField | None = None
    if frame is not None and options.sequence_path is not None:
        sequence = JsonSequence(frame, options.sequence_path, low, high)
    elif frame is not None:
        sequence = BinarySequence(
            frame,
            options.sequence_offset,
            options.sequence_width,
            cast(Literal["big", "little"], str(options.sequence_endian)),
            options.sequence_signed,
            low,
            high,
        )
    value = -1 if options.value_frame is None else options.value_frame
    named = [at for at in (options.topic_frame, options.publisher_frame, frame, value) if at is not None]
    return Layout(
        frames=max(at + 1 if at >= 0 else -at for at in named),
        more=True,
        topic=options.topic_frame,
        publisher=options.publisher_frame,
        sequence=sequence,
        value=value,
        value_offset=options.value_offset,
    )
