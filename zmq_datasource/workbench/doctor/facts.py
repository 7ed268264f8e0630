"""The facts about one endpoint (``Feed``) and about one place for a log (``Place``). Times are seconds, sizes bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zmq_datasource.workbench.doctor.counting import Counting

# What may send to each of our sockets.
_SENDERS = {"SUB": ("PUB", "XPUB"), "PULL": ("PUSH",)}
# If the numbers of this share of the messages are repeated or late, several counters are counted as one.
_MIXED = 0.1


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What a peer says before any handshake."""

    # ``greeted`` if it speaks ZMTP 3, and otherwise why nothing is known of it; then ``reason`` says it in words.
    state: Literal[
        "greeted", "old", "unresolved", "refused", "no_answer", "silent", "not_zeromq", "not_asked"
    ]
    reason: str = ""
    version: str = ""  # of ZMTP, as in 3.1
    mechanism: str = ""  # NULL, PLAIN, CURVE, ...
    socket_type: str = ""  # empty if the peer says it only after the handshake


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """Whether there was a connection, and how often it ended."""

    state: Literal["succeeded", "failed", "none"] = "none"
    lost: int = 0  # connections that were up and have ended
    faults: int = 0  # of these, the ones that libzmq has ended because of what the peer sent


# Fewer messages, or messages in less time, may be what a publisher sends to each that joins.
_FLOW_MESSAGES, _FLOW_SECONDS = 10, 0.25
_STOPPED_SECONDS, _STOPPED_TIMES = 1.0, 5


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The messages that came while the doctor watched."""

    messages: int
    seconds: float  # from the first message to the end of watching
    size_mean: int = 0
    size_max: int = 0
    topics: tuple[tuple[str, int], ...] = ()  # the most frequent first frames, each with its messages
    longest_pause: float = 0.0  # between two messages
    silence: float = 0.0  # from the last message to the end of watching

    @property
    def has_stopped(self) -> bool:
        """Whether messages flowed, and then none came for much longer than in any pause before."""
        flowed = self.messages >= _FLOW_MESSAGES and self.seconds - self.silence >= _FLOW_SECONDS
        return flowed and self.silence >= max(_STOPPED_SECONDS, _STOPPED_TIMES * self.longest_pause)

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The publishers' numbers, as the source tracks them with the framing of the options."""

    lost: int = 0
    repeated: int = 0
    late: int = 0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """The messages of a connection from which nothing was taken for a while."""

    outcome: Literal["drops", "waits", "neither"]  # of the sender; ``neither`` if neither was seen
    seconds: float
    due: int  # the messages that the feed's usual rate makes in the stall and after it
    received: int
    lost: int | None = None  # numbers that are missing; None without numbers


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
    def has_gaps(self) -> bool:
        """Whether numbers are missing that one counter has counted."""
        return self.numbers is not None and self.numbers.lost > 0 and not self.is_mixed


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory or a bucket that is to hold a log."""

    location: str
    failed: str = ""  # the step that failed, and why
    replaced: bool = (
        False  # whether a second object took a key, or a second file a name, although it had to be free
    )
