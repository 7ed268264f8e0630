"""The offset: one text for one position, which never changes."""

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


def test_the_end_of_a_first_batch_carries_its_beginning() -> None:
    offset = Offset("a", {1: 7, 0: 2**63 - 1}, {0: 5, 1: 7})
    assert json.dumps(offset.to_json()) == (
        '{"log": "a", "next": {"0": 9223372036854775807, "1": 7}, "began": {"0": 5, "1": 7}}'
    )
    assert Offset.from_json(offset.to_json()) == offset
    assert not offset.at_the_beginning
    assert Offset("a", {0: 5}, {0: 5}).at_the_beginning
    assert not Offset("a", {0: 5}).at_the_beginning


def test_a_user_may_leave_the_log_out() -> None:
    assert Offset.from_json('{"next": {"0": 7}}') == Offset(None, {0: 7})


def test_an_offset_of_a_checkpoint_before_0_2_0_names_the_way_out() -> None:
    with pytest.raises(OptionError, match=r"before version 0\.2\.0.* another checkpointLocation"):
        Offset.from_json('{"log": "9f", "next": {"0": 5}, "reader": "orders"}')


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
        '{"next": {"0": 1}, "began": 5}',
        '{"next": {"0": 1}, "began": {"0": -1}}',
        '{"next": {"a": 1}}',
        '{"next": {"-1": 1}}',
        '{"next": {"0": -1}}',
        '{"next": {"0": 1.5}}',
        '{"next": {"0": true}}',
        '{"next": {"0": 9223372036854775808}}',
    ],
)
def test_a_text_that_is_no_offset_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="reading offset"):
        Offset.from_json(text)
