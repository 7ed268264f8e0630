"""How clients ask the server process for rows, and get its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from zmq_datasource.options import ProxyOptions
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
from zmq_datasource.proxy.router import Router
from zmq_datasource.proxy.waiting import Owner

__all__ = ["FetchWire"]

# Answers of one connection that libzmq queues; more is no client's that waits for each one.
_SNDHWM = 8
_MOST_REQUEST_BYTES = 64 << 10


class FetchWire:
    """``fetch_protocol`` on a ROUTER. A subclass translates another protocol to its requests and answers.

    Attributes:
        router: Where the clients are.
        look_ms: How soon the server looks again whether an answer has left, of which no event tells.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    look_ms = 10

    def __init__(self, options: ProxyOptions) -> None:
        self.router = Router(options, options.durable, _SNDHWM, _MOST_REQUEST_BYTES, MOST_FRAMES)

    def read(self, frames: Sequence[bytes]) -> tuple[FromClient | FromProxy, Sequence[bytes]]:
        """A request, and the frames behind it.

        Raises:
            ProtocolError: No message of this protocol.
        """
        return decode(frames)

    def send(
        self, peer: bytes, answer: FromProxy, owner: Owner | None = None, rows: pa.RecordBatch | None = None
    ) -> bool:
        """Send an answer; False if the client's queue has no room.

        Args:
            owner: Of an answer to FETCH, whose it is; the answer is counted until it has left.
            rows: Of a BATCH.

        Raises:
            zmq.ZMQError: EHOSTUNREACH: the client is gone.
        """
        buffers: Sequence[Any] = ()
        if rows is not None:
            columns, buffers = pack_rows(rows)
            answer = msgspec.structs.replace(answer, columns=tuple(columns))
        return self.router.answers.send(peer, encode(answer, buffers), owner)

    def after(self, fetch: Fetch, answer: Batch | Lost) -> Fetch | None:
        """The FETCH that follows an answer by itself; None if the client asks."""
        return None
