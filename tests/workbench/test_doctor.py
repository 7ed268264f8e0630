"""The doctor's reasoning: greetings, numbers that count up, findings from facts, the report. No sockets."""

from __future__ import annotations

import json
import random
import struct
import time
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import REPOSITORY
from zmq_datasource.cli import main
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.workbench.doctor import as_text, greeting, report
from zmq_datasource.workbench.doctor.counting import Counting, find_counting
from zmq_datasource.workbench.doctor.facts import Feed, Greeting, Handshake, Numbers, Place, Stall, Traffic
from zmq_datasource.workbench.doctor.findings import TABLE, Severity, exit_code, findings_of

TRAFFIC = Traffic(messages=5000, seconds=5.0, topics=(("weather", 5000),))
NUMBERS = Numbers()
PUB = Greeting(state="greeted", version="3.1", mechanism="NULL", socket_type="PUB")
HEALTHY = Feed(
    endpoint="tcp://feed:5556",
    socket_type="SUB",
    framing="sequenced",
    greeting=PUB,
    handshake=Handshake(state="succeeded"),
    traffic=TRAFFIC,
    numbers=NUMBERS,
)
PLACE = Place(location="/wal")


def but(**facts: Any) -> Feed:
    """A healthy feed but for some facts."""
    return replace(HEALTHY, **facts)


def down(state: Any = "greeted", *, event: Any = "failed", **facts: Any) -> Feed:
    """A feed whose connection cannot be made."""
    greeting = replace(PUB, state=state) if state == "greeted" else Greeting(state=state, reason="no answer")
    usual = {"greeting": greeting, "handshake": Handshake(state=event), "traffic": None, "numbers": None}
    return but(**{**usual, **facts})


def stalled(outcome: Any) -> Feed:
    return but(stall=Stall(outcome=outcome, seconds=1, due=1000, received=400))


# For each finding of the table, facts that lead to it.
EXAMPLES: dict[str, Feed | Place] = {
    "host_unknown": down("unresolved", event="none"),
    "cannot_open": down("not_asked", event="none", not_opened="binding tcp://*:1: Address already in use"),
    "refused": down("refused", event="none"),
    "no_answer": down("no_answer", event="none"),
    "silent_peer": down("silent", event="none"),
    "not_zeromq": down("not_zeromq"),
    "nobody_came": down("not_asked", event="none"),
    "security_mismatch": down(greeting=replace(PUB, mechanism="CURVE")),
    "wrong_socket_type": down(greeting=replace(PUB, socket_type="XSUB")),
    "credentials_refused": down(greeting=replace(PUB, mechanism="CURVE"), mechanism="CURVE"),
    "hung_up": down(),
    "connection_lost": but(handshake=Handshake(state="succeeded", lost=2, faults=1)),
    "feed_stopped": but(traffic=Traffic(messages=1000, seconds=5.0, longest_pause=0.1, silence=3.0)),
    "topics_do_not_match": but(traffic=None, numbers=None, elsewhere="weather"),
    "nothing_came": but(traffic=None, numbers=None),
    "malformed": but(malformed=3),
    "numbers_found": but(framing="plain", numbers=None, counting=Counting("1:$.n")),
    "no_numbers": but(framing="plain", numbers=None),
    "another_pull": but(
        socket_type="PULL",
        greeting=replace(PUB, socket_type="PUSH"),
        numbers=Numbers(lost=4999),
    ),
    "numbers_missing": but(numbers=replace(NUMBERS, lost=10)),
    "numbers_repeat": but(numbers=replace(NUMBERS, repeated=3)),
    "stall_drops": stalled("drops"),
    "stall_waits": stalled("waits"),
    "stall_neither": stalled("neither"),
    "place_unusable": replace(PLACE, failed="making a directory there: Permission denied"),
    "name_given_twice": Place(location="s3://bucket/log", replaced=True),
}
ALL = [finding for part in TABLE.values() for finding in part]


def ids(facts: Feed | Place) -> list[str]:
    return [finding.id for finding in findings_of(facts)]


# The table.


