"""A Spark session that is started with the files in ``conf`` and leaves nothing behind.

The files are in the repository's ``conf`` directory, and in an installed package beside this
module (the wheel is built with a copy of that directory).
"""

from __future__ import annotations

import json
import logging.config
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from zmq_datasource import register
from zmq_datasource.demo.errors import DemoError
from zmq_datasource.spark.worker import LOGGING_VARIABLE

__all__ = ["conf_directory", "spark_session"]

_END_SECONDS = 15.0
_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def conf_directory() -> Path:
    """Where spark-defaults.conf, log4j2.properties and logging.json are."""
    here = Path(__file__).resolve()
    for directory in (here.parent / "conf", here.parents[2] / "conf"):
        if (directory / "spark-defaults.conf").is_file():
            return directory
    raise DemoError("finding the configuration of the demo: this installation has no conf directory")


def write_logging_conf(target: Path, log_file: Path) -> None:
    """Copy conf/logging.json to ``target``, with ``log_file`` as the file that it writes to."""
    conf = json.loads((conf_directory() / "logging.json").read_text(encoding="utf-8"))
    conf["handlers"]["file"]["filename"] = str(log_file)
    target.write_text(json.dumps(conf), encoding="utf-8")


@contextmanager
def spark_session(work: Path) -> Iterator[SparkSession]:
    """Start Spark; at the end stop it and wait until its JVM is gone.

    What the JVM and Spark's Python processes write to stderr goes to ``work/spark.log``.

    Raises:
        DemoError: Spark does not start, mostly for want of a Java 17.
    """
    logging_conf = work / "logging.json"
    write_logging_conf(logging_conf, work / "zmq_datasource.log")
    # What sinks tell this process is shown in the demo's own way.
    logging.config.dictConfig(json.loads(logging_conf.read_text(encoding="utf-8")))
    conf = conf_directory()
    log4j = f"-Dlog4j2.configurationFile={(conf / 'log4j2.properties').as_uri()}"
    submit = ["--properties-file", str(conf / "spark-defaults.conf"), "--driver-java-options", log4j]
    # On a local disk, as here, it does the same and starts fewer processes (docs/tuning.md).
    submit += ["--conf", f"spark.sql.streaming.checkpointFileManagerClass={_CHECKPOINTS}"]
    os.environ.pop("SPARK_CONF_DIR", None)
    os.environ.update(
        {
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            # Not as SPARK_CONF_DIR: Java shares classes among JVMs (CDS) only where no directory with files is among
            # the places that it loads them from.
            "PYSPARK_SUBMIT_ARGS": shlex.join([*submit, "pyspark-shell"]),
            "SPARK_LOCAL_DIRS": str(work),
            LOGGING_VARIABLE: str(logging_conf),
        }
    )
    spark_log = work / "spark.log"
    with spark_log.open("wb") as log:
        gateway = _launch(spark_log, stdout=log, stderr=log)
    try:
        context = SparkContext(gateway=gateway)
        spark = SparkSession(context)
        register(spark)
        try:
            yield spark
        finally:
            spark.stop()
    finally:
        _end(gateway)


def _launch(spark_log: Path, **popen_kwargs: Any) -> Any:
    try:
        # A session of its own: the terminal's Ctrl-C reaches the demo only, which stops Spark.
        return launch_gateway(  # type: ignore[no-untyped-call]
            popen_kwargs={"start_new_session": True, **popen_kwargs}
        )
    except PySparkRuntimeError as e:
        said = spark_log.read_text(errors="replace").strip().splitlines()
        raise DemoError(
            "starting Spark: its JVM ended at once; Spark needs Java 17 or newer on the PATH or in JAVA_HOME"
            + (f" (it said: {said[0]})" if said else "")
        ) from e


def _end(gateway: Any) -> None:
    """Wait for the JVM to end, which it does when its standard input is closed."""
    with suppress(Exception):  # it may have crashed before
        gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # A later session of this Python process would otherwise call the JVM that is gone.
    SparkContext._gateway = None
    SparkContext._jvm = None
