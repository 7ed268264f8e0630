"""Messages that wait at a receiver stay within the bounds and in their order."""

from __future__ import annotations

import json
import struct
import uuid
from collections import defaultdict
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

EACH, ALL_BYTES = 100, 1000


def offer(backlog: Backlog[int], peer: bytes, size: int, message: int) -> bool:
    admitted = backlog.make_room(peer, size)
    if admitted:
        backlog.add(peer, size, message)
    return admitted


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), st.integers(1, 300)) | st.none(),
        max_size=200,
    )
)
def test_the_bounds_hold_and_each_sender_keeps_its_order(steps: list[tuple[str, int] | None]) -> None:
    """A step without a message removes the oldest one."""
    backlog: Backlog[int] = Backlog(EACH, ALL_BYTES)
    offered = taken = 0
    last: dict[bytes, int] = defaultdict(int)
    for number, step in enumerate(steps, 1):
        if step is None:
            was_empty = not backlog
            entry = backlog.pop()
            assert (entry is None) == was_empty
            if entry is not None:
                peer, _, message = entry
                assert message > last[peer]
                last[peer] = message
                taken += 1
        else:
            peer, size = step[0].encode(), step[1]
            offered += 1
            offer(backlog, peer, size, number)
        assert backlog.bytes <= ALL_BYTES
    rest = 0
    while backlog.pop() is not None:
        rest += 1
    assert offered == taken + rest + backlog.dropped
    assert (bool(backlog), backlog.bytes) == (False, 0)


def test_a_sender_has_its_share_or_one_message() -> None:
    backlog: Backlog[int] = Backlog(EACH, ALL_BYTES)
    assert offer(backlog, b"large", 700, 0)
    assert not offer(backlog, b"large", 1, 1)
    assert offer(backlog, b"small", 60, 2)
    assert offer(backlog, b"small", 40, 3)
    assert not offer(backlog, b"small", 1, 4)
    assert backlog.dropped == 2
    assert backlog.pop() == (b"large", 700, 0)
    assert offer(backlog, b"large", 1, 5)


def test_a_sender_with_few_bytes_displaces_those_with_many() -> None:
    backlog: Backlog[int] = Backlog(EACH, ALL_BYTES)
    for number in range(10):
        for half in (0, 1):
            assert offer(backlog, b"greedy%d" % number, 50, 2 * number + half)
    assert offer(backlog, b"honest", 10, 99)
    assert backlog.bytes == ALL_BYTES - 50 + 10
    left = []
    while (entry := backlog.pop()) is not None:
        left.append(entry[2])
    assert left == [0, *range(2, 20), 99]  # one has lost its newest message


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
