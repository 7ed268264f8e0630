"""The doctor at real peers: senders with a fault, over tcp."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner

from tests.support import bound, free_endpoint
from zmq_datasource.cli import main
from zmq_datasource.workbench.doctor import examine, exit_code, report
from zmq_datasource.workbench.doctor.facts import Feed
from zmq_datasource.workbench.doctor.findings import Severity, findings_of

# Rates and queues are measured.
pytestmark = [pytest.mark.spark, pytest.mark.alone]

Sock = zmq.Socket[bytes]


def keypair() -> tuple[str, str]:
    """Keys that a command line takes: one that begins with @ would name a file."""
    while "@" in (pair := "".join(key.decode() for key in zmq.curve_keypair())):
        pass
    return pair[:40], pair[40:]


PUBLIC, SECRET = keypair()
OTHER_PUBLIC, OTHER_SECRET = keypair()
PULL = {"socketType": "PULL"}
# A small queue and small buffers at the sender, so that a stall shows.
FAST = {"rate": 2000, "size": 2000, "sndhwm": 50, "sndbuf": 16384}


def look(
    endpoint: str,
    *,
    bind: bool = False,
    duration: float = 0.5,
    wait: float = 10.0,
    stall: float = 0.0,
    **given: str,
) -> Feed:
    """The facts about one endpoint."""
    (feed,) = examine({"bind" if bind else "connect": endpoint, **given}, duration, wait, stall)
    return feed


def ids(feed: Feed) -> list[str]:
    return [finding.id for finding in findings_of(feed)]


def warnings(feed: Feed) -> list[str]:
    return [finding.id for finding in findings_of(feed) if finding.severity != Severity.NOTE]


def curve(server: str) -> dict[str, str]:
    keys = {"serverkey": server, "publickey": OTHER_PUBLIC, "secretkey": OTHER_SECRET}
    return {f"zmq.curve_{name}": key for name, key in keys.items()}


def curve_server(sock: Sock) -> None:
    sock.curve_server, sock.curve_secretkey = True, SECRET.encode()


@contextmanager
def sending(
    kind: int = zmq.PUB,
    *,
    rate: float = 200.0,
    burst: int = 1,
    size: int = 1000,
    most: int = 1 << 30,
    framing: str = "sequenced",
    at: str = "tcp://127.0.0.1:*",
    connects: bool = False,
    prepare: Callable[[Sock], object] = str,
    **options: int,
) -> Iterator[str]:
    """The endpoint of a sender: at a rate, ``burst`` messages in a row, ``most`` in all."""
    ended = threading.Event()
    with zmq.Context[Sock]() as context, context.socket(kind) as sock:
        for name, value in {"linger": 0, "sndtimeo": 20, **options}.items():
            sock.setsockopt(getattr(zmq, name.upper()), value)
        prepare(sock)
        (sock.connect if connects else sock.bind)(at)

        def send() -> None:
            number, began = 0, time.monotonic()
            while not ended.wait(0.001):
                due = min(most, int((time.monotonic() - began) * rate))
                while number < due - due % burst and not ended.is_set():
                    before, count = time.monotonic(), struct.pack(">Q", number)
                    numbered = {"sequenced": [b"station", count], "vllm": [count]}
                    with suppress(zmq.Again):
                        sock.send_multipart([b"weather", *numbered[framing], b"x" * size])
                        number += 1
                    if (late := time.monotonic() - before) > 0.005:  # it was blocked, and does not catch up
                        began += late
                        break

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield at if connects else sock.getsockopt_string(zmq.LAST_ENDPOINT)
        finally:
            ended.set()
            thread.join(30)


# The connection.


@pytest.mark.parametrize(
    ("kind", "given", "prepare", "found"),
    [
        (zmq.PUSH, {}, None, "wrong_socket_type"),
        (zmq.PUB, {}, curve_server, "security_mismatch"),
        (zmq.PUB, curve(OTHER_PUBLIC), curve_server, "credentials_refused"),
        (zmq.PUB, {}, None, "nothing_came"),
    ],
)
def test_a_handshake_is_explained(kind: int, given: dict[str, str], prepare: Any, found: str) -> None:
    with zmq.Context() as context, context.socket(kind) as sock:
        (prepare or str)(sock)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        assert ids(look(f"tcp://127.0.0.1:{port}", wait=2.0, duration=0.2, **given)) == [found]


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        (free_endpoint, "refused"),
        (lambda: "tcp://no-such-host.invalid:5556", "host_unknown"),
    ],
)
def test_an_endpoint_without_a_peer_is_explained(endpoint: Callable[[], str], found: str) -> None:
    feed = look(endpoint(), wait=0.3)
    assert ids(feed) == [found]
    assert max(exit_code(row.severity) for row in report([feed])) == 3


def test_an_endpoint_that_accepts_and_says_nothing_is_told_from_one_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ids(look(f"tcp://127.0.0.1:{listener.getsockname()[1]}", wait=0.5)) == ["silent_peer"]
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        socket.socket() as one,
        socket.socket() as two,
    ):
        for queued in (one, two):  # the backlog is full: further packets are dropped
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        assert ids(look(f"tcp://127.0.0.1:{listener.getsockname()[1]}", wait=0.5)) == ["no_answer"]


def test_a_binding_doctor_says_that_nobody_came_or_that_the_port_is_taken() -> None:
    assert ids(look(free_endpoint(), bind=True, wait=0.3)) == ["nobody_came"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert ids(look(f"tcp://127.0.0.1:{listener.getsockname()[1]}", bind=True)) == ["cannot_open"]


def test_to_ask_a_push_for_its_greeting_takes_no_message(context: zmq.Context[Sock]) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    assert ids(look(endpoint, wait=2.0)) == ["wrong_socket_type"]
    push.setsockopt(zmq.SNDTIMEO, 0)
    with pytest.raises(zmq.Again):  # still nobody there to take it
        push.send(b"x")


# Messages and numbers.


def test_a_healthy_feed_has_no_findings_beside_an_endpoint_that_is_absent() -> None:
    with sending() as endpoint:
        given = {"connect": f"{endpoint},{free_endpoint()}", "framing": "sequenced"}
        feed, absent = examine(given, 0.5, 1.0)
    assert (ids(feed), ids(absent)) == ([], ["refused"])
    assert feed.traffic is not None
    assert feed.traffic.topics[0][0] == "weather"
    assert feed.numbers is not None
    assert feed.numbers.lost == 0


def test_numbers_that_count_up_are_named_with_their_options() -> None:
    with sending(framing="vllm") as endpoint:
        feed = look(endpoint)
    (finding,) = findings_of(feed)
    assert (finding.id, finding.severity) == ("numbers_found", "note")
    assert "framing=custom" in finding.fix


def test_the_topics_that_come_without_the_filter_are_named() -> None:
    with sending() as endpoint:
        (finding,) = findings_of(look(endpoint, topics="Weather"))
    assert finding.id == "topics_do_not_match"
    assert "weather" in finding.what


def test_losses_are_told_with_the_given_framing() -> None:
    with sending(rate=2000, burst=40, sndhwm=4, size=200) as endpoint:
        assert warnings(look(endpoint, framing="sequenced")) == ["numbers_missing"]


def test_a_frame_over_the_limit_is_told() -> None:
    with sending(rate=100, size=10_000) as endpoint:
        feed = look(endpoint, duration=2.0, **{"zmq.maxmsgsize": "1024"})
    (finding,) = findings_of(feed)
    assert finding.id == "connection_lost"
    assert feed.handshake.faults


# Stops and stalls.


def test_a_feed_that_stops_while_it_is_watched_is_found() -> None:
    with sending(rate=500, most=600) as endpoint:
        assert warnings(look(endpoint, duration=4.0, framing="sequenced")) == ["feed_stopped"]


@pytest.mark.parametrize(
    ("sender", "given", "outcome"),
    [
        (FAST, {"framing": "sequenced"}, "drops"),
        ({**FAST, "kind": zmq.PUSH}, PULL, "waits"),
        ({"rate": 200, "size": 100, "sndhwm": 5000}, {"framing": "sequenced"}, "neither"),
    ],
)
def test_a_stall_shows_which_side_drops_and_which_waits(
    sender: dict[str, Any], given: dict[str, str], outcome: str
) -> None:
    with sending(**sender) as endpoint:
        feed = look(endpoint, stall=2.0, duration=1.0, **given)
    assert feed.stall is not None
    assert feed.stall.outcome == outcome, feed.stall
    assert f"stall_{outcome}" in ids(feed)


def test_the_command_ends_with_its_exit_code_and_its_rows(ipc_path: Path) -> None:
    keys = [f"-o{name}={key}" for name, key in curve(PUBLIC).items()]
    with sending(at=f"ipc://{ipc_path}", prepare=curve_server) as endpoint:
        arguments = ["doctor", "--connect", endpoint, "--duration", "500ms", *keys]
        result = CliRunner().invoke(main, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        assert "security CURVE" in {row["id"]: row["what"] for row in json.loads(result.stdout)}["peer"]
        assert OTHER_SECRET not in result.output
        shown = CliRunner().invoke(main, arguments)
        assert "No problem found in what was checked." in shown.stdout
    taken = CliRunner().invoke(main, ["doctor", "--bind", f"ipc://{os.path.dirname(ipc_path)}/no/such/dir"])
    assert taken.exit_code == 3
    assert "binding ipc://" in taken.stdout
