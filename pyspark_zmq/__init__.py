"""Lets Spark find ``format("zmq")`` by itself: Spark registers the ``DefaultSource`` of every ``pyspark_*`` module."""

from zmq_datasource.spark.datasource import ZmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
