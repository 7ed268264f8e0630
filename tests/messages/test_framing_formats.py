"""The framings: golden bytes of each format, what does not fit and why, and any bytes at all."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import DATA, stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.framing.fields import UnfitError
from zmq_datasource.messages.framing.replay import Reply, read_reply, request
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.source.kept import read_gaps

GOLDEN = json.loads((DATA / "framings.json").read_text(encoding="utf-8"))
FRAMINGS = ["sequenced", "vllm", "bitcoin", "clone", "dafka", "jupyter"]
DETECTOR = {"framing": "custom", "sequenceFrame": 0, "sequencePath": "$.frameNumber", "valueFrame": 1}


def intake(**options: Any) -> Intake:
    return Intake(stream_options(connect="tcp://feed:1", **options), SourceCounters())


def read(framing: Intake, messages: list[RawMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and the reasons of the messages that did not fit."""
    batch, findings = framing.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
    batch.validate(full=True)
    rows = to_rows(number_rows(batch, 0, 0), include_frames=True).to_pylist()
    return rows, [malformed.reason for malformed in findings.malformed]


def frames_of(entry: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in entry["frames"]]


def intake_for(entry: dict[str, Any]) -> Intake:
    if entry["framing"] == "detector":
        return intake(**{**DETECTOR, "sequencePath": entry.get("field", "frameNumber")})
    return intake(framing=entry["framing"])


@pytest.mark.parametrize(
    "entry", GOLDEN, ids=[f"{entry['framing']}-{number}" for number, entry in enumerate(GOLDEN)]
)
def test_golden_bytes_are_read_as_the_format_says(entry: dict[str, Any]) -> None:
    framing, frames = intake_for(entry), frames_of(entry)
    rows, reasons = read(framing, [frames])
    if entry.get("control"):
        assert rows == []
        # A detector's end of acquisition has the form of half a message.
        assert bool(reasons) == (entry["framing"] == "detector")
        return
    if entry["sequence"] is not None and entry["sequence"] >= 2**63:
        assert rows == []
        assert reasons == [f"the sequence {entry['sequence']} is outside {reasons[0].split('outside ')[1]}"]
        return
    (row,) = rows
    assert row["topic"] == entry["topic"]
    assert row["sequence"] == entry["sequence"]
    assert row["value"] == bytes.fromhex(entry["value"])
    assert row["frames"] == frames
    if entry["framing"] != "jupyter":  # who names no publisher is told apart by its endpoint
        assert row["publisher"] == (entry["publisher"] or "tcp://feed:1")


def test_the_endpoint_tells_publishers_apart_that_do_not_name_themselves() -> None:
    """Two ranks of one vLLM: the same topic, the same numbers."""
    framing = Intake(stream_options(connect="tcp://feed:1,tcp://feed:2", framing="vllm"), SourceCounters())
    message = [b"t", bytes(8), b"v"]
    runs = [Arrival(0, 2, "tcp://feed:1"), Arrival(1, 2, "tcp://feed:2"), Arrival(2, 1, "tcp://feed:1")]
    for bad in (False, True):
        batch, _ = framing.read(
            raw_of([message, [b"bad"] if bad else message, message, message, message]), runs
        )
        expected = ["tcp://feed:1", *([] if bad else ["tcp://feed:1"]), *["tcp://feed:2"] * 2, "tcp://feed:1"]
        assert batch.column("publisher").to_pylist() == expected
        assert to_rows(number_rows(batch, 0, 0), include_frames=True).to_pylist()[-1]["frames"] == message


def test_a_publisher_without_a_name_stays_unnamed_where_its_endpoint_does_not_count() -> None:
    for options in ({"framing": "plain"}, {"framing": "vllm", "sequenceBy": "topic"}):
        rows, _ = read(intake(**options), [[b"t", bytes(8), b"v"]])
        assert rows[0]["publisher"] is None


