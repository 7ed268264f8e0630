"""A query on Spark's reduced engine that kills itself where it is told to: tests.source.test_beginnings.

Usage: python -m tests.support.beginning_driver SETTINGS, a JSON object:

directory: Of the checkpoint and the output. sources: Their options, one object each. trigger: ``now`` or ``""``.
kill: ``name:n``, the n-th time that a failpoint of this name is reached; empty for none. until: The number of rows at
which the query is stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.weather.engine import Query, read_output, write_rows
from zmq_datasource.host import failpoints
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.stream_reader import ZmqStreamReader


def main() -> None:
    settings = json.loads(sys.argv[1])
    directory = Path(settings["directory"])
    (directory / "out").mkdir(parents=True, exist_ok=True)
    name, _, number = settings["kill"].partition(":")
    left = int(number or 0)

    def reach(reached: str) -> None:
        nonlocal left
        left -= reached == name
        if reached == name and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(batch: int, items: list[Any]) -> None:
        columns = ["id", "publisher", "sequence", "value"]
        rows = [list(row.values()) for b in items for row in b.select(columns).to_pylist()]
        write_rows(directory, batch, rows)

    def make(options: dict[str, str]) -> ZmqStreamReader:
        return ZmqStreamReader(parse(StreamReadOptions, options))

    failpoints.reach = reach
    sources = [partial(make, options) for options in settings["sources"]]
    query = Query(directory, sources, write, settings["trigger"] == "now")
    query.run(lambda: len(read_output(directory)) >= settings["until"])


if __name__ == "__main__":
    main()
