"""Serves the chunks of a query's log to executors that do not see its directory.

It runs in the driver's source runner, in a thread of its own that sleeps until somebody asks.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import threading
from contextlib import ExitStack

import zmq

from zmq_datasource.errors import DiskFaultError, LogError
from zmq_datasource.host import failpoints
from zmq_datasource.host.addresses import own_addresses
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.log.deletions import begin_of
from zmq_datasource.log.files import open_file
from zmq_datasource.log.layout import parse_chunk_name
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.range_protocol import (
    BEGIN,
    MOST_REQUEST_BYTES,
    SECRET_BYTES,
    Access,
    Answer,
    Request,
    parse_skipped,
)
from zmq_datasource.transport.kernel import find_dead_peers

__all__ = ["RangeServer"]

_log = logging.getLogger(__name__)

# Requests and answers that wait for one executor; each answer is a block at most.
_QUEUED = 16
_HANDSHAKE_MS = 10_000
_JOIN_SECONDS = 5.0
_ANYWHERE = "tcp://*:*"


class RangeServer:
    """A ROUTER that gives executors what they ask for of the chunks of one log.

    Args:
        storage: The log, of any of its partitions.
        log_id: Its id.
        endpoint: Where to listen; None for a free port of all this machine's addresses.

    Raises:
        OSError: There are too many open files.
        zmq.ZMQError: It cannot listen there, or this libzmq has no CURVE.
    """

    def __init__(self, storage: LogStorage, log_id: str, endpoint: str | None = None) -> None:
        self._storage = storage
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._warnings = LimitedLog(__name__, "requests that were refused")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.term)
            public, private = zmq.curve_keypair()
            self._socket = self._context.socket(zmq.ROUTER)
            undo.callback(self._socket.close, linger=0)
            options: dict[int, int | bytes] = {
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: private,
                zmq.ROUTER_MANDATORY: 1,
                zmq.MAXMSGSIZE: MOST_REQUEST_BYTES,
                zmq.RCVHWM: _QUEUED,
                zmq.SNDHWM: _QUEUED,
                zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
                zmq.LINGER: 0,
                zmq.IPV6: int("[" in (endpoint or "")),
            }
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            find_dead_peers(self._socket)
            self._socket.bind(endpoint or _ANYWHERE)
            bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            host, _, port = bound.removeprefix("tcp://").rpartition(":")
            hosts = own_addresses() if host in ("0.0.0.0", "[::]") else [host]
            self._wake, self._waker = os.pipe()
            undo.pop_all()
        self.access = Access(tuple(f"tcp://{host}:{port}" for host in hosts), public, self._secret, log_id)
        self._thread = threading.Thread(target=self._serve, name="zmq-range-server", daemon=True)
        self._thread.start()
        _log.info(
            "serving %s to executors that do not see it, on %s", storage, ", ".join(self.access.endpoints)
        )

    @property
    def is_serving(self) -> bool:
        """Whether nothing has ended it."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Serve no more. Once is enough."""
        os.write(self._waker, b"\0")
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._waker)

    # The thread.

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not any(key == self._wake for key, _ in poller.poll()):
                sender, *frames = self._socket.recv_multipart()
                answer = self._answer(frames)
                if answer is None:
                    continue
                try:
                    self._socket.send_multipart([sender, *answer.to_frames()], zmq.NOBLOCK, copy=False)
                    failpoints.reach("source.range.after_answer")
                except zmq.ZMQError as e:
                    # Gone, or it takes nothing: it asks again if it still wants to know.
                    if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                        raise
        except Exception:
            _log.exception("serving %s has ended; executors that do not see it cannot read it", self._storage)
        finally:
            self._socket.close(linger=0)
            self._context.term()

    def _answer(self, frames: list[bytes]) -> Answer | None:
        try:
            if len(frames) != 1:
                raise ValueError(f"a request of {len(frames)} frames")
            secret, request = Request.of_frame(frames[0])
            if not hmac.compare_digest(secret, self._secret):
                raise ValueError("a request with another secret")
            known = request.name == BEGIN or parse_skipped(request.name) or parse_chunk_name(request.name)
            if not known:
                raise ValueError(f"a request for {request.name!r}, which is no chunk")
        except ValueError as e:
            self._warnings.warn("refused %s", e)
            return None
        try:
            return Answer(request.number, 0, self._read(request))
        except OSError as e:
            return Answer(request.number, e.errno or errno.EIO, str(e).encode())
        except LogError as e:  # the task asks again only for what may pass
            code = errno.EIO if isinstance(e, DiskFaultError) else errno.EINVAL
            return Answer(request.number, code, str(e).encode())
        except Exception as e:  # whatever one request does, the others are served
            _log.exception("reading %s", request)
            return Answer(request.number, errno.EIO, str(e).encode())

    def _read(self, request: Request) -> bytes:
        failpoints.reach("source.range.before_read")
        storage = self._storage.of(request.partition)
        if request.name == BEGIN:
            begin = begin_of(storage, self.access.log_id)
            return b"" if begin is None else str(begin).encode()
        if (skipped := parse_skipped(request.name)) is not None:
            ReaderRecords(storage).write_skipped(*skipped)
            return b""
        # Opened for each block: a file that was kept open would keep its room on the disk when it is deleted.
        file = open_file(storage.path_of(request.name))
        try:
            if not request.length:
                return str(os.fstat(file).st_size).encode()
            return os.pread(file, request.length, request.offset)
        finally:
            os.close(file)
