"""Which high-water mark of the sender explains what a stalled reader was held. Pure.

A sender's pipe takes a message while fewer than ``sndhwm`` are written and not known to be read. It
learns in steps of ``lwm = (sndhwm + 1) // 2`` how many have left it, counted from the beginning of the
connection. So if the reader had taken ``before`` messages when it stopped, and ``beyond`` have left the
sender's pipe since (into its kernel, ours and our own queue), then at the first refusal::

    before + held = sndhwm + lwm * floor((before + beyond) / lwm)

``held`` is counted, ``before`` too, ``beyond`` is known within some messages where the kernel's queues can
be read, and not at all otherwise. Each high-water mark for which the equation holds for one of the possible
``beyond`` explains what was seen.
"""

from __future__ import annotations

import math

from zmq_datasource.workbench.doctor.facts import HwmRange

__all__ = ["DEFAULT_HWM", "MAILBOX_SECONDS", "beyond", "explain", "fits", "step"]

DEFAULT_HWM = 1000
# A sender looks about that often whether its queue has room again, so a smaller one refuses though it has.
MAILBOX_SECONDS = 0.0012
# libzmq sends and reads in batches of 8 kB, on both sides, which no kernel's queue shows.
_BATCHES_BYTES = 2 * 8192
# What Linux lets a send buffer grow to by itself (the third figure of net.ipv4.tcp_wmem), and leaves unread
# beside our own; assumed where the peer's machine cannot be read.
_ASSUMED_BYTES = 4 << 20
_LEAST_SLACK = 2


def step(hwm: int) -> int:
    """libzmq's low-water mark: a sender learns of what has left its queue by so many messages at a time."""
    return (hwm + 1) // 2


def fits(hwm: int, held: int, before: int, low: int, high: int) -> bool:
    """Whether a high-water mark explains ``held``, if ``low`` to ``high`` messages are beyond the sender's pipe."""
    lwm = step(hwm)
    # A look at the kernel, the last message and a burst do not happen at one moment: some messages either way.
    slack = max(_LEAST_SLACK, hwm // 50)
    heard = before + held - hwm  # of so many the sender had heard, in whole steps
    least, most = math.ceil((heard - slack) / lwm), (heard + slack) // lwm
    return max(0, least, (before + low) // lwm) <= min(most, (before + high) // lwm)


def beyond(rcvhwm: int, wire_bytes: float, ours: int | None, theirs: int | None) -> tuple[int, int]:
    """How many messages are beyond the sender's pipe at the end of a stall, at least and at most."""
    low = rcvhwm + int(((ours or 0) + (theirs or 0)) / wire_bytes)
    high = low + int((_BATCHES_BYTES + (_ASSUMED_BYTES if theirs is None else 0)) / wire_bytes)
    return max(0, low - _LEAST_SLACK), high + _LEAST_SLACK


def explain(
    held: int,
    before: int,
    rcvhwm: int,
    wire_bytes: float,
    ours: int | None,
    theirs: int | None,
    expected: int | None,
) -> HwmRange | None:
    """The high-water marks that explain a stall; None if none does.

    Args:
        held: Messages that came after it before the first that is missing.
        before: Messages taken on this connection before it.
        rcvhwm: Of our socket.
        wire_bytes: Of one message, its frames' headers included.
        ours, theirs: Bytes in the kernel's queues at its end; None if unknown.
        expected: The high-water mark that the user meant.
    """
    low, high = beyond(rcvhwm, wire_bytes, ours, theirs)
    # Of a high-water mark at least half is free when a reader that keeps up stops: larger ones would have held more.
    possible = [hwm for hwm in range(1, 2 * held + 2) if fits(hwm, held, before, low, high)]
    if not possible:
        return None
    return HwmRange(
        low=possible[0],
        high=possible[-1],
        measured=theirs is not None,
        expected_fits=None if expected is None else expected in possible,
        default_fits=DEFAULT_HWM in possible,
    )
