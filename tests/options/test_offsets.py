"""The offset: one text for one position, kept for ever."""

from __future__ import annotations

import json

import pytest

from zmq_datasource.errors import OptionError
from zmq_datasource.options.offsets import Offset

GOLDEN = '{"log": "0123456789abcdef", "next": {"0": 1234, "2": 0, "10": 5}}'


def test_the_text_of_an_offset_never_changes() -> None:
    offset = Offset("0123456789abcdef", {10: 5, 2: 0, 0: 1234})
    assert json.dumps(offset.to_json()) == GOLDEN


def test_an_offset_reads_what_it_wrote() -> None:
    assert json.dumps(Offset.from_json(json.loads(GOLDEN)).to_json()) == GOLDEN
    assert Offset.from_json(GOLDEN) == Offset("0123456789abcdef", {0: 1234, 2: 0, 10: 5})


def test_an_offset_keeps_the_name_of_its_reader() -> None:
    offset = Offset("a", {0: 2**63 - 1}, "me-1_x")
    assert offset.to_json() == {"log": "a", "next": {"0": 2**63 - 1}, "reader": "me-1_x"}
    assert Offset.from_json(offset.to_json()) == offset


@pytest.mark.parametrize("reader", ["5", '"a/b"', '""', '"\\n"', "[]", f'"{"a" * 65}"'])
def test_what_is_no_name_of_a_reader_is_refused(reader: str) -> None:
    if reader == "5":
        assert Offset.from_json('{"next": {"0": 1}, "reader": "5"}').reader == "5"
    with pytest.raises(OptionError, match="is no name of a reader"):
        Offset.from_json(f'{{"next": {{"0": 1}}, "reader": {reader}}}')


def test_a_user_may_leave_the_log_out() -> None:
    assert Offset.from_json('{"next": {"0": 7}}') == Offset(None, {0: 7})


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"next": {}}',
        '{"next": 5}',
        '{"log": 5, "next": {"0": 1}}',
        '{"next": {"0": 1}, "more": 1}',
        '{"next": {"a": 1}}',
        '{"next": {"-1": 1}}',
        '{"next": {"0": -1}}',
        '{"next": {"0": 1.5}}',
        '{"next": {"0": true}}',
        '{"next": {"0": 9223372036854775808}}',
    ],
)
def test_what_is_no_offset_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="reading offset"):
        Offset.from_json(text)
