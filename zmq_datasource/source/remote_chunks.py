"""An executor's side of reading without a shared directory: it fetches whole chunks from the driver.

The model: a fetch is one request with a number, and one answer. The request is sent once on each connection. If no byte
comes for ``again`` seconds, the client closes the connection, and repeats the request on a new one; each time it waits
longer. An answer with another number belongs to an older request, and is dropped. The fetch ends with the answer, or
with an error when no byte has come for ``give_up`` seconds. The client has one chunk in memory, and decodes record
batches there without a copy.

Tasks that share a chunk each fetch all of it. A cache would keep a chunk in the memory of every idle Python worker, and
would rarely help: Spark runs the tasks of one chunk at the same time, in different workers.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogError, LogFetchError
from zmq_datasource.host.log_lines import printable
from zmq_datasource.log import Deletions, LogStorage, OpensChunks, retry_reading
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.source.chunk_server import (
    BEGIN,
    FRAME_BYTES,
    ChunkRequest,
    LogAccess,
    skipped_name,
    unpack_head,
)
from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.session import RequestSession
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

_AGAIN_SECONDS, _LONGEST_AGAIN_SECONDS = 3.0, 40.0
_GIVE_UP_SECONDS = 90.0
# How often to try to send a request while there is no connection.
_UNSENT_SECONDS = 0.005
# Errors of a process that has run out of descriptors or memory.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_has_logged = False


@contextmanager
def chunks_for(storage: LogStorage, names: Iterable[str], access: LogAccess) -> Iterator[OpensChunks]:
    """Choose where a task reads: in the log's directory if this machine sees it, else from the driver.

    Args:
        names: The names of all chunks that the task reads.
    """
    if _sees(storage, names, access.log_id):
        yield storage
        return
    global _has_logged
    if not _has_logged:
        _has_logged = True
        _log.info("this machine does not see %s; its chunks are read from the driver", storage)
    with RemoteChunks(access, storage) as remote:
        yield remote


def _sees(storage: LogStorage, names: Iterable[str], log_id: str) -> bool:
    """Whether this machine sees all these chunks of this log.

    The path may lead to another log, which has another id, or to an older copy, which lacks chunks.
    """

    def sees_all() -> bool:
        try:
            return storage.log_id() == log_id and all(os.path.exists(storage.path_of(name)) for name in names)
        except (LogError, OSError) as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in _EXHAUSTED:
                raise  # a connection to the driver needs descriptors and memory, too
            return False

    return retry_reading(sees_all, storage.retry_seconds)


class RemoteChunks:
    """Opens chunks that the driver serves; use it in a ``with`` block, in one thread.

    Args:
        access: The access to the driver's server.
        storage: The partition, whose path is only for messages here.
        again: Seconds without a byte after which a request is repeated; they double each time.
        give_up: Seconds without a byte after which a fetch fails.

    Raises:
        LogFetchError: On any use, if the driver does not answer.
    """

    def __init__(
        self,
        access: LogAccess,
        storage: LogStorage,
        *,
        again: float = _AGAIN_SECONDS,
        give_up: float = _GIVE_UP_SECONDS,
    ) -> None:
        self._access, self._storage = access, storage
        self.log_id, self.partition = access.log_id, storage.partition
        self.retry_seconds = (
            storage.retry_seconds
        )  # how long to repeat a fetch that the driver cannot answer now
        self._numbers = itertools.count()
        public, secret = zmq.curve_keypair()
        keys = {"serverkey": access.server_key, "publickey": public, "secretkey": secret}
        spec = SocketSpec(
            kind="DEALER",
            connect=Endpoints(map(Endpoint.read, access.endpoints)),
            max_message_bytes=FRAME_BYTES,
            zmq=ZmqOptions({f"curve_{name}": key.decode() for name, key in keys.items()}),
        )
        self._session = _Fetching(again, give_up, ", ".join(access.endpoints))
        self._link = Link(spec, self._session, _prepare)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close(linger=0)

    def path_of(self, name: str) -> str:
        """The path of a chunk, for messages."""
        return f"{self._storage.path_of(name)} of the driver"

    def open_sealed(self, name: str, whole: bool = True) -> pa.NativeFile:
        """Fetch a whole chunk. FileNotFoundError if it is gone, OSError if the driver cannot read it."""
        return pa.BufferReader(self._fetch(name))

    def begin(self) -> int | None:
        """Ask for the first id of the partition; None if it has no chunk.

        Raises:
            LogFetchError: The driver does not answer, or cannot list the log.
        """
        found = self._ask(BEGIN, self.retry_seconds)
        return int(found) if found else None

    def skipped(self, reader: str, first: int, end: int) -> None:
        """Record that a task of this reader has skipped the ids ``[first, end)``.

        Raises:
            LogFetchError: The driver does not answer, or cannot record it.
        """
        self._ask(skipped_name(reader, first, end), 0.0)

    def _ask(self, name: str, retry_seconds: float) -> bytearray:
        try:
            return retry_reading(lambda: self._fetch(name), retry_seconds)
        except OSError as e:
            raise LogFetchError(f"asking the driver about {self._storage}: {e}") from e

    def _fetch(self, name: str) -> bytearray:
        """Send a request for this name. Returns the content of the answer; OSError if its status is not 0."""
        if not self._link.is_open:
            self._link.open(check_hosts=False)
        number, session = next(self._numbers), self._session
        request = ChunkRequest(number, self.log_id, self._storage.partition, name).to_frame(
            self._access.secret
        )
        session.fetch(self.path_of(name), number, request, time.monotonic())
        while session.waiting:
            self._link.run_once(_UNSENT_SECONDS if session.outbox else TICK_SECONDS)
        error, content = session.answer
        if error:
            raise OSError(error, printable(bytes(content), 1000))
        return content


class _Fetching(RequestSession):
    """The session of ``RemoteChunks``: one fetch after the other.

    Args:
        again, give_up: See ``RemoteChunks``.
        driver: The addresses of the driver, for messages.

    Attributes:
        answer: The status and the content of the last answer.
    """

    def __init__(self, again: float, give_up: float, driver: str) -> None:
        super().__init__(math.inf, again)
        self._again, self._give_up, self._driver = again, give_up, driver
        self._path, self._number, self._request = "", 0, b""
        self.answer = 0, bytearray()

    def fetch(self, path: str, number: int, request: bytes, now: float) -> None:
        """Send a request. ``waiting`` is true until the answer has come."""
        self._path, self._number, self._request = path, number, request
        self.redial_after = self._again
        self._mark_asked(now)
        self._repeat(now)

    def _repeat(self, now: float) -> None:
        if self.waiting:
            self._mark_asked(now)
            self.outbox.append([self._request])

    def wake(self, now: float) -> None:
        """Do what is due now. Each new connection has twice as long to bring the answer as the one before.

        Raises:
            LogFetchError: No byte has come for ``give_up`` seconds.
        """
        if self.waiting and now - self._last_word > self._give_up:
            self._mark_answered()
            raise LogFetchError(
                f"reading {self._path}: it is not in a directory that this machine shares with the driver, and the "
                f"driver has not answered at {self._driver} for {self._give_up:.0f} s. Let executors connect to the "
                "driver there, name another address with serveLog, or share walLocation"
            )
        redials = self.redial  # the link sets it back once it has a free descriptor for the new connection
        super().wake(now)
        if self.redial and not redials:
            self.redial_after = min(2 * self.redial_after, _LONGEST_AGAIN_SECONDS)

    def receive(self, frames: list[bytes], now: float) -> None:
        self._mark_heard(now)
        head = unpack_head(frames[0])
        if head is None or not self.waiting or head[0] != self._number:
            return
        content = bytearray()
        for at in range(1, len(frames)):
            content += frames[at]
            frames[at] = b""  # so that memory holds the chunk only once
        self.answer = head[1], content
        self._mark_answered()


def _prepare(sock: zmq.Socket[bytes]) -> None:
    # With IMMEDIATE, libzmq queues a request only for a connection that is established. Otherwise it could queue the
    # request for an address of the driver that this machine cannot reach.
    sock.setsockopt(zmq.IMMEDIATE, 1)
    find_dead_peers(sock)


class RemoteDeletions(Deletions):
    """Asks the driver which ids the log's writer has deleted. For the arguments see ``Deletions``."""

    def __init__(self, chunks: RemoteChunks, storage: LogStorage, fails: bool, reader: str | None) -> None:
        super().__init__(storage, chunks.log_id, fails, reader)
        self._chunks = chunks

    def _ask(self) -> int | None:
        return self._chunks.begin()

    def _record(self, reader: str, first: int, end: int) -> None:
        self._chunks.skipped(reader, first, end)
