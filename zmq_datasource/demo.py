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
from rich.table import Table
from rich.text import Text

from zmq_datasource import metrics, reason, register
from zmq_datasource.errors import LogError, ZmqDataSourceError
from zmq_datasource.log import LogStorage

_PUBLISHED_PER_SECOND, _SLOW_PER_SECOND = 2000, 1000
_CITIES = ("athens", "berlin", "lisbon", "nairobi", "oslo", "toronto")
_AGGREGATION, _FAST, _SLOW = "aggregation", "fast sink", "slow sink"
# Short queues at every stage: the kernel's buffers would hide how slow the consumer is.
_SLOW_SINK = {"noblock": "true", "sndhwm": "500", "zmq.sndbuf": "4096", "linger": "10s"}
_SLOW_CONSUMER = {"rcvhwm": 10, "rcvbuf": 4096}

# The figures of one query's messages, by the names in ``_FIGURES``. The aggregation sends none.
Account: TypeAlias = dict[str, int]
_FIGURES = ("published", "received", "rows", "sent", "dropped", "arrived")
# Equations between the figures: whether a difference is a fault, and its usual reason.
_EQUATIONS = {
    "published = received": (
        False,
        "the publisher dropped them at its queue, or this machine was too busy to receive them",
    ),
    "received = rows": (False, "they wait in the log for the next run of the query"),
    "rows = sent + dropped": (True, "the sink has not counted them"),
    "sent = arrived": (
        True,
        "accepted by a PUSH is not delivered; below 0, a batch was cut off before it was counted",
    ),
}


