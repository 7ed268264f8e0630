"""The sockets of the server process: how clients ask for rows, and how they get their answers.

There are two protocols: that of durable subscribers (``FetchWire``), and vLLM's replay protocol (``ReplayWire``), which
is translated to the same requests and answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
import zmq
from msgspec.structs import replace

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import TOPIC_WANTED, end_of_replay, read_request, reply
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.proxy.fetch_protocol import (
    MOST_FRAMES,
    Batch,
    Fetch,
    FromClient,
    FromProxy,
    Lost,
    decode,
    encode,
    pack_rows,
)
from zmq_datasource.proxy.waiting import Owner
from zmq_datasource.transport.answers import Answers, set_router_options
from zmq_datasource.transport.authentication import NameRights
from zmq_datasource.transport.core import Outbox, SameColumn, columns_of
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
_MOST_REQUEST_BYTES = 64 << 10
# Of replays: about how many bytes one answer has (or one message), and the most bytes and frames of a request.
_REPLAY_BYTES = 1 << 20
_MOST_REPLAY_REQUEST_BYTES, _MOST_REPLAY_FRAMES = 1024, 2


class Request(NamedTuple):
    """A message from a peer, and a function that says whether the peer may use a name."""

    peer: bytes
    frames: list[bytes]
    may_use: Callable[[str], bool]


class Router:
    """A ROUTER that takes requests in small portions, however much clients send; in one thread.

    Args:
        options: Security, and other options of every socket.
        bind: Its endpoints.
        sndhwm: Messages that libzmq queues for one peer; 0 for no bound.
        most_bytes, most_frames: The largest message of an honest peer. A message with more bytes comes without frames,
            and one with more frames is cut behind the first frame too many, so that the protocol refuses it.

    Attributes:
        requests: The requests that were received, in order; its user removes them.
        answers: Sends, and knows which answers libzmq has not handed to the system yet.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(
        self,
        options: ProxyOptions,
        bind: Endpoints,
        sndhwm: int,
        most_bytes: int,
        most_frames: int,
    ) -> None:
        def set_options(sock: zmq.Socket[bytes]) -> None:
            set_router_options(sock, _RCVHWM, sndhwm, most_bytes)
            # A client that sets a routing id keeps it with a new connection, while the old one may still be there.
            sock.setsockopt(zmq.ROUTER_HANDOVER, 1)

        self._opened = OpenSocket(SocketSpec.of_proxy(options, "ROUTER", bind), set_options)
        self.socket = self._opened.socket
        self._most_bytes = most_bytes
        self._most_frames = 1 + most_frames  # libzmq puts the peer's routing id in front
        self._unfinished = Unfinished(self._opened, most_bytes)
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
                peer, *frames = self._unfinished.receive(self._most_frames)
                last = (frames or [peer])[-1]
                size = sum(map(len, frames))
                room -= size
                taken = [frame.bytes for frame in frames] if size <= self._most_bytes else []
                self.requests.append(Request(peer.bytes, taken, self._rights.of(last)))

    def close(self) -> None:
        self._opened.close(linger=0)


class FetchWire(Router):
    """The protocol of durable subscribers (``fetch_protocol``).

    Attributes:
        recheck_ms: After how many milliseconds to check again whether an answer has left, because no event says so.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    recheck_ms = 10

    def __init__(self, options: ProxyOptions) -> None:
        super().__init__(options, options.durable, _SNDHWM, _MOST_REQUEST_BYTES, MOST_FRAMES)

    def read(self, frames: Sequence[bytes]) -> tuple[FromClient | FromProxy, Sequence[bytes]]:
        """A request, and the frames behind it.

        Raises:
            ProtocolError: It is not a message of the protocol.
        """
        return decode(frames)

    def send(
        self, peer: bytes, answer: FromProxy, owner: Owner | None = None, rows: pa.RecordBatch | None = None
    ) -> bool:
        """Send an answer; False if the client's queue has no room.

        Args:
            owner: The owner of the FETCH that is answered; the answer is counted as the owner's until it has left.
            rows: The rows of a BATCH.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        buffers: Sequence[Any] = ()
        if rows is not None:
            columns, buffers = pack_rows(rows)
            answer = replace(answer, columns=tuple(columns))
        return self.answers.send(peer, encode(answer, buffers), owner)

    def next_fetch(self, fetch: Fetch, answer: Batch | Lost) -> Fetch | None:
        """The FETCH to continue with by itself after an answer; None, because these clients ask each time."""
        return None


class ReplayWire(Router):
    """vLLM's replay protocol, from the publisher's side. Its requests are FETCHes of a range without a name.

    A client asks once for a whole range. So each BATCH is followed by the FETCH of the rest, and a BATCH without rows
    ends the range. Messages that the log no longer has are left out, as any publisher does.

    Attributes:
        replays, sent: How many replays were asked for, and how many messages were sent.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    recheck_ms = 2

    def __init__(self, options: ProxyOptions) -> None:
        # No bound on the queue: the server sends the next batch when the one before has left.
        super().__init__(options, options.replay, 0, _MOST_REPLAY_REQUEST_BYTES, _MOST_REPLAY_FRAMES)
        self.replays = 0
        self.sent = 0

    def read(self, frames: Sequence[bytes]) -> tuple[Fetch, Sequence[bytes]]:
        try:
            start, end = read_request(frames)
        except UnfitError as e:
            raise ProtocolError(str(e)) from None
        self.replays += 1
        return Fetch(first=start, until=end, max_bytes=_REPLAY_BYTES), ()

    def send(
        self, peer: bytes, answer: FromProxy, owner: Owner | None = None, rows: pa.RecordBatch | None = None
    ) -> bool:
        answers, with_topic = self.answers, peer.startswith(TOPIC_WANTED)
        if rows is None:
            # The protocol has no message for lost ids, nor for a refusal.
            return not isinstance(answer, Batch) or answers.send(peer, end_of_replay(with_topic), owner)
        messages, first, last = raw_messages(rows), rows.column("id")[0].as_py(), rows.num_rows - 1
        columns = columns_of(messages, first)[0 if with_topic else 1 :]
        outbox = Outbox([SameColumn(peer), SameColumn(b""), *columns], rows.num_rows)
        self.sent += rows.num_rows
        # The last reply stands for all: when it has left, the others have too.
        return outbox.give(self.socket, 0, last) == last and answers.send(
            peer, reply(first + last, messages.message(last), with_topic), owner, rows.nbytes
        )

    def next_fetch(self, fetch: Fetch, answer: Batch | Lost) -> Fetch | None:
        if isinstance(answer, Batch) and not answer.rows:
            return None
        until = answer.end if fetch.until is None else min(fetch.until, answer.end)
        return replace(fetch, first=answer.next, until=until)
