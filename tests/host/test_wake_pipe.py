"""``host.wake_pipe``: a thread that waits in a poller is woken, and nothing is written after the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq

from zmq_datasource.host.wake_pipe import WakePipe


@pytest.fixture
def pipe() -> Iterator[WakePipe]:
    with closing(WakePipe()) as pipe:
        yield pipe


def is_readable(pipe: WakePipe) -> bool:
    poller = zmq.Poller()
    poller.register(pipe.descriptor, zmq.POLLIN)
    return bool(poller.poll(0))


def test_a_pipe_is_readable_from_wake_until_clear(pipe: WakePipe) -> None:
    assert not is_readable(pipe)
    pipe.wake()
    assert is_readable(pipe)
    pipe.clear()
    assert not is_readable(pipe)


def test_a_full_pipe_does_not_block_wake(pipe: WakePipe) -> None:
    for _ in range(100_000):
        pipe.wake()
    assert is_readable(pipe)


def test_a_late_wake_writes_nothing_into_a_file_that_has_got_the_descriptor() -> None:
    pipe = WakePipe()
    pipe.close()
    ends = [os.pipe() for _ in range(2)]
    try:
        pipe.wake()
        for read, _ in ends:
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
    finally:
        for end in ends:
            for descriptor in end:
                os.close(descriptor)
