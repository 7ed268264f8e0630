"""The ROUTER of the server process: it bounds what it takes from clients, and never waits for one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, free_endpoint, wait_for
from zmq_datasource.options import ProxyOptions
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.proxy.fetch_wire import FetchWire, Request

FRAME = bytes(60_000)


@contextmanager
def connected(context: zmq.Context[Socket], tmp_path: Path) -> Iterator[tuple[FetchWire, Socket]]:
    endpoint = free_endpoint()
    options = ProxyOptions(durable=Endpoints.read(endpoint), wal_location=str(tmp_path))
    with (
        closing(FetchWire(options)) as router,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.SNDHWM, 1)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(endpoint)
        yield router, client


def inbox(router: FetchWire) -> list[Request]:
    router.receive()
    found = list(router.requests)
    router.requests.clear()
    return found


def test_requests_to_a_busy_server_are_bounded_in_bytes(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with connected(context, tmp_path) as (_, client):
        sent = 0
        while sent < 100 << 20 and client.poll(300, zmq.POLLOUT):
            # One frame: libzmq 4.3.5 aborts if a socket is closed when a part of a message has left (libzmq#3442).
            client.send(FRAME, copy=False)
            sent += len(FRAME)
        assert sent < 40 << 20  # most of it in the kernel


def test_a_request_that_is_too_large_comes_without_frames(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with connected(context, tmp_path) as (router, client):
        client.send_multipart([FRAME] * 3, copy=False)
        (large,) = wait_for(lambda: inbox(router), "the large request")
        assert large.frames == []
        client.send_multipart([b"small", b"request"])
        (small,) = wait_for(lambda: inbox(router), "the small request")
        assert small.frames == [b"small", b"request"]
        assert small.peer == large.peer


def client_of(router: FetchWire, client: Socket) -> bytes:
    client.send_multipart([b"hello"])
    (request,) = wait_for(lambda: inbox(router), "the request")
    return request.peer


def test_a_client_that_takes_nothing_is_not_waited_for(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with connected(context, tmp_path) as (router, client):
        peer, sent = client_of(router, client), 0
        frame = bytes(1 << 20)
        while router.answers.send(peer, [b"%d" % sent, frame, b"last"]):
            assert not router.answers.stuck
            sent += 1
            assert sent < 10_000
        assert router.answers.stuck
        got = [client.recv_multipart() for _ in range(sent)]
        assert [frames[0] for frames in got] == [b"%d" % number for number in range(sent)]
        assert all(frames[1:] == [frame, b"last"] for frames in got), "no message is torn"
        router.answers.stuck = False
        wait_for(lambda: router.answers.send(peer, [b"again"]), "room")
        assert client.recv_multipart() == [b"again"]


def test_an_answer_is_tracked_until_the_system_has_taken_it(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    with connected(context, tmp_path) as (router, client):
        peer = client_of(router, client)
        answers = router.answers
        assert answers.send(peer, [b"head", b""], owner="me")
        wait_for(lambda: not answers.connections_of("me"), "the small answer")
        answer, count = bytes(8 << 20), 6
        for _ in range(count):
            assert answers.send(peer, [b"head", answer, b"tail"], owner="me")
        assert client.recv_multipart() == [b"head", b""]
        # What the client has not taken fills the kernel and libzmq on its side.
        assert answers.bytes >= len(answer)
        assert set(answers.connections_of("me")) == {peer}
        for _ in range(count):
            assert client.recv_multipart() == [b"head", answer, b"tail"]
        wait_for(lambda: not answers.bytes, "the last answer")


def test_a_client_that_is_gone_is_not_a_full_queue(context: zmq.Context[Socket], tmp_path: Path) -> None:
    with connected(context, tmp_path) as (router, client):
        client_of(router, client)
        with pytest.raises(zmq.ZMQError) as caught:
            router.answers.send(b"another", [b"x"])
        assert caught.value.errno == zmq.EHOSTUNREACH
        assert not router.answers.stuck
