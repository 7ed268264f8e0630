"""Make the framing that the options name, and decode messages of Jupyter kernels."""

from __future__ import annotations

from typing import Protocol

import msgspec

from zmq_datasource.messages.columns import binary_of, integers_of
from zmq_datasource.messages.framing.fields import Fields, Malformed, UnfitError
from zmq_datasource.messages.framing.layout import LayoutFraming
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import FramingOptions

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


class FramingDecoder(Protocol):
    """Finds the fields of raw messages."""

    def decode(self, raw: RawMessages) -> Fields:
        """Find the fields of one message or more. Raises nothing for any bytes."""


def make_framing(options: FramingOptions) -> FramingDecoder | None:
    """Make the framing; None for plain framing, whose messages have no fields to find."""
    if options.layout is not None:
        return LayoutFraming(options.layout)
    return JupyterFraming() if options.framing == "jupyter" else None
