"""The framings: golden messages of each format, messages that do not fit, and random bytes."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import DATA, stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.framing import LayoutFraming, to_rows
from zmq_datasource.messages.framing.fields import Announced, UnfitError
from zmq_datasource.messages.framing.replay import Reply, read_reply, request
from zmq_datasource.messages.raw import RawMessage, raw_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.options import PRESETS
from zmq_datasource.options.framing import Framing
from zmq_datasource.source.facts import read_gaps
from zmq_datasource.source.intake import Arrival, Intake

GOLDEN = json.loads((DATA / "framings.json").read_text(encoding="utf-8"))
FRAMINGS = [name for name in PRESETS if name != "plain"]
DETECTOR = {"framing": "custom", "sequenceAt": "0:$.frameNumber", "valueFrame": 1}


def intake(**options: Any) -> Intake:
    return Intake(stream_options(connect="tcp://feed:1", **options), SourceCounters())


def read(framing: Intake, messages: list[RawMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """Read messages. Returns the rows of those that fit, and the reasons why the others do not."""
    rows, reasons = read_all(framing, messages)
    return [row for row in rows if row["value"] is not None], reasons


def read_all(framing: Intake, messages: list[RawMessage]) -> tuple[list[dict[str, Any]], list[str]]:
    """Read messages. Returns all rows, and the reasons why messages do not fit."""
    batch, findings = framing.read(raw_of(messages), [Arrival(0, len(messages), "tcp://feed:1")])
    batch.validate(full=True)
    rows = to_rows(number_rows(batch, 0), include_frames=True).to_pylist()
    return rows, [malformed.reason for malformed in findings.malformed]


def frames_of(entry: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in entry["frames"]]


def intake_for(entry: dict[str, Any]) -> Intake:
    if entry["framing"] == "detector":
        return intake(**{**DETECTOR, "sequenceAt": f"0:$.{entry.get('field', 'frameNumber')}"})
    return intake(framing=entry["framing"])


def test_each_preset_is_an_option_and_has_golden_bytes() -> None:
    assert set(get_args(Framing)) == {*PRESETS, "custom"}
    assert {entry["framing"] for entry in GOLDEN} == {*FRAMINGS, "detector"}
    for name, preset in PRESETS.items():
        assert (preset.numbering is None) == bool(preset.unnumbered), name
        assert (preset.numbering is None) == (preset.layout is None), name


@pytest.mark.parametrize(
    "entry", GOLDEN, ids=[f"{entry['framing']}-{number}" for number, entry in enumerate(GOLDEN)]
)
def test_golden_bytes_are_read_as_the_format_says(entry: dict[str, Any]) -> None:
    framing, frames = intake_for(entry), frames_of(entry)
    rows, reasons = read(framing, [frames])
    if entry.get("control"):
        assert rows == []
        # The message at the end of an acquisition has fewer frames than the others.
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
    assert row["publisher"] == (
        entry["publisher"] or "tcp://feed:1"
    )  # those that name none have their endpoint


@pytest.mark.parametrize(
    ("message", "topic", "value"),
    [
        (b"v", None, b"v"),
        (b"", None, b""),
        ([b"t", b"v"], "t", b"v"),
        ([b"", b""], "", b""),
        ([b"t", b"x", b"v"], "t", b"v"),
        ([b"\xff", b"v"], "hex:ff", b"v"),
        ([b"t", b"\x00\xff"], "t", b"\x00\xff"),
    ],
)
def test_with_plain_framing_the_first_frame_is_the_topic_and_the_last_the_value(
    message: RawMessage, topic: str | None, value: bytes
) -> None:
    (row,), _ = read(intake(framing="plain"), [message])
    assert (row["topic"], row["value"]) == (topic, value)


def test_the_endpoint_is_the_publisher_of_messages_that_name_none() -> None:
    """Two ranks of one vLLM have the same topic and the same numbers."""
    framing = Intake(stream_options(connect="tcp://feed:1,tcp://feed:2", framing="vllm"), SourceCounters())
    message = [b"t", bytes(8), b"v"]
    runs = [Arrival(0, 2, "tcp://feed:1"), Arrival(1, 2, "tcp://feed:2"), Arrival(2, 1, "tcp://feed:1")]
    for bad in (False, True):
        batch, _ = framing.read(
            raw_of([message, [b"bad"] if bad else message, message, message, message]), runs
        )
        expected = ["tcp://feed:1", None if bad else "tcp://feed:1", *["tcp://feed:2"] * 2, "tcp://feed:1"]
        assert batch.column("publisher").to_pylist() == expected
        assert to_rows(number_rows(batch, 0), include_frames=True).to_pylist()[-1]["frames"] == message


def test_publisher_is_null_if_messages_are_not_counted_by_endpoint() -> None:
    for options in ({"framing": "plain"}, {"framing": "vllm", "sequenceBy": "topic"}):
        rows, _ = read(intake(**options), [[b"t", bytes(8), b"v"]])
        assert rows[0]["publisher"] is None


def test_many_messages_are_decoded_like_each_alone() -> None:
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
        ("sequenced", [b"t", b"p", b"", b"v", b"w"], "it has 5 frames, 4 expected"),
    ],
)
def test_a_message_that_does_not_fit_is_listed_with_the_reason(
    framing: str, message: RawMessage, reason: str
) -> None:
    rows, reasons = read(intake(framing=framing), [message])
    assert (rows, reasons) == ([], [reason])


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"no json", "JSON is malformed"),
        (b'{"frame": 1}', "missing required field `header`"),
        (b'{"header": {"frameNumber": 1.5}}', "got `float`"),
        (b'{"header": {"frameNumber": 99999999999999999999999}}', "the sequence"),
        (b"[" * 100_000, "the header does not hold the sequence"),
        (b'{"header": {"frameNumber": 1}}\xff', "JSON is malformed"),
        (b'{"header": {"frameNumber": 1}}' + b" " * 300_000, "the header has 300030 bytes, 262144 at most"),
    ],
)
def test_a_header_without_the_number_does_not_fit(header: bytes, reason: str) -> None:
    framing = intake(framing="custom", sequenceAt="0:$.header.frameNumber")
    rows, (told,) = read(framing, [[header, b"v"]])
    assert rows == []
    assert reason in told


def test_a_message_with_its_number_is_a_row_whatever_else_its_text_has() -> None:
    """Otherwise it would count as lost, though it has come."""
    texts = [
        b'{"seq": 1, "temp": NaN}',
        b'{"seq": 2, "temp": -Infinity}',
        b'{"seq": 3.0}',
        b'{"seq": "4"}',
        b'\xef\xbb\xbf{"seq": 5}',
        b'{"seq": 6}\0',
        b'{"seq": 7, "place": "\xe9"}\n',
        b'{"seq": 8}',
    ]
    feed = intake(framing="custom", sequenceAt="0:$.seq")
    rows, reasons = read(feed, [*texts])
    assert ([row["sequence"] for row in rows], reasons) == ([1, 2, 3, 4, 5, 6, 7, 8], [])
    assert feed.tracker is not None
    assert feed.tracker.totals.lost == 0


@pytest.mark.parametrize(
    ("options", "message", "expected"),
    [
        (
            {
                "sequenceAt": "-1:0:i32be",
                "valueFrame": 1,
                "topicFrame": 0,
            },
            [b"t", b"v", b"\xff\xff\xff\xfe"],
            ("t", "tcp://feed:1", -2),
        ),
        (
            {"sequenceAt": "2:0:u64be", "publisherFrame": 1, "topicFrame": 0, "valueFrame": -1},
            [b"t", b"p", (9).to_bytes(8, "big"), b"extra", b"v"],
            ("t", "p", 9),
        ),
        (
            {"sequenceAt": "0:$.a.n"},
            [b'{"a": {"x": [1], "n": 6}}', b"v"],
            (None, "tcp://feed:1", 6),
        ),
        ({"topicFrame": 0, "publisherFrame": 1}, [b"t", b"\xff\xfe", b"v"], ("t", "hex:fffe", None)),
    ],
)
def test_custom_framing_finds_the_fields(
    options: dict[str, Any], message: RawMessage, expected: tuple[Any, ...]
) -> None:
    rows, reasons = read(intake(framing="custom", **options), [message])
    assert reasons == []
    assert (rows[0]["topic"], rows[0]["publisher"], rows[0]["sequence"]) == expected
    assert rows[0]["frames"] == (message if isinstance(message, list) else [message])


# Fields that are bytes of a frame, and numbers that a counter cannot have.


@pytest.mark.parametrize(
    ("place", "frame", "told"),
    [
        ("0:2:u32be", b"xx\0\0\0\5rest", 5),
        ("0:2:u32be", b"xx\0\0\0", "the frame with the sequence has 5 bytes, 6 needed"),
        ("0:2:i32be", b"xx\xff\xff\xff\xff", -1),
        ("0:2:u32le", b"xx\1\0\0\0", 1),
        ("0:0:i32le", b"\xfe\xff\xff\xff", -2),
        ("0:0:u64le", b"\1" + bytes(7), 1),
        ("0:0:i64le", b"\xff" * 8, -1),
        ("0:0:u64be", b"\x7f" + b"\xff" * 7, 2**63 - 1),
        ("0:0:u64be", b"\x80" + bytes(7), f"the sequence {2**63} is outside 0 to {2**63 - 1}"),
        ("0:0:i64be", b"\x80" + bytes(7), -(2**63)),
    ],
)
def test_a_number_is_read_at_the_place_in_the_options(place: str, frame: bytes, told: int | str) -> None:
    rows, reasons = read(intake(framing="custom", sequenceAt=place), [frame])
    if isinstance(told, str):
        assert (rows, reasons) == ([], [told])
    else:
        assert ([row["sequence"] for row in rows], reasons) == ([told], [])


@pytest.mark.parametrize(
    ("options", "message", "reason"),
    [
        ({"topicFrame": 0, "valueFrame": 2}, [b"t", b"v"], "it has 2 frames, 3 or more expected"),
        ({"topicFrame": 0, "valueFrame": 2}, [b"t", b"x", b"v", b"y"], None),
        ({"topicFrame": -3}, [b"t", b"v"], "it has 2 frames, 3 or more expected"),
        ({"topicFrame": -3}, [b"t", b"x", b"v"], None),
        ({"topicFrame": 0}, b"tv", None),  # one frame can be both
        ({"publisherFrame": 1}, b"v", "it has 1 frame, 2 or more expected"),
    ],
)
def test_a_message_needs_the_frames_that_the_options_name(
    options: dict[str, Any], message: RawMessage, reason: str | None
) -> None:
    rows, reasons = read(intake(framing="custom", **options), [message])
    assert reasons == ([] if reason is None else [reason])
    assert len(rows) == (reason is None)


# What a message is stored as.


def kept(options: dict[str, Any], messages: list[RawMessage]) -> list[list[bytes] | None]:
    batch, _ = intake(**options).read(raw_of(messages), [Arrival(7_000_000, len(messages), "tcp://feed:1")])
    assert set(batch.column("timestamp").cast(pa.int64()).to_pylist()) == {7_000_000}
    return batch.column("frames").to_pylist()


@pytest.mark.parametrize(
    ("options", "messages", "stored"),
    [
        (
            {"framing": "plain"},
            [b"v", [b"t", b"v"], [b"a", b"b", b"c"], [b"\xff", b"v"], ["\ufffd".encode(), b"v"]],
            [False, False, True, True, False],
        ),
        (
            {"framing": "sequenced"},
            [[b"t", b"p", bytes(8), b"v"], [b"\xff", b"p", bytes(8), b"v"], [b"t", b"\xff", bytes(8), b"v"]],
            [False, True, True],
        ),
        ({"framing": "vllm"}, [[b"t", bytes(8), b"v"], [b"\xff", bytes(8), b"v"]], [False, True]),
        # The fields are the frames of a plain message.
        ({"framing": "custom", "topicFrame": 0}, [[b"t", b"v"], [b"t", b"x", b"v"]], [False, True]),
        ({"framing": "custom", "valueFrame": 0}, [b"v", [b"v", b"x"]], [False, True]),
        # The fields are not the frames of a plain message.
        ({"framing": "custom", "topicFrame": 1, "valueFrame": 0}, [[b"v", b"t"]], [True]),
    ],
)
def test_frames_are_stored_where_the_fields_do_not_give_them_back(
    options: dict[str, Any], messages: list[RawMessage], stored: list[bool]
) -> None:
    lists = [message if isinstance(message, list) else [message] for message in messages]
    assert kept(options, messages) == [
        frames if there else None for frames, there in zip(lists, stored, strict=True)
    ]
    rows, _ = read(intake(**options), messages)
    assert [row["frames"] for row in rows] == lists
    value = options.get("valueFrame", -1)
    assert [row["value"] for row in rows] == [frames[value] for frames in lists]


# Messages without content.


def test_the_end_of_a_publisher_announces_its_last_number() -> None:
    layout = PRESETS["sequenced"].layout
    assert layout is not None
    fields = LayoutFraming(layout).decode(
        raw_of([[b"t", b"p", bytes(8), b"v"], [b"t", b"p", bytes(7) + b"\5"]])
    )
    assert fields.announced == [Announced(1, b"t", b"p", 4, end=True)]
    assert (len(fields), fields.malformed) == (1, [])


# Beside a message that does not fit.


@pytest.mark.parametrize("mode", ["keep", "skip", "fail"])
def test_a_message_that_does_not_fit_is_counted_and_only_with_keep_a_row(mode: str) -> None:
    counters = SourceCounters()
    options = stream_options(connect="tcp://feed:1", framing="vllm", deduplicate=True, onMalformed=mode)
    first, second = ([b"t", number.to_bytes(8, "big"), b"v"] for number in (1, 2))
    rows, _ = read_all(Intake(options, counters), [first, second, [b"a"], second, [b"b"]])
    kept = [[b"a"], [b"b"]] if mode == "keep" else []
    assert [row["frames"] for row in rows] == [first, second, *kept]
    assert (counters.received, counters.malformed) == (2 + len(kept), 2)


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
    *({"framing": name} for name in PRESETS),
    DETECTOR,
    {"framing": "custom", "sequenceAt": "-1:3:u32be", "topicFrame": 0},
    {"framing": "custom", "publisherFrame": 1, "sequenceAt": "0:0:i64be"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=lambda options: "-".join(map(str, options.values())))
@given(messages=st.lists(st.one_of(anything, nearly_golden(), golden), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_message_is_a_row_with_all_its_frames(
    options: dict[str, Any], messages: list[RawMessage]
) -> None:
    counters = SourceCounters()
    framing = Intake(stream_options(connect="tcp://feed:1", **options), counters)
    rows, reasons = read_all(framing, messages)
    assert len(rows) + counters.control == len(messages)
    assert (counters.received, counters.malformed) == (len(rows), len(reasons))
    assert [row["value"] for row in rows].count(None) == len(reasons)
    assert all(
        row | dict.fromkeys(("topic", "publisher", "sequence")) == row for row in rows if row["value"] is None
    )
    sent = [m if isinstance(m, list) else [m] for m in messages]
    at = 0
    for row in rows:  # in the order of arrival, with all frames
        at = sent.index(row["frames"], at) + 1
    assert options["framing"] != "plain" or all(row["value"] == row["frames"][-1] for row in rows)
    framing.state()


# The replay protocol.

NINE = (9).to_bytes(8, "big")
END = b"\xff" * 8


def test_a_replay_request_is_an_empty_frame_and_the_first_sequence() -> None:
    assert request(258) == [b"", b"\x00\x00\x00\x00\x00\x00\x01\x02"]


@pytest.mark.parametrize(
    ("frames", "read"),
    [
        ([b"", NINE, b"v"], Reply(9, None, b"v")),
        ([b"", b"t", NINE, b"v"], Reply(9, b"t", b"v")),
        ([b"", b"", NINE, b"v"], Reply(9, b"", b"v")),
        ([NINE, b"v"], Reply(9, None, b"v")),
        ([b"", NINE, b""], Reply(9, None, b"")),
        ([b"", b"\x7f" + b"\xff" * 7, b"v"], Reply(2**63 - 1, None, b"v")),
        ([b"", END, b""], None),
        ([b"", b"", END, b""], None),
        ([b"", b"t", END, b""], None),
    ],
)
def test_replies_of_both_versions_are_read(frames: list[bytes], read: Reply | None) -> None:
    assert read_reply(frames) == read


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"x"], "a reply has 1 frames, 3 or 4 expected"),
        ([b"", b"t", b"x", NINE, b"v"], "a reply has 5 frames, 3 or 4 expected"),
        ([b"x", b"t", NINE, b"v"], "a reply has 4 frames, 3 or 4 expected"),
        ([b"", b"123", b"v"], "the sequence of a reply has 3 bytes, 8 expected"),
        ([b"", NINE], "the sequence of a reply has 0 bytes, 8 expected"),
        ([b"", b"\x80" + bytes(7), b"v"], f"the sequence {2**63} is outside 0 to {2**63 - 1}"),
        ([b"", END, b"v"], f"the sequence {2**64 - 1} is outside 0 to {2**63 - 1}"),
    ],
)
def test_frames_that_are_not_a_reply_are_refused_with_the_reason(frames: list[bytes], reason: str) -> None:
    with pytest.raises(UnfitError, match=f"^{re.escape(reason)}$"):
        read_reply(frames)


def test_numbers_at_the_ends_of_their_range_are_tracked() -> None:
    framing = intake(framing="custom", sequenceAt="0:0:i64be")
    numbers = [-(2**63), 2**63 - 1, 0, -(2**63)]
    messages: list[RawMessage] = [[n.to_bytes(8, "big", signed=True), b"v"] for n in numbers]
    rows, _ = read(framing, messages)
    assert [row["sequence"] for row in rows] == numbers
    gaps = read_gaps(framing.state())
    assert all(row["messages"] < 2**63 for row in gaps)
