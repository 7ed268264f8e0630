"""What the doctor measured, as figures: seconds, bytes, messages. The parts of its JSON document."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = [
    "DEFAULT_HWM",
    "MAILBOX_SECONDS",
    "Buffers",
    "Consumed",
    "Durable",
    "Examined",
    "Expected",
    "Greeting",
    "Handshake",
    "HwmRange",
    "Numbers",
    "Outcome",
    "Stalled",
    "State",
    "Traffic",
]

# ``dropped``: numbers are missing; ``fewer``: no number is missing, or the messages have none, but fewer messages came
# than the rate says; ``all``: nothing is missing; ``idle``: too few messages came to say.
Outcome: TypeAlias = Literal["dropped", "fewer", "all", "idle"]
# ``covered``: what was seen on the wire was in the log; ``behind``: not within the time; ``unnumbered``: it cannot be
# compared; ``empty``: the log holds nothing, ``foreign``: nothing of this feed.
State: TypeAlias = Literal["covered", "behind", "unnumbered", "empty", "foreign"]

# libzmq's default high-water mark, in messages.
DEFAULT_HWM = 1000
# About how often a sender of libzmq looks whether its queue has room again. A queue that is too small for the messages
# of this time refuses messages although it has room.
MAILBOX_SECONDS = 0.0012


class _Facts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Figures. Their names in JSON are in camelCase, as options are."""


class Expected(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What the user expects of the feed."""

    hwm: int | None = None  # the high-water mark meant for the sender's socket
    full: Literal["drop", "wait"] | None = None  # what the sender should do when it is full
    consume: float | None = None  # seconds that the user's receiver takes for a message
    rcvhwm: int = 1000  # of the user's receiver
    max_message_size: int | None = None  # the largest frame that it lets in (libzmq's MAXMSGSIZE)


class Greeting(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What a peer says before any handshake."""

    # ``greeted`` if it speaks ZMTP; otherwise why nothing is known of it.
    state: Literal["greeted", "unresolved", "refused", "no_answer", "silent", "not_zeromq", "not_asked"]
    reason: str = ""  # in words, if it did not greet or is older than ZMTP 3
    version: str | None = None  # of ZMTP, as 3.1
    mechanism: str | None = None  # NULL, PLAIN, CURVE, ...
    socket_type: str | None = None  # unknown with a mechanism that says it only to those it trusts


class Handshake(_Facts, frozen=True, kw_only=True, rename="camel"):
    """How the connection was made, or why not."""

    state: Literal[
        "succeeded", "failed", "hung_up", "none"
    ]  # failed by an event of libzmq's, hung up by the peer
    event: str | None = None  # its name, if it failed
    seconds: float = 0.0  # from connecting to its end
    waited: bool = False  # whether the peer was away at first, and came while the doctor was there
    connections: int = 0
    disconnects: int = 0


class Traffic(_Facts, frozen=True, kw_only=True, rename="camel"):
    """The messages that came while the doctor watched."""

    messages: int
    bytes: int
    seconds: float  # from the first message to the end of watching
    rate: float  # messages a second over that
    peak: float  # messages a second in the busiest tenth of a second
    frames: dict[int, int]  # how many frames messages have, and how many messages
    size_min: int  # bytes of a message, all frames together
    size_median: int
    size_p99: int
    size_max: int
    largest_frame: int
    topics: list[tuple[str, int]]  # first frames with their messages, the most frequent first
    topics_more: int  # further topics
    saturated: bool  # whether the doctor itself was always behind: then gaps may be of its own making


class Numbers(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What the publisher's own numbers tell, as the source tracks them."""

    framing: str  # plain has no numbers
    options: dict[str, str] = {}  # what to set beside framing
    guessed: bool = True  # whether the doctor found it, and the user did not say
    judged: bool = False  # whether there are numbers that could be followed
    counters: int = 0
    missed_first: int = 0  # messages of the counters' beginning that were sent before the first that came
    lost: int = 0
    gaps: int = 0
    duplicates: int = 0
    late: int = 0
    restarts: int = 0
    malformed: int = 0  # messages that do not fit the framing
    compared: int = 0  # numbers that came again so soon that their messages could be compared
    unequal: int = 0  # of these the ones whose messages differ in topic or value
    suggested: dict[str, str] = {}  # what to set instead, because the numbers then fit


class Buffers(_Facts, frozen=True, kw_only=True, rename="camel"):
    """The buffers of our socket, and as much of the peer's as this machine's kernel shows."""

    rcvhwm: int  # of our socket, in messages
    rcvbuf: int | None = None  # of our connection, in bytes, as the kernel has it
    sndbuf: int | None = None
    queued: int | None = None  # bytes that waited in our kernel's buffer when watching ended
    peer_queued: int | None = None  # bytes in the peer's send buffer then; unknown on another machine


class Consumed(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What a receiver got that takes ``each`` seconds for a message."""

    each: float
    seconds: float
    messages: int
    lost: int
    behind: bool  # whether messages were waiting for it all the time towards the end
    queued: int | None  # bytes in the kernel's buffers at the end, the peer's included if it is here


class HwmRange(_Facts, frozen=True, kw_only=True, rename="camel"):
    """Which high-water marks of the sender explain what a stall held; see ``stall``."""

    low: int  # messages
    high: int
    measured: bool  # whether the kernel's share was read on this machine, not assumed
    expected_fits: bool | None  # whether the expected high-water mark is one of them
    default_fits: bool  # whether libzmq's default of 1000 is


class Stalled(_Facts, frozen=True, kw_only=True, rename="camel"):
    """What a receiver got that took nothing for a while."""

    outcome: Outcome
    seconds: float
    rcvhwm: int
    rate: float  # messages a second before it
    expected: int  # messages that this rate makes in the stall and in the time until all was taken
    received: int
    lost: int | None  # numbers that are missing of that time; None without numbers
    held: int | None  # messages that were held for us before the first that is missing
    kernel_bytes: (
        int | None
    )  # in the kernel's buffers at the end of the stall, the peer's included if measured
    measured: bool
    beyond: int  # messages that can have been in the kernel's buffers, libzmq's batches and our own queue
    marks: HwmRange | None = None


class Durable(_Facts, frozen=True, kw_only=True, rename="camel"):
    """How far a log is behind the wire."""

    location: str
    state: State
    missing: int = 0  # how many messages the log was behind the wire at the end
    seconds: float = 0.0  # waited
    grew: bool = False  # whether the log grew meanwhile


class Examined(_Facts, frozen=True, kw_only=True, rename="camel"):
    """Everything about one endpoint."""

    endpoint: str
    role: Literal["feed", "upstream"]  # what the receiver reads, or what is behind a proxy
    socket_type: str  # ours
    greeting: Greeting
    handshake: Handshake = Handshake(state="none")
    mechanism: str = "NULL"  # of our security
    filtered: bool = False  # whether we subscribe to some topics only
    traffic: Traffic | None = None
    numbers: Numbers | None = None
    buffers: Buffers | None = None
    consumed: Consumed | None = None
    stalled: Stalled | None = None
    elsewhere: list[str] = []  # topics that come without the filter, if nothing came with it
    limit_hit: int | None = None  # bytes of the largest frame without the limit, where it cut connections
    lost_behind: int | None = None  # of a feed: messages that are missing in it and came from upstream
