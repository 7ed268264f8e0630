"""Messages of Jupyter kernels (on their iopub channel) and of Dafka producers.

A message of Jupyter has the frames: topic, the delimiter ``<IDS|MSG>``, signature, header, parent header, metadata,
content, and any number of buffers. ``msg_id`` in the header is opaque, so losses cannot be tracked. Checking the
signature would need the kernel's key, so it is not checked. Source: jupyter-client's documentation, "Messaging in
Jupyter", wire protocol 5.

The first frame of a Dafka message has its type (one letter), the topic, a zero byte, the version (1), and the fields:
strings with a length byte in front, and big-endian numbers. A record (``M``) has the producer's address, the subject
and the sequence (8 bytes), and its content in a second frame. A head (``H``) has the same fields, and no content: its
sequence is that of the producer's last record. Consumers and stores send the other types. Source: dafka_proto.xml and
the generated dafka_proto.c of zeromq/dafka.
"""

from __future__ import annotations

import msgspec

from zmq_datasource.messages.columns import binary_of, integers_of
from zmq_datasource.messages.framing.fields import Announced, Fields, Malformed, UnfitError
from zmq_datasource.messages.raw import RawMessages

__all__ = ["DafkaFraming", "JupyterFraming"]

_DELIMITER = b"<IDS|MSG>"


class _Header(msgspec.Struct):
    session: str


class JupyterFraming:
    """Decodes messages: ``value`` is the content, ``publisher`` the session, and ``topic`` the first frame, if any."""

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
    """Decodes records: ``topic`` is the subject, and ``publisher`` the producer's address."""

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
