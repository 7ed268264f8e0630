"""A transaction is in the log whole and once, wherever the receiver is killed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest

from tests.support import log_at, log_rows, wait_for
from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.protocol import (
    Commit,
    Committed,
    Data,
    End,
    Message,
    Staged,
    encode,
)
from zmq_datasource.acknowledged.reception import Reception, Terms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.log.writer import LogWriter
from zmq_datasource.messages.packed import pack_columns

# In three data messages.
LARGE, SMALL = 3000, 3
_MESSAGE_ROWS, _ROW_BYTES = 1000, 1000


class Receiver:
    """A reception that fills a log, without a socket; in a ``with`` block."""

    def __init__(self, location: Path | str) -> None:
        self.counters, self.now = SourceCounters(), 0.0
        self.storage = log_at(location)
        self.files = AttemptFiles(self.storage.directory)
        self.transactions = CommittedTransactions(self.counters, 10)
        self.log = LogWriter(
            self.storage,
            chunk_bytes=1 << 26,
            max_bytes=1 << 40,
            retry_timeout=60.0,
            carried=self.transactions,
        )
        self._forcing = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self.log.open()
        self.transactions.restore(self.log.saved)
        self.reception = Reception(
            Terms(100.0, 1 << 30),
            self.transactions,
            self.counters,
            self.files,
            self.log,
            self._forcing,
            lambda: 1.0,
        )
        self.reception.recover(0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._forcing.shutdown()
        self.log.close()

    def tell(self, *messages: Message, rows: pa.RecordBatch | None = None) -> list[Message]:
        """Send a message. Returns the answers of this moment."""
        for message in messages:
            buffers = [] if rows is None else [bytes(memoryview(b)) for b in pack_columns(rows)[1]]  # type: ignore[arg-type]
            self.reception.receive(b"p", [bytes(f) for f in encode(message, buffers)], self.now)
        return self.heard()

    def heard(self) -> list[Message]:
        self.reception.go_on(self.now)
        answers = [answer.message for answer in self.reception.answers]
        self.reception.answers.clear()
        return answers

    def settled(self) -> list[Message]:
        """Wait until nothing is being written. Returns the answers."""
        answers = self.heard()
        while self.reception.busy:
            time.sleep(0.001)  # other threads need the interpreter
            answers += self.heard()
        return answers

    def stage(
        self, rows: int, number: int = 0, partition: int = 0, producer: str = "q", letter: bytes = b"a"
    ) -> str:
        end = self.send(rows, number, partition, producer, letter)
        assert [*self.tell(end), *self.settled()] == [Staged(attempt=end.attempt, rows=rows)]
        return end.attempt

    def send(
        self, rows: int, number: int = 0, partition: int = 0, producer: str = "q", letter: bytes = b"a"
    ) -> End:
        """Send data. Returns the message that ends the attempt."""
        part: dict[str, Any] = {"producer": producer, "number": number, "partition": partition}
        part["attempt"] = uuid.uuid4().hex
        batches = [batch(rows, letter)[at : at + _MESSAGE_ROWS] for at in range(0, rows, _MESSAGE_ROWS)]
        for index, sent in enumerate(batches):
            values = pa.record_batch({"value": sent})
            self.tell(Data(**part, index=index, rows=len(sent), columns=["value"]), rows=values)
        return End(attempt=part["attempt"], messages=len(batches), rows=rows)

    def commit(self, attempts: list[str], rows: int, number: int = 0, producer: str = "q") -> list[Message]:
        """Ask for a commit. ``settled`` returns its answer."""
        return self.tell(Commit(producer=producer, number=number, attempts=attempts, rows=rows))


def batch(rows: int, letter: bytes = b"a") -> list[bytes]:
    return [b"%s%0*d" % (letter, _ROW_BYTES, row) for row in range(rows)]


def committed(answers: list[Message]) -> list[tuple[str, int, bool]]:
    assert all(isinstance(answer, Committed) for answer in answers), answers
    return [(a.producer, a.number, a.again) for a in answers if isinstance(a, Committed)]


def values(location: Path | str) -> list[bytes]:
    found = log_rows(location)
    assert found.column("id").to_pylist() == list(range(found.num_rows))
    return list(found.column("value").to_pylist())


def chunks(location: Path) -> list[Path]:
    return sorted((location / "chunks").glob("[0-9]*.arrow"))


def staged(location: Path) -> list[Path]:
    return list((location / "staging").iterdir())


def test_a_commit_waits_while_the_log_is_away(tmp_path: Path) -> None:
    location, away = tmp_path / "log", tmp_path / "away"
    with Receiver(location) as receiver:
        attempt = receiver.stage(LARGE)
        location.rename(away)
        (location / "chunks").mkdir(parents=True)  # the mount point, below the mounted directory
        assert receiver.commit([attempt], LARGE) == []
        wait_for(lambda: receiver.log.fault, "the log to miss the files of the attempt")
        shutil.rmtree(location)
        away.rename(location)
        assert committed(receiver.settled()) == [("q", 0, False)]
    assert values(location) == batch(LARGE)


# A kill.

# A process for each failpoint and number of parts, which is killed there. They are forked, because imports are slow.
_COMMITS = """
import os, signal, sys
from pathlib import Path
import pyarrow.compute
from tests.acknowledged.test_kills import LARGE, Receiver
from zmq_datasource.host import failpoints

def commit(place, parts, point):
    with Receiver(place) as receiver:
        attempts = [receiver.stage(LARGE, partition=p, letter=b"%d" % p) for p in range(parts)]
        (place / "attempts").write_text(" ".join(attempts))
        failpoints.reach = lambda name: name == point and os.kill(os.getpid(), signal.SIGKILL)
        receiver.commit(attempts, parts * LARGE)
        receiver.settled()

pyarrow.compute.min_max([1])  # the first call takes a quarter of a second
processes = {}
for point in sys.argv[2:]:
    for parts in (1, 2):
        process = os.fork()
        if not process:
            commit(Path(sys.argv[1], f"{point}-{parts}"), parts, point)
            os._exit(0)
        processes[process] = point
for process, point in processes.items():
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL, point
"""
_POINTS = [
    *("acknowledged.commit.before_append", "acknowledged.commit.after_append", "log.chunk.before_put"),
    *("log.store.before_write", "log.store.after_write", "log.store.before_link", "log.store.after_link"),
    *("log.chunk.after_put", "acknowledged.committed.before_answer", "acknowledged.file.before_remove"),
    "acknowledged.committed.after_answer",
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log for each number of parts and each failpoint at which its receiver was killed."""
    path = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, "-c", _COMMITS, str(path), *_POINTS], check=True, timeout=120)
    return path


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("point", _POINTS)
def test_a_kill_leaves_all_of_a_transaction_or_nothing(killed: Path, point: str, parts: int) -> None:
    path, rows = killed / f"{point}-{parts}", parts * LARGE
    attempts = (path / "attempts").read_text().split()
    is_there = _POINTS.index(point) >= _POINTS.index("log.store.after_link")
    with Receiver(path) as receiver:
        assert receiver.log.durable_end == (rows if is_there else 0)
        assert len(staged(path)) == (0 if is_there else parts)
        answers = [*receiver.commit(attempts, rows), *receiver.settled()]
        assert committed(answers) == [("q", 0, is_there)]
        receiver.commit([receiver.stage(SMALL, 1)], SMALL, 1)
        assert committed(receiver.settled()) == [("q", 1, False)]
    assert values(path) == [
        *(value for p in range(parts) for value in batch(LARGE, b"%d" % p)),
        *batch(SMALL),
    ]
    assert not staged(path)
