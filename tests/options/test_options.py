"""Options: what is accepted, and that every refusal names the option, the value and the way out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from zmq_datasource.cli.types import DIRECTORY
from zmq_datasource.errors import OptionError
from zmq_datasource.messages.rows import name_of
from zmq_datasource.options import (
    BatchReadOptions,
    Numbering,
    ProxyOptions,
    ReadOptions,
    StreamReadOptions,
    WriteOptions,
)
from zmq_datasource.options.parser import describe, parse, texts_of
from zmq_datasource.options.types import Delimiter, Location, Timestamp

FEED = {"connect": "tcp://feed:5556"}
PROXY = {**FEED, "durable": "tcp://*:5558", "walLocation": "/log"}


def test_names_are_read_in_any_case() -> None:
    options = parse(StreamReadOptions, {"CONNECT": "tcp://feed:5556", "RcvHwm": "5", "walmaxbytes": "1g"})
    assert options.rcvhwm == 5
    assert options.wal_max_bytes == 1 << 30


def test_connect_and_bind_may_be_combined() -> None:
    options = parse(StreamReadOptions, {"connect": "tcp://a:1, ipc:///tmp/x", "bind": "tcp://*:2"})
    assert [str(e) for e in options.connect] == ["tcp://a:1", "ipc:///tmp/x"]
    assert [str(e) for e in options.bind] == ["tcp://*:2"]


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("1970-01-01T00:00:01.5Z", 1_500_000),
        ("1970-01-01T01:00:01.500001+01:00", 1_500_001),
        ("2026-11-22 10:00:00+00:00", 1_795_341_600_000_000),
    ],
)
def test_times_are_in_iso_8601(text: str, micros: int) -> None:
    assert Timestamp.read(text) == micros
    assert Timestamp.read(str(Timestamp.read(text))) == micros


@pytest.mark.parametrize(
    ("text", "topics"),
    [
        ("weather", ("weather",)),
        ("a, b,a", ("a", "b")),
        ("", ("",)),
    ],
)
def test_topics_are_prefixes(text: str, topics: tuple[str, ...]) -> None:
    assert parse(StreamReadOptions, {**FEED, "topics": text}).topics == topics


def test_what_a_column_shows_of_a_binary_topic_subscribes_to_it() -> None:
    for prefix in (b"weather", b"\xff\x00", b"hex:ff", "é".encode()):
        assert parse(StreamReadOptions, {**FEED, "topics": name_of(prefix)}).topics.prefixes == [prefix]
        assert parse(ProxyOptions, PROXY | {"topics": name_of(prefix)}).topics.prefixes == [prefix]


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("10s", 10), ("5 minutes", 300), ("1.5h", 5400)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse(StreamReadOptions, {**FEED, "timeout": text}).timeout == seconds


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", 1 << 20), ("64m", 64 << 20), ("2 GiB", 2 << 30), ("2GB", 2 << 30)]
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse(StreamReadOptions, {**FEED, "walMaxBytes": text}).wal_max_bytes == size


@pytest.mark.parametrize(("text", "millis"), [("-1", -1), ("1500", 1500), ("2s", 2000)])
def test_linger_is_libzmqs_milliseconds_or_has_a_unit(text: str, millis: int) -> None:
    assert parse(WriteOptions, {**FEED, "linger": text}).linger == millis


def test_options_of_libzmq_are_collected() -> None:
    options = parse(StreamReadOptions, {**FEED, "zmq.RCVBUF": "4096", "zmq.tcp_keepalive": "1"})
    assert options.zmq == {"rcvbuf": "4096", "tcp_keepalive": "1"}


def test_a_secret_is_never_shown() -> None:
    options = parse(StreamReadOptions, {**FEED, "zmq.curve_secretkey": "S3cret", "zmq.plain_password": "pw1"})
    assert "S3cret" not in repr(options)
    assert "pw1" not in repr(options)


VLLM = {"framing": "vllm"}
CUSTOM = {"framing": "custom"}
NUMBERED = {"framing": "custom", "sequenceAt": "0:0:u64be"}
BOUND = {"bind": "tcp://*:1"}
ROUTER, DEALER = {"socketType": "ROUTER"}, {"socketType": "DEALER"}
REPLAY = {"replayEndpoint": "tcp://feed:5557"}

REFUSALS = [
    (StreamReadOptions, {"rcvhvm": "5"}, "rcvhvm", "did you mean 'rcvhwm'"),
    (
        StreamReadOptions,
        {"fooBar": "5"},
        "fooBar",
        "there are allowedClients, bind, connect",
    ),
    (StreamReadOptions, {}, "neither connect nor bind", "name the feed"),
    (
        StreamReadOptions,
        {**FEED, "walLocation": "dbfs:/mnt/x"},
        "dbfs:/mnt/x",
        "name a local directory of the driver",
    ),
    (StreamReadOptions, {**FEED, "walLocation": "wal"}, "walLocation='wal'", "an absolute path, as in /data"),
    (StreamReadOptions, {**FEED, "walLocation": "file://data/wal"}, "//data/wal", "file:///data/wal"),
    (StreamReadOptions, {**FEED, "walLocation": "s3://b/x"}, "s3://b/x", "only local or shared"),
    (StreamReadOptions, {"connect": "tcp://a:80000"}, "80000", "from 1 to 65535"),
    (StreamReadOptions, {"connect": "localhost:5555"}, "localhost:5555", "tcp://localhost:5555"),
    (StreamReadOptions, {"connect": "inproc://a"}, "inproc", "use tcp:// or ipc://"),
    (StreamReadOptions, {"connect": "tcp://a"}, "tcp://a", "tcp://host:port"),
    (StreamReadOptions, {"connect": "ipc://" + "x" * 108}, "path", "1 to 107 bytes"),
    (StreamReadOptions, {"connect": " "}, "connect", "names no endpoint"),
    (StreamReadOptions, {"connect": "tcp://a:1,tcp://a:1"}, "tcp://a:1", "more than once"),
    (StreamReadOptions, {**FEED, "bind": FEED["connect"]}, "both connect and bind", "keep one"),
    (StreamReadOptions, {**FEED, "socketType": "PUB"}, "'PUB'", "SUB, PULL or ROUTER"),
    (StreamReadOptions, {**FEED, "socketType": "PULL", "topics": "a"}, "topics=a", "socketType=SUB"),
    (StreamReadOptions, {**FEED, "rcvhwm": "0"}, "rcvhwm='0'", ">= 1"),
    (StreamReadOptions, {**FEED, "rcvhwm": "many"}, "rcvhwm='many'", "a whole number"),
    (StreamReadOptions, {**FEED, "includeFrames": "yes"}, "includeFrames='yes'", "true or false"),
    (StreamReadOptions, {**FEED, "timeout": "10"}, "timeout='10'", "a number and a unit"),
    (StreamReadOptions, {**FEED, "walMaxBytes": "much"}, "walMaxBytes='much'", "64m"),
    (StreamReadOptions, {**FEED, "walMaxBytes": "0"}, "walMaxBytes='0'", "at least 1 byte"),
    (WriteOptions, {**FEED, "linger": "-2"}, "linger='-2'", "-1 (without a limit)"),
    (StreamReadOptions, {**FEED, "serveLog": "ipc:///tmp/x"}, "serveLog='ipc:///tmp/x'", "never"),
    (StreamReadOptions, {**FEED, "topics": "hex:f"}, "hex:f", "pairs of hexadecimal digits"),
    (StreamReadOptions, {**FEED, "topics": "\udcff"}, r"'\udcff' is no text", "hex:ff00"),
    (StreamReadOptions, {**FEED, "startingOffsets": "yesterday"}, "'yesterday'", "earliest, latest"),
    (StreamReadOptions, {**FEED, "startingOffsets": '{"next": "x"}'}, "'x'", "no message id"),
    (StreamReadOptions, {**FEED, "startingOffsets": "2026-11-22T10:00:00"}, "no time zone", ":00Z"),
    (StreamReadOptions, {**FEED, "startingOffsets": "1969-01-01T00:00:00Z"}, "1969", "before 1970"),
    (StreamReadOptions, {**FEED, "startingOffsets": "1795341600000"}, "or a time", '{"next": 1795'),
    (StreamReadOptions, {**FEED, "endingOffsets": "2026-11-22T10:00Z"}, "endingOffsets", "batch read"),
    (StreamReadOptions, {**FEED, "maxMessages": "5"}, "maxMessages", "batch read"),
    (BatchReadOptions, {}, "either", "name one"),
    (BatchReadOptions, {**FEED, "walLocation": "/x"}, "either", "keep one"),
    (BatchReadOptions, {**FEED, "walRetention": "1h"}, "walRetention", "streaming read"),
    (BatchReadOptions, {**FEED, "startingOffsets": "earliest"}, "startingOffsets", "walLocation"),
    (BatchReadOptions, {**FEED, "minPartitions": "2"}, "minPartitions", "walLocation"),
    (BatchReadOptions, {"walLocation": "/x", "topics": "a"}, "topics", ".where()"),
    (BatchReadOptions, {"walLocation": "/x", "zmq.rcvbuf": "1"}, "zmq.*", "opens no socket"),
    (BatchReadOptions, {"walLocation": "/x", "maxMessages": "5"}, "maxMessages", ".limit()"),
    (BatchReadOptions, {"walLocation": "/x", "endingOffsets": "earliest"}, "endingOffsets", "latest"),
    (StreamReadOptions, {**FEED, "framing": "xml"}, "framing='xml'", "sequenced, vllm"),
    (StreamReadOptions, {**FEED, "deduplicate": "true"}, "deduplicate", "name the framing"),
    (StreamReadOptions, {**FEED, "onMalformed": "fail"}, "onMalformed", "every message fits plain"),
    (StreamReadOptions, {**FEED, **VLLM, "sequenceAt": "1:0:u64be"}, "sequenceAt", "framing=custom"),
    (StreamReadOptions, {**FEED, **CUSTOM, "deduplicate": "true"}, "deduplicate", "sequenceAt is not set"),
    (StreamReadOptions, {**FEED, **CUSTOM, "topicFrame": "99999999999"}, "topicFrame", "<= 1000000"),
    *(
        (StreamReadOptions, {**FEED, **CUSTOM, "sequenceAt": place}, f"sequenceAt='{place}'", way_out)
        for way_out, places in {
            "as in 1:3:u32le": ("1", "x:0:u32le", "1:0:u16le", "1:-1:u32le", "1:0:u32le:"),
            "1:$.header.frame": ("1:$", "1:$.a..b", "$.a", "1:a", "1:$a"),
        }.items()
        for place in places
    ),
    (StreamReadOptions, {**FEED, **NUMBERED, "sequenceBy": "publisher"}, "publisher", "set publisherFrame"),
    (StreamReadOptions, {**FEED, **NUMBERED, "sequenceBy": "topic"}, "topic", "set topicFrame"),
    (StreamReadOptions, {**FEED, **NUMBERED, "sequenceBy": "peer"}, "'peer'", "publisher, topic, endpoint"),
    (StreamReadOptions, {**FEED, **VLLM, "sequenceBy": "publisher"}, "vllm", "endpoint or topic"),
    (StreamReadOptions, {**FEED, "framing": "sequenced", "topics": "a"}, "topics=a", "sequenceBy=none"),
    (StreamReadOptions, {**FEED, **VLLM, "replayFrom": "earliest"}, "replayFrom", "needs replayEndpoint"),
    (StreamReadOptions, {**FEED, **VLLM, "replayFrom": "-1"}, "'-1'", "latest or earliest"),
    (StreamReadOptions, {**FEED, **REPLAY, "framing": "bitcoin"}, "bitcoin", "framing=vllm"),
    (StreamReadOptions, {"bind": "tcp://*:1", **VLLM, **REPLAY}, "replayEndpoint", "one endpoint for each"),
    (StreamReadOptions, {**FEED, **VLLM, **REPLAY, "sequenceBy": "topic"}, "sequenceBy=topic", "remove it"),
    (StreamReadOptions, {**FEED, "sequenceBy": "topic"}, "sequenceBy=topic", "name the framing"),
    (StreamReadOptions, {**FEED, **NUMBERED, "sequenceStart": "-1"}, "sequenceStart=-1", "from 0 to"),
    (
        StreamReadOptions,
        {"bind": "tcp://*:1", **NUMBERED, "deduplicate": "true"},
        "deduplicate with bind",
        "count by publisher or topic",
    ),
    (BatchReadOptions, {"walLocation": "/x", **VLLM}, "framing", "live socket"),
    (
        BatchReadOptions,
        {"walLocation": "/x", "view": "gaps", "includeFrames": "true"},
        "includeFrames",
        "gap",
    ),
    (StreamReadOptions, {**BOUND, **ROUTER, "topics": "a"}, "topics", "acknowledged rows"),
    (StreamReadOptions, {**BOUND, **ROUTER, "framing": "vllm"}, "framing", "acknowledged rows"),
    (StreamReadOptions, {**FEED, **ROUTER}, "connect=", "with bind"),
    (
        StreamReadOptions,
        {**BOUND, **ROUTER, "transactionTimeout": "0s"},
        "transactionTimeout=0s",
        "1s or more",
    ),
    (StreamReadOptions, {**FEED, "transactionTimeout": "1m"}, "transactionTimeout", "socketType=ROUTER"),
    (BatchReadOptions, {**BOUND, **ROUTER}, "socketType=ROUTER", "zmq-datasource receive"),
    (StreamReadOptions, {"walLocation": "/x", "readerTimeout": "1h"}, "readerTimeout", "needs reader"),
    (StreamReadOptions, {"walLocation": "/x", "reader": "a/b"}, "reader='a/b'", "regex"),
    (StreamReadOptions, {"walLocation": "/x", "walRetention": "1h"}, "walRetention", "only reads its log"),
    (WriteOptions, {**FEED, **DEALER, "noblock": "true"}, "noblock", "nothing is dropped"),
    (
        WriteOptions,
        {**FEED, "noblock": "true", "deadLetterLocation": "/x"},
        "noblock=true drops rows",
        "sendTimeout=0s",
    ),
    (
        WriteOptions,
        {**FEED, **DEALER, "deadLetterLocation": "/x"},
        "deadLetterLocation",
        "whole or not at all",
    ),
    (WriteOptions, {"connect": "tcp://a:1,tcp://b:1", **DEALER}, "DEALER", "one endpoint"),
    (WriteOptions, {**FEED, "transactionId": "x"}, "transactionId", "socketType=DEALER"),
    (WriteOptions, {**FEED, **DEALER, "transactionId": "x" * 201}, "transactionId", "1 to 200 bytes"),
    (WriteOptions, {**FEED, **DEALER, "transactionId": "two\nlines"}, r"'two\nlines'", "printable text"),
    (WriteOptions, {**FEED, "framing": "vllm"}, "framing='vllm'", "plain or sequenced"),
    (WriteOptions, {**FEED, "socketType": "PULL"}, "'PULL'", "PUSH, PUB or DEALER"),
    (WriteOptions, {**FEED, "linger": "30 days"}, "linger='30 days'", "2147482647 ms"),
    (WriteOptions, {**FEED, "linger": "0"}, "linger=0", "noblock=true"),
    (WriteOptions, {**FEED, "topic": ""}, "topic is empty", "remove it"),
    (WriteOptions, {**FEED, "topics": "a"}, "'topics'", "'topic'"),
    (WriteOptions, {**FEED, "minSubscribers": "2"}, "minSubscribers", "socketType=PUB"),
]


@pytest.mark.parametrize(("kind", "options", "names", "way_out"), REFUSALS)
def test_a_refusal_names_the_value_and_the_way_out(
    kind: type[ReadOptions], options: dict[str, str], names: str, way_out: str
) -> None:
    with pytest.raises(OptionError) as refused:
        parse(kind, options)
    assert names in str(refused.value)
    assert way_out in str(refused.value)
    # A notebook would print an inner error first, as another stack that says the same or less.
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


@pytest.mark.parametrize(
    "text", ["/data/wal", "file:/data/wal", "file:///data/wal", "file://localhost/data/wal"]
)
def test_a_log_is_at_an_absolute_path_or_a_file_uri(text: str) -> None:
    assert parse(StreamReadOptions, {**FEED, "walLocation": text}).wal_location == "/data/wal"


def test_a_command_makes_a_relative_directory_absolute_and_leaves_uris() -> None:
    convert = partial(DIRECTORY.convert, param=None, ctx=None)
    assert convert("wal") == str(Path.cwd() / "wal")
    assert convert("./a:b") == str(Path.cwd() / "a:b")
    assert [convert(text) for text in ("/wal", "file:///wal", "dbfs:/wal")] == [
        "/wal",
        "file:///wal",
        "dbfs:/wal",
    ]


def test_an_option_has_one_default_wherever_it_is_used() -> None:
    found: dict[str, set[str]] = {}
    for kind in (ReadOptions, WriteOptions, ProxyOptions):
        for option in describe(kind):
            found.setdefault(option.name, set()).add(option.default)
    assert {name for name, defaults in found.items() if len(defaults) > 1} == {
        "socketType"
    }  # a sink has its own


def test_a_writer_accepts_sparks_own_option() -> None:
    parse(WriteOptions, {**FEED, "checkpointLocation": "/somewhere"})


@pytest.mark.parametrize("kind", [ReadOptions, WriteOptions])
def test_every_option_is_documented(kind: type[ReadOptions]) -> None:
    for option in describe(kind):
        assert option.doc.endswith((".", "...")), option.name


def test_both_kinds_of_read_take_the_options_of_the_dataframe() -> None:
    names = {o.name for o in describe(ReadOptions)}
    assert (
        {o.name for o in describe(StreamReadOptions)} == names == {o.name for o in describe(BatchReadOptions)}
    )


@pytest.mark.parametrize(
    ("options", "numbering"),
    [
        ({"framing": "sequenced"}, Numbering(("publisher",), restarts=False, whole=True)),
        ({"framing": "vllm"}, Numbering(("endpoint", "topic"))),
        ({"framing": "vllm", **REPLAY}, Numbering(("endpoint",), replayed=True)),
        ({"framing": "bitcoin"}, Numbering(("endpoint", "topic"))),
        (
            {**VLLM, "replayFrom": "earliest", "sequenceStart": "5"},
            Numbering(("endpoint", "topic"), start=5, whole=True),
        ),
        (NUMBERED, Numbering(("endpoint",))),
        ({**NUMBERED, "publisherFrame": "1"}, Numbering(("publisher",))),
        (
            {**NUMBERED, "topicFrame": "1", "sequenceBy": "endpoint, topic", "sequenceStart": "1"},
            Numbering(("topic", "endpoint"), start=1),
        ),
    ],
)
def test_a_framing_says_how_its_publishers_count(options: dict[str, str], numbering: Numbering) -> None:
    assert parse(StreamReadOptions, {**FEED, **options}).numbering == numbering


@pytest.mark.parametrize("options", [{}, {**VLLM, "sequenceBy": "none"}, CUSTOM])
def test_without_numbers_nothing_is_tracked(options: dict[str, str]) -> None:
    assert parse(StreamReadOptions, {**FEED, **options}).numbering is None


KEY = "x" * 40


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"zmq.curve_server": "1"}, "zmq.curve_server needs zmq.curve_secretkey"),
        ({"zmq.curve_serverkey": KEY}, "needs zmq.curve_publickey and zmq.curve_secretkey"),
        ({"zmq.curve_serverkey": KEY, "zmq.curve_publickey": KEY}, "needs zmq.curve_secretkey"),
    ],
)
def test_incomplete_curve_keys_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse(StreamReadOptions, {"connect": "tcp://a:1", **options})


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        (
            "abfss://c@account/p?client_id=i&client_secret=S%26",
            "abfss://***@account/p?client_id=***&client_secret=***",
        ),
        ("s3://key:hun?ter@bucket/x?region=eu&token=t", "s3://***@bucket/x?region=eu&token=***"),
        ("s3://bucket/x?endpoint_override=minio%3A9000&scheme=http", None),
        ("/data/what?is=this", None),
    ],
)
def test_a_location_hides_what_may_be_a_secret(location: str, shown: str | None) -> None:
    assert str(Location(location)) == (shown or location)
    assert Location(location).with_credentials == location


@pytest.mark.parametrize(
    ("text", "delimiter"),
    [
        (" ", b" "),
        (":", b":"),
        ("hex:00", b"\0"),
        ("hex:1f", b"\x1f"),
        ("\\", b"\\"),
        (", ", b", "),
        ("–", "–".encode()),
    ],
)
def test_a_delimiter_is_bytes(text: str, delimiter: bytes) -> None:
    options = parse(StreamReadOptions, {"connect": "tcp://feed:5556", "topicDelimiter": text})
    assert options.topic_delimiter == delimiter
    assert Delimiter.read(str(options.topic_delimiter)) == delimiter


@pytest.mark.parametrize("text", ["", "hex:", "hex:0", "\ud800"])
def test_what_is_no_delimiter_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="option topicDelimiter="):
        parse(StreamReadOptions, {"connect": "tcp://feed:5556", "topicDelimiter": text})


def test_topics_in_json_are_refused() -> None:
    with pytest.raises(OptionError, match="separated by commas, as in a,b"):
        parse(StreamReadOptions, {**FEED, "topics": '["a", "b"]'})


def test_a_listed_topic_may_contain_a_comma() -> None:
    texts = texts_of(StreamReadOptions, {**FEED, "topics": ["a,b", "c"]})
    assert parse(StreamReadOptions, texts).topics.prefixes == [b"a,b", b"c"]
