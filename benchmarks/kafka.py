"""Beside Kafka: the same Spark, the same machine, a broker of one node and Spark's own connector.

Both come from Maven Central with ``mvn`` into ``build/``, once; where they cannot be had, the section is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from benchmarks.latency import median_latency, our_latency
from benchmarks.measure import Measurement, Sample, Times, measured, temporary_directory, wait_for
from benchmarks.peers import free_endpoint, listens
from benchmarks.processes import cpu_seconds, per_message
from benchmarks.queries import live_rate, running, spark_session, steady_rate, stream_of
from benchmarks.report import Section, Target
from benchmarks.transactions import written_to_log

_KAFKA, _OURS = "Kafka", "zmq"
_SINK = "sink, rows/s"
_BROKER_VERSION, _CONNECTOR_VERSION = "4.1.0", "4.2.0"
SECTION = Section(
    "kafka",
    "Beside Kafka",
    "Messages of 100 bytes through the same Spark into the `noop` sink, on the same two cores, which the broker "
    f"shares. *{_KAFKA}*: a broker of one node with two partitions. It acknowledges, and leaves the disk to the "
    f"system. Kafka's own `ProducerPerformance` feeds it. *{_OURS}*: the defaults, with each chunk forced to the "
    "disk. A loop in C feeds it. *live*: as source throughput. "
    "*latency*: from sending to the user's function (`foreachBatch`), at a thousand a second. *sink*: one "
    "`df.write` in two partitions until all rows are acknowledged (ours: a DEALER's transaction into the log of "
    f"another process). Kafka {_BROKER_VERSION}, Spark's connector {_CONNECTOR_VERSION}.",
    targets=(Target(_SINK, _OURS, 1.3, times=_KAFKA),),
)

_BUILD = Path(__file__).parent.parent / "build" / "kafka"
_BROKER = tuple(f"org.apache.kafka:{jar}:{_BROKER_VERSION}" for jar in ("kafka_2.13", "kafka-tools"))
# The connector's jars without their dependencies, which the installed Spark has. The newest on Maven Central.
_CONNECTOR = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{_CONNECTOR_VERSION}",
    f"org.apache.spark:spark-token-provider-kafka-0-10_2.13:{_CONNECTOR_VERSION}",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
_MAVEN_SECONDS = 300

_SIZE, _PARTITIONS, _PACE = 100, 2, 1000
_ROWS_A_SECOND = 500_000
_MOST_SECONDS = 180.0
_CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{controller}
listeners=PLAINTEXT://{endpoint},CONTROLLER://{controller}
controller.listener.names=CONTROLLER
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


def measure_kafka(scratch: Path, times: Times) -> Iterator[Measurement]:
    """Ours and Kafka's, interleaved. Where Kafka cannot be fetched, print why and measure nothing."""
    missing = _set_up()
    if missing is not None:
        print(f"kafka: skipped, {missing}", flush=True)
        return
    jars = sorted(str(jar) for jar in (_BUILD / "connector").glob("*.jar"))
    with _broker() as broker, spark_session(scratch, jars) as spark:
        count = max(1000, round(_ROWS_A_SECOND * times.seconds))
        rows = spark.range(0, count, 1, _PARTITIONS)
        rows = rows.selectExpr(f"cast(lpad(id, {_SIZE}, 'x') as binary) as value").cache()
        rows.count()
        cases: Mapping[str, Mapping[str, Callable[[], Sample]]] = {
            "live, messages/s": {
                _KAFKA: partial(_live, spark, broker, times),
                _OURS: partial(live_rate, spark, "zmq", {}, times, size=_SIZE),
            },
            "latency, p50 in ms": {
                _KAFKA: partial(_latency, spark, broker, times),
                _OURS: partial(our_latency, spark, _PACE, times),
            },
            _SINK: {
                _KAFKA: partial(_sink, rows, broker, count),
                _OURS: partial(written_to_log, rows, count),
            },
        }
        for case, methods in cases.items():
            yield from measured("kafka", case, "", methods, times)
        rows.unpersist(blocking=True)


# Fetching the broker and the connector.


def _set_up() -> str | None:
    """Fetch the jars of the broker and the connector into ``build/kafka``; returns why that was not possible."""
    if shutil.which("mvn") is None or shutil.which("java") is None:
        return "mvn and java are needed"
    for directory, jars, dependencies in (("broker", _BROKER, True), ("connector", _CONNECTOR, False)):
        if not (_BUILD / directory).exists() and not _fetch(directory, jars, dependencies):
            return f"Maven cannot fetch the jars of the {directory}"
    return None


