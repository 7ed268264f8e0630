"""What is fuzzed: each target takes any bytes, and raises only if something is wrong with the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from unittest import mock

import pyarrow as pa
import zmq

from tests.support import batch_of, facts_of
from zmq_datasource.acknowledged.protocol import Data, decode, rows_of
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import DamagedChunkError, ProtocolError
from zmq_datasource.log.chunk import encode_chunk, read_chunk
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.arrow_values import ArrowValues, UnfitValueError
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import read_reply
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.serving import protocol as fetch_protocol
from zmq_datasource.source import chunk_server
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.transport import core, python_core

__all__ = ["FRAMINGS", "TARGETS"]

Target = Callable[[bytes], None]


def frames_of(data: bytes) -> list[bytes]:
    """Frames with their lengths before them, in two bytes; the last is what is left. At least one."""
    frames, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 2], "big") % 4096
        frames.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return frames or [b""]


def messages_of(data: bytes) -> list[list[bytes]]:
    """Messages of so many frames each."""
    count, frames = 1 + (data or b"\0")[0] % 8, frames_of(data[1:])
    return [frames[at : at + count] for at in range(0, len(frames), count)]


# Framings.

FRAMINGS: list[dict[str, str]] = [
    *({"framing": name} for name in ("plain", "sequenced", "vllm", "bitcoin")),
    {"framing": "custom", "sequenceAt": "0:$.n.m", "valueFrame": "-1"},
    {
        "framing": "custom",
        "sequenceAt": "1:3:u32le",
        "topicFrame": "0",
        "publisherFrame": "2",
    },
]


def framing(data: bytes) -> None:
    """Any messages in any framing become rows, each message one row at most."""
    which, rest = data[:1] or b"\0", data[1:]
    options = FRAMINGS[which[0] % len(FRAMINGS)]
    counters = SourceCounters()
    given = parse(StreamReadOptions, {"connect": "tcp://feed:1", **options})
    messages = messages_of(rest)
    batch, _ = Intake(given, counters).read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
    batch.validate(full=True)
    rows = to_rows(number_rows(batch, 0), include_frames=True)
    rows.validate(full=True)
    controls = len(messages) - rows.num_rows
    assert controls >= 0, "a message became two"
    assert controls == 0 or options["framing"] not in ("plain", "custom"), "a message is nowhere"


# Protocols.


def acknowledged(data: bytes) -> None:
    """What a sender of transactions says."""
    with suppress(ProtocolError):
        message, buffers = decode(frames_of(data))
        if isinstance(message, Data):
            rows_of(message, buffers, 0).validate(full=True)


def durable(data: bytes) -> None:
    """What a durable subscriber and its server say to each other."""
    with suppress(ProtocolError):
        message, buffers = fetch_protocol.decode(frames_of(data))
        if isinstance(message, fetch_protocol.Batch):
            rows = fetch_protocol.unpack_rows(message, buffers)
            rows.validate(full=True)
            ids = rows["id"].to_pylist()
            assert len(ids) == message.rows, "other messages than were announced"
            assert ids == sorted(set(ids)), "ids that do not grow"
            assert all(message.first <= number < message.next for number in ids), "an id of another answer"


def chunks(data: bytes) -> None:
    """What executors and the driver say to each other, behind CURVE."""
    with suppress(ProtocolError):
        chunk_server.read_request(frames_of(data), bytes(32))


def replay(data: bytes) -> None:
    """What a publisher's replay socket answers."""
    with suppress(UnfitError):
        read_reply(frames_of(data))


# Files.


def _damaged(content: bytes, data: bytes) -> pa.Buffer:
    """Content with bytes changed and cut off, as three bytes each say."""
    damaged = bytearray(content)
    for at in range(0, len(data) - 2, 3):
        place = int.from_bytes(data[at : at + 2], "big")
        if place < len(damaged):
            damaged[place] ^= data[at + 2]
        else:
            del damaged[place % len(content) :]
    return pa.py_buffer(bytes(damaged))


