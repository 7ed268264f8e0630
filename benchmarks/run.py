"""The command line: which sections, how large, and where the results go."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks import kafka, latency, loss, proxy, receiving, scaling, sink, source, transactions
from benchmarks.machine import describe_machine
from benchmarks.measure import Measurement, Times, temporary_directory
from benchmarks.queries import spark_session
from benchmarks.report import page, read_results, write_results
from zmq_datasource.spark.worker import LOGGING_VARIABLE

__all__ = ["SECTIONS", "main"]

# In the order of RESULTS.md.
SECTIONS = tuple(
    module.SECTION for module in (source, receiving, latency, sink, transactions, kafka, proxy, scaling, loss)
)
# Those without Spark are measured first. Kafka's has a Spark session of its own, with the connector.
_WITHOUT_SPARK: dict[str, Callable[[Times], Iterator[Measurement]]] = {
    "receiving": receiving.measure_receiving,
    "scaling": scaling.measure_scaling,
    "proxy": proxy.measure_proxy,
}
_WITH_SPARK: dict[str, Callable[[SparkSession, Times], Iterator[Measurement]]] = {
    "source": source.measure_source,
    "sink": sink.measure_sink,
    "transactions": transactions.measure_transactions,
    "loss": loss.measure_loss,
    "latency": latency.measure_latency,
}
_SECONDS, _WARM_UP = 10.0, 3.0


def main() -> None:
    """Measure, and write ``results.json`` and ``RESULTS.md``."""
    arguments = _arguments()
    if arguments.page:
        text = page(SECTIONS, *read_results(arguments.output))
        (arguments.output / "RESULTS.md").write_text(text, encoding="utf-8")
        return
    began = time.monotonic()
    machine = describe_machine()
    with temporary_directory() as scratch:
        _quiet(scratch / "logging.json")
        times = Times(
            _SECONDS * arguments.scale, _WARM_UP * arguments.scale, arguments.rounds, arguments.case
        )
        found = _measure(arguments.only or [section.name for section in SECTIONS], scratch, times)
        for _, section in groupby(found, key=lambda measurement: measurement.section):
            measured = []
            for measurement in section:
                measured.append(replace(measurement, scale=arguments.scale))
                print(
                    f"{time.monotonic() - began:6.0f} s  {measurement.section}, {measurement.case}, "
                    f"{measurement.method}: {measurement.median:,.2f} {measurement.unit}",
                    flush=True,
                )
            # After each section, so that an error in a later one loses nothing.
            write_results(arguments.output, SECTIONS, machine, measured, whole=not arguments.case)


def _quiet(configuration: Path) -> None:
    """Let the processes that Spark starts log errors only."""
    levels = {"version": 1, "loggers": {"zmq_datasource": {"level": "ERROR"}}}
    configuration.write_text(json.dumps(levels), encoding="utf-8")
    os.environ[LOGGING_VARIABLE] = str(configuration)


def _measure(sections: Sequence[str], scratch: Path, times: Times) -> Iterator[Measurement]:
    for section, measure in _WITHOUT_SPARK.items():
        if section in sections:
            yield from measure(times)
    if "kafka" in sections:
        yield from kafka.measure_kafka(scratch, times)
    wanted = [measure for section, measure in _WITH_SPARK.items() if section in sections]
    if wanted:
        with spark_session(scratch) as spark:
            for with_spark in wanted:
                yield from with_spark(spark, times)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help=f"of every run; 1 is a window of {_SECONDS:g} s after {_WARM_UP:g} s of warm-up (default: 1)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="runs of each case, after one that does not count (default: 5; below a scale of 0.5 it is 1)",
    )
    parser.add_argument(
        "--only",
        choices=[section.name for section in SECTIONS],
        action="append",
        help="one section; may be repeated",
    )
    parser.add_argument(
        "--case",
        default="",
        help="only cases with this in their name, such as '1 MB'; the other figures stay as they were",
    )
    parser.add_argument(
        "--page", action="store_true", help="measure nothing; write RESULTS.md again from results.json"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).parent,
        help="directory for results.json and RESULTS.md (default: that of the benchmarks)",
    )
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 5 if arguments.scale >= 0.5 else 1
    if arguments.scale <= 0 or arguments.rounds < 1:
        parser.error("--scale must be more than 0, --rounds at least 1")
    return arguments
