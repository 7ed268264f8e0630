"""The command line: which sections, how large, and the results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil
import zmq
from pyspark.sql import SparkSession

from benchmarks import kafka, latency, loss, proxy, receiving, scaling, sink, source, transactions
from benchmarks.measure import Measurement, Times, temporary_directory
from benchmarks.queries import spark_session
from benchmarks.report import page, read_results, write_results
from zmq_datasource.spark.worker import LOGGING_VARIABLE
from zmq_datasource.transport import core

# In the order of RESULTS.md.
SECTIONS = tuple(
    module.SECTION for module in (source, receiving, latency, sink, transactions, kafka, proxy, scaling, loss)
)
# Those without Spark are measured first. Kafka's has a Spark session of its own, with the connector.
_WITHOUT_SPARK: Mapping[str, Callable[[Times], Iterator[Measurement]]] = {
    "receiving": receiving.measure_receiving,
    "scaling": scaling.measure_scaling,
    "proxy": proxy.measure_proxy,
}
_WITH_SPARK: Mapping[str, Callable[[SparkSession, Times], Iterator[Measurement]]] = {
    "source": source.measure_source,
    "sink": sink.measure_sink,
    "transactions": transactions.measure_transactions,
    "loss": loss.measure_loss,
    "latency": latency.measure_latency,
    "scaling": scaling.measure_loads,
}
_SECONDS, _WARM_UP = 10.0, 3.0
_OUTPUT = Path(__file__).parent


def main() -> None:
    """Measure, and write ``results.json`` and ``RESULTS.md``."""
    arguments = _arguments()
    if arguments.page:
        text = page(SECTIONS, *read_results(_OUTPUT))
        (_OUTPUT / "RESULTS.md").write_text(text, encoding="utf-8")
        return
    began = time.monotonic()
    with temporary_directory() as scratch:
        levels = {"version": 1, "loggers": {"zmq_datasource": {"level": "ERROR"}}}
        (scratch / "logging.json").write_text(json.dumps(levels), encoding="utf-8")
        os.environ[LOGGING_VARIABLE] = str(scratch / "logging.json")  # for the processes that Spark starts
        times = Times(_SECONDS * arguments.scale, _WARM_UP * arguments.scale, arguments.rounds)
        for m in _measure(arguments.only or [section.name for section in SECTIONS], scratch, times):
            spent = f"{time.monotonic() - began:6.0f} s"
            print(f"{spent}  {m.section}, {m.case}, {m.method}: {m.median:,.2f} {m.unit}", flush=True)
            # After each figure, so that an error in a later one loses nothing.
            write_results(_OUTPUT, SECTIONS, _machine(), [replace(m, scale=arguments.scale)])


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


def _machine() -> dict[str, str]:
    """What the numbers are measured on, in the order to show. No host names, no paths."""
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    return {
        "date": date.today().isoformat(),
        "CPU": next(models, platform.machine()),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "pyspark": version("pyspark"),
        "pyzmq": f"{zmq.pyzmq_version()} with libzmq {zmq.zmq_version()}",
        "pyarrow": version("pyarrow"),
        "zmq_datasource": f"{version('zmq_datasource')}, {core.NAME} core",
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    help_ = f"of every run; 1 is a window of {_SECONDS:g} s after {_WARM_UP:g} s of warm-up (default: 1)"
    add("--scale", type=float, default=1.0, help=help_)
    add("--rounds", type=int, default=5, help="runs of each case, after one that does not count (default: 5)")
    names = [section.name for section in SECTIONS]
    add("--only", choices=names, action="append", help="one section; may be repeated")
    add("--page", action="store_true", help="measure nothing; write RESULTS.md again from results.json")
    arguments = parser.parse_args()
    if arguments.scale <= 0 or arguments.rounds < 1:
        parser.error("--scale must be more than 0, --rounds at least 1")
    return arguments
