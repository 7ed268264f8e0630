"""Lets Spark find ``format("zmq")`` by itself: it registers ``DefaultSource`` of every ``pyspark_*`` module."""

from zmq_datasource.spark.datasource import ZmqDataSource as DefaultSource

__all__ = ["DefaultSource"]
