"""ZeroMQ as a source and sink of Spark Structured Streaming.

>>> from zmq_datasource import register
>>> register(spark)  # doctest: +SKIP
>>> feed = spark.readStream.format("zmq").option("connect", "tcp://feed:5556").load()  # doctest: +SKIP
"""

from zmq_datasource.errors import (
    DamagedChunkError,
    DataLossError,
    DeadLetterError,
    EndpointError,
    FlushTimeoutError,
    LogError,
    LogFormatError,
    LogLockedError,
    LogWriteError,
    MalformedMessageError,
    MessageLossError,
    NoPeerError,
    OptionError,
    ProtocolError,
    RowError,
    SendTimeoutError,
    SocketError,
    TransactionError,
    ZmqDataSourceError,
)
from zmq_datasource.producer import Producer
from zmq_datasource.spark.datasource import ZmqDataSource, register

__version__ = "0.1.0"

__all__ = [
    "DamagedChunkError",
    "DataLossError",
    "DeadLetterError",
    "EndpointError",
    "FlushTimeoutError",
    "LogError",
    "LogFormatError",
    "LogLockedError",
    "LogWriteError",
    "MalformedMessageError",
    "MessageLossError",
    "NoPeerError",
    "OptionError",
    "Producer",
    "ProtocolError",
    "RowError",
    "SendTimeoutError",
    "SocketError",
    "TransactionError",
    "ZmqDataSource",
    "ZmqDataSourceError",
    "__version__",
    "register",
]
