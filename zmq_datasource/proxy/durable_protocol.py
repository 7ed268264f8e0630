"""The wire of durable subscribers: bytes only. Specified in docs/proxy.md, for clients in any language.

A message is a word, then its frames; every number is 8 bytes, big-endian, unsigned. A DEALER of the
subscriber talks to a ROUTER of the proxy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from zmq_datasource.errors import ProtocolError
from zmq_datasource.host.printable import printable

__all__ = [
    "EARLIEST",
    "HEARTBEAT_SECONDS",
    "LATEST",
    "MOST_CLIENT",
    "MOST_FRAMES",
    "MOST_NAME_BYTES",
    "SILENCE_SECONDS",
    "VERSION",
    "Ack",
    "Acked",
    "Close",
    "Credit",
    "Forget",
    "Forgotten",
    "FromClient",
    "FromProxy",
    "Heartbeat",
    "Lost",
    "Message",
    "Ready",
    "Refused",
    "Subscribe",
    "client_of",
    "read_from_client",
    "read_from_proxy",
    "session_number",
    "write",
]

VERSION = b"1"
EARLIEST, LATEST = b"earliest", b"latest"
# The proxy says so often that it is there. After so much silence it is asked; after twice as much without a byte
# the connection is given up. A message of 100 MB may take longer than that, and no heartbeat overtakes it.
HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 3 * HEARTBEAT_SECONDS
MOST_NAME_BYTES = 200
_MOST_TOPICS, _MOST_TOPIC_BYTES = 1000, 32_768
# Characters of the reason of a refusal.
_MOST_REASON = 2000
# Of a message of a client: SUBSCRIBE, what is said of it, and its topics.
MOST_FRAMES = 7 + _MOST_TOPICS


class Subscribe(NamedTuple):
    """Client: here I am (again), under this name.

    Attributes:
        name: Of the subscription, 1 to 200 bytes of UTF-8.
        session: Any number; ``READY`` says it again, so that the client knows what comes from when. Its upper half may
            name the client, see ``session_number``.
        start: Where a new one begins: ``earliest``, ``latest``, or an id.
        resume: The id after the last message that this client has received; None if it has none.
        credit: How many messages may be sent without further credit.
        topics: Prefixes; empty for all messages.
    """

    name: str
    session: int
    start: bytes
    resume: int | None
    credit: int
    topics: tuple[bytes, ...]


# The lower bits of a session's number count the sessions of one client; those above name the client.
_COUNT_BITS = 32
MOST_CLIENT = 2**31 - 1


def session_number(client: int, count: int) -> int:
    """The number of a client's session.

    Args:
        client: A random number up to ``MOST_CLIENT``; 0 for a client without a number of its own.
        count: Goes up with each session of the client.
    """
    return client << _COUNT_BITS | count


def client_of(session: int) -> int:
    """The client in a session's number; 0 if it has none."""
    return session >> _COUNT_BITS


class Ack(NamedTuple):
    """Client: done with everything up to this id."""

    id: int


class Credit(NamedTuple):
    """Client: the proxy may send so many messages more."""

    messages: int


class Close(NamedTuple):
    """Client: gone for now; the subscription stays."""


class Forget(NamedTuple):
    """Client: the subscription is not needed any more."""


class Ready(NamedTuple):
    """Proxy: from this id on it will come; ``end`` is the log's; ``new`` if the name was not known."""

    session: int
    next: int
    end: int
    new: bool


class Message(NamedTuple):
    """Proxy: a message, all its frames."""

    id: int
    frames: tuple[bytes, ...]


class Acked(NamedTuple):
    """Proxy: the subscription begins at this id from now on, whatever happens."""

    next: int


class Heartbeat(NamedTuple):
    """Proxy: still here; the log ends at this id."""

    end: int


class Lost(NamedTuple):
    """Proxy: the ids from ``first`` to before ``end`` were due, and the log has them no more."""

    first: int
    end: int


class Forgotten(NamedTuple):
    """Proxy: the subscription is gone."""


class Refused(NamedTuple):
    """Proxy: it cannot be done, or no more; ``code`` is for programs, ``reason`` for people."""

    code: str
    reason: str


FromClient: TypeAlias = Subscribe | Ack | Credit | Close | Forget
FromProxy: TypeAlias = Ready | Message | Acked | Heartbeat | Lost | Forgotten | Refused


