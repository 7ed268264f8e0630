"""What the servers of a proxy take from clients that nobody has asked: little, whatever is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import zmq

from tests.support import Socket, free_endpoint, wait_for
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.types import Endpoints
from zmq_datasource.proxy.router import Request, Router

MOST_BYTES, MOST_FRAMES = 64 << 10, 1007
FRAME = bytes(60_000)


@contextmanager
def connected(context: zmq.Context[Socket], tmp_path: Path) -> Iterator[tuple[Router, Socket]]:
    endpoint = free_endpoint()
    options = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(tmp_path))
    with (
        closing(Router(options, options.durable, 10, MOST_BYTES, MOST_FRAMES)) as router,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.SNDHWM, 1)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(endpoint)
        yield router, client


def inbox(router: Router) -> list[Request]:
    router.receive()
    return router.inbox()


def test_what_waits_for_a_server_that_is_busy_is_bounded_in_bytes(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with connected(context, tmp_path) as (_, client):
        sent = 0
        while sent < 100 << 20 and client.poll(300, zmq.POLLOUT):
            client.send_multipart([FRAME, FRAME], copy=False)
            sent += 2 * len(FRAME)
        assert sent < 40 << 20  # most of it in the kernel


def test_of_a_request_that_is_too_large_nothing_is_kept(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with connected(context, tmp_path) as (router, client):
        client.send_multipart([FRAME] * 500, copy=False)
        (large,) = wait_for(lambda: inbox(router), "the large request")
        assert large.frames == []
        client.send_multipart([b"small", b"request"])
        (small,) = wait_for(lambda: inbox(router), "the small request")
        assert small.frames == [b"small", b"request"]
        assert small.peer == large.peer
