"""Each finding of the doctor's provoked for real: senders with that fault, in processes, over tcp.

All scenarios run beside one another, started by the first test that asks for one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq
from click.testing import CliRunner

from tests.support import bound, free_endpoint, wait_for
from tests.support.doctor_peers import Running
from zmq_datasource.cli import main
from zmq_datasource.workbench.doctor import (
    ExaminationRequest,
    Expected,
    Finding,
    diagnose,
    examine,
    exit_code,
)
from zmq_datasource.workbench.doctor.facts import Examined

# Many processes, whose rates and queues are measured; and all scenarios run at once, for all tests of this file.
pytestmark = [pytest.mark.spark, pytest.mark.alone]


def keypair() -> tuple[str, str]:
    """Keys that a command line takes: one that begins with @ would name a file."""
    while "@" in (pair := "".join(key.decode() for key in zmq.curve_keypair())):
        pass
    return pair[:40], pair[40:]


PUBLIC, SECRET = keypair()
OTHER_PUBLIC, OTHER_SECRET = keypair()


class Result(NamedTuple):
    endpoints: list[Examined]
    findings: list[Finding]

    def __repr__(self) -> str:
        """What a failing test needs to be understood."""
        facts = [
            (one.role, one.handshake.state, one.traffic and one.traffic.rate, one.numbers, one.stalled)
            for one in self.endpoints
        ]
        return f"{[finding.id for finding in self.findings]} from {facts}"

    @property
    def ids(self) -> set[str]:
        """Without notes."""
        return {finding.id for finding in self.findings if finding.severity != "note"}

    @property
    def noted(self) -> set[str]:
        return {finding.id for finding in self.findings}

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)


def look(given: dict[str, str], expected: Expected | None = None, **request: Any) -> Result:
    usual: dict[str, Any] = {"duration": 0.5, "wait": 10.0}
    expected = Expected() if expected is None else expected
    found = examine(ExaminationRequest(given, expected=expected, **{**usual, **request}))
    return Result(found.endpoints, diagnose(found.endpoints, found.log, expected))


def chain(
    *senders: dict[str, Any],
    given: dict[str, str] | None = None,
    expected: Expected | None = None,
    compare: bool = False,
    **request: Any,
) -> Callable[[], Result]:
    """Examine the last of these senders, each the upstream of the next."""

    def run() -> Result:
        with ExitStack() as stack:
            endpoints = [""]
            for sender in senders:
                running = Running(**{**sender, **({"upstream": endpoints[-1]} if endpoints[-1] else {})})
                endpoints.append(stack.enter_context(running).endpoint)
            upstream = endpoints[1] if compare else None
            return look({"connect": endpoints[-1], **(given or {})}, expected, upstream=upstream, **request)

    return run


def against(
    kind: int, given: dict[str, str] | None = None, prepare: Callable[[Any], None] | None = None
) -> Callable[[], Result]:
    """Examine a silent socket of this type."""

    def run() -> Result:
        with zmq.Context() as context, context.socket(kind) as sock:
            if prepare is not None:
                prepare(sock)
            port = sock.bind_to_random_port("tcp://127.0.0.1")
            return look({"connect": f"tcp://127.0.0.1:{port}", **(given or {})}, wait=2.0, duration=0.2)

    return run


def curve_server(sock: Any) -> None:
    sock.curve_server, sock.curve_secretkey = True, SECRET.encode()


def plain_server(sock: Any) -> None:
    sock.plain_server = True


def curve(server: str) -> dict[str, str]:
    keys = {"serverkey": server, "publickey": OTHER_PUBLIC, "secretkey": OTHER_SECRET}
    return {f"zmq.curve_{name}": key for name, key in keys.items()}


def joining_late() -> Result:
    """The doctor listens; then a publisher connects that has sent to nobody before."""
    endpoint = free_endpoint()
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look, {"bind": endpoint}, wait=30.0)
        with Running(connect=endpoint, first=500, rate=500):
            return looking.result(60)


def beside_an_absent_one() -> Result:
    """Examine a fast feed, and an endpoint where nothing is, which is waited for."""
    with Running(rate=2000, size=1000, sndbuf=16384) as sender:
        return look({"connect": f"{sender.endpoint},{free_endpoint()}"}, wait=2.0)


@contextmanager
def receiver(endpoint: str, log: str, *options: str, framing: str = "sequenced") -> Iterator[None]:
    """``zmq-datasource receive``, as a process; from when it has its log."""
    command = [sys.executable, "-m", "zmq_datasource", "receive", "--socket-type", "SUB"]
    command += ["--connect", endpoint, "--wal-location", log, "-o", f"framing={framing}", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for((Path(log) / "log.json").exists, "a log")
        yield
    finally:
        process.kill()
        process.wait(30)


def received(seal: str, wait: float) -> Callable[[], Result]:
    """Examine a feed and the log of its receiver, which seals that often."""

    def run() -> Result:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            log = f"{directory}/log"
            sender = stack.enter_context(Running(rate=500, size=100))
            stack.enter_context(receiver(sender.endpoint, log, "-o", f"walFlushInterval={seal}"))
            return look({"connect": sender.endpoint}, wait=wait, log={"walLocation": log})

    return run


def received_by_two(*named: int) -> Callable[[], Result]:
    """Examine some of two endpoints, whose receiver has a log partition for each."""

    def run() -> Result:
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            log = f"{directory}/log"
            senders = [Running(rate=100, framing="vllm", first=first) for first in (0, 1_000_000)]
            ends = [stack.enter_context(sender).endpoint for sender in senders]
            stack.enter_context(
                receiver(
                    ",".join(ends), log, "-o", "receivers=2", "-o", "walFlushInterval=100ms", framing="vllm"
                )
            )
            given = {"connect": ",".join(ends[at] for at in named), "framing": "vllm"}
            return look(given, wait=20.0, log={"walLocation": log, "framing": "vllm"})

    return run


def against_a_silent_listener() -> Result:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return look({"connect": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}, wait=0.5)


# Small buffers at the sender, so that its mark shows soon.
FAST = {"rate": 4000, "size": 1000, "sndbuf": 16384}
PULL = {"socketType": "PULL"}
STALL = 1.0

SCENARIOS: dict[str, Callable[[], Result]] = {
    "healthy": chain({**FAST, "sndhwm": 400}, stall=STALL, expected=Expected(hwm=400), duration=1.0),
    # So slow a feed that it is kept up with on a busy machine too.
    "healthy receiver": chain(
        {"rate": 200, "framing": "sequenced"}, expected=Expected(consume=0.00001), duration=1.0
    ),
    "healthy proxy": chain(
        {"rate": 500, "framing": "vllm"}, {"kind": "proxy"}, compare=True, expected=Expected(rcvhwm=1000)
    ),
    "late": chain(
        {**FAST, "sndhwm": 10, "when": "after"}, stall=STALL, expected=Expected(hwm=10, full="wait")
    ),
    "wrong socket": chain({**FAST, "sndhwm": 10, "when": "wrong"}, stall=STALL, expected=Expected(hwm=10)),
    "unnumbered": chain({**FAST, "sndhwm": 50, "framing": "plain"}, stall=STALL, duration=1.0),
    "push": chain(
        {**FAST, "kind": "PUSH", "sndhwm": 50}, given=PULL, stall=STALL, expected=Expected(full="drop")
    ),
    "nodrop": chain({**FAST, "nodrop": True, "sndhwm": 50}, stall=STALL, expected=Expected(full="drop")),
    "store": chain(
        {**FAST, "rate": 800, "sndhwm": 5000},
        {"kind": "store", "nodrop": True, "sndhwm": 20, "sndbuf": 16384},
        stall=STALL,
        duration=1.0,
        expected=Expected(hwm=20),
    ),
    "proxy hides": chain(
        {**FAST, "sndhwm": 100}, {"kind": "proxy", "sndhwm": 1000, "sndbuf": 16384}, compare=True, stall=STALL
    ),
    "proxy drops": chain(
        {"rate": 2000, "burst": 40, "sndhwm": 5000, "size": 200}, {"kind": "proxy", "sndhwm": 4}, compare=True
    ),
    "bursts": chain({"rate": 2000, "burst": 40, "sndhwm": 4, "size": 200}),
    "slow receiver": chain({"rate": 1000}, expected=Expected(consume=0.01)),
    "large frames": chain(
        {"rate": 100, "size": 10_000},
        given={"zmq.maxmsgsize": "1024"},
        expected=Expected(max_message_size=1024),
    ),
    "other topics": chain({"rate": 100}, given={"topics": "Weather"}),
    "late joiner": joining_late,
    "one absent": beside_an_absent_one,
    "not sealed": received("1h", 1.0),
    "sealed": received("100ms", 20.0),
    "the first of two": received_by_two(0),
    "the second of two": received_by_two(1),
    "both of two": received_by_two(0, 1),
    "nobody": lambda: look({"connect": free_endpoint()}, wait=0.3),
    "nobody comes": lambda: look({"bind": free_endpoint()}, wait=0.3),
    "no such host": lambda: look({"connect": "tcp://no-such-host.invalid:5556"}, wait=0.3),
    "no host": lambda: look({"connect": "tcp://a..b:5556"}, wait=0.3),
    "silent": against_a_silent_listener,
    "a PUSH": against(zmq.PUSH),
    "an XSUB": against(zmq.XSUB),
    "a PUB for a PULL": against(zmq.PUB, PULL),
    "security": against(zmq.PUB, prepare=curve_server),
    "keys": against(zmq.PUB, curve(OTHER_PUBLIC), curve_server),
    "password": against(zmq.PUB, {"zmq.plain_username": "me", "zmq.plain_password": "pw"}, plain_server),
    "right keys": against(zmq.PUB, curve(PUBLIC), curve_server),
    "idle": against(zmq.PUB),
}


class Found:
    """What the doctor finds in the scenarios, which run side by side from the first question on."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._futures: dict[str, Future[Result]] = {}

    def __call__(self, name: str, holds: Callable[[Result], object] = lambda result: True) -> Result:
        """The result of a scenario.

        Args:
            holds: What is to be true of a figure that was measured. Where it is not, the scenario is measured again,
                alone: beside others on a busy machine a sender can stand still for as long as a whole stall.
        """
        if not self._futures:
            self._futures = {each: self._pool.submit(run) for each, run in SCENARIOS.items()}
        result = self._futures[name].result(120)
        if holds(result):
            return result
        wait(self._futures.values(), 120)
        return SCENARIOS[name]()


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    with ThreadPoolExecutor(6) as pool:
        yield Found(pool)


