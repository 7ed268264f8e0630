"""The doctor's reasoning: greetings, framings, marks, stalls and findings from figures. No sockets."""

from __future__ import annotations

import io
import json
import random
import struct
import time
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support import stream_options
from zmq_datasource.cli import main
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.sequences import Gap
from zmq_datasource.workbench.doctor import Examination, diagnose, document, exit_code, greeting, show
from zmq_datasource.workbench.doctor.facts import (
    Consumed,
    Durable,
    Examined,
    Expected,
    Greeting,
    Handshake,
    Numbers,
    Stalled,
    Traffic,
)
from zmq_datasource.workbench.doctor.framing import Numbered, guess, options_of, per_topic
from zmq_datasource.workbench.doctor.stall import explain, fits, held_before, outcome_of

TRAFFIC = Traffic(
    messages=5000,
    bytes=500_000,
    seconds=5.0,
    rate=1000.0,
    peak=1200.0,
    frames={3: 5000},
    size_min=100,
    size_median=100,
    size_p99=100,
    size_max=100,
    largest_frame=90,
    topics=[("weather", 5000)],
    topics_more=0,
    saturated=False,
)
NUMBERS = Numbers(framing="sequenced", judged=True, counters=1)
STALLED = Stalled(
    outcome="dropped",
    seconds=2.0,
    rcvhwm=10,
    rate=1000.0,
    expected=2300,
    received=1300,
    lost=1000,
    held=1000,
    kernel_bytes=50_000,
    measured=True,
    beyond=500,
)


def examined(**facts: Any) -> Examined:
    """A healthy endpoint but for ``facts``."""
    usual: dict[str, Any] = {
        "endpoint": "tcp://feed:5556",
        "role": "feed",
        "socket_type": "SUB",
        "greeting": Greeting(state="greeted", version="3.1", mechanism="NULL", socket_type="PUB"),
        "handshake": Handshake(state="succeeded", connections=1),
        "traffic": TRAFFIC,
        "numbers": NUMBERS,
    }
    return Examined(**{**usual, **facts})


def ids(*endpoints: Examined, log: Durable | None = None, **expected: Any) -> list[str]:
    return [finding.id for finding in diagnose(endpoints, log, Expected(**expected))]


# Greetings.


def greeted(mechanism: bytes, command: bytes = b"") -> bytes:
    return greeting.OPENING + b"\x01" + mechanism.ljust(20, b"\0") + bytes(32) + command


READY = b"\x04\x26\x05READY\x08Identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00\x03PUB"


def test_a_greeting_tells_the_security_and_the_socket_type() -> None:
    found = greeting.parse_greeting(greeted(b"NULL", READY))
    assert (found.version, found.mechanism) == ("3.1", "NULL")
    assert greeting.parse_greeting(greeted(b"NULL", READY)).socket_type == "PUB"
    assert greeting.is_complete(greeted(b"NULL", READY))
    assert not greeting.is_complete(greeted(b"NULL", READY[:-1]))
    assert greeting.parse_greeting(greeted(b"CURVE")).mechanism == "CURVE"


def test_nothing_in_a_greeting_steers_the_terminal_of_the_doctor() -> None:
    evil = b"\x1b]0;owned\x07"
    mechanism = greeting.parse_greeting(greeted(evil)).mechanism
    assert mechanism == r"\x1b]0;owned\x07"
    property_ = b"\x0bSocket-Type" + len(evil).to_bytes(4, "big") + evil
    command = b"\x05READY" + property_
    told = greeted(b"NULL", b"\x04" + bytes([len(command)]) + command)
    assert greeting.parse_greeting(told).socket_type == r"\x1b]0;owned\x07"


def test_our_own_greeting_is_one() -> None:
    whole = greeting.OPENING + greeting.REST
    assert len(whole) == greeting.GREETING_BYTES
    assert greeting.parse_greeting(whole).mechanism == "NULL"


