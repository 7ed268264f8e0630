"""Clients that know the proxy only by docs/proxy.md: its own example in pyzmq, and JeroMQ, which is not libzmq."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pyspark
import pytest
import zmq

from tests.support import REPOSITORY, Socket, wait_for
from tests.support.maven import JEROMQ, fetched
from tests.support.proxies import endpoints, publisher, receive
from zmq_datasource import Proxy, SocketError

pytestmark = pytest.mark.spark

MESSAGES = 3000

# What the reader of the docs adds: a handler, and where to connect.
HANDLER = """

import sys
import time

endpoint, name, last = sys.argv[1:]
MAX_BYTES = 4096  # so that there are many answers


def handle(position, topic, value):
    assert value == str(position).encode(), (position, topic, value)
    print("got", position, flush=True)
    time.sleep(0.001)  # so that there is a middle to be killed in
    return position != int(last)


consume(endpoint, name, handle)
"""


@pytest.fixture
def documented_client(tmp_path: Path) -> list[str]:
    """The code of docs/proxy.md as it stands, as a program."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/proxy.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def consume(" in block]
    program = tmp_path / "client.py"
    program.write_text(code + HANDLER)
    return [sys.executable, str(program)]


@pytest.fixture(scope="module")
def java() -> list[str]:
    """Runs a source file with JeroMQ: PySpark brings a compiler, so that a JRE will do."""
    home = os.environ.get("JAVA_HOME")
    command = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if command is None:
        pytest.skip("there is no Java runtime")
    jars = Path(pyspark.__file__).parent / "jars"
    compiler = [*jars.glob("janino-*.jar"), *jars.glob("commons-compiler-*.jar")]
    if len(compiler) != 2:
        pytest.skip("this PySpark brings no Janino, which compiles the client")
    path = os.pathsep.join(map(str, [fetched(JEROMQ), *compiler]))
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    return [command, *quick, "-cp", path, "org.codehaus.janino.SimpleCompiler"]


def java_program(java: list[str], name: str) -> list[str]:
    return [*java, str(REPOSITORY / "tests/support/jeromq" / f"{name}.java"), name]


