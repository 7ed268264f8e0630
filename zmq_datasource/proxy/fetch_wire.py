"""The socket of the server process: how durable subscribers ask for rows, and how they get their answers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
import zmq
from msgspec.structs import replace

from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.fetch_protocol import MOST_FRAMES, Batch, FromProxy, encode, pack_rows
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

# How many requests wait in memory, and about how many bytes one round takes. The rest waits in libzmq and the kernel.
_MOST_REQUESTS, _MOST_ROUND_BYTES = 256, 8 << 20
# libzmq bounds the number of messages and not their bytes, so it must queue few.
_RCVHWM = 16
_HOUSEKEEPING_SECONDS = 0.1
# Answers that libzmq queues for one connection. A client that waits for each answer needs one.
_SNDHWM = 8
# The largest message of an honest client. A message with more bytes comes without frames, and one with more frames is
# cut behind the first frame too many, so that the protocol refuses it.
_MOST_REQUEST_BYTES = 64 << 10


class Request(NamedTuple):
    """A message from a peer, and a function that says whether the peer may use a name."""

    peer: bytes
    frames: list[bytes]
    may_use: Callable[[str], bool]


class FetchWire:
    """A ROUTER that takes requests in small portions, however much clients send; in one thread.

    Attributes:
        requests: The requests that were received, in order; its user removes them.
        answers: Sends, and knows which answers libzmq has not handed to the system yet.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, options: ProxyOptions) -> None:
        def set_options(sock: zmq.Socket[bytes]) -> None:
            set_router_options(sock, _RCVHWM, _SNDHWM, _MOST_REQUEST_BYTES)
            # A client that sets a routing id keeps it with a new connection, while the old one may still be there.
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)

        self._opened = OpenSocket(SocketSpec.of_proxy(options, "ROUTER", options.durable), set_options)
        self.socket = self._opened.socket
        self._unfinished = Unfinished(self._opened, _MOST_REQUEST_BYTES)
        self._rights = NameRights(options.allowed_clients)
        self._next_housekeeping = 0.0
        self.requests: deque[Request] = deque()
        self.answers = Answers(self.socket)

    def receive(self) -> None:
        """Receive requests, as far as there is room for them.

        Called in each round, also while there is no room, because it also watches the connections.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
            self._opened.watch.update()
            self._unfinished.check_connections()
        room = _MOST_ROUND_BYTES
        with suppress(zmq.Again):
            while len(self.requests) < _MOST_REQUESTS and room > 0:
                # libzmq puts the peer's routing id in front.
                peer, *frames = self._unfinished.receive(1 + MOST_FRAMES)
                last = (frames or [peer])[-1]
                size = sum(map(len, frames))
                room -= size
                taken = [frame.bytes for frame in frames] if size <= _MOST_REQUEST_BYTES else []
                self.requests.append(Request(peer.bytes, taken, self._rights.of(last)))

    def send(
        self, peer: bytes, answer: FromProxy, name: str | None = None, rows: pa.RecordBatch | None = None
    ) -> bool:
        """Send an answer; False if the client's queue has no room.

        Args:
            name: The name whose FETCH is answered; the answer is counted as the name's until it has left.
            rows: The rows of a BATCH.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        buffers: Sequence[Any] = ()
        if rows is not None:
            assert isinstance(answer, Batch)
            columns, buffers = pack_rows(rows)
            answer = replace(answer, columns=tuple(columns))
        return self.answers.send(peer, encode(answer, buffers), name)

    def close(self) -> None:
        self._opened.close(linger=0)