@pytest.mark.parametrize(
    ("received", "state"),
    [
        (b"", "silent"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not_zeromq"),
        (b"\xff" + bytes(9), "not_zeromq"),
        (greeting.OPENING, "silent"),
    ],
)
def test_what_is_no_greeting_is_told_apart(received: bytes, state: str) -> None:
    assert greeting.parse_greeting(received).state == state


@pytest.mark.parametrize(("revision", "version"), [(0, "1.0"), (1, "2.0")])
def test_an_old_greeting_tells_its_version(revision: int, version: str) -> None:
    found = greeting.parse_greeting(greeting.OPENING[:10] + bytes([revision, 1]))
    assert (found.state, found.version, found.reason) == ("greeted", version, "it is older than ZeroMQ 4")


@settings(max_examples=50)
@given(st.binary(max_size=100))
def test_no_bytes_behind_a_greeting_stop_the_doctor(rest: bytes) -> None:
    greeting.is_complete(greeted(b"NULL", rest))
    greeting.parse_greeting(greeted(b"NULL", rest))
    greeting.parse_greeting(greeted(b"NULL", b"\x04\x50\x05READY" + rest))


# Framings.


def u64(number: int) -> bytes:
    return struct.pack(">Q", number)


FEEDS: dict[str, list[Any]] = {
    "sequenced": [[b"t", b"station", u64(n), b"x"] for n in range(50)],
    "vllm": [[b"kv", u64(7 + 2 * (n // 3) + n), b"payload"] for n in range(50)],  # with gaps
    "bitcoin": [[b"hashtx", b"h" * 32, struct.pack("<I", 900 + n)] for n in range(50)],
    "jupyter": [[b"k", b"<IDS|MSG>", b"", b'{"session": "s"}', b"{}", b"{}", b"{}"]] * 20,
}


@pytest.mark.parametrize("framing", FEEDS)
def test_a_framing_is_recognised_by_its_numbers(framing: str) -> None:
    assert guess(raw_of(FEEDS[framing])) == {"framing": framing}


@pytest.mark.parametrize(
    "messages",
    [
        [b"one frame"] * 20,
        [[b"weather", b'{"t": 21}']] * 20,
        [[b"weather", b'{"t": %d}' % (21 + n % 3)] for n in range(50)],
        [[b"weather", b'{"at": %d}' % (time.time() + n)] for n in range(50)],  # a message a second
        [[b"kv", random.Random(n).randbytes(8), b"payload"] for n in range(50)],  # looks like vllm
        [[b"kv", u64(5), b"payload"]] * 50,  # never counts
        [[b"kv", u64(n), b"payload"] for n in range(3)],  # too few to say
        [[b"{", b"[" * 50]] * 20,
    ],
)
def test_what_does_not_count_is_plain(messages: list[Any]) -> None:
    assert guess(raw_of(messages)) == {"framing": "plain"}


def numbered(*, connect: str = "tcp://feed:1", **options: str) -> Numbered:
    return Numbered(stream_options(connect=connect, **options))


def test_a_number_at_a_place_of_its_own_is_found_and_can_be_read_with_what_is_said() -> None:
    messages = raw_of([[b"t", struct.pack("<I", n) + b"data"] for n in range(100)])
    found = guess(messages)
    assert found["framing"] == "custom"
    reader = numbered(**found)
    reader.follow(messages)
    assert (reader.newest(), reader.lost) == ({("",): 99}, 0)


TOPICS = (b"a", b"b", b"c")
PER_TOPIC = {"topicFrame": "0", "sequenceBy": "endpoint,topic"}


@pytest.mark.parametrize("whole", [True, False])
def test_numbers_in_json_are_found_for_each_topic_or_for_the_feed(whole: bool) -> None:
    messages = [
        [topic, b'{"head": {"n": %d}, "at": %d, "value": 7}' % (3 * n + at if whole else n, time.time())]
        for n in range(60)
        for at, topic in enumerate(TOPICS)
    ]
    expected = {"framing": "custom", "sequenceAt": "1:$.head.n"}
    assert guess(raw_of(messages)) == (expected if whole else {**expected, **PER_TOPIC})
    one_topic = guess(raw_of(messages[::3] if not whole else messages), {"topics": "a"})
    assert one_topic == {**expected, **PER_TOPIC} if not whole else expected


def test_a_preset_whose_publisher_counts_each_topic_is_told_from_one_that_counts_all() -> None:
    drawn = random.Random(1)
    topics = [drawn.choice(TOPICS) for _ in range(200)]
    over_all = [[topic, u64(n), b"payload"] for n, topic in enumerate(topics)]
    assert guess(raw_of(over_all)) == {"framing": "vllm", "sequenceBy": "endpoint"}
    of_each = [[topic, b"station", u64(topics[:n].count(topic)), b""] for n, topic in enumerate(topics)]
    assert guess(raw_of(of_each)) == {"framing": "sequenced", "sequenceBy": "publisher,topic"}


def test_counters_that_the_filter_forbids_are_not_followed() -> None:
    found = options_of({"connect": "tcp://feed:1", "topics": "t"}, {"framing": "sequenced"})
    assert found.numbering is None


def test_history_before_the_first_message_is_not_lost() -> None:
    reader = numbered(framing="sequenced")
    reader.follow(raw_of([[b"t", b"p", u64(n), b""] for n in (500, 501, 505)]))
    numbers = reader.figures({"framing": "sequenced"}, guessed=True)
    assert (numbers.missed_first, numbers.lost, numbers.gaps) == (500, 3, 1)


def test_what_a_proxy_lost_is_what_its_publisher_had() -> None:
    above, below = numbered(framing="vllm"), numbered(framing="vllm", connect="tcp://proxy:1")
    above.follow(raw_of([[b"t", u64(n), b""] for n in [*range(10, 20), *range(25, 40)]]))
    below.follow(raw_of([[b"t", u64(n), b""] for n in [5, *range(12, 15), *range(30, 45)]]))
    assert (
        above.count_of_missing(below) == 2 + 5 + 5
    )  # 10 and 11, 15 to 19, 25 to 29: not 6 to 9, nor 20 to 24


def test_equal_numbers_of_different_messages_are_told_from_duplicates() -> None:
    two_topics = raw_of([[topic, u64(n), b"%d" % n] for n in range(30) for topic in (b"a", b"b")])
    options = {"framing": "vllm", "sequenceBy": "endpoint"}
    reader = numbered(**options)
    reader.follow(two_topics)
    assert (reader.compared, reader.unequal) == (30, 30)
    assert per_topic(two_topics, options, reader.by) == {"sequenceBy": "endpoint,topic"}
    same_value = raw_of([[topic, u64(n), b"y"] for n in range(30) for topic in (b"a", b"b")])
    custom = {"framing": "custom", "sequenceAt": "1:0:u64be"}  # which does not say what the topic is
    reader = numbered(**custom)
    reader.follow(same_value)
    assert (reader.compared, reader.unequal) == (30, 30)
    assert per_topic(same_value, custom, reader.by) == {"sequenceBy": "endpoint,topic", "topicFrame": "0"}
    repeated = raw_of([[b"a", u64(n), b"%d" % n] for n in range(30) for _ in range(2)])
    assert guess(repeated) == {"framing": "vllm"}
    reader = numbered(**options)
    reader.follow(repeated)
    assert (reader.compared, reader.unequal) == (30, 0)


# Marks.


def held_by(hwm: int, before: int, beyond: int) -> int:
    """A sender's pipe as libzmq's: told of what has left it in steps of half the mark."""
    lwm = (hwm + 1) // 2
    written = before
    while written - (min(written, before + beyond) // lwm) * lwm < hwm:
        written += 1
    return written - before


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2000), st.integers(20, 300))
def test_the_mark_that_a_sender_has_is_among_those_that_explain_it(
    hwm: int, before: int, beyond: int
) -> None:
    found = explain(held_by(hwm, before, beyond), before, 10, 100.0, (beyond - 10) * 100, 0, hwm)
    assert found is not None
    assert found.expected_fits
    assert found.low <= hwm <= found.high


def test_a_mark_of_1000_is_told_from_one_of_10_and_only_with_the_kernel_in_view() -> None:
    held = held_by(1000, 300, 700)
    seen = explain(held, 300, 10, 1000.0, 100_000, 590_000, 10)
    assert seen is not None
    assert (seen.measured, seen.expected_fits, seen.default_fits) == (True, False, True)
    assert 500 <= seen.low <= 1000 <= seen.high <= 2100
    unseen = explain(held, 300, 10, 1000.0, 100_000, None, 10)
    assert unseen is not None
    assert (unseen.measured, unseen.expected_fits) == (False, True)
    assert not fits(5000, held, 300, 690, 720)


# Stalls.


def gap(key: bytes, first: int, last: int, noticed: int) -> Gap:
    return Gap(0, key, 0, first, last, noticed)


def test_a_stall_with_missing_numbers_was_dropped_and_the_rest_was_held() -> None:
    assert outcome_of(100, 150, 100.0, 2.0, 50.0) == "dropped"
    assert held_before([gap(b"p", 150, 299, 1050)], 1000, 100.0) == 50
    assert held_before([gap(b"p", 150, 151, 1050)], 1000, 100.0) is None


def test_of_many_counters_the_first_long_gap_ends_what_was_held() -> None:
    gaps = [gap(b"a", 10, 10, 1020), gap(b"a", 50, 199, 1100), gap(b"b", 50, 199, 1101)]
    assert held_before(gaps, 1000, 100.0) == 100


def test_a_stall_without_missing_numbers_tells_waiting_from_holding() -> None:
    assert outcome_of(100, 0, 100.0, 2.0, 50.0) == "fewer"
    assert outcome_of(240, 0, 100.0, 2.0, 50.0) == "all"
    assert outcome_of(10, 0, 100.0, 2.0, 50.0) == "idle"
    assert outcome_of(100, None, 100.0, 2.0, 50.0) == "fewer"


# Findings that a test cannot provoke, or not cheaply.


def test_a_healthy_endpoint_has_no_findings() -> None:
    assert ids(examined()) == []
    assert exit_code(diagnose([examined()], None, Expected())) == 0


@pytest.mark.parametrize(
    ("facts", "expected", "found"),
    [
        ({"traffic": msgspec.structs.replace(TRAFFIC, size_max=2 << 30)}, {}, "message_too_large"),
        ({"traffic": msgspec.structs.replace(TRAFFIC, size_p99=5 << 20)}, {}, "queue_needs_much_memory"),
        ({}, {"max_message_size": 100}, "near_the_limit"),
        ({"numbers": msgspec.structs.replace(NUMBERS, duplicates=3)}, {}, "duplicates"),
        ({"numbers": msgspec.structs.replace(NUMBERS, duplicates=3, unequal=3)}, {}, "equal_numbers"),
        ({"numbers": msgspec.structs.replace(NUMBERS, malformed=3, guessed=False)}, {}, "malformed"),
        ({"numbers": Numbers(framing="plain")}, {}, "unnumbered"),
        ({"handshake": Handshake(state="succeeded", connections=3, disconnects=2)}, {}, "connection_breaks"),
        ({"stalled": msgspec.structs.replace(STALLED, outcome="idle")}, {}, "stall_says_nothing"),
        ({"stalled": STALLED}, {}, "drops_counted"),
        ({"stalled": msgspec.structs.replace(STALLED, outcome="all")}, {"full": "drop"}, "no_drops_seen"),
        (
            {"stalled": msgspec.structs.replace(STALLED, outcome="idle", rate=1.0)},
            {"hwm": 5000},
            "mark_cannot_be_told",
        ),
    ],
)
def test_figures_lead_to_a_finding(facts: dict[str, Any], expected: dict[str, Any], found: str) -> None:
    assert found in ids(examined(**facts), **expected)


def test_a_doctor_that_is_behind_does_not_blame_the_publisher() -> None:
    lost = msgspec.structs.replace(NUMBERS, lost=10, gaps=2)
    behind = msgspec.structs.replace(TRAFFIC, saturated=True)
    assert ids(examined(numbers=lost)) == ["messages_lost"]
    assert ids(examined(numbers=lost, traffic=behind)) == ["doctor_too_slow"]


def test_a_slow_receiver_is_found_by_being_behind_and_a_fast_one_is_not() -> None:
    slow = Consumed(each=0.002, seconds=5.0, messages=2500, lost=0, behind=True, queued=1000)
    assert ids(examined(consumed=slow)) == ["receiver_too_slow"]
    assert ids(examined(consumed=msgspec.structs.replace(slow, behind=False))) == []


@pytest.mark.parametrize(
    ("greeting", "found"),
    [
        (Greeting(state="no_answer", reason="nothing answered within 2 s"), "no_answer"),
        (Greeting(state="not_zeromq"), "not_zeromq"),
        (Greeting(state="greeted", mechanism="NULL", socket_type="PUB"), "hung_up"),
    ],
)
def test_an_endpoint_that_cannot_be_examined_is_worth_its_own_exit_code(
    greeting: Greeting, found: str
) -> None:
    findings = diagnose(
        [examined(greeting=greeting, handshake=Handshake(state="hung_up"), traffic=None, numbers=None)],
        None,
        Expected(),
    )
    assert [finding.id for finding in findings] == [found]
    assert exit_code(findings) == 3


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("covered", []),
        ("behind", ["log_behind"]),
        ("foreign", ["log_of_another_feed"]),
        ("unnumbered", ["log_not_comparable"]),
    ],
)
def test_a_log_is_judged_by_what_it_has_of_the_wire(state: Any, found: list[str]) -> None:
    assert ids(examined(), log=Durable(location="/log", state=state, missing=5000, seconds=5.0)) == found


# The command.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "either --connect or --bind"),
        (["--connect", "feed:5556"], "tcp://feed:5556"),
        (["--connect", "tcp://feed:5556", "--socket-type", "PULL"], "add --take-messages"),
        (["--connect", "tcp://feed:5556", "--expect-hwm", "10"], "add --stall"),
        (["--connect", "tcp://feed:5556", "--duration", "5"], "a number and a unit"),
        (["--connect", "tcp://feed:5556", "-o", "frming=vllm"], "did you mean 'framing'"),
        (["--connect", "tcp://feed:5556", "-o", "rcvhwm=5"], "has an option of its own"),
        (["--connect", "tcp://feed:5556", "-o", "zmq.nonsense=5"], "zmq.nonsense"),
        (
            ["--bind", "tcp://*:5556", "--socket-type", "PULL", "--take-messages", "--upstream", "tcp://a:1"],
            "SUB",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2, result.output
    assert word in " ".join(result.stderr.split())


def test_a_secret_that_is_refused_is_not_shown() -> None:
    for given_as in ("zmq.curve_secretkey=hunter2", "hunter2"):
        result = CliRunner().invoke(main, ["doctor", "--connect", "tcp://feed:5556", "-o", given_as])
        assert result.exit_code == 2
        assert "hunter2" not in result.output


def test_the_document_has_a_format_and_what_was_not_measured_is_null() -> None:
    found = Examination([examined(stalled=STALLED)], Durable(location="/log", state="covered"))
    told = json.loads(json.dumps(document(found, diagnose(found.endpoints, found.log, Expected()))))
    assert list(told) == ["format", "healthy", "exitCode", "endpoints", "log", "findings"]
    assert (told["format"], told["healthy"], told["exitCode"]) == (1, True, 0)
    (one,) = told["endpoints"]
    assert list(one) == [
        *("endpoint", "role", "socketType", "greeting", "handshake", "mechanism", "filtered", "traffic"),
        *("numbers", "buffers", "consumed", "stalled", "elsewhere", "limitHit", "lostBehind"),
    ]
    assert one["buffers"] is None
    assert one["traffic"]["frames"] == {"3": 5000}
    assert one["traffic"]["sizeP99"] == 100
    assert one["stalled"]["kernelBytes"] == 50_000
    assert list(told["findings"][0]) == ["id", "severity", "endpoint", "what", "evidence", "cause", "fix"]


def test_a_counter_for_each_topic_is_never_answered_with_deduplicate() -> None:
    suggested = {"sequenceBy": "endpoint,topic"}
    each = msgspec.structs.replace(NUMBERS, duplicates=9, compared=9, unequal=9, suggested=suggested)
    (finding,) = diagnose([examined(numbers=each)], None, Expected())
    assert finding.id == "counter_per_topic"
    assert "Set sequenceBy=endpoint,topic. Do not set deduplicate" in finding.fix
    equal = msgspec.structs.replace(NUMBERS, duplicates=9, compared=9)
    (finding,) = diagnose([examined(numbers=equal)], None, Expected())
    assert (finding.id, "deduplicate=true" in finding.fix) == ("duplicates", True)


def test_numbers_in_json_come_with_the_options_that_read_them() -> None:
    options = {"sequenceAt": "1:$.n", **PER_TOPIC}
    numbers = Numbers(framing="custom", options=options, judged=True, counters=3)
    (finding,) = diagnose([examined(numbers=numbers)], None, Expected())
    assert (finding.id, finding.severity) == ("numbers_in_json", "note")
    assert "framing=custom, sequenceAt=1:$.n, topicFrame=0, sequenceBy=endpoint,topic" in finding.fix


def test_the_report_shows_facts_and_findings_in_a_hundred_columns() -> None:
    lost = msgspec.structs.replace(NUMBERS, lost=10, gaps=2)
    found = Examination([examined(numbers=lost, stalled=STALLED)], Durable(location="/log", state="covered"))
    console = Console(width=100, record=True, file=io.StringIO())
    show(console, found, diagnose(found.endpoints, found.log, Expected()))
    text = console.export_text()
    for word in ("PUB, ZMTP 3.1", "1,000/s", "'weather'", "10 lost in 2 gaps", "WARNING", "messages_lost"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    assert "1 finding to act on." in text