@pytest.mark.parametrize(
    ("scenario", "finding"),
    [
        ("nobody", "refused"),
        ("nobody comes", "nobody_came"),
        ("no such host", "host_unknown"),
        ("no host", "host_unknown"),
        ("silent", "silent_peer"),
        ("a PUSH", "wrong_socket_type"),
        ("an XSUB", "wrong_socket_type"),
        ("a PUB for a PULL", "wrong_socket_type"),
        ("security", "security_mismatch"),
        ("keys", "credentials_refused"),
        ("password", "credentials_refused"),
    ],
)
def test_an_endpoint_that_cannot_be_examined_is_explained(found: Found, scenario: str, finding: str) -> None:
    result = found(scenario)
    assert result.ids == {finding}
    assert result.exit_code == 3


@pytest.mark.parametrize(
    ("scenario", "ours", "other"), [("keys", "CURVE", "PLAIN"), ("password", "PLAIN", "CURVE")]
)
def test_refused_credentials_are_explained_by_the_security_that_is_used(
    found: Found, scenario: str, ours: str, other: str
) -> None:
    (refused,) = (finding for finding in found(scenario).findings if finding.id == "credentials_refused")
    text = f"{refused.what} {refused.evidence} {refused.cause} {refused.fix}"
    assert ours in text
    assert other not in text
    assert f"zmq.{other.lower()}" not in text


