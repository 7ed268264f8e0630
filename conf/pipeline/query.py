"""Reads the log that the receiver fills, and sends each reading on to the consumer (PUSH, at least once)."""

from pyspark.sql import SparkSession

from zmq_datasource import register

spark = SparkSession.builder.master("local[2]").appName("pipeline").getOrCreate()
spark.sparkContext.setLogLevel("WARN")
register(spark)
readings = (
    spark.readStream.format("zmq").option("walLocation", "/mnt/wal/feed").option("reader", "pipeline").load()
)
query = (
    readings.select("value")
    .writeStream.format("zmq")
    .option("socketType", "PUSH")
    .option("connect", "tcp://consumer:5558")
    .option("checkpointLocation", "/mnt/state/checkpoint")
    .start()
)
query.awaitTermination()