def write(message: FromClient | FromProxy) -> list[Any]:
    """The frames of a message."""
    match message:
        case Subscribe(name, session, start, resume, credit, topics):
            resumed = b"" if resume is None else _number(resume)
            return [
                *(b"SUBSCRIBE", VERSION, name.encode(), _number(session), start, resumed, _number(credit)),
                *topics,
            ]
        case Message(id, frames):
            return [b"MESSAGE", _number(id), *frames]
        case Ready(session, first, end, new):
            return [b"READY", _number(session), _number(first), _number(end), b"new" if new else b"known"]
        case Refused(code, reason):
            return [b"REFUSED", code.encode(), reason.encode()]
        case _:
            return [type(message).__name__.upper().encode(), *map(_number, message)]


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


_NUMBERS: dict[bytes, type[Any]] = {
    cls.__name__.upper().encode(): cls
    for cls in (Ack, Credit, Close, Forget, Acked, Heartbeat, Lost, Forgotten)
}
_OF_CLIENT = (b"ACK", b"CREDIT", b"CLOSE", b"FORGET")


def read_from_client(frames: Sequence[bytes]) -> FromClient:
    """What a client has sent.

    Raises:
        ProtocolError: No message of this protocol.
    """
    if not frames:
        raise ProtocolError("a message without frames, or with more bytes than any request has")
    word = frames[0]
    if word == b"SUBSCRIBE":
        return _read_subscribe(frames)
    if word in _OF_CLIENT:
        message: FromClient = _read_numbers(frames)
        return message
    raise ProtocolError(
        f"a message that begins with {word[:32]!r}; SUBSCRIBE, ACK, CREDIT, CLOSE and FORGET are known"
    )


def _read_subscribe(frames: Sequence[bytes]) -> Subscribe:
    if len(frames) < 2 or frames[1] != VERSION:
        version = printable(b"".join(frames[1:2]), 32)
        raise ProtocolError(f"version '{version}' of the protocol; this proxy speaks '{VERSION.decode()}'")
    if len(frames) < 7:
        raise ProtocolError(
            f"SUBSCRIBE with {len(frames)} frames; it has a version, a name, a session, a start, a resume, a "
            "credit, and topics"
        )
    _, _, name, session, start, resume, credit, *topics = frames
    try:
        text = name.decode()
    except UnicodeDecodeError as e:
        raise ProtocolError(f"the name {name[:32]!r} is not UTF-8") from e
    if not 0 < len(name) <= MOST_NAME_BYTES or not text.isprintable():
        raise ProtocolError(f"a name has 1 to {MOST_NAME_BYTES} bytes of printable text, not {name[:32]!r}")
    if start not in (EARLIEST, LATEST) and len(start) != 8:
        raise ProtocolError(f"start {start[:32]!r} is not earliest, latest, or an id of 8 bytes")
    if len(topics) > _MOST_TOPICS or sum(map(len, topics)) > _MOST_TOPIC_BYTES:
        raise ProtocolError(
            f"{len(topics)} topics of {sum(map(len, topics))} bytes; {_MOST_TOPICS} of {_MOST_TOPIC_BYTES} are the most"
        )
    return Subscribe(
        text,
        _id(session, "session"),
        bytes(start),
        _id(resume, "resume") if resume else None,
        _id(credit, "credit"),
        tuple(topics),
    )


def read_from_proxy(frames: Sequence[bytes]) -> FromProxy:
    """What a proxy has sent.

    Raises:
        ProtocolError: No message of this protocol.
    """
    match frames:
        case [b"MESSAGE", id, _, *_]:
            return Message(_id(id, "id"), tuple(frames[2:]))
        case [b"READY", session, first, end, new]:
            return Ready(_id(session, "session"), _id(first, "next"), _id(end, "end"), new == b"new")
        case [b"REFUSED", code, reason]:
            return Refused(printable(code, 64), printable(reason, _MOST_REASON))
        case [word, *_] if word in _NUMBERS and word not in _OF_CLIENT:
            message: FromProxy = _read_numbers(frames)
            return message
    raise ProtocolError(f"a message that begins with {bytes(frames[0])[:32]!r} and has {len(frames)} frames")


def _read_numbers(frames: Sequence[bytes]) -> Any:
    cls = _NUMBERS[frames[0]]
    fields = cls._fields
    if len(frames) != 1 + len(fields):
        raise ProtocolError(f"{frames[0].decode()} with {len(frames) - 1} frames; it has {len(fields)}")
    return cls(*(_id(frame, name) for frame, name in zip(frames[1:], fields, strict=True)))


def _id(frame: bytes, name: str) -> int:
    if len(frame) != 8 or frame[0] & 0x80:
        raise ProtocolError(
            f"{name} has {len(frame)} bytes or is too large; it is a number of 8 bytes, big-endian"
        )
    return int.from_bytes(frame, "big")
