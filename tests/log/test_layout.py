"""The names in a log: what each says, and what only looks like one."""

from __future__ import annotations

import pytest

from zmq_datasource.log.layout import chunk_name, merged_name, parse_name


@pytest.mark.parametrize("first", [0, 5, 10**19])
def test_a_chunk(first: int) -> None:
    assert chunk_name(first) == f"{first:020d}.arrow"
    assert parse_name(chunk_name(first)) == (first, None)
    assert merged_name(first, first + 2) == f"merged/{first + 2:020d}-{first:020d}.arrow"
    assert parse_name(merged_name(first, first + 2)) == (first, first + 2)


@pytest.mark.parametrize(
    "name",
    [
        "5.arrow",
        f"{5:021d}.arrow",
        f".{5:020d}.arrow",
        f"{5:020d}.arrow.tmp",
        f"{5:020d}-{6:020d}.arrow",  # as in format 1
        f"merged/{5:020d}.arrow",
        f"-{5:019d}.arrow",
        "x",
    ],
)
def test_names_that_are_not_chunks_are_recognised(name: str) -> None:
    assert parse_name(name) is None
