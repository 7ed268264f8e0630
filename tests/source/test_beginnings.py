"""Where a query begins, and goes on after SIGKILLs in its first batches: each row once. No JVM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import batch_of
from tests.weather.engine import read_output
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter

pytestmark = pytest.mark.spark  # processes of their own

BEFORE_OFFSETS = "log.position.after_write:2"  # its beginning is recorded
AFTER_OFFSETS, AFTER_OUTPUT = "weather.offsets.after_write:1", "weather.commits.before_write:1"
SECOND_OUTPUT = "weather.commits.before_write:2"  # after the first batch, which is repeated


class Log:
    """A log that this process fills, so that a query loses no messages when it is killed."""

    def __init__(self, location: Path) -> None:
        self.location = location
        self.end = 0  # the number of the next message
        storage = LogStorage(str(location))
        self._writer = LogWriter(storage, chunk_bytes=1 << 20, max_bytes=1 << 30, retention=600.0)
        self._writer.open()

    def fill(self, chunks: int) -> None:
        """Add chunks of three messages."""
        for _ in range(chunks):
            values = [b"%d" % (self.end + n) for n in range(3)]
            self._writer.append(batch_of(values, 1_000_000 * self.end))
            self._writer.cut().result(30)
            self.end += 3

    def close(self) -> None:
        self._writer.close()


def run(
    directory: Path, sources: list[dict[str, Any]], kill: str = "", trigger: str = "", until: int = 1
) -> int:
    settings = {
        "directory": str(directory),
        "sources": sources,
        "kill": kill,
        "trigger": trigger,
        "until": until,
    }
    command = [sys.executable, "-m", "tests.support.beginning_driver", json.dumps(settings)]
    return subprocess.run(command, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("options", "kills", "first"),
    [
        ({"startingOffsets": "latest", "reader": "desk"}, (BEFORE_OFFSETS, AFTER_OFFSETS, AFTER_OFFSETS), 6),
        ({"startingOffsets": "latest"}, (AFTER_OFFSETS, AFTER_OUTPUT, SECOND_OUTPUT), 6),
        ({"startingOffsets": "earliest"}, (BEFORE_OFFSETS, AFTER_OFFSETS, AFTER_OFFSETS), 0),
        (
            {"startingOffsets": "1970-01-01T00:00:03Z", "maxMessagesPerTrigger": "2"},
            (BEFORE_OFFSETS, AFTER_OUTPUT),
            3,
        ),
        ({"startingOffsets": "earliest", "trigger": "now"}, (AFTER_OFFSETS, AFTER_OUTPUT), 0),
        ({"startingOffsets": "latest", "empty": "yes"}, (AFTER_OFFSETS, AFTER_OFFSETS), 6),
    ],
    ids=["named", "latest", "earliest", "timestamp", "available-now", "union"],
)
def test_a_query_that_is_killed_goes_on_with_the_same_rows(
    tmp_path: Path, options: dict[str, str], kills: tuple[str, ...], first: int
) -> None:
    options = dict(options)
    trigger = options.pop("trigger", "")
    log = Log(tmp_path / "log")
    log.fill(2)
    sources = [{"walLocation": str(log.location), **options}]
    if options.pop("empty", ""):
        sources[0].pop("empty")
        empty = Log(tmp_path / "empty")
        empty.close()
        sources.append({"walLocation": str(empty.location), "startingOffsets": "latest"})
    query = tmp_path / "query"
    for kill in kills:
        assert run(query, sources, kill, trigger, until=1 << 30) == -signal.SIGKILL
        log.fill(1)
    while len(read_output(query)) < log.end - first:
        assert run(query, sources, trigger=trigger, until=log.end - first) == 0
    rows = read_output(query)
    assert sorted(int(row[3]) for row in rows) == list(range(first, log.end))
    ids = [row[0] for row in rows]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    log.close()


@pytest.mark.parametrize(("begins", "first"), [("earliest", 0), ("latest", 3)])
def test_a_source_that_joins_and_is_killed_in_its_first_batch_has_each_message_once(
    tmp_path: Path, begins: str, first: int
) -> None:
    old, new, query = Log(tmp_path / "old"), Log(tmp_path / "new"), tmp_path / "query"
    sources = [
        {"walLocation": str(log.location), "startingOffsets": starts}
        for log, starts in ((old, "earliest"), (new, begins))
    ]
    old.fill(1), new.fill(1)
    assert run(query, sources[:1], until=3) == 0
    old.fill(1)
    assert run(query, sources, AFTER_OFFSETS, until=1 << 30) == -signal.SIGKILL
    old.fill(1), new.fill(1)
    wanted = Counter([*range(old.end), *range(first, new.end)])
    assert run(query, sources, until=wanted.total()) == 0
    assert Counter(int(row[3]) for row in read_output(query)) == wanted
    old.close(), new.close()
