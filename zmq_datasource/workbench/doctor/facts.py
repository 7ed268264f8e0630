"""The facts about one endpoint (``Feed``) and about one place for a log (``Place``). Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from zmq_datasource.workbench.doctor.counting import Counting

# What may send to each of our sockets.
_SENDERS = {"SUB": ("PUB", "XPUB"), "PULL": ("PUSH",)}
# A feed has stopped if so many messages came over so many seconds, and then none to the end of watching, which is
# this many seconds, and this many times the longest pause before.
_FLOW_MESSAGES, _FLOW_SECONDS = 10, 0.25
_STOPPED_SECONDS, _STOPPED_TIMES = 1.0, 5
# If the numbers of this share of the messages are repeated or late, several counters are counted as one.
_MIXED = 0.1


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What a peer says before any handshake."""

    # ``greeted`` if it speaks ZMTP, and otherwise why nothing is known of it; then ``reason`` says it in words.
    state: Literal["greeted", "unresolved", "refused", "no_answer", "silent", "not_zeromq", "not_asked"]
    reason: str = ""
    version: str = ""  # of ZMTP, as in 3.1
    mechanism: str = ""  # NULL, PLAIN, CURVE, ...
    socket_type: str = ""  # empty if the peer says it only after the handshake
    addresses: tuple[str, ...] = ()  # of the host name

    @property
    def is_old(self) -> bool:
        """Whether the peer is older than ZMTP 3, and so is connected without a handshake."""
        return self.state == "greeted" and self.version < "3"


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """How the connection was made, or why not."""

    # ``failed`` by an event of libzmq's, whose name is ``event``; ``hung_up`` by the peer, without such an event.
    state: Literal["succeeded", "failed", "hung_up", "none"] = "none"
    event: str = ""
    seconds: float = 0.0  # from connecting until this was known
    lost: int = 0  # connections that were up and have ended
    faults: int = 0  # of these, the ones that libzmq has ended because of what the peer sent


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The messages that came while the doctor watched."""

    messages: int
    seconds: float  # from the first message to the end of watching
    peak: float = 0.0  # messages a second in the busiest tenth of a second
    frames: tuple[tuple[int, int], ...] = ()  # numbers of frames, each with its messages
    size_median: int = 0
    size_p99: int = 0
    size_max: int = 0
    topics: tuple[tuple[str, int], ...] = ()  # the most frequent first frames, each with its messages
    more_topics: int = 0
    longest_pause: float = 0.0  # between two messages
    silence: float = 0.0  # from the last message to the end of watching

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    @property
    def has_stopped(self) -> bool:
        flowed = self.messages >= _FLOW_MESSAGES and self.seconds - self.silence >= _FLOW_SECONDS
        return flowed and self.silence >= max(_STOPPED_SECONDS, _STOPPED_TIMES * self.longest_pause)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The publishers' numbers, as the source tracks them with the framing of the options."""

    counters: int
    lost: int = 0
    gaps: int = 0
    repeated: int = 0
    late: int = 0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """What a connection brought on which nothing was taken for a while."""

    outcome: Literal["drops", "waits", "neither"]  # of the sender; ``neither`` if none of them was seen
    seconds: float
    due: int  # the messages that the feed's rate makes from the beginning of the stall on
    received: int
    lost: int | None = None  # numbers that are missing; None without numbers
    disconnected: int = 0  # how often the connection has ended


@dataclass(frozen=True, kw_only=True)
class Feed:
    """Everything about one endpoint."""

    endpoint: str
    socket_type: str  # ours
    mechanism: str = "NULL"  # of our security
    framing: str = "plain"  # of the options
    not_opened: str = ""  # why our socket could not be bound or connected
    greeting: Greeting = Greeting(state="not_asked")
    handshake: Handshake = Handshake()
    traffic: Traffic | None = None
    numbers: Numbers | None = None  # None if the framing has none, or no message had one
    malformed: int = 0  # messages that do not fit the framing
    counting: Counting | None = None  # numbers that count up, in messages whose framing has none
    elsewhere: str = ""  # topics that come without the filter, if nothing came with it
    stall: Stall | None = None

    def but(self, **facts: Any) -> Self:
        """The same with other facts."""
        return replace(self, **facts)

    @property
    def is_up(self) -> bool:
        return self.handshake.state == "succeeded"

    @property
    def is_mismatched(self) -> bool:
        """Whether the socket types of the two sides do not belong together."""
        return bool(self.greeting.socket_type) and self.greeting.socket_type not in _SENDERS[self.socket_type]

    @property
    def has_other_security(self) -> bool:
        return self.greeting.state == "greeted" and self.greeting.mechanism != self.mechanism

    @property
    def is_mixed(self) -> bool:
        """Whether so many numbers are repeated or late that a missing one says nothing."""
        if self.numbers is None or self.traffic is None:
            return False
        return self.numbers.repeated + self.numbers.late >= _MIXED * self.traffic.messages

    @property
    def is_shared(self) -> bool:
        """Whether numbers are missing as regularly as if other PULLs took turns with ours."""
        if self.socket_type != "PULL":
            return False
        if self.numbers is not None and self.traffic is not None:
            return 2 * self.numbers.gaps >= self.traffic.messages
        return self.counting is not None and self.counting.step > 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory or a bucket that is to hold a log."""

    location: str
    file_system: str = ""  # its type, as the system calls it; empty if that is unknown, and for a bucket
    failed: str = ""  # the step that failed, and why
    is_full: bool = False  # whether it failed for lack of room
    no_links: str = ""  # what is wrong with hard links
    sync_seconds: float | None = None  # to force a MiB and its name to the disk
    free_bytes: int | None = None
    needed_bytes: int = 0  # what a log may take
    put_seconds: float | None = None  # to put a MiB into the bucket
    replaced: bool = False  # whether the bucket replaced an object although its key had to be free

    @property
    def is_narrow(self) -> bool:
        """Whether there is less room than a log may take."""
        return self.is_full or (self.free_bytes is not None and self.free_bytes < self.needed_bytes)

    @property
    def is_volatile(self) -> bool:
        """Whether files are in memory, or are said to be on the disk sooner than any disk can have a MiB."""
        in_memory = self.file_system in ("tmpfs", "ramfs", "devtmpfs")
        return in_memory or (self.sync_seconds is not None and self.sync_seconds < 0.0002)
