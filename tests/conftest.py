"""Shared by all tests: the interpreter for Spark's workers, and one Spark session."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import zmq

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.bucket_server import BucketServer

# Before Spark starts: workers must be able to import what the tests import.
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
os.environ["TZ"] = "UTC"
# NumPy's threads would spin in each Python process, and nothing is computed there.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Every JVM of the tests lives for seconds: the optimising compiler and parallel collector cost it more than they save.
JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
os.environ["SPARK_LAUNCHER_OPTS"] = os.environ["EXECUTOR_OPTS"] = JVM_OPTIONS
_ARCHIVE = Path(sys.prefix, "spark.jsa")  # made by tests.support.spark_archive
if _ARCHIVE.exists() and " " not in str(_ARCHIVE):
    os.environ["EXECUTOR_OPTS"] += f" -XX:SharedArchiveFile={_ARCHIVE} -Xshare:auto -Xlog:cds*=off"
# Spark's default writes a checkpoint through Hadoop's FileContext, which without Hadoop's native library starts forty
# processes (chmod, readlink) a micro-batch; this one starts eight.
os.environ["SPARK_SUBMIT_OPTS"] = (
    os.environ["EXECUTOR_OPTS"] + " -Dspark.sql.streaming.checkpointFileManagerClass="
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)

# Hypothesis has an example fail for the time that it takes, which beside other tests says nothing of ours.
hypothesis.settings.register_profile(
    "ours", deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ours")


# Half a minute and more a test: notebooks, demos, and kills of whole drivers.
_LONGEST = {
    "test_notebooks.py",
    "demo/test_demo.py",
    "spark/test_crash.py",
    "spark/test_transactions.py",
}
# With so many of the others behind each, the last of those that take longest begins well before the end.
_BETWEEN = 3


# What the text of a file has whose tests start processes or servers, or wait for time to pass.
_STARTS_PROCESSES = re.compile(
    r"subprocess|multiprocessing|mark\.spark|tests\.weather|log\.orders"
    r"|support\.(proxies|programs|middlebox)|bucket: str|time\.sleep|hold_for"
)


def _starts_processes(path: Path) -> bool:
    return _STARTS_PROCESSES.search(path.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the files without a test that is asked for: that takes seconds, in each process."""
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or not asked:
        return None
    if "not processes" in asked:
        return True if _starts_processes(collection_path) else None
    only = re.match(r"(spark|alone|slow|long)\b", asked)
    if only is None:
        return None
    return True if f"mark.{only[1]}" not in collection_path.read_text(encoding="utf-8") else None


def _mark_processes(items: list[pytest.Item]) -> None:
    starting = {path for path in {item.path for item in items} if _starts_processes(path)}
    for item in items:
        if item.path in starting:
            item.add_marker("processes")


@pytest.hookimpl(tryfirst=True)  # before the selection by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread out what takes longest, in turn from each of those files.

    Several of them side by side would have the machine to themselves, and their Spark gives up a Python process that
    has not connected back within 10 s; what waits most of its time fills the rest.
    """
    _mark_processes(items)
    tests = Path(__file__).parent
    assert all((tests / name).exists() for name in _LONGEST)
    files: dict[str, list[pytest.Item]] = {name: [] for name in sorted(_LONGEST)}
    others = []
    for item in items:
        files.get(item.path.relative_to(tests).as_posix(), others).append(item)
    others.sort(key=lambda item: item.get_closest_marker("spark") is None)
    longest = [item for turn in zip_longest(*files.values()) for item in turn if item is not None]
    behind = iter(others)
    items[:] = []
    for item in longest:
        items += [item, *islice(behind, _BETWEEN)]
    items += behind


def _log_to_file(path: Path) -> None:
    config = {
        "version": 1,
        "formatters": {"plain": {"format": "%(process)d %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"file": {"class": "logging.FileHandler", "filename": str(path), "formatter": "plain"}},
        "loggers": {"zmq_datasource": {"level": "INFO", "handlers": ["file"]}},
    }
    settings = path.with_suffix(".json")
    settings.write_text(json.dumps(config))
    os.environ["ZMQ_DATASOURCE_LOGGING"] = str(settings)


@pytest.fixture(scope="session", autouse=True)
def _log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the package logs in Spark's processes, for the tests to read."""
    path = tmp_path_factory.mktemp("log") / "package.log"
    path.touch()
    _log_to_file(path)
    return path


@pytest.fixture
def package_log(_log_file: Path) -> Callable[[], str]:
    """What Spark's Python processes have logged since the test began."""
    begin = _log_file.stat().st_size

    def read() -> str:
        return _log_file.read_bytes()[begin:].decode()

    return read


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from tests.support.streams import new_session  # noqa: PLC0415 - the fast tests do without Spark

    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stopTimeout": "30s",
    }
    session = new_session(tmp_path_factory.mktemp("spark"), conf=conf)
    yield session
    session.stop()


class _RememberingContext(zmq.Context[zmq.Socket[bytes]]):
    made: list[zmq.Socket[bytes]]

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "made", [])

    def socket(self, *args: Any, **kwargs: Any) -> zmq.Socket[bytes]:
        sock = super().socket(*args, **kwargs)
        self.made.append(sock)
        return sock


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZeroMQ context whose sockets are dropped at the end, whatever they still hold."""
    made = _RememberingContext()
    yield made
    for sock in made.made:
        sock.close(linger=0)
    made.term()


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """Give SIGTERM and SIGINT their handlers back. A reader's ``stop`` ignores them, and programs that later tests
    start would inherit that, so that nothing could end them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def server() -> Iterator[BucketServer]:
    """A server of buckets."""
    from tests.support.bucket_server import BucketServer  # noqa: PLC0415 - it takes a second, and most do without

    with BucketServer() as running:
        yield running


@pytest.fixture
def bucket(server: BucketServer) -> str:
    """A new place in a bucket, as ``walStore``."""
    return server.location(uuid.uuid4().hex)


@pytest.fixture
def ipc_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path for an ipc endpoint (they are limited to 107 bytes)."""
    return tmp_path_factory.mktemp("i") / "s"
