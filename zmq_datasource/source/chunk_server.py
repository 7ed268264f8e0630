"""The driver's side of reading without a shared directory: it answers executors, which read ranges of a log's chunks.

The protocol (``Envelope``), which ``remote_chunks`` speaks in the executors. Each request has the secret, and a number
that its answer has, too.

======== ========================= ===========================================================================
Request  It has                    The answer has
======== ========================= ===========================================================================
``Find`` an id                     where the log begins, and the chunk that has the id, if there is one
``Read`` a chunk's name, a place,  the chunk's size, and bytes of this length from that place on; fewer at its
         a length                  end. A negative place counts from the end.
======== ========================= ===========================================================================

An answer with an ``error``, which is a number of the system, has only a text: ENOENT if the chunk is gone, because it
was deleted, or merged with others (``Find`` tells which); EIO if the task may ask again; EINVAL if it must fail.

For an executor a name is any text that the driver has given. The server opens an object only if its name is one of a
chunk, so no name leads out of the log.

The server's thread, in the driver's source runner, sleeps until a request comes, and keeps nothing between two of them.
A client's queue has room for one answer (SNDHWM 1). The server drops a second one; the client asks again. So memory is
bounded by ``MOST_BYTES`` for each client, and no client is waited for. If a client takes no byte for 30 s, the system
ends its connection, and libzmq frees its answer."""

from __future__ import annotations

import errno
import hmac
import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import zmq

from zmq_datasource.errors import DiskFaultError, LogError, ProtocolError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.host.machine import own_addresses
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import Found, LogStorage, find_id, parse_name
from zmq_datasource.options.socket import Endpoint
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.opened import bind_when_free
from zmq_datasource.transport.session import Envelope, Header

MOST_BYTES = 4 << 20
# libzmq encrypts a frame as a whole, which takes several times the memory of the frame.
FRAME_BYTES = 1 << 20
_MOST_REQUEST_BYTES = 1024

_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Request(Header, frozen=True, kw_only=True):
    number: int
    secret: bytes


class Find(Request, frozen=True, kw_only=True):
    kind: ClassVar[bytes] = b"F"
    id: _Id


class Read(Request, frozen=True, kw_only=True):
    kind: ClassVar[bytes] = b"R"
    name: str
    place: int
    length: Annotated[int, msgspec.Meta(gt=0, le=MOST_BYTES)]
    modified: float | None = None

    def check(self) -> None:
        if parse_name(self.name) is None:
            raise ProtocolError(f"{self.name!r} is no chunk")


class Answer(Header, frozen=True, kw_only=True):
    kind: ClassVar[bytes] = b"A"
    number: int
    error: int = 0
    text: str = ""
    found: Found | None = None
    size: int = 0


PROTOCOL: Envelope[Header] = Envelope(1, (Find, Read, Answer), "reading a log from the driver")


class LogAccess(NamedTuple):
    """The data with which an executor can ask the server.

    Attributes:
        endpoints: The addresses of the server. Which of them work depends on the executor's machine.
        server_key: The server's public key, in Z85.
    """

    endpoints: tuple[str, ...]
    server_key: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Access({', '.join(self.endpoints)})"  # no secret in a plan or a log


_log = logging.getLogger(__name__)


def read_request(frames: Sequence[bytes], secret: bytes) -> Request:
    """Decode a request; ProtocolError if it is not valid, or has another secret."""
    request, buffers = PROTOCOL.decode(frames)
    if not isinstance(request, Request) or buffers:
        raise ProtocolError("this is no request")
    if not hmac.compare_digest(request.secret, secret):
        raise ProtocolError("it has another secret")
    return request


def answer(storage: LogStorage, log_id: str, request: Request) -> list[Any]:
    """The frames of the answer to a request. If the log has another id now, it has no ids."""
    try:
        failpoints.reach("source.chunk.before_read")
        found, size, content = None, 0, memoryview(b"")
        match request:
            case Find(id=id_):
                found = find_id(storage, log_id, id_)
            case Read(name=name, place=place, length=length, modified=modified):
                with storage.open_sealed(name, modified) as file:
                    size = file.size()
                    file.seek(min(max(0, size + place if place < 0 else place), size))
                    content = memoryview(file.read(length))
    except Exception as e:  # an error in one request must not end the server
        error = e.errno if isinstance(e, OSError) else None
        if isinstance(e, LogError) and not isinstance(e, DiskFaultError):
            error = errno.EINVAL
        return PROTOCOL.encode(Answer(number=request.number, error=error or errno.EIO, text=str(e)))
    pieces = [content[at : at + FRAME_BYTES] for at in range(0, len(content), FRAME_BYTES)]
    return PROTOCOL.encode(Answer(number=request.number, found=found, size=size), pieces)


class ChunkServer:
    """A ROUTER that answers executors.

    Args:
        storage: The log.
        log_id: The id of the log.
        endpoint: Where to listen; None for a free port at all addresses of this machine.

    Raises:
        OSError: There are too many open files.
        zmq.ZMQError: The server cannot listen at ``endpoint``, or this libzmq has no CURVE.
    """

    def __init__(self, storage: LogStorage, log_id: str, endpoint: str | None = None) -> None:
        self._storage, self._log_id = storage, log_id
        self._warnings = LimitedLog(__name__, "requests that were not answered")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._answers = Answers(self._socket)
            set_router_options(self._socket, rcvhwm=1, sndhwm=1, most_request_bytes=_MOST_REQUEST_BYTES)
            public, private = zmq.curve_keypair()
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
            address = (endpoint or "tcp://*:*").removeprefix("tcp://")
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            bind_when_free(self._socket, Endpoint("tcp", address))
            self._end = WakePipe()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        host, _, port = bound.removeprefix("tcp://").rpartition(":")
        hosts = own_addresses() if host in ("0.0.0.0", "[::]") else [host]
        self.access = LogAccess(
            tuple(f"tcp://{host}:{port}" for host in hosts), public, secrets.token_bytes(32)
        )
        self._thread = threading.Thread(target=self._serve, name="zmq-chunk-server", daemon=True)
        self._thread.start()
        _log.info(
            "serving %s to executors that do not see it, on %s", storage, ", ".join(self.access.endpoints)
        )

    def stop(self) -> None:
        """End the thread, and close the socket. Call it once."""
        self._end.wake()
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._end.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._end.descriptor, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while self._end.descriptor not in dict(poller.poll()):
            try:
                self._answer(*self._socket.recv_multipart())
            except Exception as e:
                self._warnings.warn("a request was not answered: %s", e)
        self._context.destroy(linger=0)

    def _answer(self, client: bytes, *frames: bytes) -> None:
        request = read_request(frames, self.access.secret)
        if self._answers.send(client, answer(self._storage, self._log_id, request)):
            failpoints.reach("source.chunk.after_answer")
