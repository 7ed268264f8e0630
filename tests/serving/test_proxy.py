"""The proxy as a user runs it, in a process that is killed."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import psutil
import pytest
import zmq
from click.testing import CliRunner

from tests.support import Socket, log_rows, wait_for
from tests.support.proxies import endpoints, publisher, receive
from tests.support.serving import Client
from zmq_datasource import DurableSubscriber, OptionError, Proxy, SocketError
from zmq_datasource.cli import main as cli
from zmq_datasource.serving.protocol import Fetch

pytestmark = pytest.mark.spark


def test_of_a_feed_a_killed_proxy_loses_only_what_was_not_sealed(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "durable")
    push = context.socket(zmq.PUSH)
    push.connect(sides["pull"])
    done = threading.Event()

    def produce() -> None:
        for number in itertools.count():
            while not push.poll(100, zmq.POLLOUT):
                if done.is_set():
                    return
            if done.wait(0.0005):
                return
            push.send(b"%d" % number)

    producing = threading.Thread(target=produce)
    got: list[tuple[int, int]] = []
    proxy = Proxy(wal_location=tmp_path, **sides)
    proxy.__enter__()
    try:
        producing.start()
        with DurableSubscriber(sides["durable"], "me", timeout=60) as subscriber:
            for kills in range(3):
                while len(got) < 300 * (kills + 1):
                    message = subscriber.receive(60)
                    assert message is not None
                    got.append((message.id, int(message.value)))
                if kills < 2:
                    psutil.Process(proxy.pid).kill()
                    with pytest.raises(SocketError, match="has ended by itself"):
                        proxy.__exit__(None, None, None)
                    proxy = Proxy(wal_location=tmp_path, **sides)
                    proxy.__enter__()
    finally:
        done.set()
        producing.join(60)
        proxy.__exit__(None, None, None)
    ids, numbers = zip(*got, strict=True)
    assert ids == tuple(range(len(got))), "no gap, and no id twice"
    assert list(numbers) == sorted(set(numbers))
    rows = log_rows(tmp_path)
    assert [int(value) for value in rows.column("value").to_pylist()[: len(got)]] == list(numbers)


@pytest.mark.slow
def test_memory_stays_bounded_behind_subscribers_that_take_nothing(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish", "durable")
    options = {"wal_max_bytes": "64m", "when_full": "discard", "slow_subscriber": "drop"}
    with Proxy(wal_location=tmp_path, **sides, **options) as proxy:
        stalled = context.socket(zmq.SUB)
        stalled.setsockopt(zmq.RCVHWM, 10)
        stalled.setsockopt(zmq.RCVBUF, 4096)
        stalled.subscribe(b"")
        stalled.connect(sides["publish"])
        wait_for(lambda: proxy.status()["subscriptions"], "subscribed")
        durable = [Client(context, sides["durable"], rcvhwm=1, rcvbuf=4096) for _ in range(200)]
        for at, client in enumerate(durable):
            client.open(f"stalled{at}")
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        process = psutil.Process(proxy.pid)
        before = process.memory_info().rss
        value = b"." * 20_000
        for i in range(20_000):  # 400 MB
            push.send(value)
            if i in (2500, 10_000):
                for at, client in enumerate(durable):
                    client.send(Fetch(name=f"stalled{at}", session=1, first=0, done=0))
        wait_for(lambda: proxy.status()["messagesReceived"] == 20_000, "all received", 120)
        grown = process.memory_info().rss - before
        # Mapped files of the log count too, of which there are 64 MB.
        assert grown < 250 << 20, f"{grown >> 20} MiB"
        assert proxy.status()["logBytes"] <= 64 << 20


def test_an_error_at_the_start_is_raised_by_the_with_block(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "publish", "durable")
    with pytest.raises(OptionError, match="walLocation is not set"):
        Proxy(**sides)
    taken = context.socket(zmq.PULL)
    taken.bind(sides["durable"])
    with (
        pytest.raises(SocketError, match="Address already in use"),
        Proxy(wal_location=tmp_path, **sides),
    ):
        pass
    taken.close(0)
    with (
        pytest.raises(OptionError, match=r"zmq\.nothing"),
        Proxy(wal_location=tmp_path, zmq_nothing="1", **sides),
    ):
        pass


def test_a_proxy_can_be_started_again(tmp_path: Path) -> None:
    proxy = Proxy(wal_location=tmp_path, **endpoints("pull", "publish"))
    for _ in range(2):
        with proxy:
            assert psutil.Process(proxy.pid).children() == []
            assert proxy.status()["nextId"] == 0


def test_the_command_runs_until_it_is_told_to_end(context: zmq.Context[Socket], tmp_path: Path) -> None:
    sides = endpoints("bind", "publish", "durable")
    command = [sys.executable, "-m", "zmq_datasource", "proxy", "--wal-location", str(tmp_path)]
    for side, endpoint in sides.items():
        command += [f"--{side}", endpoint]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("receiving from" in line for line in process.stderr)
        pub = publisher(context, sides["bind"])
        sub = context.socket(zmq.SUB)
        sub.connect(sides["publish"])
        sub.subscribe(b"t")
        assert pub.recv() == b"\x01t"
        pub.send_multipart([b"t", b"v"])
        assert receive(sub, 1) == [[b"t", b"v"]]
        with DurableSubscriber(sides["durable"], "me") as subscriber:
            message = subscriber.receive(30)
            assert message is not None
            assert message.value == b"v"
        process.send_signal(signal.SIGINT)
        _, lines = process.communicate(timeout=60)
        assert process.returncode == 0, lines
        assert "stopped receiving into" in lines
    finally:
        process.kill()
        process.wait()


def test_figures_are_json_for_programs_and_a_pipe_without_a_reader_ends_nothing(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides, log = endpoints("bind", "publish"), tmp_path / "log.txt"
    command = [sys.executable, "-m", "zmq_datasource", "proxy", "--wal-location", str(tmp_path / "log")]
    command += ["--figures", "json", "--figures-every", "0"]
    for side, endpoint in sides.items():
        command += [f"--{side}", endpoint]
    with log.open("w") as lines, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines) as process:
        try:
            publisher(context, sides["bind"]).send_multipart([b"t", b"v"])
            assert process.stdout is not None
            said = (json.loads(line) for line in process.stdout)
            assert any(
                status["messagesReceived"] == 1 and status["published"] == 1 and status["timestamp"]
                for status in islice(said, 60)
            )
            process.stdout.close()
            wait_for(lambda: "no more are printed" in log.read_text(), "the warning")
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    assert process.returncode == 0
    assert "at id 1" in log.read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--bind", "tcp://*:5557", "--publish", "tcp://*:5556"], "walLocation is not set"),
        (
            ["--bind", "tcp://*:1", "--publish", "tcp://*:2", "--wal-location", "x", "-o", "rcvhwm"],
            "NAME=VALUE",
        ),
        (
            ["--bind", "tcp://*:1", "--publish", "tcp://*:2", "--wal-location", "x", "-o", "a=b"],
            "unknown proxy",
        ),
    ],
)
def test_the_command_names_what_is_wrong(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(cli, ["proxy", *arguments])
    assert result.exit_code != 0
    assert problem in result.output
