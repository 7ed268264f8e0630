"""What the messages show, or that there are none."""

from __future__ import annotations

from typing import Any

from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.options.types import ByteSize
from zmq_datasource.workbench.doctor.facts import Examined, Expected
from zmq_datasource.workbench.doctor.findings.finding import Case, Conditions
from zmq_datasource.workbench.doctor.hwm import MAILBOX_SECONDS

__all__ = ["CONNECTION", "TRAFFIC", "FlowCase"]

# A queue of the receiver that may need more than this is worth a word.
_MUCH_MEMORY = 1 << 30


class FlowCase(Case):
    """An endpoint that shook hands."""

    row_bytes = MAX_MESSAGE_BYTES

    def __init__(self, one: Examined, expected: Expected) -> None:
        self.endpoint, self.our_kind, self.handshake = one.endpoint, one.socket_type, one.handshake
        self.traffic: Any = one.traffic
        self.numbers: Any = one.numbers
        self.consumed: Any = one.consumed
        self.limit_hit, self.lost_behind, self.elsewhere = one.limit_hit, one.lost_behind, one.elsewhere
        self.limit, self.rcvhwm = expected.max_message_size or 0, expected.rcvhwm
        self.silent = one.traffic is None and one.limit_hit is None
        self.judged = one.numbers is not None and one.numbers.judged
        self.lost = one.numbers.lost if self.judged and one.numbers is not None else 0

    @property
    def times(self) -> str:
        count = self.handshake.disconnects
        return "once" if count == 1 else f"{count:,} times"

    @property
    def topics(self) -> str:
        return ", ".join(self.elsewhere)

    @property
    def missing(self) -> str:
        return (
            f"{self.lost:,} numbers missing in {self.numbers.gaps:,} gaps, {self.traffic.messages:,} messages came "
            f"({self.traffic.rate:,.0f}/s, at the peak {self.traffic.peak:,.0f}/s)"
        )

    @property
    def least(self) -> int:
        """The least high-water mark at which libzmq does not drop by mistake."""
        return max(2, round(float(self.traffic.peak) * MAILBOX_SECONDS))

    @property
    def above(self) -> str:
        return (
            " The same numbers are missing upstream, so the proxy is not who drops."
            if self.lost_behind == 0
            else ""
        )

    @property
    def size(self) -> ByteSize:
        return ByteSize(self.traffic.size_p99)

    @property
    def memory(self) -> ByteSize:
        return ByteSize(self.traffic.size_p99 * self.rcvhwm)

    @property
    def affordable(self) -> int:
        return max(1, _MUCH_MEMORY // int(self.traffic.size_p99))

    @property
    def too_slow(self) -> bool:
        """Whether a receiver fell behind; what was missing before is not its fault."""
        return self.consumed is not None and bool(
            self.consumed.behind or (self.consumed.lost and not (self.numbers and self.numbers.lost))
        )

    @property
    def taken(self) -> str:
        consumed = self.consumed
        return (
            f"at {consumed.each * 1000:g} ms a message {consumed.messages / consumed.seconds:,.0f}/s were taken, "
            f"{1 / consumed.each:,.0f}/s at best, of {self.traffic.rate:,.0f}/s; it was "
            f"{'behind to the end' if consumed.behind else 'behind at times'}"
            + (f"; {consumed.lost:,} messages were lost meanwhile" if self.judged else "")
            + (f"; {consumed.queued:,} bytes waited in the kernel" if consumed.queued else "")
        )


CONNECTION: Conditions = (
    {
        "frame_too_large": lambda c: c.limit_hit is not None,
        "connection_breaks": lambda c: c.handshake.disconnects,
    },
    {
        "topics_do_not_match": lambda c: c.silent and c.elsewhere,
        "nothing_came-pull": lambda c: c.silent and c.our_kind == "PULL",
        "nothing_came": lambda c: c.silent,
    },
)

# Where messages came.
TRAFFIC: Conditions = (
    {
        "malformed": lambda c: c.numbers and c.numbers.malformed and not c.numbers.guessed,
    },
    {
        "unnumbered": lambda c: c.numbers and not c.judged and c.our_kind == "SUB",
    },
    {
        "slow_joiner": lambda c: (
            c.judged and c.numbers.missed_first and c.handshake.waited and c.numbers.framing != "custom"
        ),
    },
    {
        "doctor_too_slow": lambda c: c.lost and c.traffic.saturated,
        "proxy_drops": lambda c: c.lost and c.lost_behind,
        "messages_lost": lambda c: c.lost,
    },
    {
        "duplicates": lambda c: c.judged and c.numbers.duplicates,
    },
    {
        "message_too_large": lambda c: c.traffic.size_max > c.row_bytes,
        "near_the_limit": lambda c: c.limit and 2 * c.traffic.largest_frame > c.limit,
    },
    {
        "queue_needs_much_memory": lambda c: c.memory > _MUCH_MEMORY,
    },
    {
        "receiver_too_slow": lambda c: c.too_slow,
    },
)