@pytest.mark.parametrize(
    ("scenario", "finding"),
    [
        ("late", "mark_not_in_effect"),
        ("late", "drops_where_waiting_was_expected"),
        ("wrong socket", "mark_not_in_effect"),
        ("unnumbered", "drops_uncounted"),
        ("push", "sender_waits"),
        ("nodrop", "sender_waits"),
        ("store", "held_outside_the_mark"),
        ("proxy hides", "proxy_hides_the_mark"),
        ("proxy drops", "proxy_drops"),
        ("bursts", "messages_lost"),
        ("slow receiver", "receiver_too_slow"),
        ("large frames", "frame_too_large"),
        ("other topics", "topics_do_not_match"),
        ("late joiner", "slow_joiner"),
        ("not sealed", "log_behind"),
        ("idle", "nothing_came"),
        ("right keys", "nothing_came"),
    ],
)
def test_a_fault_is_recognised(found: Found, scenario: str, finding: str) -> None:
    result = found(scenario, lambda result: finding in result.ids)
    assert finding in result.ids, result
    assert result.exit_code == 1


def test_a_healthy_chain_is_found_healthy(found: Found) -> None:
    result = found("healthy", lambda result: not result.ids)
    assert (result.ids, result.exit_code) == (set(), 0), result
    (one,) = result.endpoints
    assert one.greeting.socket_type == "PUB"
    assert one.numbers is not None
    assert (one.numbers.framing, one.numbers.lost) == ("sequenced", 0)
    assert one.stalled is not None
    assert one.stalled.outcome == "dropped"
    assert one.stalled.marks is not None
    assert one.stalled.marks.expected_fits


