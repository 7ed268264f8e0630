"""Small helpers: waiting with a deadline, free ports, sending, and a log to read."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tests.support.ports import free_port
from zmq_datasource.host import failpoints
from zmq_datasource.log.bucket_store import bucket_at
from zmq_datasource.log.chunk import latest_of
from zmq_datasource.log.facts import ChunkFacts, pack
from zmq_datasource.log.leases import Lease, LeaseFiles
from zmq_datasource.log.reader import Deletions, read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.columns import LOG_SCHEMA
from zmq_datasource.messages.rows import message_rows, times_of
from zmq_datasource.options import StreamReadOptions, WriteOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.options.types import Location
from zmq_datasource.source.receive_loop import ReceiveLoop
from zmq_datasource.source.standby import Standby

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY / "tests" / "data"

T = TypeVar("T")
Socket = zmq.Socket[bytes]


def wait_for(condition: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Return the first true value of ``condition``; fail with ``what`` after the deadline.

    A condition that takes time is asked less often: asking Spark without a pause would take the processor from the
    query that the test waits for.
    """
    deadline = time.monotonic() + seconds
    while True:
        asked = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(max(0.005, min(0.1, 2 * (now - asked))))


def bound(context: zmq.Context[Socket], kind: int, **options: int) -> tuple[Socket, str]:
    """A socket bound to a free port, its options set before, and its endpoint."""
    sock = context.socket(kind)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name.upper()), value)
    endpoint = free_endpoint()
    sock.bind(endpoint)
    return sock, endpoint


def need(storage: LogStorage | str | Path, next_id: int, name: str = "desk", timeout: float = 1e9) -> None:
    """Write the lease of a named reader: it needs the messages from this id on."""
    log = storage if isinstance(storage, LogStorage) else log_at(storage)
    LeaseFiles(log).write(Lease(name, next_id, timeout))


class Connections:
    """What a socket's own events say of its connections; use it in a ``with`` block, from before the first on."""

    def __init__(self, sock: Socket) -> None:
        self._sock = sock
        self._monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._made = self._lost = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.disable_monitor()

    def wait_for_only(self, number: int) -> None:
        """Wait until the connection with this number, from 1 on, is the only one.

        What a PUSH sends before that may go into a connection whose other end is closed.
        """

        def only() -> bool:
            while self._monitor.poll(0):
                made = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self._made, self._lost = self._made + made, self._lost + (not made)
            return (self._made, self._lost) == (number, number - 1)

        wait_for(only, f"connection {number} alone")


def free_endpoint() -> str:
    """An endpoint that nobody is bound to."""
    return f"tcp://127.0.0.1:{free_port()}"


def bind_when_free(sock: Socket, endpoint: str) -> None:
    """Bind where a listener was just closed, which libzmq does in the background."""

    def bound() -> bool:
        try:
            sock.bind(endpoint)
        except zmq.ZMQError:
            return False
        return True

    wait_for(bound, f"{endpoint} free")


def offer(sock: Socket, *frames: bytes) -> bool:
    """Send if there is room, else wait a moment for some.

    What polls first and then sends may wait for ever: the peer can leave between the two.
    """
    try:
        sock.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        sock.poll(20, zmq.POLLOUT)
        return False
    return True


def take(sock: Socket, count: int, seconds: float = 30.0) -> list[list[bytes]]:
    """``count`` messages, however late they come, and those that are there already behind them."""
    got: list[list[bytes]] = []
    deadline = time.monotonic() + seconds
    while len(got) < count:
        if sock.poll(20):
            got.append(sock.recv_multipart())
        elif time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {count} messages; {len(got)} have come")
    while sock.poll(20):
        got.append(sock.recv_multipart())
    return got


class Offering:
    """A thread that sends the numbers from 0 on as there is room, each after a pause, until the ``with`` block ends.

    Args:
        padding: What follows each number.

    Attributes:
        sent: How many were sent.
    """

    def __init__(self, sock: Socket, pause: float, padding: bytes = b"", topic: bytes | None = None) -> None:
        self.sent = 0
        self._sock, self._pause, self._padding = sock, pause, padding
        self._before = () if topic is None else (topic,)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.wait(self._pause):
            self.sent += offer(self._sock, *self._before, b"%d" % self.sent + self._padding)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(30)


class Consuming:
    """A consumer thread that receives until told to end, with a pause after each message.

    A bound SUB must keep receiving to subscribe. It ends when nothing is there: a test that wants to have all of it
    waits for that (``wait_for``).
    """

    def __init__(self, sock: Socket, pause: float = 0.0) -> None:
        self.got: list[list[bytes]] = []
        self._sock, self._pause = sock, pause
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while self._sock.poll(20) or not self._end.is_set():
            if self._sock.poll(0):
                self.got.append(self._sock.recv_multipart())
                if self._pause:
                    self._end.wait(self._pause)

    def wait_for(self, count: int) -> None:
        """Until ``count`` messages have come."""
        wait_for(lambda: len(self.got) >= count, f"{count} messages received")

    def __enter__(self) -> Consuming:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)


def need_mounts() -> None:
    """Skip the test where programs cannot have mounts of their own."""
    command = ["unshare", "--mount", "true"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(command, check=False, capture_output=True).returncode
    ):
        pytest.skip("this machine does not allow mounts that only one program sees")


