"""A log that executors read over the network, because they do not see its directory; real sockets, real files."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zmq

from tests.support import REPOSITORY, Socket, at_failpoints, batch_of, free_endpoint, wait_for
from tests.support.middlebox import Middlebox
from zmq_datasource.errors import DamagedChunkError, DataLossError, DiskFaultError, LogFetchError
from zmq_datasource.log.chunk import read_chunk, times_of, write_chunk
from zmq_datasource.log.facts import ChunkFacts, Incarnations, PastTimes
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.chunk_server import (
    BEGIN,
    FRAME_BYTES,
    ChunkRequest,
    ChunkServer,
    LogAccess,
    pack_head,
    unpack_head,
)
from zmq_datasource.source.remote_chunks import RemoteChunks, chunks_for
from zmq_datasource.transport import link

ELSEWHERE = LogStorage("/not/on/this/machine")
_SERVE = """
import sys
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.chunk_server import ChunkServer
log = LogStorage(sys.argv[1])
access = ChunkServer(log, log.log_id(), "tcp://127.0.0.1:*").access
print(*access.endpoints, access.server_key.decode(), access.secret.hex(), access.log_id, flush=True)
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
    facts = ChunkFacts(
        log.partition,
        first,
        first + len(values),
        times_of(parts),
        PastTimes(),
        Incarnations(((0, "writer"),)),
    )
    return write_chunk(log, parts, facts, {})


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


def asking(access: LogAccess, chunk: Chunk, number: int = 1) -> bytes:
    return ChunkRequest(number, access.log_id, 0, chunk.name).to_frame(access.secret)


def test_a_chunk_over_the_network_is_the_chunk_of_the_file(log: LogStorage, server: ChunkServer) -> None:
    values = [os.urandom(10_000) for _ in range(1000)]
    chunk = add(log, 5, values, batches=4)
    assert chunk.size > 8 * FRAME_BYTES
    assert read(server.access, chunk)["value"].to_pylist() == values
    assert read(server.access, chunk, 300, 305)["id"].to_pylist() == [300, 301, 302, 303, 304]
    assert read(server.access, add(log, 1005, [b"a", b""]))["value"].to_pylist() == [b"a", b""]
    in_another = add(log.of(3), 0, [b"of partition 3"])
    with RemoteChunks(server.access, ELSEWHERE.of(3)) as chunks:
        (batch,) = read_chunk(chunks, in_another.name, 0, 1)
    assert batch["value"].to_pylist() == [b"of partition 3"]


def test_a_task_that_sees_the_log_reads_its_files(log: LogStorage, server: ChunkServer) -> None:
    chunk = add(log, 0, [b"v"])
    with chunks_for(log, [chunk.name], server.access) as chunks:
        assert chunks is log
    with chunks_for(ELSEWHERE, [chunk.name], server.access) as chunks:
        assert isinstance(chunks, RemoteChunks)
    # The same path may be another log on another machine.
    with chunks_for(log, [chunk.name], server.access._replace(log_id="another")) as chunks:
        assert isinstance(chunks, RemoteChunks)


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
        stranger.send(good)
        assert not stranger.poll(200)
    known = dealer(context, access, access.server_key)
    of_this = ChunkRequest(1, access.log_id, 0, chunk.name)
    for bad in (
        b"",
        b"short",
        of_this.to_frame(bytes(32)),
        of_this._replace(log_id="another").to_frame(access.secret),
        of_this._replace(name="log.json").to_frame(access.secret),
        of_this._replace(name=f"../0/{chunk.name}").to_frame(access.secret),
        of_this._replace(partition=-1).to_frame(access.secret),
        of_this._replace(name="skipped-0-5-../desk").to_frame(access.secret),
        access.secret + b"\xff" * 40,
    ):
        known.send(bad)
    known.send_multipart([good, good])
    known.send(b"x" * 10_000)  # over the limit of a frame: it costs the connection
    assert not known.poll(200)
    known.close(linger=0)
    again = dealer(context, access, access.server_key)
    again.send(good)
    assert again.poll(10_000)
    head, *content = again.recv_multipart()
    assert unpack_head(head) == (1, 0)
    assert b"".join(content) == Path(log.path_of(chunk.name)).read_bytes()
    assert "refused" in caplog.text
    assert repr(access.secret) not in repr(access)


def test_an_answer_to_another_request_is_dropped(context: zmq.Context[Socket]) -> None:
    public, private = zmq.curve_keypair()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, private)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def answer() -> None:
        client, frame = router.recv_multipart()
        secret, request = ChunkRequest.of_frame(frame)
        assert (secret, request.log_id, request.partition, request.name) == (bytes(32), "a log", 3, BEGIN)
        older = pack_head(request.number + 2**63, 0)
        for frames in ([older, b"1"], [b"nonsense", b"2"], [b""], [pack_head(request.number, 0), b"5"]):
            router.send_multipart([client, *frames])

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        access = LogAccess((f"tcp://127.0.0.1:{port}",), public, bytes(32), "a log")
        with RemoteChunks(access, ELSEWHERE.of(3)) as chunks:
            assert chunks.begin() == 5
        answered.result(10)