def test_a_receiver_that_keeps_up_is_found_healthy(found: Found) -> None:
    result = found("healthy receiver", lambda result: not result.ids)
    assert (result.ids, result.exit_code) == (set(), 0), result
    (one,) = result.endpoints
    assert one.consumed is not None
    assert not one.consumed.behind


def test_a_healthy_proxy_is_told_from_its_publisher(found: Found) -> None:
    result = found("healthy proxy", lambda result: not result.ids)
    assert (result.ids, result.exit_code) == (set(), 0), result
    proxy, publisher = result.endpoints
    assert (proxy.greeting.socket_type, publisher.greeting.socket_type) == ("XPUB", "PUB")
    assert (proxy.role, publisher.role, proxy.lost_behind) == ("feed", "upstream", 0)
    assert proxy.numbers is not None
    assert proxy.numbers.framing == "vllm"


def test_a_log_that_keeps_up_is_found_so(found: Found) -> None:
    assert found("sealed", lambda result: not result.noted).noted == set()


@pytest.mark.parametrize("named", ["the first of two", "the second of two", "both of two"])
def test_all_partitions_and_endpoints_of_a_log_are_compared(found: Found, named: str) -> None:
    def of_the_log(result: Result) -> set[str]:
        return {finding for finding in result.noted if finding.startswith("log_")}

    assert of_the_log(found(named, lambda result: not of_the_log(result))) == set()


def test_a_late_mark_is_told_to_be_the_default(found: Found) -> None:
    def told(result: Result) -> tuple[bool, bool, bool | None]:
        stalled = result.endpoints[0].stalled
        assert stalled is not None
        assert stalled.marks is not None, result
        return stalled.marks.measured, stalled.marks.default_fits, stalled.marks.expected_fits

    wanted = (True, True, False)
    assert told(found("late", lambda result: told(result) == wanted)) == wanted


def test_a_waiting_sender_loses_nothing(found: Found) -> None:
    for scenario in ("push", "nodrop"):
        result = found(scenario, lambda result: _outcome(result) == ("fewer", 0))
        assert _outcome(result) == ("fewer", 0), result


def _outcome(result: Result) -> tuple[str, int | None]:
    stalled = result.endpoints[0].stalled
    assert stalled is not None
    return stalled.outcome, stalled.lost


def test_an_endpoint_that_is_absent_costs_the_others_nothing(found: Found) -> None:
    assert found("one absent", lambda result: result.ids == {"refused"}).ids == {"refused"}


def test_the_other_topics_are_named(found: Found) -> None:
    assert found("other topics").endpoints[0].elsewhere == ["weather"]


def test_to_ask_a_push_for_its_greeting_takes_no_message(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    assert look({"connect": endpoint}, wait=2.0).ids == {"wrong_socket_type"}
    push.setsockopt(zmq.SNDTIMEO, 0)
    with pytest.raises(zmq.Again):  # still nobody there to take it
        push.send(b"x")
    pull = context.socket(zmq.PULL)
    pull.connect(endpoint)
    push.setsockopt(zmq.SNDTIMEO, 10_000)
    push.send(b"x")
    assert pull.poll(10_000)


def test_the_command_ends_with_its_exit_code_and_one_document(ipc_path: Path) -> None:
    keys = [f"-o{name}={key}" for name, key in curve(PUBLIC).items()]
    with Running(bind=f"ipc://{ipc_path}", rate=200, curve=(PUBLIC, SECRET)) as sender:
        arguments = ["doctor", "--connect", sender.endpoint, "--duration", "500ms", "--json", *keys]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert (told["healthy"], told["endpoints"][0]["mechanism"]) == (True, "CURVE")
        assert OTHER_SECRET not in result.output
        assert OTHER_PUBLIC not in result.output
        shown = CliRunner().invoke(main, [*arguments[:-4], *keys])
        assert shown.exit_code == 0, shown.output
        assert "seems sequenced" in shown.stdout
    taken = CliRunner().invoke(main, ["doctor", "--bind", f"ipc://{os.path.dirname(ipc_path)}/no/such/dir"])
    assert taken.exit_code == 3
    assert "binding ipc://" in taken.stderr
