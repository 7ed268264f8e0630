"""The inputs that fuzzing begins with: what honest peers send, in the form that the targets read.

Usage: python -m tests.fuzz.seeds; writes them to tests/fuzz/corpus.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from tests.fuzz.targets import FRAMINGS
from tests.support import DATA
from zmq_datasource.acknowledged.protocol import Commit, Data, End, Hello, encode
from zmq_datasource.log import Chunk, Found
from zmq_datasource.messages.packed import pack_columns
from zmq_datasource.serving import protocol as fetch
from zmq_datasource.source.chunk_server import PROTOCOL, Answer, Find, Read

CORPUS = Path(__file__).parent / "corpus"


def packed(frames: Sequence[object]) -> bytes:
    """As ``frames_of`` reads them."""
    contents = [bytes(memoryview(frame)) for frame in frames]  # type: ignore[arg-type]
    return b"".join(len(content).to_bytes(2, "big") + content for content in contents)


def framing() -> Iterator[bytes]:
    golden = json.loads((DATA / "framings.json").read_text(encoding="utf-8"))
    names = [options["framing"] for options in FRAMINGS]
    for entry in golden:
        if entry["framing"] in names:
            frames = [bytes.fromhex(frame) for frame in entry["frames"]]
            yield bytes([names.index(entry["framing"])]) + bytes([len(frames) - 1]) + packed(frames)
    yield bytes([7, 1]) + packed([b'{"n": {"m": 5}}', b"value"])
    yield bytes([8, 2]) + packed([b"topic", b"xyz\5\0\0\0", b"me", b"1234567value"])


def acknowledged() -> Iterator[bytes]:
    attempt, who = "0" * 32, {"producer": "p", "number": 1}
    rows = pa.RecordBatch.from_pydict(
        {"topic": pa.array([b"t", None], pa.binary()), "value": pa.array([b"v", b"w"], pa.binary())}
    )
    columns, buffers = pack_columns(rows)
    data = Data(attempt=attempt, partition=0, index=0, rows=2, columns=columns, **who)
    yield packed(encode(data, buffers))
    for message in (
        Hello(attempt=attempt, producer="p"),
        End(attempt=attempt, messages=1, rows=2),
        Commit(attempts=[attempt], rows=2, digest="0" * 16, **who),
    ):
        yield packed(encode(message))


def durable() -> Iterator[bytes]:
    for message in (
        fetch.Open(name="me", session=1 << 32, start="last", log="x"),
        fetch.Open(name="me", session=1, start=5),
    ):
        yield packed(fetch.encode(message, [b"a", b"b"]))
    for message in (
        fetch.Opened(session=1, log="x", next=0, new=True),
        fetch.Fetch(name="me", session=1, first=5, done=4, confirm=True),
        fetch.Batch(session=1, log="x", first=1, next=4, done=0, lost=2),
        fetch.Refused(code="taken", reason="why", session=1),
    ):
        yield packed(fetch.encode(message))
    plain = {"topic": pa.array([b"t", None], pa.binary()), "value": pa.array([b"v", b"w"], pa.binary())}
    frames = {"frames": pa.array([[b"t", b"u", b"v"], [b"w"]], pa.list_(pa.binary()))}
    for rows in (plain, frames):
        columns, buffers = pack_columns(pa.record_batch(rows))
        head = fetch.Batch(session=1, log="x", first=1, next=4, done=0, rows=2, columns=tuple(columns))
        ids = (1).to_bytes(8, "little") + (3).to_bytes(8, "little")
        yield packed(fetch.encode(head, [ids, *buffers]))


def chunks() -> Iterator[bytes]:
    for said in (
        Find(number=1, secret=bytes(32), id=7),
        Read(number=2, secret=bytes(32), name="00000000000000000000.arrow", place=-10, length=10),
        Answer(number=1, found=Found(0, Chunk(0, 10, 1000, 0.5, None))),
        Answer(number=2, error=2, text="gone"),
    ):
        yield packed(PROTOCOL.encode(said))


def replay() -> Iterator[bytes]:
    yield packed([b"", bytes(7) + b"\5", b"value"])
    yield packed([b"", b"topic", b"\xff" * 8, b""])


def damage() -> Iterator[bytes]:
    """Bytes that are changed and cut off."""
    yield b""
    yield b"\4\0\1"
    yield b"\xff\xff\0"


def filling() -> Iterator[bytes]:
    yield b"\2\0\5\2" + packed([b"a", b"b", b"c", b"", b"\1x", b"y" * 100])


def main() -> None:
    made = {seeds.__name__: seeds for seeds in (framing, acknowledged, durable, chunks, replay, filling)}
    for target, seeds in (made | dict.fromkeys(("sealed", "tables"), damage)).items():
        directory = CORPUS / target
        directory.mkdir(parents=True, exist_ok=True)
        for seed in seeds():
            (directory / hashlib.sha1(seed, usedforsecurity=False).hexdigest()[:16]).write_bytes(seed)


if __name__ == "__main__":
    main()
