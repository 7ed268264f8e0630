"""The other end of the socket: plain pyzmq in a process of its own, the same for every method.

A peer that binds takes a port that the system chooses and tells it through its pipe. High-water
marks are libzmq's default of 1000. The first message is a *primer*: it is not measured, and
it shows that the whole chain behind the socket is up.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import zmq

__all__ = ["SHAPES", "Peer", "child", "consumer", "in_process", "numbered", "payload", "sender"]

_SPAWN = multiprocessing.get_context("spawn")
_START_SECONDS = 30.0


def payload(size: int) -> bytes:
    """What every message of this size holds."""
    return b"x" * size


def numbered(shape: str, size: int, number: int) -> list[bytes]:
    """A message of ``size`` bytes of payload with a sequence, in one of ``SHAPES``."""
    sequence = number.to_bytes(8, "big")
    if shape == "one frame":
        return [sequence + payload(size - 8)]
    if shape == "vllm":
        return [b"topic", sequence, payload(size)]
    # Eight publishers, each with numbers of its own.
    return [b"topic", b"publisher-%d" % (number % 8), (number // 8).to_bytes(8, "big"), payload(size)]


SHAPES = ("one frame", "vllm", "sequenced")


class Peer:
    """A child process with its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.endpoint: str = self.answer(_START_SECONDS)

    def go(self) -> None:
        """Begin what is measured."""
        self._pipe.send("go")

    def answer(self, seconds: float) -> Any:
        """What the child sends next.

        Raises:
            TimeoutError: Nothing came within ``seconds``.
        """
        return _answer(self._pipe, seconds)


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run this in a fresh process, with a pipe as its first argument, and end it with the block."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.terminate()
        process.join()
        ours.close()


@contextmanager
def sender(size: int, count: int, connect: str | None = None, shape: str | None = None) -> Iterator[Peer]:
    """A PUSH that sends the primer, and after ``go`` ``count`` messages of ``size`` bytes.

    All are alike, or with a ``shape`` numbered, the primer with 0.

    It binds, unless it is told where to connect. When all have left, it answers with the
    time (seconds since the epoch) at which the first was sent.
    """
    with child(_send, size, count, connect, shape) as pipe:
        yield Peer(pipe)


@contextmanager
def consumer(count: int) -> Iterator[Peer]:
    """A bound PULL that receives ``count`` messages.

    Answers with the time of the first when it came, and again with that of the last.
    """
    with child(_consume, count) as pipe:
        yield Peer(pipe)


def in_process(function: Callable[..., Any], *arguments: object, seconds: float) -> Any:
    """What ``function`` returns in a fresh process.

    Raises:
        TimeoutError: It returned nothing within ``seconds``.
    """
    with child(_call, function, *arguments) as pipe:
        return _answer(pipe, seconds)


def _answer(pipe: Connection, seconds: float) -> Any:
    if not pipe.poll(seconds):
        raise TimeoutError(f"waiting {seconds:.0f} s for a child process")
    return pipe.recv()


# What runs in the children.


def _call(pipe: Connection, function: Callable[..., Any], *arguments: object) -> None:
    pipe.send(function(*arguments))


def _send(pipe: Connection, size: int, count: int, connect: str | None, shape: str | None) -> None:
    # Leaving the blocks waits until everything has left the process.
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        if connect is None:
            pipe.send(_bind(socket))
        else:
            socket.connect(connect)
            pipe.send(connect)
        message, send = payload(size), socket.send
        send(message) if shape is None else _send_numbered(socket, shape, size, range(1))
        pipe.recv()
        began = time.time()
        if shape is None:
            for _ in range(count):
                send(message)
        else:
            _send_numbered(socket, shape, size, range(1, count + 1))
    pipe.send(began)


def _send_numbered(socket: zmq.Socket[bytes], shape: str, size: int, numbers: range) -> None:
    send = socket.send
    for number in numbers:
        *frames, last = numbered(shape, size, number)
        for frame in frames:
            send(frame, zmq.SNDMORE)
        send(last)


def _consume(pipe: Connection, count: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        pipe.send(_bind(socket))
        recv = socket.recv
        recv()
        pipe.send(time.time())
        for _ in range(count - 1):
            recv()
        pipe.send(time.time())
        pipe.poll(None)  # it stays until it is ended: a task waits for a consumer that leaves to come back


def _bind(socket: zmq.Socket[bytes]) -> str:
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
