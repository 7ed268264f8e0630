"""What plain sockets do not guarantee, shown by killing consumers: a row that was accepted may not be processed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import zmq

from tests.support import Socket, binary, free_endpoint, write_options
from zmq_datasource.sink.sender import Sender

pytestmark = pytest.mark.spark  # no Spark, but processes that take their time
Context = zmq.Context[Socket]

CONSUMER = """
import sys, time, zmq
kind, endpoint, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
sock = zmq.Context().socket(getattr(zmq, kind))
if kind == "SUB":
    sock.subscribe(b"")
sock.bind(endpoint)
print("bound", flush=True)
for number in range(most):
    sock.recv()
    print(number, flush=True)
while kind == "SUB":
    sock.poll(20)  # a bound SUB must keep touching its socket to stay subscribed
    time.sleep(0.02)
time.sleep(60)
"""


class Consumer:
    """A process that prints a line for each message, and stops receiving after ``most`` messages."""

    def __init__(self, kind: str, endpoint: str, most: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONSUMER, kind, endpoint, str(most)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._lines = self._process.stdout

    def __enter__(self) -> Consumer:
        assert self._lines.readline() == "bound\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._lines.close()

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            self._lines.readline()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def count_remaining(self) -> int:
        """How many more messages it had received before it was killed."""
        return len(self._lines.readlines())


@pytest.mark.parametrize("kind", ["PUSH", "PUB"])
def test_rows_that_count_as_sent_may_be_lost_with_their_consumer(kind: str) -> None:
    """The task has succeeded because all rows have left for the consumer's machine. The consumer processed 100."""
    endpoint = free_endpoint()
    with Consumer("PULL" if kind == "PUSH" else "SUB", endpoint, 100) as consumer:
        with Sender(write_options(connect=endpoint, socketType=kind, sndhwm=5000)) as sender:
            sender.send(binary([b"%d" % n for n in range(1000)]))
            counters = sender.finish()
        assert counters.sent == counters.rows == 1000
        consumer.wait_for(100)
        consumer.kill()
        assert consumer.count_remaining() == 0
