"""The chunks of a log as an executor sees it that cannot see their directory: files, read over the network."""

from __future__ import annotations

import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogError, LogFetchError
from zmq_datasource.host.printable import printable
from zmq_datasource.log.chunk import OpensChunks
from zmq_datasource.log.deletions import Deletions
from zmq_datasource.log.files import patiently
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.source.range_protocol import (
    BEGIN,
    BLOCK_BYTES,
    MOST_ANSWER_BYTES,
    Access,
    Answer,
    Request,
    skipped_name,
)

__all__ = ["RemoteChunks", "RemoteDeletions", "chunks_for"]

_log = logging.getLogger(__name__)

# Blocks that are asked for ahead of the one that is read.
_AHEAD = 4
# After so long without an answer all that is outstanding is asked for again, on a connection of its own; later where
# answers are slow, because half an answer is lost with its connection.
_AGAIN_SECONDS = 3.0
_LONGEST_AGAIN_SECONDS = 40.0
_SLOWER = 4.0
_PATIENCE_SECONDS = 90.0
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

    Raises:
        LogFetchError: On any use, if the driver does not answer.
    """

    def __init__(self, access: Access, storage: LogStorage) -> None:
        self._access, self._storage = access, storage
        self.log_id, self.partition = access.log_id, storage.partition
        self.patience = storage.patience  # for what the driver cannot read now
        self._numbers = itertools.count()
        self._endpoints = access.endpoints  # the one that has answered, once one has
        self._sockets: dict[zmq.Socket[bytes], str] = {}
        self._outstanding: dict[int, Request] = {}
        self._arrived: dict[int, Answer] = {}
        self._again = _AGAIN_SECONDS

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        self._context.term()

    def path_of(self, name: str) -> str:
        """Where a chunk is, for messages."""
        return f"{self._storage.path_of(name)} of the driver"

    def open_chunk(self, name: str, whole: bool = True) -> pa.NativeFile:
        """Open a chunk for reading, in parts; FileNotFoundError if it is gone."""
        size = int(self.wait(self.ask(name, 0, 0)))
        return pa.PythonFile(_RemoteFile(self, name, size), mode="r")

    def ask(self, name: str, offset: int, length: int) -> int:
        """Ask for bytes of a chunk, or with length 0 for its size; the number to wait for."""
        request = Request(next(self._numbers), self._storage.partition, offset, length, name)
        self._outstanding[request.number] = request
        self._send(request)
        return request.number

    def wait(self, number: int) -> bytes:
        """What was asked for under this number.

        Raises:
            OSError: The driver could not read it.
        """
        heard = asked = time.monotonic()
        while number not in self._arrived:
            if self._receive(max(0.0, asked + self._again - time.monotonic())):
                now = time.monotonic()
                self._again = min(max(_AGAIN_SECONDS, _SLOWER * (now - asked)), _LONGEST_AGAIN_SECONDS)
                heard = asked = now
            elif time.monotonic() >= asked + self._again:
                if time.monotonic() - heard > _PATIENCE_SECONDS:
                    raise LogFetchError(
                        f"reading {self.path_of(self._outstanding[number].name)}: it is not in a directory that this "
                        f"machine shares with the driver, and the driver has not answered at "
                        f"{', '.join(self._endpoints)} for {_PATIENCE_SECONDS:.0f} s. Let executors connect to the "
                        "driver there, name another address with serveLog, or share walLocation"
                    )
                self._hang_up()
                self._connect()
                asked = time.monotonic()
                self._again = min(2 * self._again, _LONGEST_AGAIN_SECONDS)
        answer = self._arrived.pop(number)
        if answer.error:
            raise OSError(answer.error, printable(answer.content, 1000))
        return answer.content

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

    def _say(self, name: str, patience: float) -> bytes:
        try:
            return patiently(lambda: self.wait(self.ask(name, 0, 0)), patience)
        except OSError as e:
            raise LogFetchError(f"asking the driver about {self._storage}: {e}") from e

    def forget(self, number: int) -> None:
        """What was asked for under this number is wanted no more."""
        self._outstanding.pop(number, None)
        self._arrived.pop(number, None)

    def _connect(self) -> None:
        public, private = zmq.curve_keypair()
        for endpoint in self._endpoints:
            sock = self._context.socket(zmq.DEALER)
            self._sockets[sock] = endpoint
            options: dict[int, int | bytes] = {
                zmq.CURVE_SERVERKEY: self._access.server_key,
                zmq.CURVE_PUBLICKEY: public,
                zmq.CURVE_SECRETKEY: private,
                zmq.MAXMSGSIZE: MOST_ANSWER_BYTES,
                zmq.LINGER: 0,
                zmq.IPV6: 1,
            }
            for option, value in options.items():
                sock.setsockopt(option, value)
            sock.connect(endpoint)
            self._poller.register(sock, zmq.POLLIN)
        for request in self._outstanding.values():
            self._send(request)

    def _hang_up(self) -> None:
        for sock in self._sockets:
            self._poller.unregister(sock)
            sock.close()
        self._sockets = {}

    def _send(self, request: Request) -> None:
        for sock in self._sockets:
            with suppress(zmq.Again):  # it is asked for again
                sock.send(request.to_frame(self._access.secret), zmq.NOBLOCK)

    def _receive(self, seconds: float) -> bool:
        ready = self._poller.poll(math.ceil(seconds * 1000))
        for sock, _ in ready:
            answer = Answer.of_frames(sock.recv_multipart())
            if self._outstanding.pop(answer.number, None) is not None:
                self._arrived[answer.number] = answer
        if ready and len(self._sockets) > 1:
            self._keep_only(ready[0][0])
        return bool(ready)

    def _keep_only(self, answering: zmq.Socket[bytes]) -> None:
        self._endpoints = (self._sockets.pop(answering),)
        self._hang_up()
        self._sockets = {answering: self._endpoints[0]}


class RemoteDeletions(Deletions):
    """As the driver sees the log: for its arguments see ``Deletions``."""

    def __init__(self, chunks: RemoteChunks, storage: LogStorage, fails: bool, reader: str | None) -> None:
        super().__init__(storage, chunks.log_id, fails, reader)
        self._chunks = chunks

    def _ask(self) -> int | None:
        return self._chunks.begin()

    def _record(self, reader: str, first: int, end: int) -> None:
        self._chunks.skipped(reader, first, end)


class _RemoteFile:
    """A chunk as a file object, read in blocks, of which some are asked for ahead."""

    def __init__(self, chunks: RemoteChunks, name: str, size: int) -> None:
        self._chunks, self._name, self._size = chunks, name, size
        self._position = 0
        self._asked: dict[int, int] = {}  # block: number of its request
        self._blocks: dict[int, bytes] = {}
        self.closed = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        begin = self._position
        end = self._size if size < 0 else min(begin + size, self._size)
        if begin >= end:
            return b""
        first, last = begin // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        parts = []
        for block in range(first, last + 1):
            offset = block * BLOCK_BYTES
            content = memoryview(self._block(block))
            parts.append(content[max(0, begin - offset) : end - offset])
        self._position = end
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _block(self, block: int) -> bytes:
        blocks = range(block, min(block + _AHEAD, -(-self._size // BLOCK_BYTES)))
        for each in blocks:
            if each not in self._asked and each not in self._blocks:
                self._asked[each] = self._ask(each)
        if block not in self._blocks:
            for old in [old for old in self._blocks if old not in blocks]:
                del self._blocks[old]
            try:
                self._blocks[block] = patiently(partial(self._fetch, block), self._chunks.patience)
            except FileNotFoundError:
                raise
            except OSError as e:
                raise LogFetchError(f"reading {self._chunks.path_of(self._name)}: {e}") from e
        return self._blocks[block]

    def _fetch(self, block: int) -> bytes:
        number = self._asked.pop(block, None)
        if number is None:  # it was answered, with an error
            number = self._ask(block)
        return self._chunks.wait(number)

    def _ask(self, block: int) -> int:
        offset = block * BLOCK_BYTES
        return self._chunks.ask(self._name, offset, min(BLOCK_BYTES, self._size - offset))

    def close(self) -> None:
        for number in self._asked.values():
            self._chunks.forget(number)
        self.closed = True
