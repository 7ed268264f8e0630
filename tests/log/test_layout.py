"""The names in a log: what each says, and what only looks like one."""

from __future__ import annotations

import pytest

from zmq_datasource.log.layout import (
    chunk_name,
    growing_name,
    parse_chunk_name,
    parse_growing_name,
    parse_partition_name,
)

ZERO, FIVE, SIX = (f"{number:020d}" for number in (0, 5, 6))


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        (chunk_name(5, 6), (5, 6)),
        (f"{FIVE}-{FIVE}.arrow", None),  # of no message
        (f"{SIX}-{FIVE}.arrow", None),
        (f"{FIVE}-{SIX}.arrow.tmp", None),
        (f".{FIVE}-{SIX}.arrow", None),
        ("5-6.arrow", None),
    ],
)
def test_a_chunk(name: str, ids: tuple[int, int] | None) -> None:
    assert parse_chunk_name(name) == ids


def test_an_open_chunk_and_a_partition() -> None:
    assert parse_growing_name(growing_name(5)) == 5
    assert parse_growing_name(chunk_name(5, 6)) is None
    partitions = {"0": 0, "7": 7, "10": 10, "07": None, "": None, "-1": None, "x": None, "9" * 11: None}
    assert {name: parse_partition_name(name) for name in partitions} == partitions
