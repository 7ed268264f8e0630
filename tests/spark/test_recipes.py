"""The recipes of docs/recipes.md, as printed."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zmq
from pyspark.sql import SparkSession

from tests.support import DATA, bound
from tests.support.pages import marked

pytestmark = pytest.mark.spark

blocks_of = partial(marked, "recipes.md")
NEWER_VLLM = ("vLLM 0.26.0", "vLLM 0.33.0")
KV_EVENTS = json.loads((DATA / "kv_events.json").read_text(encoding="utf-8"))


# Each takes five seconds, and reads by the same schema.
_PROGRAMS = [pytest.param(one, marks=[pytest.mark.slow] if at else []) for at, one in enumerate(KV_EVENTS)]


@pytest.mark.parametrize("recorded", _PROGRAMS, ids=lambda recorded: recorded["program"])
def test_vllm(recorded: dict[str, Any], spark: SparkSession) -> None:
    program = recorded["program"]
    largest = 2**64 - 1 if program.startswith("vLLM") else -1
    rows = [
        ("tcp://vllm-0:5557", at, bytes.fromhex(value)) for at, (_, _, value) in enumerate(recorded["live"])
    ]
    names: dict[str, Any] = {
        "feed": spark.createDataFrame(rows, "publisher STRING, sequence BIGINT, value BINARY")
    }
    exec(compile(blocks_of("vllm"), "recipes.md", "exec"), names)
    assert names["batches"].select("batch.data_parallel_rank").distinct().collect() == [(0,)]
    assert names["events"].count() == 5
    found = names["blocks"].select("type", "block", "medium").collect()
    medium = None if program.startswith("Dynamo") else "GPU"
    removed_from = None if program == "vLLM 0.10.2" else medium  # an array, in which it is in the third place
    assert [tuple(row) for row in found] == [
        ("BlockStored", 1, medium),
        ("BlockStored", largest, medium),
        ("BlockRemoved", 1, removed_from),
        ("BlockStored", 3, medium),
        ("BlockRemoved", largest, removed_from),
    ]
    new = ["event.block_size", "event.group_idx", "event.kv_cache_spec_kind", "event.extra_keys"]
    values = names["events"].where("event.type = 'BlockStored'").select(*new).collect()
    expected = (1, "full_attention", [["salt"], None]) if program in NEWER_VLLM else (None, None, None)
    assert {(row[0], row[1], row[2], str(row[3])) for row in values} == {
        (16, *expected[:2], str(expected[2]))
    }
    per_minute = names["per_minute"].orderBy("window").select("stored", "removed").collect()
    assert [tuple(row) for row in per_minute] == [(3, 1), (0, 1)]
    names["blocks"].createOrReplaceTempView("blocks")
    (row,) = spark.sql(names["LIFETIMES"]).collect()
    assert (row.blocks, list(row.seconds)) == (2, [2.5, 60.0])


def test_jupyter(spark: SparkSession) -> None:
    frames = [
        b"kernel.1.status",
        b"<IDS|MSG>",
        b"signature",
        b'{"msg_type": "status"}',
        b"{}",
        b"{}",
        b"content",
    ]
    names: dict[str, Any] = {
        "feed": spark.createDataFrame([([*frames, b"a buffer"],)], "frames ARRAY<BINARY>")
    }
    exec(compile(blocks_of("jupyter"), "recipes.md", "exec"), names)
    assert [tuple(row) for row in names["activity"].collect()] == [("status", "content")]


def test_numbers_in_json(spark: SparkSession) -> None:
    rows = [
        (number, topic, b'{"seq": %d, "temperature": 21.5}' % number)
        for topic in ("oslo", "rome")
        for number in (1, 2, 3, 7, 8, 8)
        if (topic, number) != ("rome", 8)
    ]
    names: dict[str, Any] = {}
    names["messages"] = spark.createDataFrame(rows, "id BIGINT, topic STRING, value BINARY")
    exec(compile(blocks_of("json"), "recipes.md", "exec"), names)
    found = sorted(tuple(row) for row in names["gaps"].collect())
    assert found == [("oslo", 4, 6, 3), ("rome", 4, 6, 3)]
    assert [tuple(row) for row in names["twice"].collect()] == [("oslo", 8, 2)]


def test_detector(spark: SparkSession) -> None:
    compressed = cbor2.CBORTag(56500, ["bslz4", 2, b"pixels"])
    image = {
        "type": "image",
        "series_id": 7,
        "image_id": 3,
        "real_time": [5, 1000],
        "data": {"threshold_1": cbor2.CBORTag(40, [[2, 3], cbor2.CBORTag(69, compressed)])},
    }
    rows = [(cbor2.dumps(value),) for value in ({"type": "start", "series_id": 7}, image)]
    names: dict[str, Any] = {"feed": spark.createDataFrame(rows, "value BINARY")}
    exec(compile(blocks_of("detector"), "recipes.md", "exec"), names)
    (row,) = names["channels"].collect()
    assert (row.series_id, row.image_id, row.channel, row.image.shape) == (7, 3, "threshold_1", [2, 3])
    assert (row.image.pixels.algorithm, bytes(row.image.pixels.bytes)) == ("bslz4", b"pixels")


def test_numpy(spark: SparkSession, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    push, endpoint = bound(context, zmq.PUSH)

    def send_array(array: np.ndarray[Any, Any]) -> None:
        """As pyzmq's documentation has it."""
        push.send_json({"dtype": str(array.dtype), "shape": array.shape}, zmq.SNDMORE)
        push.send(array)

    def send() -> None:
        send_array(np.arange(6, dtype="int16").reshape(2, 3))
        send_array(np.array([0.5], dtype="float32"))

    sending = threading.Thread(target=send)  # each send waits for a reader
    sending.start()
    reader = spark.read.format("zmq").option("socketType", "PULL").option("connect", endpoint)
    feed = reader.option("includeFrames", "true").option("maxMessages", "2").load().cache()
    assert feed.count() == 2
    sending.join()
    names: dict[str, Any] = {"feed": feed}
    exec(compile(blocks_of("numpy"), "recipes.md", "exec"), names)
    assert [tuple(row) for row in names["numbers"].orderBy("id").collect()] == [
        (0, [2, 3], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (1, [1], [0.5]),
    ]


def test_compressed_values(spark: SparkSession) -> None:
    reading = pa.compress(msgspec.msgpack.encode({"city": "Oslo", "celsius": 7.5}), "zstd", asbytes=True)
    rows = [(0, reading), (1, b"plain")]
    names: dict[str, Any] = {"feed": spark.createDataFrame(rows, "id INT, value BINARY")}
    exec(compile(blocks_of("compressed"), "recipes.md", "exec"), names)
    read = names["readings"].orderBy("id").selectExpr("id", "r.city", "r.celsius").collect()
    assert [tuple(row) for row in read] == [(0, "Oslo", 7.5), (1, None, None)]
    assert [row.id for row in names["unreadable"].collect()] == [1]


_AVRO = """
import json, sys
from pyspark.sql import SparkSession

jar, recipe, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").config("spark.jars", jar)
spark = builder.getOrCreate()
rows = [(at, None if value is None else bytes.fromhex(value)) for at, value in enumerate(values)]
names = {"feed": spark.createDataFrame(rows, "id INT, value BINARY")}
exec(recipe, names)
read = names["readings"].orderBy("id").selectExpr("schema", "reading", "reading.city", "reading.celsius")
print(json.dumps([[row.schema, row.reading is not None, row.city, row.celsius] for row in read.collect()]))
"""


_AVRO_JAR = "org/apache/spark/spark-avro_2.13/4.2.0/spark-avro_2.13-4.2.0.jar"
_AVRO_SHA256 = "4c186cedc03cbe4ee356a94b32232b347ef48611c3209400b3a77e4fe4abff4f"


def avro_jar() -> Path:
    """Spark's Avro, which PySpark does not have: fetched once, checked each time. It also runs on Spark 4.3."""
    file = Path.home() / ".cache" / "zmq_datasource" / Path(_AVRO_JAR).name
    if not file.exists():
        try:
            content = urllib.request.urlopen(f"https://repo1.maven.org/maven2/{_AVRO_JAR}", timeout=20).read()
        except OSError as e:
            pytest.skip(f"{file.name} cannot be had: {e}; put it into {file.parent}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == _AVRO_SHA256, f"{file} is another file; remove it"
    return file


@pytest.mark.slow
def test_avro_with_a_schema_registry() -> None:
    """In a process of its own, because Spark needs the jar when it starts."""

    def framed(schema: int, body: bytes) -> str:
        return (b"\0" + schema.to_bytes(4, "big") + body).hex()

    oslo = bytes([2 * len(b"Oslo")]) + b"Oslo"
    degrees = struct.pack("<d", 7.5)
    values = [
        framed(7, oslo),
        framed(9, oslo + degrees),
        framed(8, oslo),
        b"{}".hex(),
        framed(9, b"\xff"),
        None,
        "",
    ]
    program = subprocess.run(
        [sys.executable, "-c", _AVRO, str(avro_jar()), blocks_of("avro"), json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(program.stdout.splitlines()[-1]) == [
        [7, True, "Oslo", 0.0],
        [9, True, "Oslo", 7.5],
        [8, False, None, None],
        [None, False, None, None],
        [9, True, None, None],
        [None, False, None, None],
        [None, False, None, None],
    ]
