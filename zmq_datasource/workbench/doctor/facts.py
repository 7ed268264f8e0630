"""What the doctor measured, as figures: seconds, bytes, messages. The parts of its JSON document."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "Buffers",
    "Consumed",
    "Durable",
    "Examined",
    "Expected",
    "Glance",
    "Handshake",
    "HwmRange",
    "Numbers",
    "Outcome",
    "Stalled",
    "State",
    "Traffic",
]


class _Facts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Written to JSON with names as the data source's options have them."""


class Expected(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What the user says that the feed should be.

    Attributes:
        hwm: The high-water mark meant for the sender's socket.
        full: What the sender should do when it is full.
        consume: Seconds that the user's receiver takes for a message.
        rcvhwm: The RCVHWM of the user's receiver.
        max_message_size: The largest frame that it lets in (libzmq's MAXMSGSIZE).
    """

    hwm: int | None = None
    full: Literal["drop", "wait"] | None = None
    consume: float | None = None
    rcvhwm: int = 1000
    max_message_size: int | None = None


class Glance(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What a peer says before any handshake.

    Attributes:
        state: ``greeted`` if it speaks ZMTP; otherwise why nothing is known of it.
        reason: In words, if it did not greet.
        version: Of ZMTP, as ``3.1``.
        mechanism: ``NULL``, ``PLAIN``, ``CURVE``, ...
        socket_type: As it names itself; None with a mechanism that says it only to those it trusts.
    """

    state: Literal["greeted", "unresolved", "refused", "no_answer", "silent", "not_zeromq", "not_asked"]
    reason: str = ""
    version: str | None = None
    mechanism: str | None = None
    socket_type: str | None = None


class Handshake(_Facts, frozen=True, kw_only=True, rename="camel"):
    """How the connection was made, or why not.

    Attributes:
        state: ``failed`` by an event of libzmq's, ``hung_up`` by the peer, ``none`` if there was none.
        event: The event's name, if it failed.
        seconds: From connecting to its end.
        waited: Whether the peer was away at first, and came while the doctor was there.
        connections, disconnects: How many there were in all.
    """

    state: Literal["succeeded", "failed", "hung_up", "none"]
    event: str | None = None
    seconds: float = 0.0
    waited: bool = False
    connections: int = 0
    disconnects: int = 0


class Traffic(_Facts, frozen=True, kw_only=True, rename="camel"):
    """The messages that came while the doctor watched.

    Attributes:
        seconds: From the first message to the end of watching.
        rate: Messages a second over that.
        peak: Messages a second in the busiest tenth of a second.
        frames: How many frames messages have, and how many messages.
        size_*: Bytes of a message, all frames together.
        largest_frame: Bytes.
        topics: First frames with their messages, the most frequent first.
        topics_more: How many further topics there are.
        saturated: Whether the doctor itself was always behind: then gaps may be of its own making.
    """

    messages: int
    bytes: int
    seconds: float
    rate: float
    peak: float
    frames: dict[int, int]
    size_min: int
    size_median: int
    size_p99: int
    size_max: int
    largest_frame: int
    topics: list[tuple[str, int]]
    topics_more: int
    saturated: bool


class Numbers(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What the publisher's own numbers tell.

    Attributes:
        framing: Of the package; ``plain`` has no numbers.
        options: What to set for it beside ``framing``.
        guessed: Whether the doctor found it, and the user did not say.
        judged: Whether there are numbers that could be followed.
        counters: How many counted by themselves.
        missed_first: Messages of the counters' beginning that were sent before the first that came.
        lost, gaps, duplicates, late, restarts: As ``sequences`` tracks them.
        malformed: Messages that do not fit the framing.
    """

    framing: str
    options: dict[str, str] = {}
    guessed: bool = True
    judged: bool = False
    counters: int = 0
    missed_first: int = 0
    lost: int = 0
    gaps: int = 0
    duplicates: int = 0
    late: int = 0
    restarts: int = 0
    malformed: int = 0


class Buffers(_Facts, frozen=True, kw_only=True, rename="camel"):
    """Our own end, read back; and of the peer's what this machine's kernel shows.

    Attributes:
        rcvhwm: Of our socket, in messages.
        rcvbuf, sndbuf: Of our connection, in bytes, as the kernel has them.
        queued: Bytes that waited in our kernel's buffer when watching ended.
        peer_queued: Bytes in the peer's send buffer then; None if the peer is on another machine.
    """

    rcvhwm: int
    rcvbuf: int | None = None
    sndbuf: int | None = None
    queued: int | None = None
    peer_queued: int | None = None


class Consumed(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What came of a receiver that takes ``each`` seconds for a message.

    Attributes:
        behind: Whether messages were waiting for it all the time towards the end.
        queued: Bytes in the kernel's buffers at the end, the peer's included if it is here.
    """

    each: float
    seconds: float
    messages: int
    lost: int
    behind: bool
    queued: int | None


class HwmRange(_Facts, frozen=True, kw_only=True, rename="camel"):
    """Which high-water marks of the sender explain what a stall held; see ``hwm``.

    Attributes:
        low, high: Messages.
        measured: Whether the kernel's share was read on this machine, not assumed.
        expected_fits: Whether the expected high-water mark is one of them; None if none was given.
        default_fits: Whether libzmq's default of 1000 is.
    """

    low: int
    high: int
    measured: bool
    expected_fits: bool | None
    default_fits: bool


Outcome: TypeAlias = Literal["dropped", "fewer", "all", "idle"]


class Stalled(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What came of taking nothing for a while.

    Attributes:
        outcome: ``dropped``: numbers are missing; ``fewer``: there are no numbers, or none is missing, but
            fewer came than the rate says; ``all``: nothing is missing; ``idle``: too little to say.
        rate: Messages a second before it.
        expected: Messages that this rate makes in the stall and what followed until all was taken.
        received: Messages that came.
        lost: Numbers that are missing of that time; None without numbers.
        held: Messages that were held for us before the first that is missing; None if none is.
        kernel_bytes: In the kernel's buffers at the end of the stall, the peer's included if ``measured``.
        beyond: Messages that can have been in the kernel's buffers, libzmq's batches and our own queue.
    """

    outcome: Outcome
    seconds: float
    rcvhwm: int
    rate: float
    expected: int
    received: int
    lost: int | None
    held: int | None
    kernel_bytes: int | None
    measured: bool
    beyond: int
    marks: HwmRange | None = None


State: TypeAlias = Literal["covered", "behind", "unnumbered", "empty", "foreign"]


class Durable(_Facts, frozen=True, kw_only=True, rename="camel"):
    """How far a log is behind the wire.

    Attributes:
        location: Of the log.
        state: ``covered``: what was seen on the wire was in it; ``behind``: not within ``seconds``;
            ``unnumbered``: it cannot be compared; ``empty``: it holds nothing, ``foreign``: nothing of this feed.
        missing: Messages that the wire was ahead at the end.
        seconds: Waited.
        grew: Whether the log grew meanwhile.
    """

    location: str
    state: State
    missing: int = 0
    seconds: float = 0.0
    grew: bool = False


class Examined(_Facts, frozen=True, kw_only=True, rename="camel"):
    """Everything about one endpoint.

    Attributes:
        role: ``feed`` for what the receiver reads, ``upstream`` for what is behind a proxy.
        socket_type: Ours.
        elsewhere: Topics that come without the filter, if nothing came with it.
        limit_hit: Bytes of the largest frame that comes if the limit is lifted, where it cut connections.
        mechanism: Of our security.
        filtered: Whether we subscribe to some topics only.
        lost_behind: Of a feed: messages that are missing in it and came from upstream.
    """

    endpoint: str
    role: Literal["feed", "upstream"]
    socket_type: str
    glance: Glance
    handshake: Handshake = Handshake(state="none")
    mechanism: str = "NULL"
    filtered: bool = False
    traffic: Traffic | None = None
    numbers: Numbers | None = None
    buffers: Buffers | None = None
    consumed: Consumed | None = None
    stalled: Stalled | None = None
    elsewhere: list[str] = []
    limit_hit: int | None = None
    lost_behind: int | None = None
