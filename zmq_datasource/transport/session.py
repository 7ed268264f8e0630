"""One side of a conversation over DEALER, as a state machine without a socket, a clock or a thread.

A session takes messages and the time, and puts its messages into ``outbox``. So tests can try every order of loss,
delay and silence in a moment. ``link`` carries a session over a socket. Times are monotonic seconds.

``Envelope`` gives the messages of transactions and of durable subscribers one form. The first frame is ``ZDS``, the
version of the protocol (one byte) and the kind (one letter). The second frame is a JSON object. The other frames are
binary: topics, or the buffers of columns. There is no delimiter frame.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.log_lines import printable


class Session:
    """One side of a conversation.

    Attributes:
        outbox: Messages to send, oldest first, each a list of frames. The link removes them as they leave.
        redial: Whether the link must open a new connection before it sends, and discard what the old connection still
            delivers. The link resets it.
    """

    def __init__(self) -> None:
        self.outbox: deque[Sequence[Any]] = deque()
        self.redial = False

    def receive(self, frames: list[bytes], now: float) -> None:
        """Process a message from the peer."""
        raise NotImplementedError

    def wake(self, now: float) -> None:
        """Do what is due. Called every ``TICK_SECONDS`` (``link``) while no message arrives."""

    def reconnected(self, now: float) -> None:
        """libzmq has connected again: the peer may not know this session, and messages that were sent may be lost."""

    def bytes_arrived(self, now: float) -> None:
        """The peer has sent bytes, perhaps a part of a large message."""

    def blocked(self) -> None:
        """The socket has no room at present. The link keeps ``outbox`` and tries again."""


class RequestSession(Session):
    """A session that asks: one request is open at a time, and is repeated until it is answered.

    The peer gives a repeated request the same answer. A request is repeated after silence and on each new connection;
    after longer silence the session asks for a new connection. Bytes of any message end the silence.

    A subclass sends its requests, calls ``_mark_asked``, ``_mark_heard`` and ``_mark_answered``, and implements
    ``_repeat``.

    Args:
        repeat_after: Seconds of silence after which an open request is repeated.
        redial_after: Seconds of silence after which a new connection is opened; by default never.

    Attributes:
        waiting: Whether a request is open.
    """

    def __init__(self, repeat_after: float, redial_after: float = math.inf) -> None:
        super().__init__()
        self.repeat_after, self.redial_after = repeat_after, redial_after
        self.waiting = False
        self._asked = self._heard = 0.0

    def _mark_asked(self, now: float) -> None:
        """A request is sent, for the first time or again."""
        if not self.waiting:  # before the request the peer had nothing to say, so its silence begins now
            self._heard = max(self._heard, now)
        self.waiting, self._asked = True, now

    def _mark_answered(self) -> None:
        """The open request is answered."""
        self.waiting = False

    def _mark_heard(self, now: float) -> None:
        """The peer has sent something."""
        self._heard = now

    def _repeat(self, now: float) -> None:
        """Send the open request again, if there is one."""
        raise NotImplementedError

    def reconnected(self, now: float) -> None:
        self.outbox.clear()  # these messages were for the earlier connection; _repeat sends the open request
        self._heard = now
        self._repeat(now)

    def bytes_arrived(self, now: float) -> None:
        self._mark_heard(now)

    def wake(self, now: float) -> None:
        """Repeat the open request, or ask for a new connection, if it is time."""
        if not self.waiting:
            return
        if now - self._heard > self.redial_after:
            self.redial = True
            self.reconnected(now)
        elif now - max(self._heard, self._asked) > self.repeat_after:
            self._repeat(now)


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
            ProtocolError: The frames are not a message of this protocol and version.
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
