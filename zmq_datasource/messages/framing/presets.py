"""Make the framing that the options name, and decode messages of Jupyter kernels and Dafka producers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, cast

import msgspec

from zmq_datasource.messages.columns import binary_of, integers_of
from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed, UnfitError
from zmq_datasource.messages.framing.layout import BinarySequence, JsonSequence, Layout, SequenceField
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import FramingOptions, Numbering

__all__ = [
    "DafkaFraming",
    "FramingDecoder",
    "JupyterFraming",
    "make_framing",
    "subscriptions",
    "whole_layout",
]

_DELIMITER = b"<IDS|MSG>"


class _Header(msgspec.Struct):
    session: str


class JupyterFraming:
    """Decodes messages of Jupyter kernels, on their iopub channel.

    A message has the frames: topic, the delimiter ``<IDS|MSG>``, signature, header, parent header, metadata, content,
    and any number of buffers. ``value`` is the content, ``publisher`` the session, and ``topic`` the first frame, if
    any. ``msg_id`` in the header is opaque, so losses cannot be tracked. Checking the signature would need the kernel's
    key, so it is not checked. Source: jupyter-client's documentation, "Messaging in Jupyter", wire protocol 5.
    """

    def __init__(self) -> None:
        self._header = msgspec.json.Decoder(_Header)

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields. Raises nothing for any bytes."""
        values: list[bytes] = []
        topics: list[bytes | None] = []
        publishers: list[bytes] = []
        rows: list[int] = []
        malformed: list[Malformed] = []
        for row, frames in enumerate(raw.lists().to_pylist()):
            try:
                topic, session, content = self._read(frames)
            except UnfitError as e:
                malformed.append(Malformed(row, str(e)))
                continue
            rows.append(row)
            topics.append(topic)
            publishers.append(session)
            values.append(content)
        return Fields(
            binary_of(values),
            binary_of(topics),
            binary_of(publishers),
            rows=integers_of(rows),
            malformed=malformed,
        )

    def _read(self, frames: list[bytes]) -> tuple[bytes | None, bytes, bytes]:
        if _DELIMITER not in frames:
            raise UnfitError("it has no frame <IDS|MSG>")
        at = frames.index(_DELIMITER)
        rest = frames[at + 1 :]
        if len(rest) < 5:
            raise UnfitError(f"it has {len(rest)} frames after <IDS|MSG>, 5 or more expected")
        try:
            session = self._header.decode(rest[1]).session
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            raise UnfitError(f"the header is no JSON object with a session: {e}") from e
        return frames[0] if at else None, session.encode(), rest[4]


_RECORD, _HEAD = b"M", b"H"
_OF_OTHERS = (b"D", b"E", b"F", b"G", b"K", b"L", b"W")
_VERSION = 1


class DafkaFraming:
    """Decodes records of Dafka producers: ``topic`` is the subject, and ``publisher`` the producer's address.

    The first frame of a message has its type (one letter), the topic, a zero byte, the version (1), and the fields:
    strings with a length byte in front, and big-endian numbers. A record (``M``) has the producer's address, the
    subject and the sequence (8 bytes), and its content in a second frame. A head (``H``) has the same fields, and no
    content: its sequence is that of the producer's last record. Consumers and stores send the other types. Source:
    dafka_proto.xml and the generated dafka_proto.c of zeromq/dafka.
    """

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields. Raises nothing for any bytes."""
        values: list[bytes] = []
        topics: list[bytes | None] = []
        publishers: list[bytes] = []
        sequences: list[int] = []
        rows: list[int] = []
        malformed: list[Malformed] = []
        announced: list[Announced] = []
        skipped = 0
        for row, frames in enumerate(raw.lists().to_pylist()):
            kind = frames[0][:1]
            if kind in _OF_OTHERS:
                skipped += 1
                continue
            try:
                if kind not in (_RECORD, _HEAD):
                    raise UnfitError(f"its first byte {kind!r} is not a type of Dafka message")
                expected = 2 if kind == _RECORD else 1
                if len(frames) != expected:
                    raise UnfitError(f"it has {len(frames)} frames, {expected} expected")
                publisher, subject, sequence = _read(frames[0])
            except UnfitError as e:
                malformed.append(Malformed(row, str(e)))
                continue
            if kind == _HEAD:
                announced.append(Announced(row, subject, publisher, sequence))
                continue
            rows.append(row)
            topics.append(subject)
            publishers.append(publisher)
            sequences.append(sequence)
            values.append(frames[1])
        return Fields(
            binary_of(values),
            binary_of(topics),
            binary_of(publishers),
            integers_of(sequences),
            integers_of(rows),
            malformed=malformed,
            announced=announced,
            skipped=skipped,
        )


def _read(frame: bytes) -> tuple[bytes, bytes, int]:
    zero = frame.find(0, 1)
    if zero < 0:
        raise UnfitError("no zero byte ends its topic")
    if frame[zero + 1 : zero + 2] != bytes([_VERSION]):
        raise UnfitError(f"its version is not {_VERSION}")
    publisher, at = _string(frame, zero + 2)
    subject, at = _string(frame, at)
    number = frame[at:]
    if len(number) != 8:
        raise UnfitError(f"the sequence has {len(number)} bytes, 8 expected")
    sequence = int.from_bytes(number, "big")
    if sequence >= 2**63:
        raise UnfitError(f"the sequence {sequence} is outside 0 to {2**63 - 1}")
    return publisher, subject, sequence


def _string(frame: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(frame) or at + 1 + frame[at] > len(frame):
        raise UnfitError("a string in it is cut off")
    end = at + 1 + frame[at]
    return frame[at + 1 : end], end


class FramingDecoder(Protocol):
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


def make_framing(options: FramingOptions) -> FramingDecoder | None:
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
