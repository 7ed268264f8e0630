"""The command line: which sections, how large, and where the results go."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.measure import Measurement, temporary_directory
from benchmarks.memory import measure_memory
from benchmarks.metrics import measure_metrics
from benchmarks.planning import measure_planning
from benchmarks.proxy import measure_proxy
from benchmarks.queries import spark_session
from benchmarks.report import write_results
from benchmarks.sequences import measure_sequences
from benchmarks.sink import measure_sink
from benchmarks.source import measure_source
from benchmarks.transactions import measure_transactions
from zmq_datasource.spark.worker import LOGGING_VARIABLE

__all__ = ["main"]

_SECTIONS = ("source", "sequences", "sink", "transactions", "metrics", "proxy", "memory", "planning")


def main() -> None:
    """Measure, and write ``results.json`` and ``RESULTS.md``."""
    arguments = _arguments()
    began = time.monotonic()
    measured = []
    with temporary_directory() as scratch:
        _quiet(scratch / "logging.json")
        for measurement in _measure(arguments.only or _SECTIONS, scratch, arguments.scale, arguments.rounds):
            measured.append(replace(measurement, scale=arguments.scale))
            print(
                f"{time.monotonic() - began:6.0f} s  {measurement.section}, {measurement.case}, "
                f"{measurement.method}: {measurement.median:,.0f} {measurement.unit}",
                flush=True,
            )
    write_results(arguments.output, describe_machine(), measured)


def _quiet(configuration: Path) -> None:
    """Have the processes that Spark starts log errors only."""
    levels = {"version": 1, "loggers": {"zmq_datasource": {"level": "ERROR"}}}
    configuration.write_text(json.dumps(levels), encoding="utf-8")
    os.environ[LOGGING_VARIABLE] = str(configuration)


def _measure(sections: Sequence[str], scratch: Path, scale: float, rounds: int) -> Iterator[Measurement]:
    if "planning" in sections:
        yield from measure_planning(rounds)
    if "proxy" in sections:
        yield from measure_proxy(scale, rounds)
    if set(sections) <= {"planning", "proxy"}:
        return
    with spark_session(scratch) as spark:
        if "source" in sections:
            yield from measure_source(spark, scale, rounds)
        if "sequences" in sections:
            yield from measure_sequences(spark, scale, rounds)
        if "sink" in sections:
            yield from measure_sink(spark, scale, rounds)
        if "transactions" in sections:
            yield from measure_transactions(spark, scale, rounds)
        if "metrics" in sections:
            yield from measure_metrics(spark, scale, rounds)
        if "memory" in sections:
            yield from measure_memory(spark, scale)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="size of every run; 0.05 is a smoke run of two minutes (default: 1)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="runs of each case (default: 3; below a scale of 0.5 it is 1)",
    )
    parser.add_argument("--only", choices=_SECTIONS, action="append", help="one section; may be repeated")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent,
        help="directory for results.json and RESULTS.md (default: that of the benchmarks)",
    )
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.scale >= 0.5 else 1
    if arguments.scale <= 0 or arguments.rounds < 1:
        parser.error("--scale must be more than 0, --rounds at least 1")
    return arguments