def test_jupyters_publisher_is_the_session() -> None:
    entry = next(e for e in GOLDEN if e["framing"] == "jupyter")
    frames = frames_of(entry)
    (row,), _ = read(intake(framing="jupyter"), [frames])
    header = json.loads(frames[frames.index(b"<IDS|MSG>") + 2])
    assert row["publisher"] == header["session"]


def test_many_alike_are_read_like_each_alone() -> None:
    for framing in FRAMINGS:
        messages = [frames_of(e) for e in GOLDEN if e["framing"] == framing]
        alone = [row for message in messages for row in read(intake(framing=framing), [message])[0]]
        together, _ = read(intake(framing=framing), messages)
        assert [{**row, "id": 0} for row in together] == alone


@pytest.mark.parametrize(
    ("framing", "message", "reason"),
    [
        ("vllm", b"alone", "it has 1 frame, 3 expected"),
        ("vllm", [b"t", b"short", b"v"], "the sequence has 5 bytes, 8 expected"),
        ("bitcoin", [b"t", b"v", b"12345678"], "the sequence has 8 bytes, 4 expected"),
        ("clone", [b"k", b"12345678", b"v"], "it has 3 frames, 5 expected"),
        ("sequenced", [b"t", b"p", b"", b"v"], "the sequence has 0 bytes, 8 expected"),
        ("sequenced", [b"t", b"p", b"", b"v", b"w"], "it has 5 frames, 4 expected"),
        ("dafka", [b"", b"v"], "b'' is no letter of a Dafka message"),
        ("dafka", [b"Mno end", b"v"], "its topic does not end"),
        ("dafka", [b"Mt\0\2", b"v"], "its version is not 1"),
        ("dafka", [b"Mt\0\1\xffp", b"v"], "a string in it is cut off"),
        ("dafka", [b"Mt\0\1\1p\1t123", b"v"], "the sequence has 3 bytes, 8 expected"),
        ("dafka", [b"Mt\0\1\1p\1t12345678"], "it has 1 frames, 2 expected"),
        ("jupyter", [b"t", b"v"], "it has no frame <IDS|MSG>"),
        ("jupyter", [b"<IDS|MSG>", b"s", b"{}"], "it has 2 frames after <IDS|MSG>, 5 or more expected"),
    ],
)
def test_what_does_not_fit_is_told_with_its_reason(framing: str, message: RawMessage, reason: str) -> None:
    rows, reasons = read(intake(framing=framing), [message])
    assert (rows, reasons) == ([], [reason])


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"no json", "JSON is malformed"),
        (b'{"frame": 1}', "missing required field `header`"),
        (b'{"header": []}', "got `array` - at `$.header`"),
        (b'{"header": {}}', "missing required field `frameNumber` - at `$.header`"),
        (b'{"header": {"frameNumber": "1"}}', "got `str` - at `$.header.frameNumber`"),
        (b'{"header": {"frameNumber": 1.5}}', "got `float`"),
        (b'{"header": {"frameNumber": true}}', "got `bool`"),
        (b'{"header": {"frameNumber": 1e400}}', "the header does not hold the sequence"),
        (b'{"header": {"frameNumber": 99999999999999999999999}}', "the sequence"),
        (b"[" * 100_000, "the header does not hold the sequence"),
        (b'{"x": ' * 10_000, "the header does not hold the sequence"),
        (b'{"header": {"frameNumber": 1}}\xff', "JSON is malformed"),
        (b'{"header": {"frameNumber": 1}}' + b" " * 300_000, "the header has 300030 bytes, 262144 at most"),
    ],
)
def test_a_header_without_the_number_does_not_fit(header: bytes, reason: str) -> None:
    framing = intake(framing="custom", sequenceFrame=0, sequencePath="header.frameNumber")
    rows, (told,) = read(framing, [[header, b"v"]])
    assert rows == []
    assert reason in told


