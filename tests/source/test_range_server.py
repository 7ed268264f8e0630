"""A log that is read over the network by who does not see its directory; real sockets, real files."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import zmq

from tests.support import Socket, batch_of, free_endpoint, wait_for
from tests.support.middlebox import Middlebox
from zmq_datasource.errors import DamagedChunkError, DataLossError, LogFetchError
from zmq_datasource.log.chunk import read_chunk, write_chunk
from zmq_datasource.log.layout import Chunk
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source import remote_chunks
from zmq_datasource.source.range_protocol import BLOCK_BYTES, Access, Answer, Request
from zmq_datasource.source.range_server import RangeServer
from zmq_datasource.source.remote_chunks import RemoteChunks, chunks_for

ELSEWHERE = LogStorage("/not/on/this/machine")


@pytest.fixture
def log(tmp_path: Path) -> LogStorage:
    storage = LogStorage(str(tmp_path))
    storage.open_log()
    return storage


@pytest.fixture
def server(log: LogStorage) -> Iterator[RangeServer]:
    made = RangeServer(log, log.log_id())
    yield made
    made.stop()
    assert "zmq-range-server" not in {thread.name for thread in threading.enumerate()}


def add(log: LogStorage, first: int, values: list[bytes], batches: int = 1) -> Chunk:
    size = len(values) // batches
    parts = [batch_of(values[begin : begin + size]) for begin in range(0, len(values), size)]
    Path(log.path_of("")).mkdir(exist_ok=True)
    return write_chunk(log, first, parts, {}, False)


def read(access: Access, chunk: Chunk, start: int | None = None, end: int | None = None) -> pa.Table:
    with RemoteChunks(access, ELSEWHERE) as chunks:
        low, high = chunk.first if start is None else start, chunk.end if end is None else end
        return pa.Table.from_batches(read_chunk(chunks, chunk.name, low, high))


def test_what_is_read_over_the_network_is_what_the_file_has(log: LogStorage, server: RangeServer) -> None:
    values = [os.urandom(10_000) for _ in range(1000)]  # many blocks
    chunk = add(log, 5, values, batches=4)
    assert chunk.size > 8 * BLOCK_BYTES
    assert read(server.access, chunk)["value"].to_pylist() == values
    assert read(server.access, chunk, 300, 305)["id"].to_pylist() == [300, 301, 302, 303, 304]
    assert read(server.access, add(log, 1005, [b"small"]))["value"].to_pylist() == [b"small"]
    other = log.of(3)
    assert read(server.access, add(log, 1006, [b"a", b""]))["value"].to_pylist() == [b"a", b""]
    in_another = add(other, 0, [b"of partition 3"])
    with RemoteChunks(server.access, ELSEWHERE.of(3)) as chunks:
        (batch,) = read_chunk(chunks, in_another.name, 0, 1)
    assert batch["value"].to_pylist() == [b"of partition 3"]


def test_who_sees_the_log_reads_its_files(log: LogStorage, server: RangeServer, tmp_path: Path) -> None:
    chunk = add(log, 0, [b"v"])
    with chunks_for(log, [chunk.name], server.access) as chunks:
        assert chunks is log
    with chunks_for(ELSEWHERE, [chunk.name], server.access) as chunks:
        assert isinstance(chunks, RemoteChunks)
    # The same path may be another log on another machine.
    with chunks_for(log, [chunk.name], server.access._replace(log_id="another")) as chunks:
        assert isinstance(chunks, RemoteChunks)


def test_a_chunk_that_is_gone_or_damaged_is_told_as_where_it_is_seen(
    log: LogStorage, server: RangeServer
) -> None:
    chunk = add(log, 0, [b"x" * 100] * 10)
    path = Path(log.path_of(chunk.name))
    content = bytearray(path.read_bytes())
    content[content.index(b"x" * 50)] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedChunkError, match="checksum differs"):
        read(server.access, chunk)
    gone = add(log, 10, [b"y"])
    os.unlink(log.path_of(gone.name))
    with pytest.raises(DataLossError, match="of the driver: it does not exist"):
        read(server.access, gone)


def test_nobody_else_is_served_and_bad_requests_end_nothing(
    context: zmq.Context[Socket],
    log: LogStorage,
    server: RangeServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunk = add(log, 0, [b"secret"])
    access = server.access
    good = Request(1, 0, 0, 0, chunk.name).to_frame(access.secret)

    def dealer(server_key: bytes | None) -> Socket:
        sock = context.socket(zmq.DEALER)
        if server_key is not None:
            public, private = zmq.curve_keypair()
            sock.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, private)
        sock.connect(access.endpoints[-1])
        return sock

    for key in (None, zmq.curve_keypair()[0]):  # without security, and with another server's key
        stranger = dealer(key)
        stranger.send(good)
        assert not stranger.poll(200)
    known = dealer(access.server_key)
    for bad in (
        b"",
        b"short",
        Request(1, 0, 0, 0, chunk.name).to_frame(bytes(32)),
        Request(1, 0, 0, 0, "../log.json").to_frame(access.secret),
        Request(1, 0, 0, 0, f"../0/{chunk.name}").to_frame(access.secret),
        Request(1, 0, 0, 0, "skipped-0-5-../desk").to_frame(access.secret),
        Request(1, 0, 0, BLOCK_BYTES + 1, chunk.name).to_frame(access.secret),
        access.secret + b"\xff" * 40,
    ):
        known.send(bad)
    known.send_multipart([good, good])
    known.send(b"x" * 10_000)  # over the limit of a frame: it costs the connection
    assert not known.poll(200)
    known.close(linger=0)
    again = dealer(access.server_key)
    again.send(good)
    assert again.poll(10_000)
    assert int(Answer.of_frames(again.recv_multipart()).content) == chunk.size
    assert "refused" in caplog.text
    assert repr(access.secret) not in repr(access)


def test_a_cut_between_executor_and_driver_is_outlived(
    log: LogStorage, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_chunks, "_AGAIN_SECONDS", 0.3)
    values = [os.urandom(10_000) for _ in range(2000)]
    chunk = add(log, 0, values, batches=8)
    with Middlebox(server.access.endpoints[-1]) as box:
        access = server.access._replace(endpoints=(box.endpoint,))
        with RemoteChunks(access, ELSEWHERE) as chunks:
            batches = read_chunk(chunks, chunk.name, 0, 2000)
            got = next(batches)["value"].to_pylist()
            box.black_hole = True  # nothing passes, and nobody is told
            threading.Timer(1.0, box.clear).start()
            got += next(batches)["value"].to_pylist()
            box.reset()
            for batch in batches:
                got += batch["value"].to_pylist()
    assert got == values


def test_a_driver_that_does_not_answer_is_an_error_with_a_way_out(
    log: LogStorage, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_chunks, "_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(remote_chunks, "_PATIENCE_SECONDS", 0.3)
    chunk = add(log, 0, [b"v"])
    access = server.access._replace(endpoints=(free_endpoint(), free_endpoint()))
    with pytest.raises(LogFetchError, match=r"driver has not answered .* name another address with serveLog"):
        read(access, chunk)


def test_a_slow_line_costs_time_and_no_more(
    log: LogStorage, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_chunks, "_AGAIN_SECONDS", 0.2)
    monkeypatch.setattr(remote_chunks, "_PATIENCE_SECONDS", 20.0)
    values = [os.urandom(10_000) for _ in range(300)]
    chunk = add(log, 0, values)
    with Middlebox(server.access.endpoints[-1]) as box:
        box.bytes_per_second = 2_000_000  # a block takes half a second, and four are asked for at a time
        assert read(server.access._replace(endpoints=(box.endpoint,)), chunk)["value"].to_pylist() == values


def test_no_request_ends_the_server_and_if_it_has_ended_it_can_be_stopped(
    log: LogStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = add(log, 0, [b"v"])
    server = RangeServer(log, log.log_id())
    with RemoteChunks(server.access, ELSEWHERE) as chunks:
        with pytest.raises(OSError, match=r"too large|out of range|convert"):
            chunks.wait(chunks.ask(chunk.name, 2**63, 1))
        assert chunks.wait(chunks.ask(chunk.name, 0, 0))
        monkeypatch.setattr(RangeServer, "_answer", lambda *_: 1 / 0)  # whatever may be wrong with it
        chunks.ask(chunk.name, 0, 0)
        wait_for(lambda: not server.is_serving, "its end")
    server.stop()


def test_many_tasks_are_served_side_by_side_and_no_file_stays_open(
    log: LogStorage, server: RangeServer
) -> None:
    chunks = [add(log, 10 * number, [b"%d" % i for i in range(10)]) for number in range(60)]
    failures: list[BaseException] = []

    def task() -> None:
        try:
            for chunk in chunks:
                assert read(server.access, chunk).num_rows == 10
        except BaseException as e:
            failures.append(e)

    tasks = [threading.Thread(target=task) for _ in range(4)]
    for each in tasks:
        each.start()
    for each in tasks:
        each.join(60)
    assert not failures
    opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    # A chunk that is deleted gives its room back.
    assert not [path for path in opened if path.startswith(log.root)]


def _is_open(descriptor: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")
