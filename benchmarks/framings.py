"""What it costs to read and to judge publishers' numbers: rows a second beside plain framing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from pyspark.sql import SparkSession

from benchmarks.measure import Measurement, Times, measured
from benchmarks.queries import live_rate

__all__ = ["FRAMINGS", "PLAIN", "measure_framings"]

PLAIN = "plain"
_SIZE = 100
# The shape of the message, and what the source is told of it.
FRAMINGS: Mapping[str, Mapping[str, str]] = {
    PLAIN: {},
    "numbered": {"framing": "custom", "sequenceFrame": "0", "deduplicate": "true"},
    "vllm": {"framing": "vllm", "deduplicate": "true"},
    "bitcoin": {"framing": "bitcoin", "deduplicate": "true"},
    "sequenced": {"framing": "sequenced", "deduplicate": "true"},
}


def measure_framings(spark: SparkSession, times: Times) -> Iterator[Measurement]:
    """Messages a second for every framing, judged and deduplicated, interleaved."""
    methods = {
        name: partial(live_rate, spark, "zmq", options, times, size=_SIZE, shape=name)
        for name, options in FRAMINGS.items()
    }
    yield from measured("framings", "100 B", "messages/s", methods, times)