class Notes:
    """What the runs of a client have printed, each run by itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[Path] = []

    @contextmanager
    def run(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start it; it is killed at the end of the block if it has not ended by itself."""
        self._files.append(self._directory / f"run-{len(self._files)}")
        with self._files[-1].open("wb") as file:
            process = subprocess.Popen(command, stdout=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def lines(self, run: int = -1) -> list[str]:
        """Of one run; a line that its end has cut is left out."""
        return self._files[run].read_text().split("\n")[:-1]

    def numbers(self, word: str, run: int = -1) -> list[int]:
        """Those behind ``word``."""
        return [int(line.split()[1]) for line in self.lines(run) if line.startswith(f"{word} ")]

    def wait_for_id(self, position: int) -> None:
        """Until the present run has got it."""
        wait_for(lambda: any(at >= position for at in self.numbers("got")), f"message {position} received")

    @property
    def runs(self) -> int:
        return len(self._files)


def kill(proxy: Proxy) -> None:
    """Both of its processes, at once."""
    live = psutil.Process(proxy.pid)
    for process in [live, *wait_for(live.children, "the server process")]:
        process.kill()


def publish(context: zmq.Context[Socket], endpoint: str, first: int, end: int) -> None:
    pub = publisher(context, endpoint)
    for i in range(first, end):
        pub.send(b"%d" % i)


def next_id(proxy: Proxy) -> int:
    """The first id that the one durable subscriber has not acknowledged, by the proxy's account."""
    return sum(account["nextId"] for account in proxy.status().get("durable", ()))


def assert_nothing_lost_or_repeated(notes: Notes, floors: list[int]) -> None:
    """All came, in order within each run, and none from below ``floors``, where a run had to begin."""
    everything: set[int] = set()
    for run in range(notes.runs):
        got = notes.numbers("got", run)
        assert got[0] >= floors[run], f"run {run} got again what was acknowledged"
        assert all(b == a + 1 for a, b in pairwise(got)), f"run {run} is not in order"
        everything.update(got)
    assert everything == set(range(MESSAGES))


def test_the_documented_client_in_plain_pyzmq_survives_its_own_death_and_the_proxys(
    context: zmq.Context[Socket], tmp_path: Path, documented_client: list[str]
) -> None:
    sides = endpoints("bind", "durable")
    notes = Notes(tmp_path)
    command = [*documented_client, sides["durable"], "me", str(MESSAGES - 1)]
    floors = [0]
    with Proxy(wal_location=tmp_path / "log", **sides) as proxy:
        publish(context, sides["bind"], 0, MESSAGES // 2)
        for _ in range(2):
            with notes.run(command):
                notes.wait_for_id(floors[-1] + 100)
                wait_for(lambda: next_id(proxy) > floors[-1] + 50, "acknowledgements")
                floors.append(next_id(proxy))
            assert notes.numbers("got")[-1] < MESSAGES // 2 - 1, "killed in the middle"
    # It comes again before the proxy does, which is then killed too.
    with notes.run(command) as client:
        with (
            pytest.raises(SocketError, match="has ended by itself"),
            Proxy(wal_location=tmp_path / "log", **sides) as proxy,
        ):
            publish(context, sides["bind"], MESSAGES // 2, MESSAGES - 100)
            wait_for(lambda: proxy.status().get("nextId") == MESSAGES - 100, "all in the log")
            notes.wait_for_id(MESSAGES // 2)
            kill(proxy)
        assert notes.numbers("got")[-1] < MESSAGES - 101, "killed in the middle"
        with Proxy(wal_location=tmp_path / "log", **sides) as proxy:
            publish(context, sides["bind"], MESSAGES - 100, MESSAGES)
            assert client.wait(30) == 0
            wait_for(lambda: next_id(proxy) == MESSAGES, "all acknowledged")
    assert_nothing_lost_or_repeated(notes, floors)


def test_a_replay_is_asked_for_in_plain_pyzmq_by_the_words_of_the_docs(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("bind", "replay")
    last = [b"\xff" * 8, b""]

    def number(n: int) -> bytes:
        return n.to_bytes(8, "big")

    with Proxy(wal_location=tmp_path, **sides) as proxy:
        pub = publisher(context, sides["bind"])
        for i in range(1000):
            pub.send_multipart([b"t.%d" % i, b"%d" % i])
        pub.send(b"alone")
        pub.send_multipart([b"t", b"between", b"last"])
        wait_for(lambda: proxy.status().get("nextId") == 1002, "all in the log")

        dealer = context.socket(zmq.DEALER)
        dealer.connect(sides["replay"])

        def served() -> bool:  # what is in the log can be asked for a moment later
            dealer.send_multipart([b"", number(1001)])
            return receive(dealer, 1)[0][1:] != last

        wait_for(served, "the end of the log served")
        assert receive(dealer, 1) == [[b"", *last]]
        dealer.send_multipart([b"", number(990) + number(995)])
        assert receive(dealer, 6) == [
            *([b"", number(i), b"%d" % i] for i in range(990, 995)),
            [b"", *last],
        ]
        dealer.send_multipart([b"", number(0)])
        replies = receive(dealer, 1003)
        assert replies[:1000] == [[b"", number(i), b"%d" % i] for i in range(1000)]
        assert replies[1000:] == [
            [b"", number(1000), b"alone"],
            [b"", number(1001), b"between", b"last"],
            [b"", *last],
        ]
        dealer.send_multipart([b"", number(5000)])
        assert receive(dealer, 1) == [[b"", *last]]

        topics = context.socket(zmq.DEALER)
        topics.setsockopt(zmq.ROUTING_ID, b"topic:me")
        topics.connect(sides["replay"])
        topics.send_multipart([b"", number(999)])
        assert receive(topics, 4) == [
            [b"", b"t.999", number(999), b"999"],
            [b"", b"", number(1000), b"alone"],
            [b"", b"t", number(1001), b"between", b"last"],
            [b"", b"", *last],
        ]


def test_a_durable_subscriber_in_java_survives_its_own_death_and_the_proxys(
    context: zmq.Context[Socket], tmp_path: Path, java: list[str]
) -> None:
    sides = endpoints("bind", "durable")
    notes = Notes(tmp_path)
    command = [*java_program(java, "DurableClient"), sides["durable"], "java", str(MESSAGES - 1)]
    floors = [0]

    def acknowledged() -> int:
        return max([0, *(at + 1 for run in range(notes.runs) for at in notes.numbers("acked", run))])

    with (
        pytest.raises(SocketError, match="has ended by itself"),
        Proxy(wal_location=tmp_path / "log", **sides) as proxy,
    ):
        publish(context, sides["bind"], 0, MESSAGES // 2)
        for at in (100, 700):
            with notes.run(command):
                notes.wait_for_id(at)
                wait_for(lambda: notes.numbers("acked"), "an acknowledgement")
            assert notes.numbers("got")[-1] < MESSAGES // 2 - 1, "killed in the middle"
            floors.append(acknowledged())
        with notes.run(command) as client:
            publish(context, sides["bind"], MESSAGES // 2, MESSAGES - 100)
            wait_for(lambda: proxy.status()["nextId"] == MESSAGES - 100, "all in the log")
            notes.wait_for_id(MESSAGES // 2)
            kill(proxy)
            assert notes.numbers("got")[-1] < MESSAGES - 101, "killed in the middle"
            with Proxy(wal_location=tmp_path / "log", **sides):
                publish(context, sides["bind"], MESSAGES - 100, MESSAGES)
                assert client.wait(30) == 0
    assert acknowledged() == MESSAGES
    assert_nothing_lost_or_repeated(notes, floors)


def test_a_plain_subscriber_in_java_reads_topic_id_and_value(
    context: zmq.Context[Socket], tmp_path: Path, java: list[str]
) -> None:
    sides = endpoints("bind", "publish")
    command = [*java_program(java, "PlainSubscriber"), sides["publish"], "t.", "100"]
    with Proxy(wal_location=tmp_path, **sides), publishing(context, sides["bind"]):
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            output, _ = client.communicate(timeout=30)
        finally:
            client.kill()
            client.wait()
    assert client.returncode == 0
    got = [line.split() for line in output.splitlines()]
    assert all(topic == f"t.{position}" and value == position for topic, position, value in got)
    first = int(got[0][1])
    assert [int(position) for _, position, _ in got] == list(range(first, first + 200, 2))


@contextmanager
def publishing(context: zmq.Context[Socket], endpoint: str) -> Iterator[None]:
    """A thread that publishes, every other message under ``t.``, until the end of the block."""
    end = threading.Event()

    def run() -> None:
        pub, i = publisher(context, endpoint), 0
        while not end.wait(0.001):
            for _ in range(10):
                pub.send_multipart([b"%s.%d" % (b"tu"[i % 2 : i % 2 + 1], i), b"%d" % i])
                i += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