def run_demo(console: Console, seconds: float) -> None:
    """Stream for ``seconds``, and show what became of every message. Starting and ending come on top.

    Raises:
        ZmqDataSourceError: The demo could not be shown; one line says why.
    """
    with ExitStack() as ending:
        work = Path(tempfile.mkdtemp(prefix="zmq-datasource-demo-"))
        ending.callback(shutil.rmtree, work, ignore_errors=True)
        ending.callback(_wait_for_receivers, work)
        run = _Run(console, work)
        try:
            accounts = run.stream(seconds)
        except ZmqDataSourceError:
            raise
        except Exception as e:
            kept = f"{work}.log"
            with suppress(OSError):
                shutil.copyfile(work / "spark.log", kept)
            said = (reason(e) or type(e).__name__).partition("\n")[0]
            raise ZmqDataSourceError(f"{said} (Spark's log: {kept})") from e
    topics = _table("topic", "messages")
    for topic, count in sorted(run.counts.items(), key=lambda item: -item[1]):
        topics.add_row(topic, f"{count:,}")
    sentences = Table.grid(padding=(0, 1))
    for good, sentence in findings(accounts):
        sentences.add_row({True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[good], Text(sentence))
    console.print(Group(topics, "", _accounts_table(accounts), "", sentences))


def findings(accounts: Mapping[str, Account]) -> Iterator[tuple[bool | None, str]]:
    """Yield a verdict (True: good, False: a fault, None: neither) and a sentence for each finding."""
    for equation, (fault, why) in _EQUATIONS.items():
        whole, *parts = re.findall(r"\w+", equation)
        known = {name: a for name, a in accounts.items() if {whole, *parts} <= a.keys()}
        missing = {name: a[whole] - sum(a[part] for part in parts) for name, a in known.items()}
        if differences := ", ".join(f"{n:,} ({name})" for name, n in missing.items() if n):
            yield False if fault else None, f"{equation}, but for {differences}: {why}."
        else:
            yield True, f"{equation}, in each query."
    if dropped := accounts.get(_SLOW, {}).get("dropped"):
        yield (
            None,
            f"{_SLOW}: {dropped:,} rows found the queue full and were dropped and counted, as asked for "
            f"({_SLOW_SINK['sndhwm']} messages of queue, a consumer of {_SLOW_PER_SECOND} a second, noblock=true). "
            "With noblock=false, the default, the sink waits for its consumer instead.",
        )


def _table(name: str, *figures: str) -> Table:
    table = Table(name, box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for figure in figures:
        table.add_column(figure, justify="right")
    return table


def _accounts_table(accounts: Mapping[str, Account]) -> Table:
    """The accounts of the queries; a dash for what a query does not do."""
    table = _table("query", *_FIGURES)
    for name, account in accounts.items():
        table.add_row(name, *(f"{account[one]:,}" if one in account else "–" for one in _FIGURES))
    return table


class _Run:
    """One run of the demo.

    Attributes:
        counts: The newest result of the aggregation: messages by topic.
    """

    def __init__(self, console: Console, work: Path) -> None:
        self._console, self._work = console, work
        self._live = Live(console=console, transient=True)
        self._interrupted = threading.Event()
        self._peers: dict[str, _Peer] = {}
        self._queries: dict[str, StreamingQuery] = {}
        self.counts: dict[str, int] = {}

    def stream(self, seconds: float) -> dict[str, Account]:
        """Stream for ``seconds``, wait up to a minute for the queries to read the rest, and stop them.

        Returns:
            The accounts of the queries, by name.
        """
        with self._live, ExitStack() as ending:  # what is entered last ends first
            self._console.print("Starting Spark ...", style="dim")
            slowly = partial(_consume, pause=1 / _SLOW_PER_SECOND)
            self._peers[_FAST] = ending.enter_context(_Peer(zmq.PULL, _consume))
            self._peers[_SLOW] = ending.enter_context(_Peer(zmq.PULL, slowly, **_SLOW_CONSUMER))
            spark = ending.enter_context(_spark_session(self._work))
            # After a pause of a busy machine, all that is due goes out at once: the queue has room for it.
            publisher = _Peer(
                zmq.XPUB, _publish, xpub_verbose=1, linger=2000, sndhwm=10 * _PUBLISHED_PER_SECOND
            )
            # It stops before Spark: a receiver that stops drains its socket as long as messages come.
            self._peers["publisher"] = ending.enter_context(publisher)
            for signum in (signal.SIGINT, signal.SIGTERM):
                # PySpark's own handler calls the JVM, which fails within another call: `_wait` raises instead.
                signal.signal(signum, lambda *_: self._interrupted.set())
                # A second Ctrl-C must not break off the end, or processes would be left.
                ending.callback(signal.signal, signum, signal.SIG_IGN)

            self._console.print("Starting three streaming queries ...", style="dim")
            for name, options in ((_AGGREGATION, {}), (_FAST, {}), (_SLOW, _SLOW_SINK)):
                self._queries[name] = self._start(spark, name, options)
            if not self._wait(60, lambda: publisher.count > 0):
                raise ZmqDataSourceError("the queries did not begin to receive within 60 s")
            self._console.print(f"Streaming for {seconds:g} s ...", style="dim")
            self._wait(seconds)
            self._console.print("Reading the rest ...", style="dim")
            publisher.stop()
            self._wait(60, lambda: all(a["rows"] == publisher.count for a in self._accounts().values()))
            self._console.print("Stopping the queries ...", style="dim")
            for query in self._queries.values():
                # Between two batches, so that no batch is left half counted.
                self._wait(10, lambda query=query: not query.status["isTriggerActive"])  # type: ignore[misc]
                query.stop()
            for peer in self._peers.values():
                peer.stop()
            return self._accounts()

    def _start(self, spark: SparkSession, name: str, options: Mapping[str, str]) -> StreamingQuery:
        reader = spark.readStream.format("zmq").option("connect", self._peers["publisher"].endpoint)
        reader = reader.options(topics="weather.", rcvhwm="100", walLocation=str(self._work / name / "log"))
        if name == _AGGREGATION:
            count = reader.load().groupBy("topic").count()
            writer = count.writeStream.outputMode("complete").foreachBatch(self._take_counts)
        else:
            writer = reader.load().select("topic", "value").writeStream.format("zmq")
            writer = writer.options(connect=self._peers[name].endpoint, **options)
        # Each batch of a sink costs one start of a Python process, in which Spark commits it.
        writer = writer.queryName(name).trigger(processingTime="2 seconds")
        return writer.option("checkpointLocation", str(self._work / name / "checkpoint")).start()

    def _take_counts(self, counts: DataFrame, _batch: int) -> None:
        """Called by Spark for each batch of the aggregation."""
        self.counts = {row["topic"]: row["count"] for row in counts.collect()}

    def _accounts(self) -> dict[str, Account]:
        """The accounts of the queries as of their newest events."""
        return {name: self._account(name) for name in self._queries}

    def _account(self, name: str) -> Account:
        last = metrics(self._queries[name]).last
        received = last["sources"][0]["metrics"]["messagesReceived"] or 0
        account = {"published": self._peers["publisher"].count, "received": received}
        if name == _AGGREGATION:
            return account | {"rows": sum(self.counts.values())}
        total = last["sink"]["metrics"]["total"]
        sink = {figure: total[figure] or 0 for figure in ("rows", "sent", "dropped")}
        return account | sink | {"arrived": self._peers[name].count}

    def _wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``done``, and show the accounts on a terminal. Raises the error that has ended a query."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for query in self._queries.values():
                if error := query.exception():
                    raise error
            self._live.update(_accounts_table(self._accounts()))
            if done():
                return True
            if self._interrupted.wait(min(0.25, left)):
                raise KeyboardInterrupt
        return False


class _Peer:
    """A program beside Spark: a socket at a port of its own, and a thread that works with it until ``stop``.

    Attributes:
        count: Messages published or consumed so far; final after ``stop``.
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
        self.stopping.set()
        self._thread.join()

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


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
        with suppress(LogError):
            LogStorage(str(location)).lock(15).release()
