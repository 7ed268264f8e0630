"""A Spark driver for tests to kill: one query, from any source to any sink. ``Driver`` starts it, as

python -m tests.support.driver SETTINGS, a JSON object with what ``begin`` takes, and

master, conf: Of the session. stop: A file; once it is there, the query reads all there is, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import wait_for
from tests.support.streams import new_session

Options = dict[str, str]


class Driver:
    """A driver in a process group of its own: Python, JVM, source runner and workers.

    Args:
        log: The file that what it prints is added to.
        settings: See above.
    """

    def __init__(self, log: Path, **settings: Any) -> None:
        self._command = [sys.executable, "-m", "tests.support.driver", json.dumps(settings)]
        self._log = log
        self._runners: list[psutil.Process] = []
        self.start()

    def start(self) -> None:
        """Start it, again after ``kill``."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Its living processes with ``word`` in their command line."""
        found = []
        with suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.process.pid)
            for process in (driver, *driver.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # includes zombies
                    if word in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def find(self, word: str) -> psutil.Process:
        def found() -> list[psutil.Process]:
            assert self.process.poll() is None, f"the driver ended by itself: {self.said()}"
            return self.processes(word)

        return wait_for(found, f"a process of the driver with {word!r}", 90)[0]

    def wait_until_receiving(self) -> None:
        self._runners.append(self.find("source_runner"))

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        """Kill what is left, and wait until the source runner has drained and gone."""
        for process in self.processes():
            if process not in self._runners:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait(30)
        psutil.wait_procs(self._runners, 60)


def begin(
    spark: SparkSession,
    source: Options,
    sink: Options,
    select: Sequence[str] = ("*",),
    partitions: int = 0,
    **trigger: bool,
) -> StreamingQuery:
    """The query, in any session.

    Args:
        source: Its options, and as ``format`` another format than ``zmq``; so does the sink.
        partitions: To divide its rows into; 0 leaves them as they are.
    """
    read, written = {"format": "zmq", **source}, {"format": "zmq", **sink}
    rows = spark.readStream.format(read.pop("format")).options(**read).load().selectExpr(*select)
    rows = rows.repartition(partitions) if partitions else rows
    writer = rows.writeStream.format(written.pop("format")).options(**written)
    return (writer.trigger(**trigger) if trigger else writer).start()


def main() -> None:
    settings = json.loads(sys.argv[1])
    directory = Path(settings["sink"]["checkpointLocation"] + ".session")
    spark = new_session(directory, settings.pop("master"), settings.pop("conf", {}))
    stop = settings.pop("stop", None)
    query = begin(spark, **settings)
    while stop is None or not Path(stop).exists():
        if query.awaitTermination(1):
            return
    query.processAllAvailable()
    query.stop()
    spark.stop()


if __name__ == "__main__":
    main()
