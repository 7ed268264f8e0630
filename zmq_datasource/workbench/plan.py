"""Which high-water marks survive a stall of the consumer, what that holds, and how stale it gets.

What one hop (a sending and a receiving socket) holds was measured and follows from how libzmq counts: the
sender learns in steps of half its high-water mark (``lwm``) that messages have left its queue, so::

    held = sndhwm + lwm * floor((rcvhwm + kernel) / lwm)        lwm = (sndhwm + 1) // 2

where ``kernel`` is how many messages are in the system's buffers and libzmq's own batches. That
depends on the size, the buffers and the system, and is measured (``measure_kernel``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zmq_datasource.errors import WorkbenchError
from zmq_datasource.workbench.doctor.hwm import MAILBOX_SECONDS, step
from zmq_datasource.workbench.experiment import Experiment, run

__all__ = ["Plan", "held", "make_plan", "measure_kernel", "message_bytes"]

_PROBE = 10
_PROBE_BYTES = 24 << 20


def held(sndhwm: int, rcvhwm: int, kernel: int) -> int:
    """How many messages a stalled hop takes before its sender is refused."""
    lwm = step(sndhwm)
    return sndhwm + lwm * ((rcvhwm + kernel) // lwm)


def message_bytes(size: int) -> int:
    """What a queued message of ``size`` bytes takes in a process: libzmq keeps up to 33 bytes inside its own 64."""
    return 64 if size <= 33 else 64 + 56 + size


def _even(hwm: float) -> int:
    """The next even high-water mark: of an odd one, two steps of half of it are more than the whole."""
    return max(2, 2 * math.ceil(hwm / 2))


def measure_kernel(size: int, buffers: int) -> int:
    """How many messages the system's buffers of one connection on this machine hold, libzmq's batches included.

    Args:
        size: Bytes of a message, at least 16.
        buffers: SNDBUF and RCVBUF; 0 leaves them to the system.

    Raises:
        WorkbenchError: It could not be tried.
    """
    messages = min(200_000, max(1000, _PROBE_BYTES // size))
    found = run(
        Experiment(
            mode="fill",
            sndhwm=_PROBE,
            rcvhwm=_PROBE,
            messages=messages,
            size=size,
            stall=2.0,
            linger=0,
            buffers=buffers,
        )
    )
    if not found.dropped:
        raise WorkbenchError(
            f"measuring the system's buffers: they took all of {messages} messages of {size} bytes; set --buffers"
        )
    return max(0, found.sent - 2 * _PROBE)


@dataclass(frozen=True)
class Plan:
    """What to set, and what follows.

    Attributes:
        wanted: Messages to be held: rate times stall.
        hwm: The high-water mark for each socket of the chain.
        held: Messages that the chain then holds.
        kernel: Of those, in the system's buffers, which no high-water mark bounds.
        memory: Bytes of the processes' queues, at most.
        survives: Seconds of stall that are survived without a drop; what the system's buffers add is not counted on.
        staleness: Seconds that a message takes through the full chain, once it flows at ``rate`` again.
        warnings: What the wish and this do not agree in.
    """

    wanted: int
    hwm: int
    held: int
    kernel: int
    memory: int
    survives: float
    staleness: float
    warnings: tuple[str, ...]


def make_plan(
    rate: float, size: int, stall: float, hops: int, kernel: int, memory: int | None = None
) -> Plan:
    """The smallest high-water marks that survive ``stall``, within ``memory``.

    Args:
        rate: Messages a second at the peak.
        size: Bytes of a message.
        stall: Seconds for which the consumer takes nothing.
        hops: Pairs of sockets one after another: 1 without a proxy, 2 with one.
        kernel: As ``measure_kernel`` says, for each hop.
        memory: Bytes that all queues may take; None is no bound.
    """
    wanted = math.ceil(rate * stall)
    least = _even(rate * MAILBOX_SECONDS)
    # Without the system's buffers, which it sizes as it likes, each hop holds two high-water marks. When the consumer
    # goes on, the receiver lets more in only after half of its own queue was taken: that half is not counted on.
    relied_on = 1.5 * hops
    hwm = max(least, _even(wanted / relied_on))
    warnings = []
    each = 2 * hops * message_bytes(size)
    if memory is not None and hwm * each > memory:
        most = max(2, memory // each // 2 * 2)
        warnings.append(
            f"a pause of {stall:g} s needs a high-water mark of {hwm:,} and {hwm * each:,} bytes of queues; with "
            f"{memory:,} it is {most:,}, which covers a pause of {relied_on * most / rate:.2f} s. Give it more memory, "
            "send less, or keep messages in a log"
        )
        hwm = most
    if hwm < least:
        warnings.append(
            f"a high-water mark of {hwm:,} is refused by mistake at {rate:,.0f} messages a second; {least:,} is the "
            "least"
        )
    if hops * kernel > 2 * wanted:
        warnings.append(
            f"the system's buffers alone hold {hops * kernel:,} messages, more than are wanted: high-water marks bound "
            "little, and messages get older than they need. Set zmq.sndbuf and zmq.rcvbuf to small values at both ends"
        )
    total = hops * held(hwm, hwm, kernel)
    return Plan(
        wanted,
        hwm,
        total,
        hops * kernel,
        hwm * each,
        relied_on * hwm / rate,
        total / rate,
        tuple(warnings),
    )
