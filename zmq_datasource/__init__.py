"""ZeroMQ as a source and sink of Spark Structured Streaming.

>>> from zmq_datasource import register
>>> register(spark)  # doctest: +SKIP
>>> feed = spark.readStream.format("zmq").option("connect", "tcp://feed:5556").load()  # doctest: +SKIP
"""

from zmq_datasource.errors import (
    ConnectionLostError,
    DamagedChunkError,
    DataLossError,
    DeadLetterError,
    DiskFaultError,
    EndpointError,
    FlushTimeoutError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
    MalformedMessageError,
    MessageLossError,
    MetricsError,
    NoPeerError,
    OptionError,
    ProtocolError,
    RowError,
    SendTimeoutError,
    SocketError,
    SubscriptionError,
    TransactionError,
    WorkbenchError,
    ZmqDataSourceError,
)
from zmq_datasource.producer import Producer
from zmq_datasource.proxy.handle import Proxy
from zmq_datasource.spark.datasource import ZmqDataSource
from zmq_datasource.spark.history import metrics_dataframe
from zmq_datasource.spark.listener import ZmqMetricsListener
from zmq_datasource.spark.live import live_view
from zmq_datasource.spark.progress import QueryMetrics, metrics
from zmq_datasource.spark.registration import register
from zmq_datasource.subscriber import DurableMessage, DurableSubscriber

__version__ = "0.1.0"

__all__ = [
    "ConnectionLostError",
    "DamagedChunkError",
    "DataLossError",
    "DeadLetterError",
    "DiskFaultError",
    "DurableMessage",
    "DurableSubscriber",
    "EndpointError",
    "FlushTimeoutError",
    "LogError",
    "LogFormatError",
    "LogLockedError",
    "LogWriteError",
    "MalformedMessageError",
    "MessageLossError",
    "MetricsError",
    "NoPeerError",
    "OptionError",
    "Producer",
    "ProtocolError",
    "Proxy",
    "QueryMetrics",
    "RowError",
    "SendTimeoutError",
    "SocketError",
    "SubscriptionError",
    "TransactionError",
    "WorkbenchError",
    "ZmqDataSource",
    "ZmqDataSourceError",
    "ZmqMetricsListener",
    "__version__",
    "live_view",
    "metrics",
    "metrics_dataframe",
    "register",
]
