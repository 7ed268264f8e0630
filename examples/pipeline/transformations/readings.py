"""From the log that `zmq-datasource receive` fills into a table, and from the table to a ZeroMQ consumer."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def readings() -> DataFrame:
    """Each message that was received, once. The name (reader) keeps what this pipeline has not read yet."""
    feed = (
        spark.readStream.format("zmq")
        .option("walLocation", "/tmp/weather/wal")
        .option("reader", "pipeline")
        .load()
    )
    reading = "from_json(cast(value AS string), 'city STRING, temperature DOUBLE') AS reading"
    return feed.selectExpr("timestamp", reading).select("timestamp", "reading.*")


dp.create_sink(
    "alerts", format="zmq", options={"socketType": "PUSH", "connect": "tcp://localhost:5559", "topic": "heat"}
)


@dp.append_flow(target="alerts")
def heat() -> DataFrame:
    """Readings above 30 degrees, as JSON."""
    return (
        spark.readStream.table("readings").where("temperature > 30").selectExpr("to_json(struct(*)) AS value")
    )
