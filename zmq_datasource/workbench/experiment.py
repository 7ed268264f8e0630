"""A sender and a slow consumer, each in a process of its own, and the account of every message.

Each message has a number. The sender notes which numbers its socket accepted, and the consumer which ones came. After
each run every number is one of these, or the run is an error (``account``): *dropped* (refused by the socket),
*received*, or *lost* (accepted and never received: dropped in silence, or given up when linger ran out).

The sender sends as the package's sink does. It refreshes the socket's events before it counts a message as dropped, and
it measures how long it waits for a full queue.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import struct
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import zmq

from zmq_datasource.errors import OptionError, WorkbenchError

Pattern = Literal["PUSH/PULL", "PUB/SUB"]
# silent: a PUB with libzmq's defaults, which drops without an error. fill: send until the chain is full.
Mode = Literal["noblock", "block", "silent", "fill"]

_SPAWN = multiprocessing.get_context("spawn")
# A message begins with its number and when it was sent.
HEADER_BYTES = 16
_MESSAGES = 5000
# How long the sender goes on after a stall. If it ended with the stall, a queue that holds all messages would do.
_AFTER_STALL_SECONDS = 1.0
_START_SECONDS = 30.0
# If the sender has ended, and no message comes within this time, the rest is lost.
_QUIET_MS = 300
# How often the consumer looks whether the sender has ended.
_LOOK_MS = 20
# Shorter waits are busy ones, because sleep() is not as exact.
_SPIN_SECONDS = 0.0005
# A chain that takes no message within this time is full.
_FULL_MS = 300
_HEADER = struct.Struct(">Qd")


class Experiment(NamedTuple):
    """The settings of one experiment.

    Attributes:
        pattern: The socket types.
        mode: What the sender does at a full queue.
        sndhwm, rcvhwm: Messages.
        messages: How many are offered to the sender's socket; in mode ``fill``, at most.
        size: Bytes of each message, at least 16.
        rate: Messages a second; 0 is as fast as possible.
        consume: Seconds that the consumer needs for each message.
        stall: Seconds before the consumer takes its first message.
        linger: Milliseconds that the sender waits when it closes; -1 is for ever.
        buffers: SNDBUF and RCVBUF in bytes; 0 leaves them to the system.
        timeout: Seconds after which a blocked sender drops the message.
    """

    pattern: Pattern = "PUSH/PULL"
    mode: Mode = "noblock"
    sndhwm: int = 1000
    rcvhwm: int = 1000
    messages: int = 5000
    size: int = 1000
    rate: float = 0.0
    consume: float = 0.0
    stall: float = 0.0
    linger: int = -1
    buffers: int = 0
    timeout: float = 60.0


class ExperimentResult(NamedTuple):
    """What was measured in one experiment.

    Attributes:
        sent: Messages that the sender's socket accepted.
        dropped: Messages that the socket refused; in mode ``fill`` also those that were never offered.
        blocked: Seconds that the sender waited for room.
        received: Messages that the consumer received.
        lost: Messages that were sent and never received.
        p50, p99: Seconds between sending and receiving a message, median and 99th percentile.
        sender_bytes, consumer_bytes: By how much the memory of each process grew, at most.
        seconds: From the start of the consumer to its last message.
    """

    experiment: Experiment
    sent: int
    dropped: int
    blocked: float
    received: int
    lost: int
    p50: float
    p99: float
    sender_bytes: int
    consumer_bytes: int
    seconds: float

    @property
    def drop_rate(self) -> float:
        """The share of the messages that was not received, 0 to 1."""
        return 1 - self.received / self.experiment.messages


def messages_of(asked: int | None, rate: float, stall: float, largest_hwm: int) -> int:
    """How many messages a run sends: more than its queues hold, so that a queue that is too small shows.

    Args:
        asked: The user's number; None for the default.
        rate, stall: As in ``Experiment``.
        largest_hwm: The largest high-water mark that is tried.

    Raises:
        OptionError: The run would be too short to fill the queues.
    """
    if stall and rate:
        least = math.ceil(rate * (stall + _AFTER_STALL_SECONDS))
        if asked is not None and asked < least:
            raise OptionError(
                f"--messages {asked:,}: at --rate {rate:,g} the sender would end before or soon after --stall "
                f"{stall:g}s, and a queue of {asked:,} would pass any stall; send {least:,} or more (the rate × (the "
                f"stall + {_AFTER_STALL_SECONDS:g} s)), or leave --messages out"
            )
        return max(least, _MESSAGES) if asked is None else asked
    if stall and asked is None:
        raise OptionError(
            "--stall with --rate 0: say with --messages how many messages come at once, or set --rate"
        )
    messages = asked or _MESSAGES
    if largest_hwm >= messages and not stall:
        raise OptionError(
            f"a high-water mark of {largest_hwm:,} holds all --messages {messages:,}, so the run would show nothing; "
            f"set --messages {3 * largest_hwm:,}, or try smaller marks"
        )
    return messages


def run(experiment: Experiment) -> ExperimentResult:
    """Run an experiment with real sockets over tcp on this machine.

    Raises:
        WorkbenchError: A process does not start or answer, or the account does not add up.
    """
    with ExitStack() as stack:
        # Both start at once: in a short experiment, starting two interpreters takes most of the time.
        consumer = stack.enter_context(_process(_consume, experiment))
        sender = stack.enter_context(_process(_send, experiment))
        sender.send(_wait_for_answer(consumer, _START_SECONDS, "the consumer to bind"))
        _wait_for_answer(sender, _START_SECONDS, "the sender to connect")
        consumer.send("go")
        sender.send("go")
        patience = experiment.timeout + experiment.stall + _expected_seconds(experiment) + _START_SECONDS
        answer = _wait_for_answer(sender, patience, "the sender to end")
        consumer.send("end")
        took = _wait_for_answer(consumer, patience, "the consumer to end")
    return ExperimentResult(experiment, **account(answer.pop("accepted"), took.pop("came")), **answer, **took)


def account(accepted: bytes, came: bytes) -> dict[str, int]:
    """The account of a run, from what both sides have noted of each number.

    Args:
        accepted: For each number, 1 if the sender's socket accepted the message, else 0.
        came: For each number, how often the consumer has received it.

    Raises:
        WorkbenchError: A message came that the sender counts as dropped, or came twice.
    """
    wrong = [number for number, (sent, times) in enumerate(zip(accepted, came, strict=True)) if times > sent]
    if wrong:
        first = wrong[0]
        raise WorkbenchError(
            f"accounting for an experiment: {len(wrong)} of {len(accepted)} messages came more often than they were "
            f"sent; message {first} was sent {accepted[first]} times, and came {came[first]} times"
        )
    sent, received = sum(accepted), sum(came)
    return {
        "sent": sent,
        "dropped": len(accepted) - sent,
        "received": received,
        "lost": sum(sent > times for sent, times in zip(accepted, came, strict=True)),
    }


def _expected_seconds(experiment: Experiment) -> float:
    paced = experiment.messages / experiment.rate if experiment.rate else 0.0
    return 2 * max(paced, experiment.messages * (experiment.consume + 1e-4))


@contextmanager
def _process(work: Any, *arguments: Any) -> Iterator[Connection]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _wait_for_answer(pipe: Connection, seconds: float, what: str) -> Any:
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except EOFError as e:
        raise WorkbenchError(f"waiting for {what}: its process has ended; its error is above") from e
    raise WorkbenchError(f"waiting {seconds:.0f} s for {what}: nothing came")


# The consumer's process.


def _consume(pipe: Connection, experiment: Experiment) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, too, and ends this process
    kind = zmq.PULL if experiment.pattern == "PUSH/PULL" else zmq.SUB
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, experiment.rcvhwm)
        if experiment.buffers:
            socket.setsockopt(zmq.RCVBUF, experiment.buffers)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        while not pipe.poll():  # a bound SUB subscribes only while its thread uses it
            socket.poll(10)
        pipe.recv()
        began_with = _peak()
        pipe.send(_take(pipe, socket, experiment) | {"consumer_bytes": _peak() - began_with})
        pipe.poll(_START_SECONDS)  # the parent kills this process


def _take(pipe: Connection, socket: zmq.Socket[bytes], experiment: Experiment) -> dict[str, Any]:
    latencies = array("d")
    came = bytearray(experiment.messages)
    began = time.monotonic()
    free = began + experiment.stall
    last = began
    ended = False
    while True:
        wait_until(free)
        if not socket.poll(_QUIET_MS if ended else _LOOK_MS):
            if ended:
                break
            ended = pipe.poll()
            continue
        message = socket.recv()
        last = time.monotonic()
        number, sent_at = _HEADER.unpack_from(message)
        came[number] += 1
        latencies.append(last - sent_at)
        free = last + experiment.consume
    ordered = sorted(latencies)
    return {
        "came": bytes(came),
        "p50": ordered[len(ordered) // 2] if ordered else 0.0,
        "p99": ordered[len(ordered) * 99 // 100] if ordered else 0.0,
        "seconds": last - began,
    }


def wait_until(when: float) -> None:
    """Wait until this time of the monotonic clock, more exactly than ``sleep`` does."""
    while (left := when - time.monotonic()) > 0:
        if left > _SPIN_SECONDS:
            time.sleep(left - _SPIN_SECONDS)


# The sender's process.


def _send(pipe: Connection, experiment: Experiment) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kind = zmq.PUSH if experiment.pattern == "PUSH/PULL" else zmq.XPUB
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, experiment.sndhwm)
    socket.setsockopt(zmq.LINGER, experiment.linger)
    socket.setsockopt(
        zmq.SNDTIMEO, _FULL_MS if experiment.mode == "fill" else round(experiment.timeout * 1000)
    )
    if experiment.buffers:
        socket.setsockopt(zmq.SNDBUF, experiment.buffers)
    if kind == zmq.XPUB and experiment.mode != "silent":
        socket.setsockopt(zmq.XPUB_NODROP, 1)
    monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
    socket.connect(pipe.recv())
    (socket if kind == zmq.XPUB else monitor).recv_multipart()  # the subscription, or the handshake
    socket.disable_monitor()
    monitor.close()
    pipe.send("connected")
    pipe.recv()
    began_with = _peak()
    answer = _offer_all(socket, experiment)
    answer["sender_bytes"] = _peak() - began_with
    socket.close()
    context.term()  # waits as linger says
    pipe.send(answer)
    pipe.poll(_START_SECONDS)


def _offer_all(socket: zmq.Socket[bytes], experiment: Experiment) -> dict[str, Any]:
    padding = b"x" * (experiment.size - HEADER_BYTES)
    interval = 1 / experiment.rate if experiment.rate else 0.0
    accepted = bytearray(experiment.messages)
    blocked = 0.0
    due = time.monotonic()
    for number in range(experiment.messages):
        if interval:
            wait_until(due)
            due += interval
        message = _HEADER.pack(number, time.monotonic()) + padding
        accepted[number] = _offer(socket, message)
        if not accepted[number] and experiment.mode in ("block", "fill"):
            before = time.monotonic()
            with suppress(zmq.Again):
                socket.send(message)
                accepted[number] = True
            blocked += time.monotonic() - before
            if not accepted[number] and experiment.mode == "fill":
                break
    return {"accepted": bytes(accepted), "blocked": blocked}


def _offer(socket: zmq.Socket[bytes], message: bytes) -> bool:
    try:
        socket.send(message, zmq.NOBLOCK)
    except zmq.Again:
        socket.getsockopt(zmq.EVENTS)  # the refusal may be out of date
        try:
            socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
    return True


def _peak() -> int:
    """The largest memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
