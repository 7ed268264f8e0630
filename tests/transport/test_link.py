"""A link and its session, over real sockets on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, free_endpoint, wait_for
from tests.support.middlebox import Middlebox
from zmq_datasource.options.parser import ZmqOptions
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.transport.link import Link
from zmq_datasource.transport.session import Session
from zmq_datasource.transport.spec import SocketSpec


class Recorder(Session):
    """Records the calls of the link."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[list[bytes]] = []
        self.connections = self.wakes = self.signs = 0
        self.is_blocked = False

    def receive(self, frames: list[bytes], now: float) -> None:
        self.received.append(frames)

    def wake(self, now: float) -> None:
        self.wakes += 1

    def reconnected(self, now: float) -> None:
        self.connections += 1

    def bytes_arrived(self, now: float) -> None:
        self.signs += 1

    def blocked(self) -> None:
        self.is_blocked = True


@pytest.fixture
def router(context: zmq.Context[Socket]) -> Iterator[tuple[Socket, str]]:
    endpoint = free_endpoint()
    with context.socket(zmq.ROUTER) as sock:
        sock.bind(endpoint)
        yield sock, endpoint


@contextmanager
def linked(endpoint: str, session: Session, sndhwm: int = 1000, **options: str) -> Iterator[Link]:
    spec = SocketSpec(
        kind="DEALER",
        connect=Endpoints.read(endpoint),
        sndhwm=sndhwm,
        zmq=ZmqOptions({"reconnect_ivl": "20", **options}),
    )
    link = Link(spec, session)
    link.open()
    try:
        yield link
    finally:
        link.close(0)


def receive(router: Socket) -> list[bytes]:
    assert router.poll(5000)
    return router.recv_multipart()


def test_bytes_of_an_incomplete_message_are_a_sign_of_life(router: tuple[Socket, str]) -> None:
    sock, endpoint = router
    session = Recorder()
    with Middlebox(endpoint) as between:
        between.bytes_per_second = 1_000_000
        with linked(between.endpoint, session) as link:
            session.outbox.append([b"1"])
            link.run_once()
            sock.send_multipart([receive(sock)[0], bytes(4_000_000)])
            wait_for(lambda: (link.run_once(), session.signs >= 3)[1], "signs of life")
            assert not session.received


def test_a_redial_opens_a_new_connection_and_discards_late_messages(router: tuple[Socket, str]) -> None:
    sock, endpoint = router
    session = Recorder()
    with linked(endpoint, session) as link:
        session.outbox.append([b"before"])
        link.run_once()
        first = receive(sock)
        sock.send_multipart([first[0], b"late"])
        session.redial = True
        session.outbox.append([b"after"])
        link.send_outbox()
        assert not session.redial
        second = receive(sock)
        assert second[1:] == [b"after"]
        assert second[0] != first[0]
        sock.send_multipart([second[0], b"answer"])
        wait_for(lambda: (link.run_once(), session.received)[1], "the answer")
        assert session.received == [[b"answer"]]
        assert session.connections == 0


def test_an_interrupt_within_a_message_leads_to_a_new_connection(
    router: tuple[Socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, endpoint = router
    session = Recorder()
    with linked(endpoint, session) as link:
        session.outbox.append([b"half", b"a message"])
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "send_multipart", interrupted_send)
            with pytest.raises(KeyboardInterrupt):
                link.send_outbox()
        assert session.connections == 1
        session.outbox.clear()
        session.outbox.append([b"whole"])
        link.send_outbox()
        peer, *frames = receive(sock)
        assert frames == [b"whole"]
        sock.send_multipart([peer, b"half", b"an answer"])
        assert link.socket.poll(5000)
        with monkeypatch.context() as patch:
            patch.setattr(zmq.Socket, "recv_multipart", interrupted_receive)
            with pytest.raises(KeyboardInterrupt):
                link.run_once()
        session.outbox.append([b"again"])
        link.send_outbox()
        sock.send_multipart([receive(sock)[0], b"all", b"of it"])
        wait_for(lambda: (link.run_once(), session.received)[1], "the answer")
        assert session.received == [[b"all", b"of it"]]


def interrupted_send(sock: Socket, frames: list[bytes], flags: int = 0, **_: object) -> None:
    sock.send(frames[0], flags | zmq.SNDMORE)
    raise KeyboardInterrupt


def interrupted_receive(sock: Socket, flags: int = 0) -> list[bytes]:
    sock.recv(flags)
    raise KeyboardInterrupt


def test_messages_that_find_no_room_stay_in_the_outbox() -> None:
    session = Recorder()
    with linked(free_endpoint(), session, sndhwm=2) as link:
        session.outbox.extend([b"%d" % n] for n in range(5))
        link.send_outbox()
        assert session.is_blocked
        assert list(session.outbox) == [[b"%d" % n] for n in range(2, 5)]


def test_a_redial_that_fails_is_repeated(
    router: tuple[Socket, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Key files are read for each socket, and may be missing while they are replaced."""
    sock, endpoint = router
    key = tmp_path / "text"
    key.write_text("3000")
    session = Recorder()
    with linked(endpoint, session, handshake_ivl=f"@{key}") as link:
        session.outbox.append([b"1"])
        link.run_once()
        assert receive(sock)[1:] == [b"1"]
        key.unlink()
        session.redial = True
        session.outbox.append([b"2"])
        link.run_once()
        assert session.redial
        assert session.outbox
        assert "again" in caplog.text
        key.write_text("3000")
        link.run_once()
        assert not session.redial
        assert receive(sock)[1:] == [b"2"]
