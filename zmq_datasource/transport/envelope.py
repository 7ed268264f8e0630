"""The form of a message in this project's own protocols: a kind, a JSON header, and buffers.

The first frame is ``ZDS``, the version of the protocol (one byte) and the kind (one letter). The second frame is a JSON
object. The other frames are binary: topics, or the buffers of columns. There is no delimiter frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.printable import printable

__all__ = ["Envelope", "Header"]

_MAGIC = b"ZDS"


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The base class of headers. Unknown fields are ignored."""

    kind: ClassVar[bytes]

    def check(self) -> None:
        """Raise ProtocolError for a value that the protocol does not allow."""


Message = TypeVar("Message", bound=Header)


class Envelope(Generic[Message]):
    """Writes and reads the messages of one protocol.

    Args:
        version: The protocol's version.
        headers: One class for each kind of message.
        name: The protocol's name in errors.
    """

    def __init__(self, version: int, headers: Sequence[type[Message]], name: str) -> None:
        self._version = version
        self._name = name
        self._headers = {header.kind: header for header in headers}
        self._decoders = {header.kind: msgspec.json.Decoder(header) for header in headers}

    def encode(self, message: Message, buffers: Sequence[Any] = ()) -> list[Any]:
        """The frames of a message."""
        return [_MAGIC + bytes([self._version]) + message.kind, msgspec.json.encode(message), *buffers]

    def decode(self, frames: Sequence[bytes]) -> tuple[Message, Sequence[bytes]]:
        """Read a message and its buffers.

        Raises:
            ProtocolError: The frames are not a message of this protocol, or of another version.
        """
        head = bytes(frames[0]) if frames else b""
        if frames and not head:
            raise ProtocolError(
                f"a message of {self._name} begins with an empty frame: its DEALER puts a delimiter in front; "
                "send without one"
            )
        if len(head) != 5 or not head.startswith(_MAGIC) or len(frames) < 2:
            raise ProtocolError(f"this is no message of {self._name}")
        if head[3] != self._version:
            raise ProtocolError(
                f"version {head[3]} of {self._name}; this side speaks version {self._version}"
            )
        decoder = self._decoders.get(head[4:])
        if decoder is None:
            raise ProtocolError(f"unknown kind of message {head[4:]!r}")
        try:
            message = decoder.decode(frames[1])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
            name = self._headers[head[4:]].__name__
            raise ProtocolError(f"the header of a {name} message: {printable(str(e), 200)}") from e
        message.check()
        return message, frames[2:]
