"""The demo: a live feed through Spark and out again, with an account of every message.

Three streaming queries read one feed, each with its own socket and its own log: an aggregation, a sink whose consumer
keeps up, and a sink whose consumer does not. The publisher and the consumers are threads of this process. Spark
receives and sends in processes of its own.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import zmq
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from zmq_datasource import metrics, register
from zmq_datasource.errors import LogError, ZmqDataSourceError
from zmq_datasource.log import LogStorage
from zmq_datasource.monitoring.tables import Cells, alarms, number, shown, stack, words
from zmq_datasource.monitoring.view import LiveView
from zmq_datasource.spark.live import records

__all__ = ["Account", "findings", "run_demo"]

_PUBLISHED_PER_SECOND, _SLOW_PER_SECOND = 2000, 1000
_CITIES = ("athens", "berlin", "lisbon", "nairobi", "oslo", "toronto")
# A short queue on every stage, or the kernel's buffers would hide how slow the consumer is.
_SLOW_SINK = {"noblock": "true", "sndhwm": "500", "zmq.sndbuf": "4096", "linger": "10s"}
_SLOW_CONSUMER = {"rcvhwm": 10, "rcvbuf": 4096}


def run_demo(console: Console, seconds: float, feed: Mapping[str, str] | None = None) -> None:
    """Stream for ``seconds`` and show what became of every message.

    Args:
        console: Where to show it.
        seconds: How long messages flow; starting and ending come on top.
        feed: Options of the user's own feed; None for a publisher of the demo's own.

    Raises:
        ZmqDataSourceError: It could not be shown; one line says why.
    """
    with ExitStack() as ending:
        work = Path(tempfile.mkdtemp(prefix="zmq-datasource-demo-"))
        ending.callback(shutil.rmtree, work, ignore_errors=True)
        ending.callback(_wait_for_receivers, work)
        demo = _Demo(console, work)
        try:
            demo.run(seconds, feed)
        except ZmqDataSourceError:
            raise
        except Exception as e:
            kept = f"{work}.log"
            with suppress(OSError):
                shutil.copyfile(work / "spark.log", kept)
            raise ZmqDataSourceError(f"{_plain_reason(e)} (Spark's log: {kept})") from e
    accounts = [query.account() for query in demo.queries]
    if feed is not None and not any(account.received for account in accounts):
        raise ZmqDataSourceError(
            f"nothing was received in {seconds:g} s from {feed['connect']}: nobody publishes there, or on other "
            "topics, or from a socket of another type"
        )
    topics = [
        {"topic": words(row["topic"] or "(no topic frame)"), "messages": Text(number(row["count"]))}
        for row in demo.topics[:6]
    ]
    console.print(stack((topics, [account.cells() for account in accounts]), None), "")
    sentences = Table.grid(padding=(0, 1))
    for good, sentence in findings(accounts, settled=demo.settled):
        sentences.add_row({True: "[green]✓[/]", False: "[red]✗[/]", None: "·"}[good], Text(sentence))
    console.print(sentences)


_Finding: TypeAlias = tuple[bool | None, str]


class Account(NamedTuple):
    """The way of the messages through one query; the defaults are those of a query without a sink of ours."""

    name: str
    published: int | None  # None for a feed that is not ours
    received: int  # into the source's log
    rows: int  # read by Spark from the log
    sent: int = 0
    dropped: Mapping[str, int] = {}  # by the sink, by reason
    arrived: int | None = None  # at the sink's consumer

    def cells(self) -> Cells:
        return {
            "query": words(self.name),
            "published": Text("unknown" if self.published is None else number(self.published)),
            "received": Text(number(self.received)),
            "rows": Text(number(self.rows)),
            "sent": Text("–" if self.arrived is None else number(self.sent)),
            "dropped": Text("–") if self.arrived is None else alarms(self.dropped),
            "arrived": shown(self.arrived, number),
        }


def findings(accounts: Sequence[Account], *, settled: bool) -> Iterator[_Finding]:
    """What the accounts say: whether it is as it should be (None: neither good nor bad), and a sentence.

    Args:
        settled: The queries read all that was published before they were stopped.
    """

    def compare(equation: str, missing: Mapping[str, int], why: str, good: bool | None = None) -> _Finding:
        differences = ", ".join(f"{n:,} ({name})" for name, n in missing.items() if n)
        if not differences:
            return True, f"{equation}, in each query."
        return good, f"{equation}, but for {differences}: {why}."

    lost = {a.name: a.published - a.received for a in accounts if a.published is not None}
    if not settled:
        yield None, "This machine is too busy: the queries were stopped before they had read all messages."
    elif lost:
        yield compare("published = received", lost, "the publisher dropped them at its queue")
    else:
        unknown = "What your publisher sent is not known: a PUB drops without telling anybody, and a PUSH shares its"
        yield None, f"{unknown} messages among the queries."
    behind = {a.name: a.received - a.rows for a in accounts}
    yield compare("received = rows", behind, "they wait in the log for the next run of the query")
    sinks = [account for account in accounts if account.arrived is not None]
    uncounted = {a.name: a.rows - a.sent - sum(a.dropped.values()) for a in sinks}
    yield compare("rows = sent + dropped", uncounted, "the sink has not counted them", good=False)
    for account in sinks:
        if full := account.dropped.get("hwm"):
            settings = f"{_SLOW_SINK['sndhwm']} messages of queue, a consumer of {_SLOW_PER_SECOND} a second"
            text = (
                f"{account.name}: {full:,} rows found the queue full and were dropped and counted, as asked for "
                f"({settings}, noblock=true). With noblock=false, the default, the sink waits for its consumer instead."
            )
            yield None, text
    astray = {a.name: a.sent - a.arrived for a in accounts if a.arrived is not None}
    why = "accepted by a PUSH is not delivered; below 0, a batch was cut off before it was counted"
    yield compare("sent = arrived", astray, why, good=False)


class _Demo:
    """One run.

    Attributes:
        topics: The aggregation's newest result: topic and count.
        settled: Whether the queries read all that was published before they were stopped.
    """

    def __init__(self, console: Console, work: Path) -> None:
        self._console = console
        self._work = work
        self._live = Live(console=console, transient=True)
        self._spinner = Spinner("dots")
        self._view = LiveView(width=console.width)
        self.queries: list[_Query] = []
        self.topics: list[Row] = []
        self.settled = True

    def run(self, seconds: float, feed: Mapping[str, str] | None) -> None:
        with self._live, ExitStack() as ending:  # what is entered last ends first
            self._begin("Starting Spark ...")
            fast = _Peer(zmq.PULL, _consume)
            ending.callback(fast.stop)
            slow = _Peer(zmq.PULL, lambda peer: _consume(peer, 1 / _SLOW_PER_SECOND), **_SLOW_CONSUMER)
            ending.callback(slow.stop)
            spark = ending.enter_context(_spark_session(self._work))
            publisher = None
            if feed is None:
                # What is due after a pause of a busy machine goes out at once, and is not to run over.
                queue = 10 * _PUBLISHED_PER_SECOND
                publisher = _Peer(zmq.XPUB, _publish, xpub_verbose=1, linger=2000, sndhwm=queue)
                # Before Spark: a receiver drains its socket at the end, as long as messages come.
                ending.callback(publisher.stop)
                feed = {"connect": publisher.endpoint, "topics": "weather.", "rcvhwm": "100"}
            # The end is short and must be complete: nothing that was started may be left.
            for signum in (signal.SIGINT, signal.SIGTERM):
                ending.callback(signal.signal, signum, signal.SIG_IGN)

            self._begin("Starting three streaming queries ...")
            count = self._read(spark, feed, "aggregation").groupBy("topic").count()
            writer = count.writeStream.outputMode("complete").foreachBatch(self._take_topics)
            self.queries.append(_Query("aggregation", self._start(writer, "aggregation"), publisher, None))
            for name, consumer, options in (("fast sink", fast, {}), ("slow sink", slow, _SLOW_SINK)):
                messages = self._read(spark, feed, name).select("topic", "value")
                writer = messages.writeStream.format("zmq").options(connect=consumer.endpoint, **options)
                self.queries.append(_Query(name, self._start(writer, name), publisher, consumer))
            if not self._wait(60, lambda: all(query.receives() for query in self.queries)):
                raise ZmqDataSourceError("the queries did not begin to receive within 60 s")
            self._begin(f"Streaming for {seconds:g} s ...")
            self._wait(seconds)
            if publisher is not None:
                self._begin("Reading the rest ...")
                publisher.stop()
                # What PUB dropped will never come; by this time all else has.
                arrived_by = datetime.now(UTC) + timedelta(seconds=1)
                self.settled = self._wait(60, lambda: all(q.has_read_all(arrived_by) for q in self.queries))
            self._begin("Stopping the queries ...")
            for query in self.queries:
                query.stop()
            fast.stop()
            slow.stop()

    def _read(self, spark: SparkSession, feed: Mapping[str, str], name: str) -> DataFrame:
        # The reader's name tells the sources apart on the screen.
        own = {"reader": name.replace(" ", "-"), "walLocation": str(self._work / name / "log")}
        return spark.readStream.format("zmq").options(**feed, **own).load()

    def _start(self, writer: DataStreamWriter, name: str) -> StreamingQuery:
        # Each batch of a sink costs one start of a Python process, in which Spark commits it.
        writer = writer.queryName(name).trigger(processingTime="2 seconds")
        return writer.option("checkpointLocation", str(self._work / name / "checkpoint")).start()

    def _take_topics(self, counts: DataFrame, _batch_id: int) -> None:
        """Called by Spark for each micro-batch."""
        # Sorted here: an orderBy would add two Spark jobs to every micro-batch.
        self.topics = sorted(counts.collect(), key=lambda row: (-row["count"], row["topic"] or ""))

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
            time.sleep(min(0.25, left))
        return False

    def _show(self) -> None:
        """Show in a terminal what ``live_view`` does, of all queries."""
        for query in self.queries:
            query.update()
        tables = self._view.render(record for query in self.queries for record in records(query.last))
        self._live.update(Group(self._spinner, tables) if self.queries else self._spinner)


class _Query:
    """One running query, and what is counted of its messages.

    Attributes:
        last: The newest event.
    """

    def __init__(
        self, name: str, query: StreamingQuery, publisher: _Peer | None, consumer: _Peer | None
    ) -> None:
        self._name = name
        self._query = query
        self._publisher = publisher
        self._consumer = consumer
        self._rows: dict[int, int] = {}
        self.update()

    def update(self) -> None:
        """Take in new progress events; raises what has ended the query."""
        known = metrics(self._query)
        for event in known.recent:
            # An idle trigger reports the next batch, with 0 rows, until that batch has come.
            batch = event["batchId"]
            self._rows[batch] = max(event["numInputRows"], self._rows.get(batch, 0))
        self.last: dict[str, Any] = known.last
        error = self._query.exception()
        if error is not None:
            raise error

    def account(self) -> Account:
        published = None if self._publisher is None else self._publisher.count
        received = self.last["sources"][0]["metrics"]["messagesReceived"] or 0
        account = Account(self._name, published, received, sum(self._rows.values()))
        if self._consumer is None:
            return account
        total = self.last["sink"]["metrics"]["total"]
        sent, dropped = total["sent"], total["droppedByReason"]
        return account._replace(sent=sent, dropped=dropped, arrived=self._consumer.count)

    def receives(self) -> bool:
        """Whether messages can come; the publisher begins when all queries have subscribed."""
        if self._publisher is not None:
            return self._publisher.count > 0
        return self.last["sources"][0]["metrics"]["source"] is not None

    def has_read_all(self, arrived_by: datetime) -> bool:
        """Whether all that came has become rows, as of a trigger after this time."""
        account, began = self.account(), self.last["timestamp"]
        up_to_date = began is not None and datetime.fromisoformat(began) >= arrived_by
        return up_to_date and account.rows == account.received

    def stop(self) -> None:
        """Stop between two micro-batches, so that no batch is left half counted."""
        deadline = time.monotonic() + 10
        while self._query.status["isTriggerActive"] and time.monotonic() < deadline:
            time.sleep(0.01)
        self._query.stop()
        self.update()


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
        """Have it finish, and wait for that; then ``count`` is the last one."""
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
        elif last:  # and nothing has come for so long
            return


@contextmanager
def _spark_session(work: Path) -> Iterator[SparkSession]:
    """Start Spark with the files in ``conf``; at the end stop it and wait until its JVM is gone.

    What the JVM and Spark's Python processes write to stderr goes to ``work/spark.log``.
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
    logging.basicConfig(filename=spark_log)  # what sinks tell this process is shown in the demo's own way
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
    """Spark does not wait for its receivers, which drain and seal at the end; their locks tell."""
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