def _fetch(directory: str, jars: Sequence[str], dependencies: bool) -> bool:
    """Copy these jars, with or without their dependencies, into a directory of ``build/kafka``; True if it worked."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    nothing = "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
    wanted = ""
    for jar in jars:
        group, artifact, version = jar.split(":")
        wanted += f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        wanted += f"<version>{version}</version>{'' if dependencies else nothing}</dependency>"
    head = (
        "<modelVersion>4.0.0</modelVersion><groupId>b</groupId><artifactId>b</artifactId><version>1</version>"
    )
    pom = _BUILD / "pom.xml"
    pom.write_text(f"<project>{head}<dependencies>{wanted}</dependencies></project>", encoding="utf-8")
    command = ["mvn", "--quiet", "--batch-mode", "--file", str(pom), "dependency:copy-dependencies"]
    command += [f"-DoutputDirectory={_BUILD / 'part'}", "-DincludeScope=runtime"]
    shutil.rmtree(_BUILD / "part", ignore_errors=True)
    if subprocess.run(command, capture_output=True, timeout=_MAVEN_SECONDS, check=False).returncode:
        return False
    (_BUILD / "part").rename(_BUILD / directory)
    return True


# Running the broker.


class _Broker:
    def __init__(self, endpoint: str, pid: int) -> None:
        self.endpoint = endpoint
        self.pid = pid

    def options(self, topic: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.endpoint,
            "subscribe": topic,
            "startingOffsets": "earliest",
        }

    def new_topic(self) -> str:
        """A topic that its first message has made."""
        topic = f"topic{time.monotonic_ns()}"
        with self.producing(topic, 1) as producer:
            if producer.wait(_MOST_SECONDS):
                raise RuntimeError(f"the producer ended with {producer.returncode}")
        return topic

    @contextmanager
    def producing(self, topic: str, count: int, rate: int = -1) -> Iterator[subprocess.Popen[bytes]]:
        """Kafka's own producer, the fastest at hand, with batches as large as its load test uses."""
        command = _java("org.apache.kafka.tools.ProducerPerformance", heap="512m")
        command += ["--topic", topic, "--num-records", str(count), "--record-size", str(_SIZE)]
        command += ["--throughput", str(rate), "--producer-props"]
        command += [f"bootstrap.servers={self.endpoint}", "acks=1"]
        if rate < 0:
            command += ["batch.size=131072", "linger.ms=10", "buffer.memory=134217728"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def _broker() -> Iterator[_Broker]:
    """A broker that is its own controller, with its data in a temporary directory."""
    with temporary_directory() as scratch:
        endpoint, controller = (free_endpoint().removeprefix("tcp://") for _ in range(2))
        properties = scratch / "server.properties"
        text = _PROPERTIES.format(
            endpoint=endpoint, controller=controller, data=scratch / "data", partitions=_PARTITIONS
        )
        properties.write_text(text, encoding="utf-8")
        format_storage = _java("kafka.tools.StorageTool", heap="256m")
        format_storage += ["format", "-t", _CLUSTER, "-c", str(properties)]
        subprocess.run(format_storage, check=True, capture_output=True)
        process = subprocess.Popen(
            [*_java("kafka.Kafka", heap="1g"), str(properties)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for("the broker", lambda: listens(endpoint), _MOST_SECONDS)
            yield _Broker(endpoint, process.pid)
        finally:
            process.kill()  # its data go, too
            process.wait()


def _java(program: str, heap: str) -> list[str]:
    home = os.environ.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else "java"
    return [java, f"-Xmx{heap}", "-XX:+UseG1GC", "-cp", f"{_BUILD / 'broker'}/*", program]


# Measuring.


def _live(spark: SparkSession, broker: _Broker, times: Times) -> Sample:
    topic = broker.new_topic()
    stream = stream_of(spark, "kafka", broker.options(topic))
    with (
        temporary_directory() as checkpoint,
        broker.producing(topic, 1 << 40) as producer,
        running(stream.writeStream.format("noop"), checkpoint) as query,
    ):
        return steady_rate(query, times, {"sender": producer.pid, "broker": broker.pid})


def _sink(rows: DataFrame, broker: _Broker, count: int) -> Sample:
    topic = broker.new_topic()
    before, began = cpu_seconds({"broker": broker.pid}), time.monotonic()
    writer = rows.write.format("kafka").option("kafka.bootstrap.servers", broker.endpoint)
    writer.option("topic", topic).option("kafka.batch.size", 131072).option("kafka.linger.ms", 10).save()
    seconds = time.monotonic() - began
    return Sample(count / seconds, per_message(before, cpu_seconds({"broker": broker.pid}), count))


def _latency(spark: SparkSession, broker: _Broker, times: Times) -> Sample:
    topic = broker.new_topic()
    seconds = times.seconds + times.warm_up + 30
    with broker.producing(topic, round(_PACE * seconds), _PACE):
        options = broker.options(topic) | {"startingOffsets": "latest"}
        stream = stream_of(spark, "kafka", options)
        # The producer's time of sending, in whole milliseconds.
        millis = stream.selectExpr("unix_millis(timestamp) as sent")
        return median_latency(millis, times, lambda values: [value / 1000 for value in values.to_pylist()])