def test_one_that_does_not_fit_harms_no_other() -> None:
    framing = intake(framing="vllm")
    good: list[RawMessage] = [[b"t", bytes([0] * 7 + [n]), b"v%d" % n] for n in range(5)]
    rows, reasons = read(framing, [*good[:3], b"bad", *good[3:]])
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3, 4]
    assert len(reasons) == 1


@pytest.mark.parametrize(
    ("options", "message", "expected"),
    [
        ({"sequenceFrame": 0}, (7).to_bytes(8, "big") + b"rest", (None, "tcp://feed:1", 7)),
        (
            {"sequenceFrame": 0, "sequenceOffset": 2, "sequenceWidth": 4, "sequenceEndian": "little"},
            b"xx\x05\x00\x00\x00rest",
            (None, "tcp://feed:1", 5),
        ),
        (
            {
                "sequenceFrame": -1,
                "sequenceWidth": 4,
                "sequenceSigned": True,
                "valueFrame": 1,
                "topicFrame": 0,
            },
            [b"t", b"v", b"\xff\xff\xff\xfe"],
            ("t", "tcp://feed:1", -2),
        ),
        (
            {"sequenceFrame": 2, "publisherFrame": 1, "topicFrame": 0, "valueFrame": -1},
            [b"t", b"p", (9).to_bytes(8, "big"), b"extra", b"v"],
            ("t", "p", 9),
        ),
        (
            {"sequenceFrame": 0, "sequencePath": "$.a.n"},
            [b'{"a": {"x": [1], "n": 6}}', b"v"],
            (None, "tcp://feed:1", 6),
        ),
        ({"topicFrame": 0, "publisherFrame": 1}, [b"t", b"\xff\xfe", b"v"], ("t", "0xfffe", None)),
    ],
)
def test_custom_framing_finds_the_fields(
    options: dict[str, Any], message: RawMessage, expected: tuple[Any, ...]
) -> None:
    rows, reasons = read(intake(framing="custom", **options), [message])
    assert reasons == []
    assert (rows[0]["topic"], rows[0]["publisher"], rows[0]["sequence"]) == expected
    assert rows[0]["frames"] == (message if isinstance(message, list) else [message])


def test_a_value_may_begin_behind_its_number() -> None:
    framing = intake(framing="custom", sequenceFrame=0, valueFrame=0, valueOffset=8)
    message = (7).to_bytes(8, "big") + b"value"
    (row,), _ = read(framing, [message])
    assert (row["sequence"], row["value"], row["frames"]) == (7, b"value", [message])
    assert read(framing, [b"short"])[1]


# Any bytes at all.

anything = st.one_of(st.binary(max_size=40), st.lists(st.binary(max_size=40), min_size=2, max_size=9))
golden = st.sampled_from([frames_of(entry) for entry in GOLDEN])


@st.composite
def nearly_golden(draw: st.DrawFn) -> list[bytes]:
    """A golden message with a frame changed, cut, doubled or removed."""
    frames = list(draw(golden))
    at = draw(st.integers(0, len(frames) - 1))
    match draw(st.sampled_from(["change", "cut", "double", "remove"])):
        case "change":
            frames[at] = draw(st.binary(max_size=40))
        case "cut":
            frames[at] = frames[at][: draw(st.integers(0, len(frames[at])))]
        case "double":
            frames.insert(at, frames[at])
        case "remove" if len(frames) > 1:
            del frames[at]
    return frames


