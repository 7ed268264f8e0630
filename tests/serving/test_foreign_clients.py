"""Clients written from docs/durable-protocol.md alone: its example in pyzmq, and a program in Go without libzmq."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from tests.support import REPOSITORY, Socket, free_endpoint, wait_for
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

pytestmark = pytest.mark.spark

MESSAGES = 3000
# What the reader of the docs adds to its example: a handler, what is told of the answers, and where to connect.
PYTHON_HANDLER = """

import sys
import time

endpoint, name, last = sys.argv[1:]


def ask_and_tell(*request, ask=ask):
    kind, answer, buffers = ask(*request)
    if answer.get("done"):
        print("acked", answer["done"] - 1, flush=True)
    return kind, answer, buffers


def handle(position, topic, value):
    print("got", position, value.decode(), topic.decode(), flush=True)
    time.sleep(0.001)  # so that there is a middle to be killed in
    return position != int(last)


ask = ask_and_tell
consume(endpoint, name, handle, max_bytes=4096)  # so that there are many answers
"""


def python_client(directory: Path) -> list[str]:
    """The code of docs/durable-protocol.md as it stands."""
    blocks = re.findall(
        r"```python\n(.*?)```", (REPOSITORY / "docs/durable-protocol.md").read_text(), re.DOTALL
    )
    (code,) = [block for block in blocks if "def consume(" in block]
    program = directory / "client.py"
    program.write_text(code + PYTHON_HANDLER)
    return [sys.executable, str(program)]


def go_client(directory: Path) -> list[str]:
    """With go-zeromq, which is pure Go. Skips the test if there is no Go, or the module cannot be downloaded."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("there is no go")
    place = Path(shutil.copytree(Path(__file__).parent / "go_client", directory / "go"))
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    command = [go, "mod", "download"]
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, timeout=60, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("go-zeromq cannot be downloaded within 60 s")
    if done.returncode:
        assert not re.search("checksum mismatch|SECURITY ERROR", done.stderr), done.stderr
        pytest.skip(f"go-zeromq cannot be downloaded: {done.stderr.strip()}")
    subprocess.run([go, "build", "-o", "client", "."], cwd=place, check=True)
    return [str(place / "client")]


def topic_of(i: int) -> str:
    """Every third message has no topic."""
    return f"t.{i}" if i % 3 else ""


def frames_of(i: int) -> list[bytes]:
    """Some messages have more frames than topic and value, so that BATCHes of both forms come."""
    topic = [topic_of(i).encode()] if i % 3 else []
    between = [b"between"] if i % 3 == 1 and i % 1000 > 500 else []
    return [*topic, *between, b"%d" % i]


class Notes:
    """The lines that a client has printed, run by run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[Path] = []

    @contextmanager
    def run(self, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Start the client; the end of the block kills it."""
        self._files.append(self._directory / f"run-{len(self._files)}")
        with self._files[-1].open("wb") as file:
            process = subprocess.Popen(command, stdout=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def lines(self, run: int = -1) -> list[str]:
        """The whole lines of one run."""
        return self._files[run].read_text().split("\n")[:-1]

    def numbers(self, word: str, run: int = -1) -> list[int]:
        """The numbers behind ``word``."""
        return [int(line.split()[1]) for line in self.lines(run) if line.startswith(f"{word} ")]

    def wait_for_id(self, position: int) -> None:
        """Wait until the present run has got this message."""
        wait_for(lambda: any(at >= position for at in self.numbers("got")), f"message {position} received")

    def acknowledged(self) -> int:
        """The highest position that a client knows to be on the server's disk."""
        return max([0, *(at + 1 for run in range(self.runs) for at in self.numbers("acked", run))])

    @property
    def runs(self) -> int:
        return len(self._files)


@contextmanager
def receiving(place: Path, pull: str, durable: str) -> Iterator[subprocess.Popen[bytes]]:
    """A receiver with a durable side; the end of the block kills it."""
    options = ["--socket-type", "PULL", "--bind", pull, "--durable", durable, "--wal-location", str(place)]
    process = subprocess.Popen([sys.executable, "-m", "zmq_datasource", "receive", *options])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def feed(context: zmq.Context[Socket], endpoint: str, log: Path, first: int, end: int) -> None:
    """Send messages, and wait until they are in the log."""
    push = context.socket(zmq.PUSH)
    push.connect(endpoint)
    for i in range(first, end):
        push.send_multipart(frames_of(i))
    ready = (log / "log.json").exists
    wait_for(lambda: ready() and read_index(LogStorage(str(log))).durable_end == end, "all in the log")


def assert_nothing_lost_or_repeated(notes: Notes, floors: list[int]) -> None:
    """Check that all messages came, in order within each run, and none below the floor of its run."""
    everything: set[int] = set()
    for run in range(notes.runs):
        got = notes.numbers("got", run)
        assert got[0] >= floors[run], f"run {run} got again what was acknowledged"
        assert all(b == a + 1 for a, b in pairwise(got)), f"run {run} is not in order"
        everything.update(got)
        whole = [f"got {i} {i} {topic_of(i)}" for i in got]
        assert [line for line in notes.lines(run) if line.startswith("got ")] == whole
        assert not notes.numbers("lost", run)
    assert everything == set(range(MESSAGES))


@pytest.mark.parametrize("program", [python_client, pytest.param(go_client, marks=pytest.mark.slow)])
def test_a_durable_client_survives_its_own_death_and_the_servers(
    context: zmq.Context[Socket], tmp_path: Path, program: Callable[[Path], list[str]]
) -> None:
    pull, durable, log = free_endpoint(), free_endpoint(), tmp_path / "log"
    notes = Notes(tmp_path)
    command = [*program(tmp_path), durable, "me", str(MESSAGES - 1)]
    floors = [0]
    with receiving(log, pull, durable) as receiver:
        feed(context, pull, log, 0, MESSAGES - 100)
        for dies_with_it in (False, True):
            with notes.run(command):
                notes.wait_for_id(floors[-1] + 100)
                wait_for(lambda: notes.acknowledged() > floors[-1], "an acknowledgement")
                if dies_with_it:
                    receiver.kill()
            assert notes.numbers("got")[-1] < MESSAGES - 101, "killed in the middle"
            floors.append(notes.acknowledged())
    # The client starts before the receiver; then the receiver alone is killed.
    with notes.run(command) as client:
        with receiving(log, pull, durable):
            notes.wait_for_id(floors[-1] + 100)
        assert notes.numbers("got")[-1] < MESSAGES - 101, "killed in the middle"
        with receiving(log, pull, durable):
            feed(context, pull, log, MESSAGES - 100, MESSAGES)
            assert client.wait(30) == 0
    assert notes.acknowledged() == MESSAGES
    assert_nothing_lost_or_repeated(notes, floors)
