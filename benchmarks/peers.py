"""The other end of the socket: ``peer.c`` in a process of its own, the same for every method.

It is compiled on first use; where there is no C compiler, or pyzmq has no libzmq of its own beside it, the
peers are ``pypeer.py``, and the results say so. A peer that binds takes a port that the system chooses.
High-water marks are libzmq's default of 1000, unless said otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import selectors
import shutil
import socket as stdlib_socket
import subprocess
import sys
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
    "in_process",
    "listens",
    "peer",
    "peer_language",
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
    python: bool = False,
    size: int = 100,
    shape: str = "plain",
    **settings: int,
) -> Iterator[Peer]:
    """A ``push``, ``pull``, ``pub`` or ``sub``; it binds, unless it is told where to connect.

    Args:
        python: Whether it is pyzmq in any case.
        shape: ``plain`` is the payload alone, ``numbered`` one that begins with 8 bytes of sequence, ``topic`` and
            ``stamped`` (with the time of sending) have a topic in front; ``vllm``, ``bitcoin`` and ``sequenced`` are
            as those presets of ``framing``.
        settings: ``count`` (0: until it is stopped), ``rate`` (messages a second), ``hwm``, ``nodrop``.
    """
    where = f"bind={ANY_PORT}" if connect is None else f"connect={connect}"
    command = [*_command(python), f"kind={kind}", where, f"size={size}", f"shape={shape}"]
    command += [f"{name}={value}" for name, value in settings.items()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Peer(process)
    finally:
        process.kill()  # its socket lingers for nothing
        process.communicate()


def peer_language() -> str:
    """What the peers are written in, for the results."""
    return "C" if _compiled() is not None else "Python: no C compiler, or no libzmq beside pyzmq"


def _command(python: bool) -> list[str]:
    compiled = None if python else _compiled()
    return compiled or [sys.executable, str(_HERE / "pypeer.py")]


@functools.cache
def _compiled() -> list[str] | None:
    """The C peer and the libzmq that it loads, compiled if it is not yet; None if that cannot be."""
    compiler = shutil.which("cc")
    libraries = sorted((Path(zmq.__file__).parent.parent / "pyzmq.libs").glob("libzmq*"))
    if compiler is None or not libraries:
        return None
    source = _HERE / "peer.c"
    program = _BUILD / f"peer-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O2", "-Wall", "-Wextra", "-o", str(program), str(source), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return [str(program), str(libraries[0])]


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


# Python functions in processes of their own.


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


def in_process(function: Callable[..., Any], *arguments: object, seconds: float) -> Any:
    """What ``function`` returns in a fresh process.

    Raises:
        TimeoutError: It returned nothing within ``seconds``.
    """
    with child(_call, function, *arguments) as (pipe, _):
        if not pipe.poll(seconds):
            raise TimeoutError(f"waiting {seconds:.0f} s for a child process")
        return pipe.recv()


def _call(pipe: Connection, function: Callable[..., Any], *arguments: object) -> None:
    pipe.send(function(*arguments))


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