SETTINGS: list[dict[str, Any]] = [
    *({"framing": name} for name in FRAMINGS),
    DETECTOR,
    {"framing": "custom", "sequenceFrame": -1, "sequenceOffset": 3, "sequenceWidth": 4, "topicFrame": 0},
    {"framing": "custom", "publisherFrame": 1, "sequenceFrame": 0, "valueOffset": 2, "sequenceSigned": True},
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: "-".join(map(str, options.values())))
@given(messages=st.lists(st.one_of(anything, nearly_golden(), golden), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_whatever_comes_is_a_row_or_told(options: dict[str, Any], messages: list[RawMessage]) -> None:
    framing = intake(**options)
    counters = framing._counters
    rows, reasons = read(framing, messages)
    assert len(rows) + len(reasons) + counters.control == len(messages)
    assert (counters.received, counters.malformed) == (len(rows), len(reasons))
    sent = [m if isinstance(m, list) else [m] for m in messages]
    at = 0
    for row in rows:  # in their order, frames and all
        at = sent.index(row["frames"], at) + 1
    framing.full()
    framing.delta()


@pytest.mark.parametrize("framing", FRAMINGS)
def test_noise_costs_no_memory_for_ever(framing: str) -> None:
    bounds = {} if framing == "jupyter" else {"maxPublishers": 50, "maxGaps": 50}
    feed = intake(framing=framing, **bounds)
    noise: list[RawMessage] = [
        [bytes([n % 7]), b"%d" % n, (n * n).to_bytes(8, "big"), b"v"][: 1 + n % 4] for n in range(500)
    ]
    noise += [frames_of(entry) for entry in GOLDEN]
    for _ in range(5):
        read(feed, noise)
    tracemalloc.start()
    try:
        read(feed, noise)
        before = kept_by_reading()
        for _ in range(20):
            read(feed, noise)
        after = kept_by_reading()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000


def kept_by_reading() -> int:
    """Bytes alive that the reading of messages allocated; other threads of the test process allocate too."""
    gc.collect()
    modules = [
        tracemalloc.Filter(True, f"*/zmq_datasource/{room}/*") for room in ("messages", "sequences", "source")
    ]
    statistics = tracemalloc.take_snapshot().filter_traces(modules).statistics("filename")
    return sum(statistic.size for statistic in statistics)


# The replay protocol.

NINE = (9).to_bytes(8, "big")
END = b"\xff" * 8


def test_a_request_is_an_empty_frame_and_the_first_sequence() -> None:
    assert request(258) == [b"", b"\x00\x00\x00\x00\x00\x00\x01\x02"]


@pytest.mark.parametrize(
    ("frames", "reply"),
    [
        ([b"", NINE, b"v"], Reply(9, None, b"v")),
        ([b"", b"t", NINE, b"v"], Reply(9, b"t", b"v")),
        ([b"", b"", NINE, b"v"], Reply(9, b"", b"v")),
        ([NINE, b"v"], Reply(9, None, b"v")),
        ([b"", NINE, b""], Reply(9, None, b"")),
        ([b"", END, b""], Reply(None, None, b"")),
        ([b"", b"", END, b""], Reply(None, b"", b"")),
        ([b"", b"t", END, b""], Reply(None, b"t", b"")),
    ],
)
def test_replies_of_both_versions_are_read(frames: list[bytes], reply: Reply) -> None:
    assert read_reply(frames) == reply


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6))
def test_any_reply_is_read_or_refused(frames: list[bytes]) -> None:
    try:
        reply = read_reply(frames)
    except UnfitError:
        return
    assert reply.value == frames[-1]


def test_numbers_at_the_ends_of_their_range_harm_nothing() -> None:
    framing = intake(framing="clone")
    numbers = [-(2**63), 2**63 - 1, 0, -(2**63)]
    messages: list[RawMessage] = [[b"k", n.to_bytes(8, "big", signed=True), b"", b"", b"v"] for n in numbers]
    rows, _ = read(framing, messages)
    assert [row["sequence"] for row in rows] == numbers
    gaps = read_gaps(framing.full(), None)
    assert all(row["messages"] < 2**63 for row in gaps)


def test_a_topic_that_is_no_text_and_very_long_is_cut_in_sight_and_whole_in_frames() -> None:
    topic = b"\xff" * (3 << 20)
    (row,), _ = read(intake(framing="vllm"), [[topic, bytes(8), b"v"]])
    assert len(row["topic"]) == 1 << 20
    assert row["frames"][0] == topic
