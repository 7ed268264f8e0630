"""The other end of the socket: ``peer.c`` in a process of its own, the same for every method.

It is compiled on first use, which needs a C compiler and a wheel of pyzmq, which has libzmq beside it. A peer that
binds takes a port that the system chooses. High-water marks are libzmq's default of 1000, unless said otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
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
from zmq_datasource.log import LogStorage, read_index

_SPAWN = multiprocessing.get_context("spawn")
_HERE = Path(__file__).parent
_BUILD = _HERE.parent / "build" / "benchmarks"


@dataclass(frozen=True)
class Mark:
    """How many messages a peer has sent or received at a time, in seconds since the epoch."""

    messages: int
    time: float


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
        """Microseconds on the way of the ``stamped`` messages since this was last asked: p50, p99."""
        return dict(self._ask("latency"))

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
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
            ``stamped`` (with the time of sending) have a topic in front; ``vllm`` and ``sequenced`` are as those
            presets of ``framing``.
        settings: ``count`` (0: until it is stopped), ``rate`` (messages a second), ``hwm``, ``nodrop``.
    """
    where = "bind=tcp://127.0.0.1:*" if connect is None else f"connect={connect}"
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


@contextmanager
def receiver(log: Path, *arguments: str) -> Iterator[int]:
    """``zmq-datasource receive`` with these arguments in a process of its own: its process id."""
    command = [sys.executable, "-m", "zmq_datasource", "receive", *arguments]
    command += ["--wal-location", str(log), "-o", "walMaxBytes=1t"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def log_end(location: Path) -> int:
    """How many messages were ever in a log; none, where the receiver has not made it yet."""
    if not location.is_dir():
        return 0
    return read_index(LogStorage(str(location))).durable_end


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
