"""An executor's side of reading without a shared directory: it reads ranges of the log's chunks from the driver.

The model: a request has a number, and is open until the answer with this number comes. It is sent once on each
connection. If no byte comes for ``again`` seconds, the client opens another connection, and sends it there. If none
comes for ``give_up`` seconds, the request fails. An answer with another number belongs to an older request, and is
dropped.

A chunk is a file (``RangeFile``), of which Arrow reads what it needs. Tasks that share a part of a chunk each fetch it:
Spark runs them at the same time, in different workers, so a cache would rarely help.
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import suppress
from functools import partial
from typing import Any, Self

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogFetchError, ProtocolError
from zmq_datasource.host.log_lines import printable
from zmq_datasource.log import Found, LogStorage, RangeFile, retry_reading
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.source.chunk_server import (
    FRAME_BYTES,
    MOST_BYTES,
    PROTOCOL,
    Answer,
    Find,
    LogAccess,
    Read,
    Request,
)
from zmq_datasource.transport.connections import find_dead_peers
from zmq_datasource.transport.link import TICK_SECONDS, Link
from zmq_datasource.transport.session import RequestSession
from zmq_datasource.transport.spec import SocketSpec

_AGAIN_SECONDS, _GIVE_UP_SECONDS = 5.0, 90.0
# How often to try to send a request while there is no connection.
_UNSENT_SECONDS = 0.005


class RemoteChunks(LogStorage):
    """A log of which the driver opens the chunks; use it in a ``with`` block, for one act at a time.

    Args:
        access: The access to the driver's server.
        storage: The log, whose path is only for messages here.
        again: Seconds without a byte after which a request is repeated.
        give_up: Seconds without a byte after which a request fails.

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
        super().__init__(storage.store, storage.retry_seconds)
        self._access = access
        self._numbers = itertools.count()
        public, secret = zmq.curve_keypair()
        keys = {"serverkey": access.server_key, "publickey": public, "secretkey": secret}
        spec = SocketSpec(
            kind="DEALER",
            connect=Endpoints(map(Endpoint.read, access.endpoints)),
            max_message_bytes=FRAME_BYTES,
            zmq=ZmqOptions({f"curve_{name}": key.decode() for name, key in keys.items()}),
        )
        self._session = _Asking(again, give_up, f"reading {storage}", ", ".join(access.endpoints))
        self._link = Link(spec, self._session, _prepare)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close(linger=0)

    def path_of(self, name: str) -> str:
        """The path of a chunk, for messages."""
        return f"{super().path_of(name)} of the driver"

    def open_sealed(self, name: str, modified: float | None = None) -> pa.NativeFile:
        """Open a chunk. FileNotFoundError if it is gone, OSError if the driver cannot read it."""
        answer, end = self._ask(Read, name=name, place=-MOST_BYTES, length=MOST_BYTES, modified=modified)
        fetch = partial(self._fetch, name, modified)
        return pa.PythonFile(RangeFile(fetch, answer.size, memoryview(end)), mode="r")

    def _fetch(self, name: str, modified: float | None, begin: int, end: int) -> bytes:
        return b"".join(
            self._ask(Read, name=name, place=it, length=min(MOST_BYTES, end - it), modified=modified)[1]
            for it in range(begin, end, MOST_BYTES)
        )

    def find(self, id_: int) -> Found | None:
        """What ``log.find_id`` finds at the driver; LogFetchError if the driver cannot tell."""
        try:
            return retry_reading(lambda: self._ask(Find, id=id_)[0].found, self.retry_seconds)
        except OSError as e:
            raise LogFetchError(f"asking the driver about {self}: {e}") from e

    def _ask(self, kind: type[Request], **fields: Any) -> tuple[Answer, bytes]:
        """Send a request. Returns the answer and the bytes beside it; OSError if it has an error."""
        if not self._link.is_open:
            self._link.open()
        session, secret = self._session, self._access.secret
        request = kind(number=next(self._numbers), secret=secret, **fields)
        session.ask(request, time.monotonic())
        while session.waiting:
            self._link.run_once(_UNSENT_SECONDS if session.outbox else TICK_SECONDS)
        answer, content = session.answer
        if answer.error:
            raise OSError(answer.error, printable(answer.text, 1000))
        return answer, content


class _Asking(RequestSession):
    """The session of ``RemoteChunks``: one request after the other. ``answer`` is the last one, with its bytes."""

    def __init__(self, again: float, give_up: float, act: str, driver: str) -> None:
        super().__init__(math.inf, again)
        self._give_up, self._act, self._driver = give_up, act, driver
        self._number, self._frames = -1, [b""]
        self._last_word = 0.0  # of the driver; a new connection does not change it
        self.answer = Answer(number=-1), b""

    def ask(self, request: Request, now: float) -> None:
        """Send a request. ``waiting`` is true until its answer has come."""
        self._number, self._frames = request.number, PROTOCOL.encode(request)
        self._last_word = now
        self.outbox.clear()
        self._mark_asked(now)
        self._repeat(now)

    def _mark_heard(self, now: float) -> None:
        super()._mark_heard(now)
        self._last_word = now

    def _repeat(self, now: float) -> None:
        if self.waiting:
            self._mark_asked(now)
            self.outbox.append(self._frames)

    def wake(self, now: float) -> None:
        if self.waiting and now - self._last_word > self._give_up:
            self._mark_answered()
            raise LogFetchError(
                f"{self._act}: it is not in a directory that this machine shares with the driver, and the driver has "
                f"not answered at {self._driver} for {self._give_up:.0f} s. Let executors connect to the driver there, "
                "name another address with serveLog, or share walLocation"
            )
        super().wake(now)

    def receive(self, frames: list[bytes], now: float) -> None:
        self._mark_heard(now)
        with suppress(ProtocolError):
            answer, content = PROTOCOL.decode(frames)
            if self.waiting and isinstance(answer, Answer) and answer.number == self._number:
                self.answer = answer, b"".join(content)
                self._mark_answered()


def _prepare(sock: zmq.Socket[bytes]) -> None:
    # With IMMEDIATE, libzmq queues a request only for a connection that is established. Otherwise it could queue the
    # request for an address of the driver that this machine cannot reach.
    sock.setsockopt(zmq.IMMEDIATE, 1)
    find_dead_peers(sock)
