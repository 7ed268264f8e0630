"""What the sink sends, as a program in another language gets it that does not use libzmq."""

from __future__ import annotations

import subprocess

import pyarrow as pa
import pytest

from tests.support import binary, free_endpoint, write_options
from tests.support.foreign import java_program
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.sink.sender import Sender

VALUES = [bytes(range(i)) for i in range(100)]


@pytest.mark.parametrize(("kind", "peer"), [("PUSH", "PULL"), ("PUB", "SUB")])
def test_jeromq_receives_each_row_in_order(kind: str, peer: str) -> None:
    endpoint = free_endpoint()
    command = [*java_program("PlainReceiver"), peer, endpoint, "300", ""]
    receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        with Sender(write_options(bind=endpoint, socketType=kind)) as sender:
            sender.send(binary(VALUES))
            sender.send(binary(VALUES), binary([b"topic"] * 100))
            sender.send(frames=pa.array([[b"", value, b"\xff\x00"] for value in VALUES], FRAMES))
            assert sender.finish().sent == 300
            output, _ = receiver.communicate(timeout=30)
    finally:
        receiver.kill()
        receiver.wait()
    got = [[bytes.fromhex(frame) for frame in line.split(",")] for line in output.splitlines()]
    assert got[:100] == [[value] for value in VALUES]
    assert got[100:200] == [[b"topic", value] for value in VALUES]
    assert got[200:] == [[b"", value, b"\xff\x00"] for value in VALUES]
