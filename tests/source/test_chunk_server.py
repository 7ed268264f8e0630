"""A log that executors read over the network, because they do not see its directory; real sockets, real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.support import REPOSITORY, Socket, at_failpoints, batch_of, facts_of, free_endpoint, wait_for
from tests.support.middlebox import Middlebox
from zmq_datasource.errors import DamagedChunkError, DataLossError, DiskFaultError, LogFetchError
from zmq_datasource.log import Deletions, Found, read_slices, slices
from zmq_datasource.log.chunk import read_chunk, write_chunk
from zmq_datasource.log.layout import Chunk, chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.chunk_server import (
    MOST_BYTES,
    PROTOCOL,
    Answer,
    ChunkServer,
    Find,
    LogAccess,
    Read,
    answer,
)
from zmq_datasource.source.remote_chunks import RemoteChunks

ELSEWHERE = LogStorage("/not/on/this/machine")
_SERVE = """
import sys
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.chunk_server import ChunkServer
log = LogStorage(sys.argv[1])
access = ChunkServer(log, log.log_id(), "tcp://127.0.0.1:*").access
print(*access.endpoints, access.server_key.decode(), access.secret.hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def log(tmp_path: Path) -> LogStorage:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    return storage


@pytest.fixture
def server(log: LogStorage) -> Iterator[ChunkServer]:
    made = ChunkServer(log, log.log_id(), "tcp://127.0.0.1:*")
    yield made
    made.stop()
    assert "zmq-chunk-server" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each failpoint was reached."""
    counted: Counter[str] = Counter()
    at_failpoints(monkeypatch, lambda name: counted.update([name]))
    return counted


def add(log: LogStorage, first: int, values: list[bytes], batches: int = 1) -> Chunk:
    size = len(values) // batches
    parts = [batch_of(values[begin : begin + size]) for begin in range(0, len(values), size)]
    Path(log.path_of("")).mkdir(exist_ok=True)
    return write_chunk(log, parts, facts_of(parts, first))


def read(
    access: LogAccess, chunk: Chunk, start: int = 0, end: int | None = None, **limits: float
) -> pa.Table:
    with RemoteChunks(access, ELSEWHERE, **limits) as chunks:
        low, high = max(start, chunk.first), chunk.end if end is None else end
        return pa.Table.from_batches(read_chunk(chunks, chunk.name, low, high))


def dealer(context: zmq.Context[Socket], access: LogAccess, server_key: bytes | None) -> Socket:
    sock = context.socket(zmq.DEALER)
    if server_key is not None:
        public, private = zmq.curve_keypair()
        sock.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, private)
    sock.connect(access.endpoints[-1])
    return sock


def asking(access: LogAccess, chunk: Chunk, number: int = 1) -> list[bytes]:
    """A request for as much of a chunk as an answer may have."""
    request = Read(number=number, secret=access.secret, name=chunk.name, place=0, length=MOST_BYTES)
    return PROTOCOL.encode(request)


def test_a_chunk_over_the_network_is_the_chunk_of_the_file(log: LogStorage, server: ChunkServer) -> None:
    values = [os.urandom(10_000) for _ in range(1000)]
    chunk = add(log, 5, values, batches=4)
    assert chunk.size > 2 * MOST_BYTES
    assert read(server.access, chunk)["value"].to_pylist() == values
    assert read(server.access, chunk, 300, 305)["id"].to_pylist() == [300, 301, 302, 303, 304]
    assert read(server.access, add(log, 1005, [b"a", b""]))["value"].to_pylist() == [b"a", b""]


def test_of_a_large_chunk_only_the_parts_that_are_needed_are_fetched(
    log: LogStorage, server: ChunkServer
) -> None:
    chunk = add(log, 0, [os.urandom(10_000) for _ in range(3000)], batches=30)
    with Middlebox(server.access.endpoints[-1]) as box:
        access = server.access._replace(endpoints=(box.endpoint,))
        assert read(access, chunk, 1000, 1100).num_rows == 100
        assert box.bytes < chunk.size // 3


def test_a_machine_sees_a_log_if_it_has_its_id_and_its_chunks(log: LogStorage) -> None:
    chunk, log_id = add(log, 0, [b"v"]), log.log_id()
    assert log.sees(log_id, [chunk.name])
    assert not ELSEWHERE.sees(log_id, [chunk.name])
    assert not log.sees("another", [chunk.name])  # the same path may be another log on another machine
    log.delete_chunk(Chunk(0, 1, 1, 0.0))
    assert not log.sees(log_id, [chunk.name])


def test_a_task_goes_on_in_the_chunk_into_which_its_chunk_was_merged(
    log: LogStorage, server: ChunkServer
) -> None:
    small = [add(log, first, [b"%d" % i for i in range(first, first + 10)]) for first in (0, 10, 20)]
    with RemoteChunks(server.access, ELSEWHERE) as chunks:
        deletions = Deletions(ELSEWHERE, log.log_id(), fails=True, find=chunks.find)
        batches = read_slices(chunks, slices(small, 5, 30), deletions=deletions)
        rows = next(batches)["id"].to_pylist()  # the first chunk is open
        for chunk in small[:2]:
            log.delete_chunk(chunk)
        add(log, 0, [b"%d" % i for i in range(20)])
        rows += [i for batch in batches for i in batch["id"].to_pylist()]
    assert rows == list(range(5, 30))


def test_a_chunk_that_is_gone_or_damaged_is_an_error_with_its_file_and_ids(
    log: LogStorage, server: ChunkServer
) -> None:
    def refused(chunk: Chunk, error: type[Exception], what: str) -> None:
        with pytest.raises(error, match=what) as raised:
            read(server.access, chunk)
        assert f"{chunk.name} of the driver" in str(raised.value)
        assert f"ids {chunk.first} to {chunk.end - 1}" in str(raised.value)

    chunk = add(log, 7, [b"x" * 100] * 10)
    path = Path(log.path_of(chunk.name))
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-20])
    refused(chunk, DamagedChunkError, "opening chunk")
    path.write_bytes(b"")
    refused(chunk, DamagedChunkError, "opening chunk")
    content[content.index(b"x" * 50)] ^= 1
    path.write_bytes(content)
    refused(chunk, DamagedChunkError, "checksum differs")
    path.unlink()
    refused(chunk, DataLossError, "it does not exist")
    path.mkdir()
    refused(chunk, DamagedChunkError, "it is a directory")


def test_a_chunk_that_the_driver_cannot_read_now_is_requested_again(
    log: LogStorage, server: ChunkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = add(log, 0, [b"v"])
    faults = [OSError(24, "too many open files")] * 2

    def refuse(name: str) -> None:
        if name == "source.chunk.before_read" and faults:
            raise faults.pop()

    at_failpoints(monkeypatch, refuse)
    patient, impatient = LogStorage("/not/here"), LogStorage("/not/here")
    patient.retry_seconds = 30.0
    with RemoteChunks(server.access, impatient) as chunks, pytest.raises(DiskFaultError, match="too many"):
        list(read_chunk(chunks, chunk.name, 0, 1))
    with RemoteChunks(server.access, patient) as chunks:
        assert len(list(read_chunk(chunks, chunk.name, 0, 1))) == 1
    assert not faults


def test_clients_without_the_secret_are_not_served_and_bad_requests_do_not_end_the_server(
    context: zmq.Context[Socket],
    log: LogStorage,
    server: ChunkServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk, access = add(log, 0, [b"secret"]), server.access
    good = asking(access, chunk)
    for key in (None, zmq.curve_keypair()[0]):  # without security, and with another server's key
        stranger = dealer(context, access, key)
        stranger.send_multipart(good)
        assert not stranger.poll(200)
    known = dealer(context, access, access.server_key)
    wanted: dict[str, Any] = {"number": 1, "secret": access.secret}
    this = wanted | {"name": chunk.name, "place": 0, "length": 10}
    for bad in (
        Read(**this | {"secret": bytes(32)}),
        Read(**this | {"name": "log.json"}),
        Read(**this | {"name": f"../chunks/{chunk.name}"}),
        Read(**this | {"length": MOST_BYTES + 1}),
        Read(**this | {"length": 0}),
        Find(**wanted, id=-1),
        Answer(number=1),
    ):
        known.send_multipart(PROTOCOL.encode(bad))
    for frames in ([b""], [b"short"], [*good, b"more"], [good[0], b"\xff" * 40]):
        known.send_multipart(frames)
    known.send(b"x" * 10_000)  # over the limit of a frame: it costs the connection
    assert not known.poll(200)
    known.close(linger=0)
    again = dealer(context, access, access.server_key)
    again.send_multipart(good)
    assert again.poll(10_000)
    answered, content = PROTOCOL.decode(again.recv_multipart())
    assert answered == Answer(number=1, size=chunk.size)
    assert b"".join(content) == Path(log.path_of(chunk.name)).read_bytes()
    assert "a request was not answered: it has another secret" in caplog.text
    assert repr(access.secret) not in repr(access)


def test_an_answer_to_another_request_is_dropped(context: zmq.Context[Socket]) -> None:
    public, private = zmq.curve_keypair()
    router = context.socket(zmq.ROUTER)
    router.curve_server, router.curve_secretkey, router.rcvtimeo = True, private, 10_000
    port = router.bind_to_random_port("tcp://127.0.0.1")
    access = LogAccess((f"tcp://127.0.0.1:{port}",), public, bytes(32))

    def serve() -> None:
        client, *frames = router.recv_multipart()
        request, _ = PROTOCOL.decode(frames)
        assert request == Find(number=0, secret=bytes(32), id=7)
        older, right = (Answer(number=number, found=Found(number + 5, None)) for number in (2**62, 0))
        for sent in (PROTOCOL.encode(older), [b"nonsense", b"2"], [b""], PROTOCOL.encode(right)):
            router.send_multipart([client, *sent])

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        with RemoteChunks(access, ELSEWHERE) as chunks:
            assert chunks.find(7) == Found(5, None)
        served.result(10)


def test_a_cut_between_executor_and_driver_is_outlived(log: LogStorage, server: ChunkServer) -> None:
    values = [os.urandom(10_000) for _ in range(1500)]
    chunks = [add(log, first, values[first : first + 500]) for first in range(0, 1500, 500)]
    got = []
    with Middlebox(server.access.endpoints[-1]) as box, ThreadPoolExecutor(1) as pool:
        access = server.access._replace(endpoints=(box.endpoint,))
        with RemoteChunks(access, ELSEWHERE, again=0.3) as remote:
            for chunk, cut in zip(chunks, ("black_hole", "reset", "half_open"), strict=True):
                before, box.bytes_per_second = box.bytes, 4_000_000
                ids = chunk.name, chunk.first, chunk.end
                reading = pool.submit(lambda of=ids: list(read_chunk(remote, *of)))
                wait_for(lambda at=before: box.bytes > at + 1_000_000, "a part of the chunk")
                if cut == "black_hole":
                    box.black_hole = True
                    threading.Timer(1.0, box.clear).start()
                else:
                    getattr(box, cut)()
                    box.bytes_per_second = 0
                got += [value for batch in reading.result(60) for value in batch["value"].to_pylist()]
    assert got == values


def test_a_slow_line_causes_no_second_request(
    log: LogStorage, server: ChunkServer, reached: Counter[str]
) -> None:
    values = [os.urandom(10_000) for _ in range(300)]
    chunk = add(log, 0, values)
    with Middlebox(server.access.endpoints[-1]) as box:
        box.bytes_per_second = 2_000_000  # the chunk takes longer than a client waits without a byte
        access = server.access._replace(endpoints=(box.endpoint,))
        assert read(access, chunk, again=0.5, give_up=1.0)["value"].to_pylist() == values
    assert reached["source.chunk.before_read"] == 1  # it has 3 MB


def test_a_chunk_comes_once_whatever_addresses_the_driver_has(
    log: LogStorage, server: ChunkServer, reached: Counter[str]
) -> None:
    chunk = add(log, 0, [b"v"])
    (endpoint,) = server.access.endpoints
    with Middlebox(endpoint) as box:
        access = server.access._replace(endpoints=(free_endpoint(), box.endpoint, endpoint))
        began = time.monotonic()
        assert read(access, chunk).num_rows == 1
        assert time.monotonic() - began < 2.0  # an address where nothing answers is not waited for
    assert reached["source.chunk.before_read"] == 1


def test_a_driver_that_does_not_answer_is_an_error_with_a_way_out(
    log: LogStorage, server: ChunkServer
) -> None:
    access = server.access._replace(endpoints=(free_endpoint(), free_endpoint()))
    with pytest.raises(LogFetchError, match=r"driver has not answered .* name another address with serveLog"):
        read(access, add(log, 0, [b"v"]), again=0.1, give_up=0.3)


def test_a_task_waits_for_a_stopped_driver_and_fails_if_it_was_killed(log: LogStorage) -> None:
    chunk = add(log, 0, [b"v"])
    driver = subprocess.Popen(
        [sys.executable, "-c", _SERVE, log.root],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        endpoint, key, secret = driver.stdout.readline().split()
        access = LogAccess((endpoint,), key.encode(), bytes.fromhex(secret))
        driver.send_signal(signal.SIGSTOP)
        threading.Timer(1.0, driver.send_signal, [signal.SIGCONT]).start()
        with RemoteChunks(access, ELSEWHERE, again=0.2, give_up=10.0) as chunks:
            assert len(list(read_chunk(chunks, chunk.name, 0, 1))) == 1
        with RemoteChunks(access, ELSEWHERE, again=0.2, give_up=1.0) as chunks:
            chunks.find(0)
            driver.kill()
            with pytest.raises(LogFetchError, match="has not answered"):
                list(read_chunk(chunks, chunk.name, 0, 1))
    finally:
        driver.kill()
        driver.communicate(timeout=30)


def test_clients_that_read_nothing_cost_one_answer_each_and_hold_up_no_other(
    context: zmq.Context[Socket], log: LogStorage, server: ChunkServer, reached: Counter[str]
) -> None:
    large = add(log, 0, [os.urandom(1 << 20) for _ in range(8)])
    small = add(log, 8, [b"v"])
    with Middlebox(server.access.endpoints[-1], kernel_holds=64 << 10) as box:
        through = server.access._replace(endpoints=(box.endpoint,))
        clients = [dealer(context, through, server.access.server_key) for _ in range(20)]
        box.bytes_per_second = 1_000_000
        clients[0].send_multipart(asking(server.access, small))
        assert clients[0].poll(10_000)  # the handshakes are done
        box.black_hole = True
        answered = reached["source.chunk.after_answer"]
        for number in range(5):
            for sock in clients:
                sock.send_multipart(asking(server.access, large, number))
        box.black_hole = False
        wait_for(
            lambda: reached["source.chunk.after_answer"] >= answered + len(clients), "an answer for each"
        )
        box.black_hole = True
        began = time.monotonic()
        assert read(server.access, small).num_rows == 1
        assert time.monotonic() - began < 2.0
        # One answer is on its way to each, and one waits behind it.
        assert reached["source.chunk.after_answer"] - answered <= 2 * len(clients) + 1
        for sock in clients:  # a client that has asked, and died
            sock.close(linger=0)
        assert read(server.access, small).num_rows == 1


def test_no_request_ends_the_server(
    log: LogStorage, server: ChunkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = add(log, 0, [b"v"])
    fails: dict[str, Any] = {}

    def fail(name: str) -> None:
        if error := fails.pop(name, None):
            raise error

    at_failpoints(monkeypatch, fail)
    for step in ("source.chunk.before_read", "source.chunk.after_answer"):
        fails[step] = ZeroDivisionError("whatever may be wrong")
        with suppress(DiskFaultError):
            read(server.access, chunk)
        assert not fails
        assert read(server.access, chunk).num_rows == 1


@pytest.mark.parametrize(
    ("place", "length", "content"),
    [(0, 4, b"0123"), (8, 4, b"89"), (10, 4, b""), (99, 4, b""), (-3, 4, b"789"), (-99, 4, b"0123")],
)
def test_a_range_ends_with_the_chunk(log: LogStorage, place: int, length: int, content: bytes) -> None:
    """Without a socket: what a request asks for is what its answer has."""
    Path(log.path_of("")).mkdir(exist_ok=True)
    Path(log.path_of(chunk_name(0))).write_bytes(b"0123456789")
    request = Read(number=4, secret=b"", name=chunk_name(0), place=place, length=length)
    answered, found = PROTOCOL.decode(answer(log, log.log_id(), request))
    assert answered == Answer(number=4, size=10)
    assert b"".join(found) == content


def test_many_tasks_are_served_at_once_and_no_file_stays_open(log: LogStorage, server: ChunkServer) -> None:
    chunks = [add(log, 10 * number, [b"%d" % i for i in range(10)]) for number in range(20)]

    def task() -> list[int]:
        return [read(server.access, chunk).num_rows for chunk in chunks]

    with ThreadPoolExecutor(50) as pool:
        for done in [pool.submit(task) for _ in range(50)]:
            assert done.result(60) == [10] * 20
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    # A chunk that is deleted gives its room back.
    assert not [path for path in opened if path.startswith(log.root)]


def _is_open(descriptor: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")