@contextmanager
def tiny_disk(mount: Path, size: str) -> Iterator[Path]:
    """A file system of this size; skips where nobody may mount one."""
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount], check=False, capture_output=True
    ).returncode:
        pytest.skip("this machine does not allow mounting a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)  # memory maps may live on


def fill_disk(disk: Path) -> Path:
    """A file that takes all the room there is."""
    blocker = disk / "blocker"
    with blocker.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            with suppress(OSError):
                while file.write(b"." * size) == size:
                    pass
    return blocker


def stop_sooner(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Have receivers that stop wait so long for what may still come; in most tests, senders have ended by then."""
    monkeypatch.setattr(ReceiveLoop, "quiet_seconds", seconds)


def keep_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have readers that run in pytest's own process leave its signal handlers as they are."""
    monkeypatch.setattr("signal.signal", lambda *_: None)


def at_failpoints(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], object]) -> None:
    """Call ``act`` with the name of each failpoint that is reached."""
    monkeypatch.setattr(failpoints, "reach", act)


def take_over(monkeypatch: pytest.MonkeyPatch, standby: float) -> None:
    """Have followers of a log look so often whether they may fill it."""
    monkeypatch.setattr(Standby, "check_seconds", standby)


def stream_options(**options: Any) -> StreamReadOptions:
    return parse(StreamReadOptions, as_text(options))


def write_options(**options: Any) -> WriteOptions:
    return parse(WriteOptions, as_text(options))


def as_text(options: dict[str, Any]) -> dict[str, str]:
    """Options as Spark has them; ``zmq_sndbuf=1`` stands for the option ``zmq.sndbuf``."""
    return {
        name.replace("zmq_", "zmq.", 1): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }


def binary(values: Sequence[bytes | None]) -> pa.Array:
    """A column of bytes, as Spark hands it to a sink."""
    return pa.array(values, pa.binary())


def facts_of(batches: Sequence[pa.RecordBatch], first: int = 0, state: bytes = b"") -> ChunkFacts:
    """The facts of a chunk of these rows, as if the log began with it."""
    latest = latest_of(batches)
    return ChunkFacts(first, first + sum(batch.num_rows for batch in batches), latest, latest, pack(state))


def batch_of(values: Iterable[bytes | None], timestamp: int = 0) -> pa.RecordBatch:
    """Messages of one frame each, as a receiver hands them over."""
    listed = list(values)
    return message_rows(binary(listed), times_of([(timestamp, len(listed))]))


def flips(path: Path, positions: Iterable[int], bit: int) -> Iterator[int]:
    """Each position in turn, its ``bit`` flipped in the file meanwhile. In place: a new file takes its time."""
    with path.open("r+b", buffering=0) as file:
        for position in positions:
            right = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([right[0] ^ bit]), position)
            yield position
            os.pwrite(file.fileno(), right, position)


def log_options(location: Path | str) -> dict[str, str]:
    """The option that names the place of a log: a directory, or the URI of a bucket."""
    return {"walStore" if "://" in str(location) else "walLocation": str(location)}


def log_at(location: Path | str) -> LogStorage:
    """The log at such a place."""
    is_bucket = "walStore" in log_options(location)
    return LogStorage(bucket_at(Location(str(location))) if is_bucket else str(location))


def log_rows(location: Path | str) -> pa.Table:
    """All rows of a log, as its readers see them."""
    storage = log_at(location)
    index = read_index(storage)
    pieces = slices(index.all, index.earliest, index.durable_end)
    merged = Deletions(storage, storage.log_id(), fails=True)
    batches = list(read_slices(storage, pieces, deletions=merged))
    return pa.Table.from_batches(batches, batches[0].schema if batches else LOG_SCHEMA)


class RawSender:
    """A DEALER that speaks the transaction protocol byte by byte, as docs/protocol.md has it."""

    def __init__(self, context: zmq.Context[Socket], endpoint: str) -> None:
        self._sock = context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.connect(endpoint)
        self.answers: list[tuple[str, dict[str, Any]]] = []

    def say(self, kind: str, *buffers: bytes, **header: Any) -> None:
        self._sock.send_multipart([b"ZDS\x02" + kind.encode(), json.dumps(header).encode(), *buffers])

    def ask(self, kind: str, expected: str, *buffers: bytes, **header: Any) -> dict[str, Any]:
        """Say something, and wait for an answer of a kind (``X`` is one too); all answers are kept."""
        self.say(kind, *buffers, **header)
        return self.hear(expected)

    def hear(self, expected: str) -> dict[str, Any]:
        while self._sock.poll(10_000):
            head, answer, *_ = self._sock.recv_multipart()
            self.answers.append((chr(head[4]), json.loads(answer)))
            if self.answers[-1][0] in (expected, "X"):
                return {"kind": self.answers[-1][0], **self.answers[-1][1]}
        raise AssertionError(f"no {expected} within 10 s, but {self.answers}")

    def data(
        self, producer: str, number: int, *values: bytes, attempt: str, index: int = 0
    ) -> dict[str, Any]:
        """Send one data message; the answer that it was taken, or the refusal."""
        ends = itertools.accumulate(map(len, values), initial=0)
        offsets = b"".join(end.to_bytes(4, "little") for end in ends)
        part = {"attempt": attempt, "producer": producer, "number": number, "partition": 0}
        return self.ask(
            *("D", "T", offsets, b"".join(values)), **part, index=index, rows=len(values), columns=["value"]
        )

    def stage(self, producer: str, number: int, *values: bytes) -> str:
        """Send an attempt of one data message and its end; the attempt."""
        attempt = uuid.uuid4().hex
        self.ask("H", "W", attempt=attempt, producer=producer)
        assert self.data(producer, number, *values, attempt=attempt)["kind"] == "T"
        assert self.ask("E", "S", attempt=attempt, messages=1, rows=len(values))["kind"] == "S"
        return attempt

    def commit(
        self, producer: str, number: int, attempts: list[str], rows: int, **more: Any
    ) -> dict[str, Any]:
        return self.ask("M", "K", producer=producer, number=number, attempts=attempts, rows=rows, **more)
