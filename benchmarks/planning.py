"""Time of the driver's calls that plan a micro-batch, with a short and with a long log."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import zmq

from benchmarks.measure import MEGA, Measurement, Times, temporary_directory
from benchmarks.peers import in_process
from zmq_datasource.log import PARTITION, DirectoryStore, LogStorage, LogWriter
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.spark.stream_reader import ZmqStreamReader

__all__ = ["measure_planning"]

_CHUNKS = (10, 10_000)
# A micro-batch covers this many of the newest chunks, however many there are.
_BATCH_CHUNKS = 5
_CALLS = 200
_MOST_SECONDS = 120.0


def measure_planning(times: Times) -> Iterator[Measurement]:
    """Microseconds a call, the median of many calls in each round."""
    for chunks in _CHUNKS:
        # A process of its own, because the reader takes over the signals of the one it runs in.
        found = in_process(_time_calls, chunks, times.rounds, seconds=_MOST_SECONDS)
        for call, values in found.items():
            yield Measurement("planning", f"{chunks} chunks", call, "µs", tuple(values))


def _time_calls(chunks: int, rounds: int) -> dict[str, list[float]]:
    with temporary_directory() as scratch, zmq.Context() as context, context.socket(zmq.PUSH) as feed:
        location = str(scratch / "log")
        _make_log(location, chunks)
        port = feed.bind_to_random_port("tcp://127.0.0.1")
        options = {
            "socketType": "PULL",
            "connect": f"tcp://127.0.0.1:{port}",
            "walLocation": location,
            "startingOffsets": "earliest",
        }
        reader = ZmqStreamReader(parse(StreamReadOptions, options))
        try:
            first = reader.initialOffset()
            end = reader.latestOffset(first, reader.getDefaultReadLimit())
            start = first | {"next": {str(PARTITION): chunks - _BATCH_CHUNKS}}
            calls: dict[str, Callable[[], object]] = {
                "partitions": lambda: reader.partitions(start, end),
                "latestOffset": lambda: reader.latestOffset(start, reader.getDefaultReadLimit()),
            }
            return {name: [_median_time(call) for _ in range(rounds)] for name, call in calls.items()}
        finally:
            reader.stop()


def _make_log(location: str, chunks: int) -> None:
    """A log of ``chunks`` chunks with one message each."""
    storage = LogStorage(DirectoryStore(location, sync=False))
    log = LogWriter(storage, chunk_bytes=1, max_bytes=1 << 40)
    log.open()
    try:
        message = decode_plain(raw_of([b"x"]), [(0, 1)])
        for _ in range(chunks):
            log.append(message)
    finally:
        log.close()


def _median_time(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * MEGA
