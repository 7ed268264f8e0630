"""Tell a ZeroMQ consumer when a sensor has fallen silent, and when it is back.

Each topic of the feed is a sensor. Its state is a timer, which each message puts off (transformWithState).

    python examples/silent_sensors.py tcp://localhost:5556 tcp://localhost:5559 /tmp/silent-sensors

The first endpoint is the feed's (PUB), and the second one the consumer's (PULL). The directory is for the checkpoint
and the log. Spark's state needs `pip install protobuf`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from zmq_datasource import register

SILENCE_MS = 5000
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


class Silence(StatefulProcessor):
    """The state of a sensor: how many messages it has sent, and when it counts as silent (null: it is)."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.sensor = handle.getValueState("sensor", "messages BIGINT, silentAt BIGINT")

    def handleInputRows(self, key, rows, timerValues) -> Iterator[Row]:
        messages, silent_at = self.sensor.get() if self.sensor.exists() else (0, None)
        if silent_at is not None:
            self.handle.deleteTimer(silent_at)
        elif messages:
            yield Row(topic=key[0], value=f"back after {messages} messages")
        silent_at = timerValues.getCurrentProcessingTimeInMs() + SILENCE_MS
        self.handle.registerTimer(silent_at)
        self.sensor.update((messages + sum(1 for _ in rows), silent_at))

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo) -> Iterator[Row]:
        messages, _ = self.sensor.get()
        self.sensor.update((messages, None))
        yield Row(topic=key[0], value=f"silent after {messages} messages")

    def close(self) -> None:
        pass


def main(feed: str, consumer: str, directory: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("silent-sensors")
        .config("spark.sql.streaming.stateStore.providerClass", ROCKSDB)  # transformWithState needs it
        .config("spark.sql.shuffle.partitions", 2)
        .getOrCreate()
    )
    register(spark)
    messages = (
        spark.readStream.format("zmq")
        .option("connect", feed)
        .option("walLocation", f"{directory}/wal")
        .load()
    )
    changes = (
        messages.select("topic")
        .groupBy("topic")
        .transformWithState(
            Silence(), "topic STRING, value STRING", outputMode="Append", timeMode="ProcessingTime"
        )
    )
    query = (
        changes.writeStream.format("zmq")
        .option("socketType", "PUSH")
        .option("connect", consumer)
        .option("checkpointLocation", f"{directory}/checkpoint")
        .trigger(processingTime="1 second")  # a timer is looked at in each micro-batch
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
