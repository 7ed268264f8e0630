"""Messages that wait at a receiver stay within the bounds and in their order."""

from __future__ import annotations

import json
import struct
import uuid
from pathlib import Path

import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.acknowledged.test_producer import program
from tests.support import Socket, free_endpoint, log_rows, stream_options
from zmq_datasource import Producer
from zmq_datasource.acknowledged.acceptor import Backlog
from zmq_datasource.spark.stream_reader import ZmqStreamReader
from zmq_datasource.transport.authentication import any_name

EACH, ALL_BYTES = 100, 1000


def offer(backlog: Backlog, peer: str, size: int, number: int) -> None:
    backlog.add(peer.encode(), size, lambda: ([b"%d" % number], any_name))


@given(st.lists(st.tuples(st.sampled_from("abcdefghij"), st.integers(1, 300)) | st.none(), max_size=200))
def test_the_bounds_hold_and_each_sender_keeps_its_order(steps: list[tuple[str, int] | None]) -> None:
    """A step without a message removes the oldest one."""
    backlog = Backlog(EACH, ALL_BYTES)
    offered = taken = last = 0
    for number, step in enumerate([*steps, *[None] * len(steps)], 1):
        if step is not None:
            offered += 1
            offer(backlog, *step, number)
        elif backlog:
            (message,) = backlog.pop()[2][0]
            assert int(message) > last
            last = int(message)
            taken += 1
        assert backlog.bytes <= ALL_BYTES
    assert offered == taken + backlog.dropped
    assert (bool(backlog), backlog.bytes) == (False, 0)


def test_a_sender_has_one_message_of_any_size_and_more_up_to_its_share() -> None:
    backlog = Backlog(EACH, ALL_BYTES)
    offer(backlog, "large", 700, 0)
    offer(backlog, "small", 60, 2)
    offer(backlog, "small", 40, 3)
    assert backlog.dropped == 0
    offer(backlog, "large", 1, 1)
    offer(backlog, "small", 1, 4)
    assert backlog.dropped == 2
    backlog.pop()
    for number in range(14):  # now each of many may have a little
        offer(backlog, str(number), 40, number)
    offer(backlog, "7", 40, 7)
    assert backlog.dropped == 3


@pytest.mark.spark  # no Spark, but a process and its memory
def test_a_sender_that_ignores_the_bounds_takes_little_memory(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    endpoint = free_endpoint()
    value = bytes(16 << 20)
    with program(tmp_path, endpoint, "-o", "walMaxBytes=100k") as process, Producer(endpoint) as producer:
        for _ in range(2):
            producer.send("x" * 60_000)
            producer.flush()
        memory = psutil.Process(process.pid)
        before = most = memory.memory_info().rss
        attempt = uuid.uuid4().hex
        with context.socket(zmq.DEALER) as sock:
            sock.setsockopt(zmq.SNDHWM, 1)
            sock.setsockopt(zmq.LINGER, 0)
            sock.connect(endpoint)
            for index in range(40):
                header = {"attempt": attempt, "producer": "greedy", "number": 0, "partition": 0}
                header |= {"index": index, "rows": 1, "columns": ["value"]}
                frames = [b"ZDS\x02D", json.dumps(header).encode(), struct.pack("<2i", 0, len(value)), value]
                assert sock.poll(20_000, zmq.POLLOUT)
                sock.send_multipart(frames, copy=False)
                most = max(most, memory.memory_info().rss)
        assert most - before < 300 << 20
        reader = ZmqStreamReader(stream_options(walLocation=tmp_path, startingOffsets="earliest"))
        end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))
        reader.latestOffset(end, ReadMaxRows(1))  # gives the log its room back
        producer.send("honest")
        producer.flush()
        reader.stop()
    assert log_rows(tmp_path).column("value").to_pylist()[-1] == b"honest"
