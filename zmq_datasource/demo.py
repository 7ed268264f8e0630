"""The demo: a live feed through Spark and out again, with an account of every message.

Three streaming queries read one feed, each with its own socket and its own log: an aggregation, a sink with a fast
consumer, and a sink with a consumer that is too slow. The publisher and the consumers are threads of this process.
Spark receives and sends in processes of its own.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TypeAlias

import zmq
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from zmq_datasource import metrics, register
from zmq_datasource.errors import LogError, ZmqDataSourceError
from zmq_datasource.log import LogStorage
from zmq_datasource.monitoring.tables import Cell, Row, shown, stack
from zmq_datasource.monitoring.view import LiveView
from zmq_datasource.spark.queries import records

__all__ = ["Account", "findings", "run_demo"]

_PUBLISHED_PER_SECOND, _SLOW_PER_SECOND = 2000, 1000
_CITIES = ("athens", "berlin", "lisbon", "nairobi", "oslo", "toronto")
_AGGREGATION, _FAST, _SLOW = "aggregation", "fast sink", "slow sink"
# Short queues at every stage: the kernel's buffers would hide how slow the consumer is.
_SLOW_SINK = {"noblock": "true", "sndhwm": "500", "zmq.sndbuf": "4096", "linger": "10s"}
_SLOW_CONSUMER = {"rcvhwm": 10, "rcvbuf": 4096}


# The figures of one query's messages, by the names in ``_FIGURES``. Unknown figures are left out.
Account: TypeAlias = dict[str, int]


def run_demo(console: Console, seconds: float, feed: Mapping[str, str] | None = None) -> None:
    """Stream for ``seconds``, and show what became of every message.

    Args:
        seconds: How long messages flow; starting and ending come on top.
        feed: Options of the user's own feed; None for the demo's publisher.

    Raises:
        ZmqDataSourceError: The demo could not be shown; one line says why.
    """
    with ExitStack() as ending:
        work = Path(tempfile.mkdtemp(prefix="zmq-datasource-demo-"))
        ending.callback(shutil.rmtree, work, ignore_errors=True)
        ending.callback(_wait_for_receivers, work)
        run = _Run(console, work)
        try:
            accounts = run.stream(seconds, feed)
        except ZmqDataSourceError:
            raise
        except Exception as e:
            kept = f"{work}.log"
            with suppress(OSError):
                shutil.copyfile(work / "spark.log", kept)
            raise ZmqDataSourceError(f"{_plain_reason(e)} (Spark's log: {kept})") from e
    if feed is not None and not any(account["received"] for account in accounts.values()):
        raise ZmqDataSourceError(
            f"nothing was received in {seconds:g} s from {feed['connect']}: no program publishes there, or it "
            "publishes other topics, or from a socket of another type"
        )
    largest = sorted(run.counts.items(), key=lambda item: -item[1])[:6]
    topics = [Row("topic", topic, {"messages": Cell(f"{count:,}")}) for topic, count in largest]
    rows = [
        Row("query", name, {figure: shown(account.get(figure), "{:,}".format) for figure in _FIGURES})
        for name, account in accounts.items()
    ]
    console.print(stack((topics, rows), console.width), "")
    sentences = Table.grid(padding=(0, 1))
    for good, sentence in findings(accounts):
        sentences.add_row({True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[good], Text(sentence))
    console.print(sentences)


# Equations between the figures, each with the usual reason for a difference.
_EQUATIONS = {
    "published = received": "the publisher dropped them at its queue, or this machine was too busy to receive them",
    "received = rows": "they wait in the log for the next run of the query",
    "rows = sent + dropped": "the sink has not counted them",
    "sent = arrived": "accepted by a PUSH is not delivered; below 0, a batch was cut off before it was counted",
}
_FAULTS = ("rows = sent + dropped", "sent = arrived")  # a PUB may drop, and rows may wait
_FIGURES = ("published", "received", "rows", "sent", "dropped", "arrived")


def findings(accounts: Mapping[str, Account]) -> Iterator[tuple[bool | None, str]]:
    """Yield a verdict (True: good, False: a fault, None: neither) and a sentence for each finding."""
    for equation, why in _EQUATIONS.items():
        whole, *parts = re.findall(r"\w+", equation)
        known = {name: a for name, a in accounts.items() if {whole, *parts} <= a.keys()}
        missing = {name: a[whole] - sum(a[part] for part in parts) for name, a in known.items()}
        differences = ", ".join(f"{n:,} ({name})" for name, n in missing.items() if n)
        if not known:
            yield None, f"{equation}: not known. A PUB drops without a word, and a PUSH shares its messages."
        elif differences:
            yield False if equation in _FAULTS else None, f"{equation}, but for {differences}: {why}."
        else:
            yield True, f"{equation}, in each query."
    if dropped := accounts.get(_SLOW, {}).get("dropped"):
        yield (
            None,
            f"{_SLOW}: {dropped:,} rows found the queue full and were dropped and counted, as asked for "
            f"({_SLOW_SINK['sndhwm']} messages of queue, a consumer of {_SLOW_PER_SECOND} a second, noblock=true). "
            "With noblock=false, the default, the sink waits for its consumer instead.",
        )


class _Run:
    """One run of the demo.

    Attributes:
        queries: By name.
        counts: The newest result of the aggregation: messages by topic.
    """

    def __init__(self, console: Console, work: Path) -> None:
        self._console, self._work = console, work
        self._live = Live(console=console, transient=True)
        self._spinner = Spinner("dots")
        self._view = LiveView(width=console.width)
        self._interrupted = threading.Event()
        self._publisher: _Peer | None = None
        self._consumers: dict[str, _Peer] = {}
        self.queries: dict[str, StreamingQuery] = {}
        self.counts: dict[str, int] = {}

    def stream(self, seconds: float, feed: Mapping[str, str] | None) -> dict[str, Account]:
        """Stream for ``seconds``, and return the accounts of the queries.

        With the demo's own publisher, first wait up to a minute for the queries to read the rest.
        """
        with self._live, ExitStack() as ending:  # what is entered last ends first
            self._begin("Starting Spark ...")
            slowly = partial(_consume, pause=1 / _SLOW_PER_SECOND)
            self._consumers = {
                _FAST: _Peer(zmq.PULL, _consume),
                _SLOW: _Peer(zmq.PULL, slowly, **_SLOW_CONSUMER),
            }
            for consumer in self._consumers.values():
                ending.callback(consumer.stop)
            spark = ending.enter_context(_spark_session(self._work))
            if feed is None:
                # After a pause of a busy machine, all that is due goes out at once: the queue has room for it.
                queue = 10 * _PUBLISHED_PER_SECOND
                self._publisher = _Peer(zmq.XPUB, _publish, xpub_verbose=1, linger=2000, sndhwm=queue)
                # It stops before Spark: a receiver that stops drains its socket as long as messages come.
                ending.callback(self._publisher.stop)
                feed = {"connect": self._publisher.endpoint, "topics": "weather.", "rcvhwm": "100"}
            for signum in (signal.SIGINT, signal.SIGTERM):
                # PySpark's own handler calls the JVM, which fails within another call: `_wait` raises instead.
                signal.signal(signum, lambda *_: self._interrupted.set())
                # A second Ctrl-C must not break off the end, or processes would be left.
                ending.callback(signal.signal, signum, signal.SIG_IGN)

            self._begin("Starting three streaming queries ...")
            for name, options in ((_AGGREGATION, {}), (_FAST, {}), (_SLOW, _SLOW_SINK)):
                self.queries[name] = self._start(spark, name, feed, options)
            if not self._wait(60, lambda: all(map(self._receives, self.queries))):
                raise ZmqDataSourceError("the queries did not begin to receive within 60 s")
            self._begin(f"Streaming for {seconds:g} s ...")
            self._wait(seconds)
            if self._publisher is not None:
                self._begin("Reading the rest ...")
                self._publisher.stop()
                # One second later all has come that the publisher did not drop.
                came = datetime.now(UTC) + timedelta(seconds=1)
                self._wait(60, lambda: all(self._has_read_all(name, came) for name in self.queries))
            self._begin("Stopping the queries ...")
            for query in self.queries.values():
                # Between two batches, so that no batch is left half counted.
                self._wait(10, lambda query=query: not query.status["isTriggerActive"])  # type: ignore[misc]
                query.stop()
            for consumer in self._consumers.values():
                consumer.stop()
            return {name: self._account(name) for name in self.queries}

    def _start(
        self, spark: SparkSession, name: str, feed: Mapping[str, str], options: Mapping[str, str]
    ) -> StreamingQuery:
        own = {"walLocation": str(self._work / name / "log")}
        messages = spark.readStream.format("zmq").options(**feed, **own).load()
        if name == _AGGREGATION:
            count = messages.groupBy("topic").count()
            writer = count.writeStream.outputMode("complete").foreachBatch(self._take_counts)
        else:
            writer = messages.select("topic", "value").writeStream.format("zmq")
            writer = writer.options(connect=self._consumers[name].endpoint, **options)
        # Each batch of a sink costs one start of a Python process, in which Spark commits it.
        writer = writer.queryName(name).trigger(processingTime="2 seconds")
        return writer.option("checkpointLocation", str(self._work / name / "checkpoint")).start()

    def _take_counts(self, counts: DataFrame, _batch: int) -> None:
        """Called by Spark for each batch of the aggregation."""
        self.counts = {row["topic"] or "(no topic frame)": row["count"] for row in counts.collect()}

    def _account(self, name: str) -> Account:
        """The account of a query as of its newest event."""
        last = metrics(self.queries[name]).last
        account = {} if self._publisher is None else {"published": self._publisher.count}
        account["received"] = last["sources"][0]["metrics"]["messagesReceived"] or 0
        if name == _AGGREGATION:
            return account | {"rows": sum(self.counts.values())}
        total = last["sink"]["metrics"]["total"]
        sink = {figure: total[figure] or 0 for figure in ("rows", "sent", "dropped")}
        return account | sink | {"arrived": self._consumers[name].count}

    def _receives(self, name: str) -> bool:
        """Whether messages can come; the publisher begins when all queries have subscribed."""
        if self._publisher is not None:
            return self._publisher.count > 0
        return metrics(self.queries[name]).last["sources"][0]["metrics"]["source"] is not None

    def _has_read_all(self, name: str, came: datetime) -> bool:
        """Whether all messages are rows, as of a trigger after ``came``."""
        began, account = metrics(self.queries[name]).last["timestamp"], self._account(name)
        return (
            began is not None
            and datetime.fromisoformat(began) >= came
            and account["rows"] == account["received"]
        )

    def _begin(self, stage: str) -> None:
        self._spinner.update(text=Text(stage, style="bold"))
        if not self._console.is_terminal:
            self._console.print(stage, style="dim")
        self._show()

    def _wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._show()
            if done():
                return True
            if self._interrupted.wait(min(0.25, left)):
                raise KeyboardInterrupt
        return False

    def _show(self) -> None:
        """Show the live view of all queries on a terminal. Raises the error that has ended a query."""
        for query in self.queries.values():
            if error := query.exception():
                raise error
        found = [record for query in self.queries.values() for record in records(metrics(query).last)]
        self._live.update(Group(self._spinner, self._view.render(found)) if found else self._spinner)


class _Peer:
    """A program beside Spark: a socket at a port of its own, and a thread that works with it until ``stop``.

    Attributes:
        count: Messages published or consumed so far.
    """

    def __init__(self, kind: int, work: Callable[[_Peer], None], **options: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name.upper()), value)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.count = 0
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[_Peer], None]) -> None:
        with self._context, self.socket:  # at the end it waits for linger
            work(self)

    def stop(self) -> None:
        """Make the thread finish, and wait for it. After this ``count`` is final."""
        self.stopping.set()
        self._thread.join()


def _publish(peer: _Peer) -> None:
    """Publish numbered reports, from the moment that all three queries have subscribed.

    An XPUB is a PUB that hears subscriptions. So there is no slow joiner, and what is published
    can be compared with what is received.
    """
    subscribed = 0
    while subscribed < 3 and not peer.stopping.is_set():
        if peer.socket.poll(50):
            subscribed += peer.socket.recv()[:1] == b"\x01"
    began = time.monotonic()
    while not peer.stopping.wait(0.005):
        due = int((time.monotonic() - began) * _PUBLISHED_PER_SECOND)
        for i in range(peer.count, due):
            topic = f"weather.{_CITIES[i % len(_CITIES)]}"
            peer.socket.send_multipart([topic.encode(), b"report %d" % i])
        peer.count = due


def _consume(peer: _Peer, pause: float = 0.0) -> None:
    while True:
        last = peer.stopping.is_set()
        if peer.socket.poll(500):
            peer.socket.recv_multipart()
            peer.count += 1
            peer.stopping.wait(pause)
        elif last:  # half a second without a message after the last one
            return


@contextmanager
def _spark_session(work: Path) -> Iterator[SparkSession]:
    """Start Spark with the files in ``conf``; at the end stop it and wait until its JVM is gone.

    What the JVM and Spark's Python processes write to stdout and stderr goes to ``work/spark.log``.
    """
    here = Path(__file__).resolve()  # an installed package has a copy of them beside this module
    conf = next(place for place in (here.parent / "conf", here.parents[1] / "conf") if place.is_dir())
    log4j = f"-Dlog4j2.configurationFile={(conf / 'log4j2.properties').as_uri()}"
    submit = ["--properties-file", str(conf / "spark-defaults.conf"), "--driver-java-options", log4j]
    # Not as SPARK_CONF_DIR: Java shares classes among JVMs (CDS) only where no directory with files is among the
    # places that it loads them from.
    os.environ.pop("SPARK_CONF_DIR", None)
    os.environ["PYSPARK_SUBMIT_ARGS"] = shlex.join([*submit, "pyspark-shell"])
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_DIRS"] = str(work)
    spark_log = work / "spark.log"
    logging.basicConfig(filename=spark_log)  # the demo shows the accounts of sinks in its own way
    try:
        with spark_log.open("ab") as log:
            # A session of its own: the terminal's Ctrl-C reaches the demo only, which stops Spark.
            popen = {"start_new_session": True, "stdout": log, "stderr": log}
            gateway = launch_gateway(popen_kwargs=popen)  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as e:
        said = spark_log.read_text(errors="replace").strip().splitlines()
        raise ZmqDataSourceError(
            "starting Spark: its JVM ended at once; Spark needs Java 17 or newer on the PATH or in JAVA_HOME"
            + (f" (it said: {said[0]})" if said else "")
        ) from e
    try:
        with SparkSession(SparkContext(gateway=gateway)) as spark:
            register(spark)
            yield spark
    finally:
        try:
            gateway.proc.communicate(timeout=15)  # closes its standard input, which ends it
        except subprocess.TimeoutExpired:
            gateway.proc.kill()


def _wait_for_receivers(work: Path) -> None:
    """Wait until the receivers have released their locks. Spark does not wait for them to drain and seal."""
    for location in work.glob("*/log"):
        log = LogStorage(str(location))
        for partition in log.partitions():
            with suppress(LogError):
                log.of(partition).lock(15).release()


def _plain_reason(error: Exception) -> str:
    """The line that matters of what Spark reports: a Python traceback within a JVM one."""
    text = str(error)
    lines = re.findall(r"zmq_datasource\.errors\.\w+: (.+)", text)[-1:] or text.strip().splitlines()
    return str(lines[0]).strip() if lines else type(error).__name__
