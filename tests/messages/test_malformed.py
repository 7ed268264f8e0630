"""Messages that do not fit their framing: rows without a value, in their order, with all frames."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.support import stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.columns import row_schema
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.source.intake import Arrival, Intake

# A layout whose fields restore the frames, one whose rows store theirs, and one that is decoded message by message.
FITTING: dict[str, list[bytes]] = {
    "vllm": [b"t", bytes(8), b"v"],
    "custom": [b"h", b"t", bytes(8), b"v"],
    "jupyter": [b"t", b"<IDS|MSG>", b"s", b'{"session": "p"}', b"{}", b"{}", b"v"],
}
NULL = {"topic": None, "value": None, "publisher": None, "sequence": None}


def intake(framing: str, **options: Any) -> tuple[Intake, SourceCounters]:
    if framing == "custom":
        options |= {"topicFrame": 1, "sequenceAt": "2:0:u64be"}
    counters = SourceCounters()
    return Intake(stream_options(connect="tcp://feed:1", framing=framing, **options), counters), counters


def read(feed: Intake, messages: list[RawMessage], include_frames: bool = True) -> pa.RecordBatch:
    arrivals = [Arrival(1000 + at, 1, "tcp://feed:1") for at in range(len(messages))]
    batch, _ = feed.read(raw_of(messages), arrivals)
    rows = to_rows(number_rows(batch, 0), include_frames)
    rows.validate(full=True)
    return rows


@pytest.mark.parametrize("framing", FITTING)
@pytest.mark.parametrize(
    "strangers",
    [[[b""]], [[b"", b""]], [[b"x"] * 9], [[b"x" * (1 << 20)]], [[b"a"], [b"b"]]],
    ids=["an empty frame", "two empty frames", "nine frames", "1 MiB", "two messages"],
)
def test_a_message_between_others_is_a_row_at_its_place(framing: str, strangers: list[RawMessage]) -> None:
    feed, counters = intake(framing)
    good = FITTING[framing]
    sent = [good, *strangers, good, *strangers]
    rows = read(feed, sent).to_pylist()
    assert [row["frames"] for row in rows] == sent
    assert [row["value"] for row in rows] == [b"v" if frames == good else None for frames in sent]
    assert all(row | NULL == row for row in rows if row["value"] is None)
    assert [row["timestamp"].microsecond for row in rows] == [1000 + at for at in range(len(sent))]
    assert (counters.received, counters.malformed, counters.bytes) == (len(sent), 2 * len(strangers), 2)


def test_without_frames_the_rows_have_the_declared_schema() -> None:
    feed, _ = intake("vllm")
    rows = read(feed, [[b"a"], FITTING["vllm"]], include_frames=False)
    assert rows.schema == row_schema(False)
    assert rows.column("value").to_pylist() == [None, b"v"]


def test_a_duplicate_beside_it_is_left_out() -> None:
    feed, counters = intake("vllm", deduplicate=True)
    first, second = ([b"t", number.to_bytes(8, "big"), b"v"] for number in (1, 2))
    rows = read(feed, [first, second, [b"a"], second, [b"b"]])
    assert rows.column("frames").to_pylist() == [first, second, [b"a"], [b"b"]]
    assert (counters.received, counters.malformed) == (4, 2)


@pytest.mark.parametrize("mode", ["skip", "fail"])
def test_it_is_counted_and_is_no_row_with_the_other_modes(mode: str) -> None:
    feed, counters = intake("vllm", onMalformed=mode)
    good = FITTING["vllm"]
    assert read(feed, [[b"a"], good]).column("frames").to_pylist() == [good]
    assert (counters.received, counters.malformed) == (1, 1)
