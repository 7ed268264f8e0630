"""What the numbers were measured on. No host names, no paths."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil
import zmq

from benchmarks.kafka import kafka_jars
from benchmarks.peers import peer_language
from zmq_datasource.transport import core

__all__ = ["describe_machine"]


def describe_machine() -> dict[str, str]:
    """Name to value, in the order to show."""
    return {
        "date": date.today().isoformat(),
        "CPU": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "pyspark": version("pyspark"),
        "pyzmq": f"{zmq.pyzmq_version()} with libzmq {zmq.zmq_version()}",
        "pyarrow": version("pyarrow"),
        "zmq_datasource": f"{version('zmq_datasource')}, {core.NAME} core",
        "peers": peer_language(),
        "Kafka": kafka_jars(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
