"""The other end of the socket: ``peer.c`` in a process of its own, the same for every method.

It is compiled on first use, which needs a C compiler and a wheel of pyzmq, which has libzmq beside it. A peer that
binds takes a port that the system chooses. High-water marks are libzmq's default of 1000, unless said otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import selectors
import socket as stdlib_socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from benchmarks.measure import Sample, Times
from benchmarks.processes import cpu_seconds, per_message

__all__ = [
    "ANY_PORT",
    "Mark",
    "Peer",
    "child",
    "free_endpoint",
    "listens",
    "peer",
    "window",
]

ANY_PORT = "tcp://127.0.0.1:*"

_SPAWN = multiprocessing.get_context("spawn")
_ANSWER_SECONDS = 30.0
_HERE = Path(__file__).parent
_BUILD = _HERE.parent / "build" / "benchmarks"


@dataclass(frozen=True)
class Mark:
    """How far a peer is.

    Attributes:
        messages: Sent or received.
        time: When, in seconds since the epoch.
        cpu: CPU seconds its process has used.
        done: Whether that were all.
    """

    messages: int
    time: float
    cpu: float
    done: bool


class Peer:
    """A running peer, which waits for ``go``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.endpoint: str = self._answer()["endpoint"]

    def go(self) -> Mark:
        """Begin to send or to receive."""
        return Mark(**self._ask("go"))

    def mark(self) -> Mark:
        return Mark(**self._ask("mark"))

    def stop(self) -> Mark:
        """Send no more; what is queued still leaves."""
        return Mark(**self._ask("stop"))

    def latency(self) -> dict[str, float]:
        """Microseconds on the way of the ``stamped`` messages since this was last asked: p50, p99, max; samples."""
        return dict(self._ask("latency"))

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # One answer a question, so nothing is left in the stream's own buffer that a selector would not see.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_ANSWER_SECONDS):
                raise TimeoutError(f"waiting {_ANSWER_SECONDS:.0f} s for a peer")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a peer ended with {self._process.wait()}")
        return dict(json.loads(line))


@contextmanager
def peer(
    kind: str,
    *,
    connect: str | None = None,
    size: int = 100,
    shape: str = "plain",
    **settings: int,
) -> Iterator[Peer]:
    """A ``push``, ``pull``, ``pub`` or ``sub``; it binds, unless it is told where to connect.

    Args:
        shape: ``plain`` is the payload alone, ``numbered`` one that begins with 8 bytes of sequence, ``topic`` and
            ``stamped`` (with the time of sending) have a topic in front; ``vllm``, ``bitcoin`` and ``sequenced`` are
            as those presets of ``framing``.
        settings: ``count`` (0: until it is stopped), ``rate`` (messages a second), ``hwm``, ``nodrop``.
    """
    where = f"bind={ANY_PORT}" if connect is None else f"connect={connect}"
    command = [*_compiled(), f"kind={kind}", where, f"size={size}", f"shape={shape}"]
    command += [f"{name}={value}" for name, value in settings.items()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Peer(process)
    finally:
        process.kill()  # its socket lingers for nothing
        process.communicate()


@functools.cache
def _compiled() -> list[str]:
    """The program and the libzmq that it loads, compiled if it is not yet."""
    library = next((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*"))
    source = _HERE / "peer.c"
    program = _BUILD / f"peer-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = ["cc", "-O2", "-Wall", "-Wextra", "-o", str(program), str(source), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return [str(program), str(library)]


def free_endpoint() -> str:
    """A tcp endpoint on this machine that no process has bound."""
    with stdlib_socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def listens(endpoint: str) -> bool:
    """Whether a process has bound this tcp endpoint."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    with stdlib_socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Connection, int]]:
    """Run this in a fresh process with a pipe as its first argument, and end it with the block: pipe and pid."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process.pid or 0
    finally:
        process.terminate()
        process.join()
        ours.close()


def window(counting: Peer, times: Times, peers: Mapping[str, int]) -> Sample:
    """Messages a second that one peer sends or receives, after a warm-up, and the CPU of these processes.

    Raises:
        RuntimeError: There was not a single one.
    """
    time.sleep(times.warm_up)
    before, first = cpu_seconds(peers), counting.mark()
    time.sleep(times.seconds)
    last, after = counting.mark(), cpu_seconds(peers)
    messages = last.messages - first.messages
    if not messages:
        raise RuntimeError(f"no message in {times.seconds:.1f} s")
    return Sample(messages / (last.time - first.time), per_message(before, after, messages))
