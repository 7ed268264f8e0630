"""Receivers on executors: Spark jobs whose tasks receive a feed, each into its own log partition.

The rules:

* A task does the same as ``zmq-datasource receive --partition K/N``: it takes the lock of its partition, or waits for
  it.
* Each receiver is a job with one task, because Spark kills all tasks of a job when one fails.
* When an executor dies, its tasks lose their locks. Spark starts the tasks elsewhere, and they continue the same
  partitions. When a job fails, it is started again.
* A task gives Spark no rows until it ends, so Spark must not kill workers that are silent.
* A file or object beside the log ends the tasks (``LogStorage.ask_to_end``). Spark could only kill them, and the
  messages in the socket of a PULL would be lost.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from zmq_datasource.errors import OptionError, SocketError
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.receive import receive_until
from zmq_datasource.source.location import log_storage
from zmq_datasource.spark.datasource import check_options
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Receivers", "start_receivers"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0
# A job that has run for this long before it fails is started again after the first pause.
_SETTLED_SECONDS = 60.0
# A task gives a row if it has failed at its end.
_FAILURES = pa.schema([("failure", pa.string())])


def start_receivers(spark: SparkSession, options: Mapping[str, str]) -> Receivers:
    """Receive a feed on the executors, into a log that queries read with ``walLocation`` or ``walStore`` alone.

    Each of the ``receivers`` is a task that runs until ``stop``, and needs its own core. Set ``spark.task.maxFailures``
    to more than 1: Spark then repeats a task that fails. After so many failures its job is started again.

    Args:
        spark: The session; also one of Spark Connect.
        options: The options of ``spark.readStream``, with ``receivers``. ``walLocation`` must be a directory that all
            executors and the driver share, unless the log is in ``walStore``. A task binds on the executor where it
            runs.

    Raises:
        OptionError: An option is wrong, or Spark would kill the receivers for being silent.
    """
    given = {name: str(value) for name, value in options.items()}
    parsed = parse(StreamReadOptions, given)
    if not parsed.has_endpoints:
        raise OptionError("neither connect nor bind is set; name the feed to receive")
    if not parsed.has_log:
        raise OptionError(
            "neither walLocation nor walStore is set: receivers on executors fill a log that queries read elsewhere; "
            "name a directory that all executors and the driver share, or object storage"
        )
    check_options(parsed)
    _refuse_idle_timeout(spark)
    return Receivers(spark, parsed)


def _refuse_idle_timeout(spark: SparkSession) -> None:
    def setting(name: str) -> str:
        # A session's own setting comes before that of the application.
        everywhere = spark.conf.get(f"spark.python.worker.{name}", "")
        return spark.conf.get(f"spark.sql.execution.pyspark.udf.{name}", everywhere) or ""

    seconds = setting("idleTimeoutSeconds")
    if setting("killOnIdleTimeout") == "true" and seconds.rstrip("s") not in ("", "0"):
        raise OptionError(
            "killOnIdleTimeout=true: a receiver gives Spark nothing until it ends, so Spark would "
            f"kill it after {seconds.rstrip('s')} s, and what is in its socket would be lost; set "
            "spark.sql.execution.pyspark.udf.killOnIdleTimeout=false for this session, or receive with zmq-datasource "
            "receive, outside of Spark"
        )


class Receivers:
    """Running receivers. The end of a ``with`` block stops them.

    Attributes:
        restarts: How many times a job has failed and was started again.
        failure: The error of the last job that has failed.
    """

    def __init__(self, spark: SparkSession, options: StreamReadOptions) -> None:
        self._spark = spark
        self._options = options
        self._storage = log_storage(options)
        self._storage.open_log()  # a query may start before the first task
        self._token = uuid.uuid4().hex
        self._ending = threading.Event()
        self.restarts = 0
        self.failure: Exception | None = None
        self._failed_at_end: Exception | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"zmq-receivers-{number}", daemon=True)
            for number in range(options.receivers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_active(self) -> bool:
        """Whether a receiver has not ended. It may still wait for a free core, or for its next start."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout: float = 60.0) -> None:
        """Stop all receivers: each drains its socket and seals its chunk.

        Args:
            timeout: Seconds after which Spark kills the receivers that have not ended.

        Raises:
            SocketError: A receiver was killed or has failed at its end. The messages that it had not sealed are lost.
            Exception: Spark's own error, if a job has ended in another way.
        """
        self._ending.set()
        if self.is_active:
            self._storage.ask_to_end(self._token)
            try:
                self._join(timeout)
                if self.is_active:
                    self._spark.interruptTag(self._tag)
                    self._join(timeout)
                    raise SocketError(
                        f"stopping the receivers of {self._storage}: some had not ended after {timeout:.0f} s, and "
                        "Spark has killed them; what they had received and not sealed is lost"
                    )
            finally:
                self._storage.remove_end(self._token)
        if self._failed_at_end is not None:
            raise self._failed_at_end

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _tag(self) -> str:
        return f"zmq-receivers-{self._token}"

    def _run(self, number: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        self._spark.addTag(self._tag)
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._run_job(number)
            except Exception as e:
                self.failure = e
                if self._ending.is_set():
                    self._failed_at_end = e
                    return
                if _is_stopped(self._spark):
                    _log.warning("receiving into %s has ended with its Spark session", self._storage)
                    return
                self.restarts += 1
                if time.monotonic() - began >= _SETTLED_SECONDS:
                    pause = _FIRST_PAUSE_SECONDS
                _log.warning(
                    "receiving into %s: the Spark job has failed and is started again: %s",
                    self._storage.of(number),
                    e,
                )
                self._ending.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _run_job(self, number: int) -> None:
        numbers = self._spark.range(number, number + 1, 1, 1)
        failures = numbers.mapInArrow(_task(self._options, self._token), "failure STRING")
        for (failure,) in failures.collect():
            raise SocketError(failure)


def _is_stopped(spark: SparkSession) -> bool:
    stopped: bool | None = getattr(spark, "is_stopped", None)  # Spark Connect
    return spark.sparkContext._jsc is None if stopped is None else stopped


def _task(
    options: StreamReadOptions, token: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def receive(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                failure = _receive(options, token, number)
                if failure is not None:
                    yield pa.RecordBatch.from_pylist([{"failure": failure}], _FAILURES)

    return receive


def _receive(options: StreamReadOptions, token: str, partition: int) -> str | None:
    """Receive until ``stop`` is called. Returns the error that receiving has met after that; None if there was none.

    This error is not raised, because Spark would repeat the task, and the repeated task would succeed.
    """
    set_up_worker()
    storage = log_storage(options)

    def stopped(seconds: float) -> bool:
        time.sleep(seconds)
        return storage.is_asked_to_end(token)

    try:
        receive_until(options, partition, stopped)
    except Exception as e:
        if not storage.is_asked_to_end(token):
            raise
        return f"stopping the receiver of {storage.of(partition)}: {e}"
    return None
