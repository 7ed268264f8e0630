"""What waits for clients that are served no more is counted, and does not wait for ever."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import zmq

from tests.support import Socket, wait_for
from tests.support.proxies import ProxyThreads, endpoints, receive
from zmq_datasource.proxy import replays
from zmq_datasource.proxy import wire as wire_module
from zmq_datasource.proxy.wire import PATIENCE_SECONDS, Wires


class Connection:
    """Stands in for the system: what the other end of a connection has taken."""

    taken: dict[int, int | None]
    ended: list[int]

    def __init__(self, descriptor: int) -> None:
        self.inode = descriptor + 1000

    def bytes(self) -> int | None:
        return self.taken[self.inode]

    def hang_up(self) -> None:
        self.ended.append(self.inode)


@pytest.fixture(name="taken")
def _taken(monkeypatch: pytest.MonkeyPatch) -> dict[int, int | None]:
    Connection.taken, Connection.ended = {1001: 50, 1002: 0}, []
    monkeypatch.setattr(wire_module, "AckedBytes", Connection)
    return Connection.taken


def test_what_was_left_behind_counts_until_it_has_left(taken: dict[int, int | None]) -> None:
    wires = Wires()
    one = wires.of(1)
    assert wires.of(1) is one
    one.write([b"x" * 100])
    assert one.queued == 102
    assert wires.left_over([one]) == []
    assert wires.left_over([]) == [one]
    # Who subscribes again on the same connection finds what is queued there already.
    assert wires.of(1).queued == 102
    taken[1001] = 50 + 102
    wires.look([], 0.0)
    assert wires.left_over([]) == []
    assert wires.of(1) is not one


def test_who_takes_none_of_it_is_hung_up(
    taken: dict[int, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires()
    idle, slow = wires.of(1), wires.of(2)
    for wire in (idle, slow):
        wire.add(10_000)
    now = 0.0
    while now < 2 * PATIENCE_SECONDS:
        wires.look([], now)
        taken[1002] = (taken[1002] or 0) + 10
        now += 10
    assert Connection.ended == [1001]
    assert "has taken none of the 10000 bytes that wait for it" in caplog.text
    assert wires.left_over([]) == [slow]


def test_whom_the_server_serves_is_the_servers_matter(taken: dict[int, int | None]) -> None:
    wires = Wires()
    wire = wires.of(1)
    wire.add(10_000)
    for now in range(0, 200, 10):
        wires.look([wire], float(now))
    assert Connection.ended == []
    # Its patience begins once the client is served no more.
    wires.look([], 200.0)
    wires.look([], 190.0 + PATIENCE_SECONDS - 1)
    assert Connection.ended == []
    taken[1001] = None  # gone, or not told
    wires.look([wire], 300.0)
    assert wire.queued == 0


@pytest.mark.spark  # no Spark, but sockets that take their time
def test_clients_of_a_replay_that_read_nothing_hold_no_place_for_ever(
    context: zmq.Context[Socket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(replays.ReplayServer, "most_clients", 2)
    monkeypatch.setattr(replays.ReplayServer, "look_seconds", 0.05)
    for module in (replays, wire_module):
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 1.0)
    sides = endpoints("pull", "replay")
    caplog.set_level(logging.WARNING)
    with ProxyThreads(tmp_path, sides, **{"zmq.sndbuf": 4096}) as proxy:
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        for _ in range(20):
            push.send(bytes(100_000))
        wait_for(lambda: proxy.flow.journal.log.durable_end == 20, "the log")

        def client() -> Socket:
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.RCVHWM, 1)
            sock.setsockopt(zmq.RCVBUF, 4096)
            sock.connect(sides["replay"])
            sock.send_multipart([b"", bytes(8)])
            return sock

        strangers = [client() for _ in range(2)]
        wait_for(lambda: proxy.next_status()["replays"]["sent"] >= 40, "all replies in libzmq's queues")
        honest = client()
        wait_for(lambda: "a replay is refused" in caplog.text, "the refusal")
        wait_for(
            lambda: "it is disconnected" in caplog.text or "has taken nothing" in caplog.text,
            "the end of one",
        )
        honest.send_multipart([b"", bytes(8)])
        assert [len(frames[-1]) for frames in receive(honest, 20)] == [100_000] * 20
        for sock in strangers:
            sock.close(0)