def test_each_finding_of_the_table_is_reached_and_documented() -> None:
    assert list(EXAMPLES) == [finding.id for finding in ALL]
    page = (REPOSITORY / "docs" / "workbench.md").read_text()
    for id_, facts in EXAMPLES.items():
        assert ids(facts) == [id_]
        (finding,) = findings_of(facts)
        assert not {"{", "}"} & set(finding.what + finding.cause + finding.fix)
        assert f"| `{id_}`" in page


def test_a_healthy_feed_and_place_have_no_findings() -> None:
    assert ids(HEALTHY) == ids(PLACE) == []


@pytest.mark.parametrize(
    ("traffic", "stopped"),
    [
        ({"longest_pause": 0.01, "silence": 2.0}, True),
        ({"longest_pause": 1.0, "silence": 2.0}, False),  # a feed with pauses
        ({"longest_pause": 0.01, "silence": 4.99}, False),  # what a publisher sends to each that joins
        ({"messages": 3, "silence": 4.0}, False),  # a slow feed
    ],
)
def test_a_feed_that_stops_is_told_from_one_with_pauses(traffic: dict[str, Any], stopped: bool) -> None:
    feed = but(traffic=Traffic(**{"messages": 1000, "seconds": 5.0} | traffic))
    assert ("feed_stopped" in ids(feed)) == stopped


def test_no_finding_advises_what_deletes_messages() -> None:
    """Equal numbers, and equal content of several publishers, are no proof that a message is a duplicate."""
    for finding in ALL:
        assert "deduplicate" not in finding.fix or "Do not set deduplicate" in finding.fix
    repeated = but(numbers=replace(NUMBERS, repeated=2500, lost=3))
    (finding,) = findings_of(repeated)  # what is missing says nothing while counters are mixed
    assert finding.id == "numbers_repeat"
    assert "it would delete every message whose number came before" in finding.fix


# Greetings.


def greeted(mechanism: bytes, command: bytes = b"") -> bytes:
    return greeting.OPENING + b"\x01" + mechanism.ljust(20, b"\0") + bytes(32) + command


READY = b"\x04\x26\x05READY\x08Identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00\x03PUB"


def test_a_greeting_tells_the_security_and_the_socket_type() -> None:
    found = greeting.parse_greeting(greeted(b"NULL", READY))
    assert (found.version, found.mechanism, found.socket_type) == ("3.1", "NULL", "PUB")
    assert greeting.is_complete(greeted(b"NULL", READY))
    assert not greeting.is_complete(greeted(b"NULL", READY[:-1]))
    assert greeting.parse_greeting(greeted(b"CURVE")).mechanism == "CURVE"


def test_nothing_in_a_greeting_steers_the_terminal_of_the_doctor() -> None:
    evil = b"\x1b]0;owned\x07"
    assert greeting.parse_greeting(greeted(evil)).mechanism == r"\x1b]0;owned\x07"
    command = b"\x05READY" + b"\x0bSocket-Type" + len(evil).to_bytes(4, "big") + evil
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
        (greeting.OPENING, "silent"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not_zeromq"),
        (b"\x4a\x00\x00\x00\x0a8.0.36\x00" + bytes(60), "not_zeromq"),  # MySQL
        (b"\xff" + bytes(9), "not_zeromq"),
        (b"\x01\x00", "old"),
        (b"\x05\x00name", "old"),
        (greeting.OPENING[:10] + b"\x01\x01\x00\x00", "old"),
    ],
)
def test_what_is_no_greeting_is_told_apart(received: bytes, state: str) -> None:
    assert greeting.parse_greeting(received).state == state


@settings(max_examples=50)
@given(st.binary(max_size=100))
def test_no_bytes_stop_the_doctor(rest: bytes) -> None:
    for received in (
        rest,
        greeting.OPENING + rest,
        greeted(b"NULL", rest),
        greeted(b"NULL", READY[:9] + rest),
    ):
        greeting.is_complete(received)
        greeting.parse_greeting(received)


# Numbers that count up.


def u64(number: int) -> bytes:
    return struct.pack(">Q", number)


