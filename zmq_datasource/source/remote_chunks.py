"""An executor's end of reading without a shared directory: whole chunks, from the driver.

The model: a fetch is one request with a number, and one answer. The request is sent once on each connection. If
no byte comes for ``again`` seconds, the client closes the connection and repeats the request on a new one; it
waits longer each time. An answer with another number belongs to an older request and is dropped. The fetch ends
with the answer, or with an error once no byte has come for ``give_up`` seconds. The client owns its connection
and the chunk that it fetches: it holds one chunk in memory, and decodes record batches there without a copy.

Tasks that share a chunk each fetch all of it. A cache would keep a chunk in the memory of every idle Python
worker, and would rarely be hit: Spark runs the tasks of one chunk side by side, in different workers.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogError, LogFetchError
from zmq_datasource.host.printable import printable
from zmq_datasource.log import Deletions, LogStorage, OpensChunks, patiently
from zmq_datasource.options.types import Endpoint, Endpoints, ZmqOptions
from zmq_datasource.source.chunk_protocol import (
    BEGIN,
    FRAME_BYTES,
    Access,
    Request,
    skipped_name,
    unpack_head,
)
from zmq_datasource.transport.kernel import bytes_received, find_dead_peers
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["RemoteChunks", "RemoteDeletions", "chunks_for"]

_log = logging.getLogger(__name__)

_AGAIN_SECONDS, _LONGEST_AGAIN_SECONDS = 3.0, 40.0
_GIVE_UP_SECONDS = 90.0
# How late a client may notice that bytes have come.
_TICK_MS = 100
# What a process has no more of.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_said = False


@contextmanager
def chunks_for(storage: LogStorage, names: Iterable[str], access: Access) -> Iterator[OpensChunks]:
    """Where a task reads: in the log's directory if this machine sees it, else from the driver.

    Args:
        names: Of all chunks that it wants.
    """
    if _sees(storage, names, access.log_id):
        yield storage
        return
    global _said
    if not _said:
        _said = True
        _log.info("this machine does not see %s; its chunks are read from the driver", storage)
    with RemoteChunks(access, storage) as remote:
        yield remote


def _sees(storage: LogStorage, names: Iterable[str], log_id: str) -> bool:
    """Whether all of this is here: not another log of the same path, nor a copy of it that is behind."""

    def look() -> bool:
        try:
            return storage.log_id() == log_id and all(os.path.exists(storage.path_of(name)) for name in names)
        except (LogError, OSError) as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in _EXHAUSTED:
                raise  # nor could it ask the driver
            return False

    return patiently(look, storage.patience)


class RemoteChunks:
    """Opens chunks that the driver serves; use it in a ``with`` block, in one thread.

    Args:
        access: Of the driver's server.
        storage: Names the partition, and for messages its place.
        again: After so many seconds without a byte a request is repeated; this doubles each time.
        give_up: After so many seconds without a byte a fetch fails.

    Raises:
        LogFetchError: On any use, if the driver does not answer.
    """

    def __init__(
        self,
        access: Access,
        storage: LogStorage,
        *,
        again: float = _AGAIN_SECONDS,
        give_up: float = _GIVE_UP_SECONDS,
    ) -> None:
        self._access, self._storage = access, storage
        self._again, self._give_up = again, give_up
        self.log_id, self.partition = access.log_id, storage.partition
        self.patience = storage.patience  # for what the driver cannot read now
        self._numbers = itertools.count()
        public, secret = zmq.curve_keypair()
        keys = {"serverkey": access.server_key, "publickey": public, "secretkey": secret}
        self._spec = SocketSpec(
            kind="DEALER",
            connect=Endpoints(map(Endpoint.read, access.endpoints)),
            max_message_bytes=FRAME_BYTES,
            zmq=ZmqOptions({f"curve_{name}": key.decode() for name, key in keys.items()}),
        )
        self._open: OpenSocket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()

    def path_of(self, name: str) -> str:
        """Where a chunk is, for messages."""
        return f"{self._storage.path_of(name)} of the driver"

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        """Fetch a chunk, all of it; FileNotFoundError if it is gone, OSError if the driver cannot read it."""
        return pa.BufferReader(self._fetch(name))

    def begin(self) -> int | None:
        """The first id that the partition has; None if it has no chunk.

        Raises:
            LogFetchError: The driver does not answer, or cannot list the log.
        """
        found = self._say(BEGIN, self.patience)
        return int(found) if found else None

    def skipped(self, reader: str, first: int, end: int) -> None:
        """Record that a task of this reader has skipped the ids ``[first, end)``.

        Raises:
            LogFetchError: The driver does not answer, or cannot record it.
        """
        self._say(skipped_name(reader, first, end), 0.0)

    def _say(self, name: str, patience: float) -> bytearray:
        try:
            return patiently(lambda: self._fetch(name), patience)
        except OSError as e:
            raise LogFetchError(f"asking the driver about {self._storage}: {e}") from e

    def _fetch(self, name: str) -> bytearray:
        """The content of the answer to this name; OSError if the driver could not read it."""
        number = next(self._numbers)
        request = Request(number, self.log_id, self._storage.partition, name).to_frame(self._access.secret)
        heard, again, answer = time.monotonic(), self._again, None
        while answer is None:
            if time.monotonic() - heard > self._give_up:
                raise LogFetchError(
                    f"reading {self.path_of(name)}: it is not in a directory that this machine shares with the "
                    f"driver, and the driver has not answered at {', '.join(self._access.endpoints)} for "
                    f"{self._give_up:.0f} s. Let executors connect to the driver there, name another address with "
                    "serveLog, or share walLocation"
                )
            answer, heard = self._ask(number, request, again, heard)
            if answer is None:
                self._hang_up()
                again = min(2 * again, _LONGEST_AGAIN_SECONDS)
        error, content = answer
        if error:
            raise OSError(error, printable(bytes(content), 1000))
        return content

    def _ask(
        self, number: int, request: bytes, again: float, heard: float
    ) -> tuple[tuple[int, bytearray] | None, float]:
        """Ask on the open connection, or else on a new one.

        Returns:
            Status and content; None if no byte has come for ``again`` seconds. And when a byte came last.
        """
        if self._open is None:
            self._open = OpenSocket(self._spec, _prepare, check_hosts=False)
        sock, watch = self._open.socket, self._open.watch
        asked, received, end = False, 0, time.monotonic() + again
        while time.monotonic() < end:
            ready = sock.poll(_TICK_MS, zmq.POLLIN if asked else zmq.POLLOUT)
            if ready and asked:
                if (answer := _receive(sock, number)) is not None:
                    return answer, heard
            elif ready:
                with suppress(zmq.Again):  # the connection has just ended
                    sock.send(request, zmq.NOBLOCK)
                    asked, received = True, bytes_received(watch)  # the handshake is no answer
            elif asked and bytes_received(watch) > received:
                received, heard = bytes_received(watch), time.monotonic()
                end = heard + again
        return None, heard

    def _hang_up(self) -> None:
        if self._open is not None:
            self._open.close(linger=0)
            self._open = None


def _prepare(sock: zmq.Socket[bytes]) -> None:
    # Of the driver's addresses, the first that answers gets the request, and no other one.
    sock.setsockopt(zmq.IMMEDIATE, 1)
    find_dead_peers(sock)


def _receive(sock: zmq.Socket[bytes], number: int) -> tuple[int, bytearray] | None:
    """Status and content of an answer; None if it is to another request."""
    head, content = unpack_head(sock.recv()), bytearray()
    while sock.getsockopt(zmq.RCVMORE):
        content += sock.recv(copy=False).buffer  # a frame is freed as soon as it is copied
    return (head[1], content) if head is not None and head[0] == number else None


class RemoteDeletions(Deletions):
    """As the driver sees the log: for its arguments see ``Deletions``."""

    def __init__(self, chunks: RemoteChunks, storage: LogStorage, fails: bool, reader: str | None) -> None:
        super().__init__(storage, chunks.log_id, fails, reader)
        self._chunks = chunks

    def _ask(self) -> int | None:
        return self._chunks.begin()

    def _record(self, reader: str, first: int, end: int) -> None:
        self._chunks.skipped(reader, first, end)