def test_while_there_is_no_free_descriptor_the_wait_for_an_answer_does_not_double(
    context: zmq.Context[Socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doubles with each new connection, and not with each attempt to open one."""
    public, private = zmq.curve_keypair()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.CURVE_SERVER, 1)
    router.setsockopt(zmq.CURVE_SECRETKEY, private)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    new_socket, refusals = link.new_socket, iter(range(10))

    def refuse(*arguments: Any) -> Any:
        if next(refusals, None) is not None:
            raise zmq.ZMQError(errno.EMFILE)
        return new_socket(*arguments)

    def answer_the_third() -> None:
        for _ in range(3):
            client, frame = router.recv_multipart()
        _, request = ChunkRequest.of_frame(frame)
        router.send_multipart([client, pack_head(request.number, 0), b"5"])

    monkeypatch.setattr(link, "new_socket", refuse)
    router.setsockopt(zmq.RCVTIMEO, 10_000)
    access = LogAccess((f"tcp://127.0.0.1:{port}",), public, bytes(32), "a log")
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer_the_third)
        with RemoteChunks(access, ELSEWHERE, again=0.1, give_up=5.0) as chunks:
            assert chunks.begin() == 5
        answered.result(10)
    assert next(refusals, None) is None


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
                wait_for(lambda at=before: box.bytes > at + FRAME_BYTES, "a part of the chunk")
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
    assert reached["source.chunk.before_read"] == 1


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
        endpoint, key, secret, log_id = driver.stdout.readline().split()
        access = LogAccess((endpoint,), key.encode(), bytes.fromhex(secret), log_id)
        driver.send_signal(signal.SIGSTOP)
        threading.Timer(1.0, driver.send_signal, [signal.SIGCONT]).start()
        with RemoteChunks(access, ELSEWHERE, again=0.2, give_up=10.0) as chunks:
            assert len(list(read_chunk(chunks, chunk.name, 0, 1))) == 1
        with RemoteChunks(access, ELSEWHERE, again=0.2, give_up=1.0) as chunks:
            chunks.begin()
            driver.kill()
            with pytest.raises(LogFetchError, match="has not answered"):
                list(read_chunk(chunks, chunk.name, 0, 1))
    finally:
        driver.kill()
        driver.communicate(timeout=30)


def test_clients_that_read_nothing_neither_fill_the_servers_memory_nor_stop_it(
    context: zmq.Context[Socket], log: LogStorage, reached: Counter[str]
) -> None:
    large = add(log, 0, [os.urandom(1 << 20) for _ in range(24)])  # more than the system's buffers hold
    small = add(log, 24, [b"v"])
    server = ChunkServer(log, log.log_id(), "tcp://127.0.0.1:*", most_bytes=large.size, patience=1.0)
    with ExitStack() as stack:
        stack.callback(server.stop)
        box = stack.enter_context(Middlebox(server.access.endpoints[-1], kernel_holds=64 << 10))
        through = server.access._replace(endpoints=(box.endpoint,))
        box.bytes_per_second = 1_000_000
        flooding, *silent = [dealer(context, through, server.access.server_key) for _ in range(3)]
        for number in range(50):
            flooding.send(asking(server.access, large, number))
        wait_for(lambda: reached["source.chunk.after_answer"], "the first answer")
        for sock in silent:
            sock.send(asking(server.access, large))
        time.sleep(0.5)
        box.black_hole = True
        time.sleep(0.5)
        assert reached["source.chunk.before_read"] == 1
        # One after the other gets its answer, and is cut off by the system.
        assert read(server.access, small, again=60.0).num_rows == 1
        assert reached["source.chunk.before_read"] <= 4


def test_no_request_ends_the_server_and_a_server_that_has_ended_can_be_stopped(
    log: LogStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = add(log, 0, [b"v"])
    server = ChunkServer(log, log.log_id())
    fails: dict[str, Any] = {"source.chunk.before_read": ZeroDivisionError("whatever may be wrong")}

    def fail(name: str) -> None:
        if error := fails.pop(name, None):
            raise error

    at_failpoints(monkeypatch, fail)
    with pytest.raises(DiskFaultError, match="whatever may be wrong"):
        read(server.access, chunk)
    assert read(server.access, chunk).num_rows == 1
    fails["source.chunk.after_answer"] = ZeroDivisionError
    with suppress(LogFetchError):  # the answer may end with the server
        read(server.access, chunk, again=0.5, give_up=1.0)
    wait_for(lambda: not server.is_serving, "its end")
    server.stop()
    assert "executors that do not see it cannot read it" in caplog.text


def test_many_tasks_are_served_at_once_and_no_file_stays_open(log: LogStorage) -> None:
    chunks = [add(log, 10 * number, [b"%d" % i for i in range(10)]) for number in range(60)]
    server = ChunkServer(log, log.log_id(), most_bytes=1)  # each answer leaves before the next is read

    def task() -> list[int]:
        return [read(server.access, chunk).num_rows for chunk in chunks]

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(task) for _ in range(4)]:
            assert done.result(60) == [10] * 60
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    # A chunk that is deleted gives its room back.
    assert not [path for path in opened if path.startswith(log.root)]
    server.stop()


def _is_open(descriptor: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")
