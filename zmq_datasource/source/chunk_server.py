"""The driver's side of reading without a shared directory: a ROUTER sends the chunks of one log to executors.

The protocol, which ``remote_chunks`` speaks in the executors:

* A request is one frame: the secret (32 bytes), a number of 8 bytes, and ``<log id>/<partition>/<name>`` as text. The
  name is that of a chunk, or one of two others. ``begin`` asks for the first id of the partition.
  ``skipped-<first>-<end>-<reader>`` reports that a task of this reader has skipped the ids ``[first, end)``, because
  they were deleted.
* The first frame of an answer has the number and a status (``_HEAD``). The other frames have the content. For a chunk,
  that is the whole file, in pieces of at most ``FRAME_BYTES``. For ``begin``, it is the id as decimal text, or nothing
  if the partition has no chunks. For ``skipped``, it is nothing. A status other than 0 is an error number of the system
  (ENOENT: the chunk does not exist), and the next frame has the text of the error.

libzmq applies MAXMSGSIZE to each frame alone, so a chunk may have any size, even more than 1 GiB. CURVE protects the
bytes on the wire, and each record batch has its own checksum.

The server's thread, in the driver's source runner, sleeps until a request comes. The rules:

* **A request waits for its turn.** Then the server takes a place in the client's queue, reads the whole file, and sends
  it. Taking the place comes first, so the server reads nothing for a client that is gone. Between two requests the
  server keeps nothing: no position, no open file.
* **A client gets one chunk at a time.** Of its requests only the newest waits, and its queue holds one answer (SNDHWM
  1). If the queue is full, the server drops the request, and the client will repeat it.
* **Memory is bounded** (``transport.answers``). While answers of ``most_bytes`` wait for the network, no request gets
  its turn. So the server holds less than that and one more chunk. A chunk has about 32 MiB, or
  is as large as one message or transaction. The pieces of an answer are freed one by one, as they leave.
* **A client that reads nothing is disconnected.** The system ends a connection that has taken no byte for ``patience``
  seconds, and libzmq frees what waits for it. The server receives requests even while it answers none, because
  libzmq notices the end of a connection only while it reads from that connection."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import re
import secrets
import struct
import threading
from contextlib import ExitStack
from typing import NamedTuple

import zmq

from zmq_datasource.errors import DiskFaultError, LogError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.machine import own_addresses
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import (
    LogStorage,
    ReaderRecords,
    begin_of,
    open_file,
    parse_chunk_name,
    parse_partition_name,
)
from zmq_datasource.options.offsets import READER_PATTERN
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.opened import bind_when_free

SECRET_BYTES = 32
# libzmq encrypts a frame as a whole, which takes several times the memory of the frame.
FRAME_BYTES = 1 << 20
BEGIN = "begin"

_NUMBER = struct.Struct(">Q")
_HEAD = struct.Struct(">QI")
_LONGEST_TEXT = 512
MOST_REQUEST_BYTES = SECRET_BYTES + _NUMBER.size + _LONGEST_TEXT
_SKIPPED = re.compile(rf"skipped-([0-9]{{1,20}})-([0-9]{{1,20}})-({READER_PATTERN.strip('^$')})")


def skipped_name(reader: str, first: int, end: int) -> str:
    """The name in a request with this meaning: a task of this reader has skipped the ids ``[first, end)``."""
    return f"skipped-{first}-{end}-{reader}"


def parse_skipped(name: str) -> tuple[str, int, int] | None:
    """The arguments of ``skipped_name``; None for another name."""
    match = _SKIPPED.fullmatch(name)
    return None if match is None else (match[3], int(match[1]), int(match[2]))


class LogAccess(NamedTuple):
    """The data with which an executor can ask the server.

    Attributes:
        endpoints: The addresses of the server. Which of them work depends on the executor's machine.
        server_key: The server's public key, in Z85.
        secret: The first bytes of each request.
        log_id: The id of the log that the server sends.
    """

    endpoints: tuple[str, ...]
    server_key: bytes
    secret: bytes
    log_id: str

    def __repr__(self) -> str:
        return f"Access({', '.join(self.endpoints)})"  # no secret in a plan or a log


class ChunkRequest(NamedTuple):
    """A request. It has all that the server needs for the answer."""

    number: int
    log_id: str
    partition: int
    name: str

    def to_frame(self, secret: bytes) -> bytes:
        return secret + _NUMBER.pack(self.number) + f"{self.log_id}/{self.partition}/{self.name}".encode()

    @classmethod
    def of_frame(cls, frame: bytes) -> tuple[bytes, ChunkRequest]:
        """Decode a frame into the secret and the request.

        Raises:
            ValueError: The frame is not a request.
        """
        begin = SECRET_BYTES + _NUMBER.size
        if not begin < len(frame) <= MOST_REQUEST_BYTES:
            raise ValueError(f"a request of {len(frame)} bytes")
        (number,) = _NUMBER.unpack_from(frame, SECRET_BYTES)
        log_id, partition, name = frame[begin:].decode().split("/")
        of = parse_partition_name(partition)
        if of is None:
            raise ValueError(f"a request for partition {partition!r}")
        return frame[:SECRET_BYTES], cls(number, log_id, of, name)


def pack_head(number: int, error: int) -> bytes:
    """Encode the first frame of an answer; ``error`` is the status."""
    return _HEAD.pack(number, error)


def unpack_head(frame: bytes) -> tuple[int, int] | None:
    """Decode the first frame of an answer into number and status; None if it is not such a frame."""
    if len(frame) != _HEAD.size:
        return None
    number, error = _HEAD.unpack(frame)
    return number, error


_log = logging.getLogger(__name__)

# Four chunks of the usual size, so that one or two executors that read nothing do not stop the others.
_MOST_BYTES = 128 << 20
# A client's libzmq takes bytes even while its program is busy. So only a stopped process, or one behind a cut network,
# takes no byte for so long.
_PATIENCE_SECONDS = 10.0
_QUEUED = 16  # requests of one client that libzmq holds
# How late the server may notice that the network has taken an answer, while requests wait.
_TICK_MS = 5
_HANDSHAKE_MS = 10_000
_JOIN_SECONDS = 5.0
_ANYWHERE = "tcp://*:*"


class ChunkServer:
    """A ROUTER that sends executors the chunks that they ask for.

    Args:
        storage: Any partition of the log.
        log_id: The id of the log.
        endpoint: Where to listen; None for a free port at all addresses of this machine.
        most_bytes: While answers of so many bytes wait for the network, no further request is answered.
        patience: A client that takes no byte for so many seconds is disconnected, if the system can do that (Linux).

    Raises:
        OSError: There are too many open files.
        zmq.ZMQError: The server cannot listen at ``endpoint``, or this libzmq has no CURVE.
    """

    def __init__(
        self,
        storage: LogStorage,
        log_id: str,
        endpoint: str | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._storage = storage
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._most_bytes = most_bytes
        self._requests: dict[bytes, ChunkRequest] = {}  # the newest request of each client, until its turn
        self._warnings = LimitedLog(__name__, "requests that were refused")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.term)
            public, private = zmq.curve_keypair()
            self._socket = self._context.socket(zmq.ROUTER)
            undo.callback(self._socket.close, linger=0)
            self._answers = Answers(self._socket)
            set_router_options(self._socket, _QUEUED, 1, MOST_REQUEST_BYTES)
            options: dict[int, int | bytes] = {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: private,
                zmq.TCP_MAXRT: round(patience * 1000),
                zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
                zmq.LINGER: 0,
            }
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            bind_when_free(self._socket, Endpoint("tcp", (endpoint or _ANYWHERE).removeprefix("tcp://")))
            bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            host, _, port = bound.removeprefix("tcp://").rpartition(":")
            hosts = own_addresses() if host in ("0.0.0.0", "[::]") else [host]
            self._end = WakePipe()
            undo.pop_all()
        self.access = LogAccess(tuple(f"tcp://{host}:{port}" for host in hosts), public, self._secret, log_id)
        self._thread = threading.Thread(target=self._serve, name="zmq-chunk-server", daemon=True)
        self._thread.start()
        _log.info(
            "serving %s to executors that do not see it, on %s", storage, ", ".join(self.access.endpoints)
        )

    @property
    def is_serving(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread, and close the socket. Call it once."""
        self._end.wake()
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            self._end.close()

    # The thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._end.descriptor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        try:
            while True:
                turn = bool(self._requests) and self._answers.bytes < self._most_bytes
                ready = dict(poller.poll(0 if turn else _TICK_MS if self._requests else None))
                if self._end.descriptor in ready:
                    return
                if self._socket in ready:
                    self._receive(*self._socket.recv_multipart())
                if turn:
                    client = next(iter(self._requests))
                    self._answer(client, self._requests.pop(client))
        except Exception:
            _log.exception("serving %s has ended; executors that do not see it cannot read it", self._storage)
        finally:
            self._socket.close(linger=0)
            self._context.term()

    def _receive(self, client: bytes, *frames: bytes) -> None:
        try:
            self._requests[client] = self._checked(frames)
        except ValueError as e:
            self._warnings.warn("refused %s", e)

    def _answer(self, client: bytes, request: ChunkRequest) -> None:
        try:
            has_place = self._answers.begin(client)
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            return  # the client is gone
        if has_place:  # else the client's queue still has the last answer, and the client will ask again
            error, parts = self._content_of(request)
            self._answers.finish(client, [pack_head(request.number, error), *parts], owner=client)
            failpoints.reach("source.chunk.after_answer")

    def _checked(self, frames: tuple[bytes, ...]) -> ChunkRequest:
        """Decode a request; ValueError if it is not valid, or has another secret."""
        if len(frames) != 1:
            raise ValueError(f"a request of {len(frames)} frames")
        secret, request = ChunkRequest.of_frame(frames[0])
        if not hmac.compare_digest(secret, self._secret):
            raise ValueError("a request with another secret")
        if request.log_id != self.access.log_id:
            raise ValueError("a request for another log")
        is_chunk = parse_chunk_name(request.name) is not None
        if not (is_chunk or request.name == BEGIN or parse_skipped(request.name)):
            raise ValueError(f"a request for {request.name!r}, which is no chunk")
        return request

    def _content_of(self, request: ChunkRequest) -> tuple[int, list[bytes]]:
        """The status and the content of the answer, in one part or more."""
        try:
            return 0, self._read(request) or [b""]
        except OSError as e:
            return e.errno or errno.EIO, [str(e).encode()]
        except LogError as e:  # the task repeats a request after EIO, and fails after EINVAL
            return errno.EIO if isinstance(e, DiskFaultError) else errno.EINVAL, [str(e).encode()]
        except Exception as e:  # an error in one request must not end the server
            _log.exception("reading %s", request)
            return errno.EIO, [str(e).encode()]

    def _read(self, request: ChunkRequest) -> list[bytes]:
        failpoints.reach("source.chunk.before_read")
        storage = self._storage.of(request.partition)
        if request.name == BEGIN:
            begin = begin_of(storage, self.access.log_id)
            return [] if begin is None else [str(begin).encode()]
        if (skipped := parse_skipped(request.name)) is not None:
            ReaderRecords(storage).write_skipped(*skipped)
            return []
        path = storage.path_of(request.name)
        if not os.path.exists(path):
            storage.log_id_again()  # raises if the whole log is away, and not only this chunk
        with open(open_file(path), "rb", buffering=0) as file:
            return list(iter(lambda: file.read(FRAME_BYTES), b""))
