"""Helpers of the tests of both cores: pairs of sockets, and columns with any offsets, also wrong ones."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import zmq

from tests.support import Socket
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.transport import core, python_core
from zmq_datasource.transport.columns import Column

Context = zmq.Context[Socket]
Frames = list[list[bytes]]
MIB = 1 << 20
LARGEST = 2**31 - 1  # what offsets of 32 bits reach

_IN_USE: ModuleType = core.implementation
_numbers = itertools.count()


def implementation(name: str) -> ModuleType:
    """The core of this name; skips the test if the compiled core is not there."""
    if name == "python":
        return python_core
    if core.NAME != "compiled":
        pytest.skip("the compiled core is not in use")
    return _IN_USE


def use(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Use the core of this name; skips the test if the compiled core is not there."""
    monkeypatch.setattr(core, "implementation", implementation(name))


def pair(
    context: Context, send: int = zmq.PUSH, receive: int = zmq.PULL, hwm: int = 0
) -> tuple[Socket, Socket]:
    """Two connected sockets; a message that was sent can be received at once."""
    sender, receiver = context.socket(send), context.socket(receive)
    sender.sndhwm = receiver.rcvhwm = hwm
    receiver.rcvtimeo = sender.sndtimeo = 20_000
    endpoint = f"inproc://core-{next(_numbers)}"
    sender.bind(endpoint)
    receiver.connect(endpoint)
    return sender, receiver


def send(sender: Socket, messages: Sequence[Sequence[bytes]]) -> None:
    for message in messages:
        sender.send_multipart(message)


def take_all(receiver: Socket, inbox: core.Inbox | None = None, **bounds: Any) -> Frames:
    """All messages of a socket, taken by an inbox."""
    inbox = inbox or core.Inbox()
    take(inbox, receiver, **{"most": 1 << 30, "room": 1 << 30, **bounds})
    return handed_over(inbox)


class Got(NamedTuple):
    """What was taken from one socket: messages, the size of one that is too large, and whether it is empty now."""

    messages: int
    excess: int
    empty: bool


def take(inbox: core.Inbox, receiver: Socket, most: int, room: int, **other: Any) -> Got:
    """Take messages from one socket."""
    taken = inbox.take([receiver], most, room, **other)
    return Got(taken.messages, taken.excess, taken.empty[0])


def handed_over(inbox: core.Inbox) -> Frames:
    raw = inbox.hand_over()
    for column in (raw.first, raw.last, raw.middle):
        if column is not None:
            column.validate(full=True)
            assert len(column) == len(raw)
    messages = raw.lists()
    messages.validate(full=True)
    return messages.to_pylist()  # type: ignore[no-any-return]


def read_all(receiver: Socket) -> Frames:
    """All messages of a socket, received by pyzmq."""
    messages = []
    while receiver.poll(0):
        messages.append(receiver.recv_multipart())
    return messages


def give_all(sender: Socket, columns: Sequence[Column], rows: int) -> None:
    assert core.Outbox(columns, rows).give(sender, 0, rows) == rows


def lists(messages: Sequence[Sequence[bytes | None] | None], kind: pa.DataType = FRAMES) -> pa.Array:
    return pa.array(messages, kind)


def offsets(*values: int) -> pa.Buffer:
    return pa.py_buffer(array("i", values))


def binary(data: bytes, *ends: int, offset: int = 0) -> pa.Array:
    """A binary array with these offsets, also wrong ones."""
    memory = bytearray(offsets(*[0] * len(ends)))
    buffers = [None, pa.py_buffer(memory), pa.py_buffer(data)]
    made = pa.Array.from_buffers(pa.binary(), len(ends) - 1 - offset, buffers, offset=offset)
    memory[:] = bytes(offsets(*ends))  # afterwards, because Arrow would refuse some of them
    return made


def raw_lists(contents: pa.Array, *ends: int) -> pa.Array:
    """Lists of a binary array with these offsets, also wrong ones."""
    memory = bytearray(offsets(*[0] * len(ends)))
    made = pa.Array.from_buffers(FRAMES, len(ends) - 1, [None, pa.py_buffer(memory)], children=[contents])
    memory[:] = bytes(offsets(*ends))
    return made