@pytest.mark.parametrize(
    "messages",
    [
        [[b"one frame"]] * 20,
        [[b"weather", b'{"t": %d}' % (21 + n % 3)] for n in range(50)],
        [[b"weather", b'{"at": %d}' % (time.time() + n)] for n in range(50)],  # a message a second
        [[b"kv", random.Random(n).randbytes(8), b"payload"] for n in range(50)],
        [[b"kv", u64(5), b"payload"]] * 50,
        [[b"kv", u64(3 * n), b"payload"] for n in range(50)],
        [[b"kv", u64(n), b"payload"] for n in range(3)],  # too few to say
        [[b"{", b"[" * 50]] * 20,
    ],
)
def test_what_does_not_count_is_nothing(messages: list[list[bytes]]) -> None:
    assert find_counting(messages) is None


@pytest.mark.parametrize(
    ("form", "at"), [(">Q", "1:0:u64be"), ("<Q", "1:0:u64le"), (">I", "1:0:u32be"), ("<I", "1:0:u32le")]
)
def test_a_frame_that_is_a_number_is_found(form: str, at: str) -> None:
    assert find_counting([[b"t", struct.pack(form, 900 + n), b"data"] for n in range(100)]) == Counting(at)


@pytest.mark.parametrize("whole", [True, False])
def test_numbers_in_json_are_found_for_each_topic_or_for_the_feed(whole: bool) -> None:
    messages = [
        [topic, b'{"head": {"n": %d}, "at": %d, "value": 7}' % (3 * n + at if whole else n, time.time())]
        for n in range(60)
        for at, topic in enumerate((b"a", b"b", b"c"))
    ]
    assert find_counting(messages) == Counting("1:$.head.n", by_topic=not whole)


@pytest.mark.parametrize("found", [Counting("2:0:u32le"), Counting("1:$.head.n", by_topic=True)])
def test_the_options_that_are_named_read_the_numbers(found: Counting) -> None:
    given = {"connect": "tcp://feed:5556", **dict(part.split("=") for part in found.options.split(", "))}
    options = parse(ReadOptions, given)
    assert options.numbering is not None
    assert set(options.numbering.by) == ({"endpoint", "topic"} if found.by_topic else {"endpoint"})


# The report and the command.


def test_the_report_is_rows_as_text_or_as_json() -> None:
    lost = but(numbers=replace(NUMBERS, lost=10), stall=Stall(outcome="drops", seconds=1, due=9, received=4))
    rows = report([lost, EXAMPLES["refused"], PLACE])
    text = as_text(rows)
    for word in (
        "PUB, ZMTP 3.1",
        "1,000/s",
        "'weather'",
        "10 lost",
        "WARNING numbers_missing",
    ):
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    assert "3 findings to act on." in text
    found = [row for row in rows if row.severity is not Severity.FACT]
    assert [row.id for row in found] == ["refused", "numbers_missing", "stall_drops"]
    told = json.loads(json.dumps([row._asdict() for row in rows]))
    assert all(list(row) == ["about", "id", "severity", "what", "cause", "fix"] for row in told)


def test_the_exit_code_is_that_of_the_worst_row() -> None:
    assert [exit_code(severity) for severity in Severity] == [3, 1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--connect or --bind, or a place"),
        (["--connect", "feed:5556"], "tcp://feed:5556"),
        (["--connect", "tcp://feed:5556", "--socket-type", "PULL"], "add --take-messages"),
        (["--connect", "tcp://feed:5556", "--duration", "5"], "a number and a unit"),
        (["--connect", "tcp://feed:5556", "-o", "zmq.nonsense=5"], "zmq.nonsense"),
        (["--wal-store", "hdfs://host/log"], "must be a URI of a bucket"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2, result.output
    assert word in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--connect", "tcp://feed:5556", "-o", "zmq.curve_secretkey=hunter2"],
        ["--connect", "tcp://feed:5556", "-o", "hunter2"],
        ["--wal-store", "s3://key:hunter2/2@bucket/log"],
    ],
)
def test_a_secret_that_is_refused_is_not_shown(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["doctor", *arguments])
    assert result.exit_code == 2
    assert "hunter" not in result.output
