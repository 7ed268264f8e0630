"""ZeroMQ as a source and sink of Spark Structured Streaming.

>>> from zmq_datasource import register
>>> register(spark)  # doctest: +SKIP
>>> feed = spark.readStream.format("zmq").option("connect", "tcp://feed:5556").load()  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zmq_datasource import errors
from zmq_datasource.errors import *  # noqa: F403 - the list of errors is theirs

if TYPE_CHECKING:
    from zmq_datasource.acknowledged.producer import Producer
    from zmq_datasource.serving.proxy import Proxy
    from zmq_datasource.serving.subscriber import AsyncDurableSubscriber, DurableMessage, DurableSubscriber
    from zmq_datasource.spark.datasource import ZmqDataSource
    from zmq_datasource.spark.listener import ZmqMetricsListener
    from zmq_datasource.spark.queries import QueryMetrics, live_view, metrics, reason
    from zmq_datasource.spark.registration import register

__version__ = "0.2.0"

__all__ = [
    "AsyncDurableSubscriber",
    "DurableMessage",
    "DurableSubscriber",
    "Producer",
    "Proxy",
    "QueryMetrics",
    "ZmqDataSource",
    "ZmqMetricsListener",
    "__version__",
    "live_view",
    "metrics",
    "reason",
    "register",
]
__all__ += errors.__all__

# These names are imported on first use: a receiver, a proxy or a Producer needs no Spark, and importing everything
# would delay each Python process that Spark starts for a query.
_HOMES = {
    "AsyncDurableSubscriber": "serving.subscriber",
    "DurableMessage": "serving.subscriber",
    "DurableSubscriber": "serving.subscriber",
    "Producer": "acknowledged.producer",
    "Proxy": "serving.proxy",
    "QueryMetrics": "spark.queries",
    "ZmqDataSource": "spark.datasource",
    "ZmqMetricsListener": "spark.listener",
    "live_view": "spark.queries",
    "metrics": "spark.queries",
    "reason": "spark.queries",
    "register": "spark.registration",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