@cache
def _sealed_chunk() -> tuple[bytes, list[bytes]]:
    """A chunk of three batches, and its values."""
    values = [b"%d" % number * number for number in range(30)]
    batches = [batch_of(values[begin : begin + 10]) for begin in range(0, 30, 10)]
    return b"".join(encode_chunk(batches, facts_of(batches))), values


class _InMemory(LogStorage):
    """A log of one chunk."""

    def __init__(self, content: pa.Buffer) -> None:
        super().__init__("/nowhere")
        self._content = content

    def open_sealed(self, _: str, modified: float | None = None) -> pa.NativeFile:
        return pa.BufferReader(self._content)

    def path_of(self, name: str) -> str:
        return name


def sealed(data: bytes) -> None:
    """A sealed chunk with any bytes changed, cut anywhere: an error of ours, or what was written."""
    content, values = _sealed_chunk()
    chunks, read = _InMemory(_damaged(content, data)), []
    with suppress(DamagedChunkError):
        for batch in read_chunk(chunks, chunk_name(0), 0, len(values)):
            read += batch.column("value").to_pylist()
    assert read == values[: len(read)], "other rows than were written"


@cache
def _table() -> tuple[bytes, ArrowValues]:
    """A value with a column of each kind of types, and what reads it."""
    columns = {
        "whole": (pa.array([1, None, 3], pa.int32()), pa.int64()),
        "real": (pa.array([1.5, None, 3.5]), pa.float32()),
        "decimal": (pa.array([1, None, 3], pa.int64()).cast(pa.decimal128(25, 3)), pa.decimal128(10, 2)),
        "text": (pa.array(["a", None, "b" * 20], pa.string_view()), pa.string()),
        "bytes": (pa.array([b"a", None, b"b" * 20], pa.large_binary()), pa.binary()),
        "when": (pa.array([1, None, 3000], pa.timestamp("ns", tz="UTC")), pa.timestamp("us", tz="UTC")),
        "of few": (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        "list": (pa.array([["a"], None, []], pa.large_list(pa.string_view())), pa.list_(pa.string())),
        "fixed": (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)), pa.list_(pa.int64())),
        "struct": (pa.array([{"x": 1}, None, {"x": None}]), pa.struct([("x", pa.float64())])),
        "map": (
            pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
            pa.map_(pa.string(), pa.int32()),
        ),
        "nothing": (pa.nulls(3), pa.list_(pa.int64())),
    }
    table = pa.table({name: given for name, (given, _) in columns.items()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    schema = pa.schema([(name, wanted) for name, (_, wanted) in columns.items()])
    return sink.getvalue().to_pybytes(), ArrowValues(schema, False)


def tables(data: bytes) -> None:
    """A value that is a table with any bytes changed, cut anywhere: rows that are sound, or none, and why."""
    content, reader = _table()
    value = _damaged(content, data)
    message = number_rows(batch_of([value.to_pybytes()]), 0)
    unfit: list[UnfitValueError] = []
    found = list(reader.rows(message, lambda _, why: unfit.append(why)))
    for batch in found:
        batch.validate(full=True)
        assert batch.schema == reader.schema
    assert not (unfit and found), "rows of a value that does not fit"


# The core.


@contextmanager
def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://fuzz")
        receiver.connect("inproc://fuzz")
        yield sender, receiver


def filling(data: bytes) -> None:
    """The cores take any messages as they were sent, whatever the bounds."""
    most, room = 1 + (data[0] if data else 0), 1 + int.from_bytes(data[1:3], "big")
    messages = messages_of(data[3:])[:500]
    for implementation in {core.implementation, python_core}:
        with zmq.Context() as context, _pair(context) as (sender, receiver):
            for message in messages:
                sender.send_multipart(message)
            with mock.patch.object(core, "implementation", implementation):
                inbox = core.Inbox()
            while (before := inbox.messages) < len(messages):
                inbox.take((receiver,), most, room)
                assert inbox.messages > before, "nothing is taken though something is there"
            taken = inbox.hand_over().lists()
            taken.validate(full=True)
            assert taken.to_pylist() == messages


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        framing,
        acknowledged,
        durable,
        chunks,
        replay,
        sealed,
        tables,
        filling,
    )
}
