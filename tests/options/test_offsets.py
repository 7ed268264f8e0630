"""The offset: one text for one position, which never changes."""

from __future__ import annotations

import json

import pytest

from zmq_datasource.errors import OptionError
from zmq_datasource.options.offsets import Offset

GOLDEN = '{"log": "0123456789abcdef", "next": 1234}'


def test_the_text_of_an_offset_never_changes() -> None:
    assert json.dumps(Offset("0123456789abcdef", 1234).to_json()) == GOLDEN
    assert (
        Offset.from_json(GOLDEN) == Offset.from_json(json.loads(GOLDEN)) == Offset("0123456789abcdef", 1234)
    )


def test_the_end_of_a_first_batch_carries_its_beginning() -> None:
    offset = Offset("a", 2**63 - 1, 5)
    assert json.dumps(offset.to_json()) == '{"log": "a", "next": 9223372036854775807, "began": 5}'
    assert Offset.from_json(offset.to_json()) == offset
    assert not offset.at_the_beginning
    assert Offset("a", 5, 5).at_the_beginning
    assert not Offset("a", 5).at_the_beginning


def test_a_user_may_leave_the_log_out() -> None:
    assert Offset.from_json('{"next": 7}') == Offset(None, 7)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"next": {}}',
        '{"next": "5"}',
        '{"log": 5, "next": 1}',
        '{"next": 1, "more": 1}',
        '{"next": 1, "began": "5"}',
        '{"next": 1, "began": -1}',
        '{"next": -1}',
        '{"next": 1.5}',
        '{"next": true}',
        '{"next": 9223372036854775808}',
    ],
)
def test_a_text_that_is_no_offset_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match="reading offset"):
        Offset.from_json(text)
