"""Columns of messages: made, taken apart and joined, also from slices."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmq_datasource.messages.columns import (
    binary_of,
    join_frames,
    numbers_from,
    numbers_to,
)


@given(st.lists(st.none() | st.binary(max_size=9), max_size=20))
def test_bytes_and_nulls_become_a_column(contents: list[bytes | None]) -> None:
    column = binary_of(contents)
    column.validate(full=True)
    assert column.to_pylist() == contents
    assert column.null_count == contents.count(None)


@given(st.lists(st.tuples(st.none() | st.binary(max_size=3), st.none() | st.binary(max_size=3)), max_size=20))
def test_columns_join_to_frames_and_a_null_adds_none(rows: list[tuple[bytes | None, bytes | None]]) -> None:
    columns = [binary_of([row[at] for row in rows]) for at in (0, 1)]
    for given_columns in (columns, [pa.concat_arrays([binary_of([b"x"]), column])[1:] for column in columns]):
        joined = join_frames(given_columns)
        joined.validate(full=True)
        assert joined.to_pylist() == [[frame for frame in row if frame is not None] for row in rows]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("endian", ["big", "little"])
@pytest.mark.parametrize("width", [4, 8])
def test_numbers_are_decoded_and_encoded(width: int, endian: str, signed: bool) -> None:
    low = -(2 ** (8 * width - 1)) if signed else 0
    given_numbers = [low, low + 1, 0, 1, 2 ** (8 * width - 1) - 1]
    frames = [value.to_bytes(width, endian, signed=signed) for value in given_numbers]  # type: ignore[arg-type]
    for column in (binary_of(frames), binary_of([b"before", *frames])[1:]):
        numbers = numbers_from(column, width, endian, signed)
        assert numbers.to_pylist() == given_numbers
        assert numbers_to(numbers, width, endian).to_pylist() == frames


def test_a_number_beyond_the_range_of_a_column_is_negative() -> None:
    assert numbers_from(binary_of([b"\xff" * 8]), 8, "big", signed=False).to_pylist() == [-1]


_RECEIVING = """
import sys
from tests.support import stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.messages.rows import number_rows
from zmq_datasource.source.intake import Arrival, Intake

fit, odd = [b"t", b"p", bytes(8), b"v"], [b"t", bytes(8), b"v"]
for framing in ("plain", "sequenced", "vllm", "bitcoin"):
    intake = Intake(stream_options(connect="tcp://a:1,tcp://b:1", framing=framing), SourceCounters())
    raw = raw_of([fit, odd, [b"\\xff", bytes(8), b"v"], [b"\\xff", b"p", bytes(8), b"v"], b"v"])
    batch, _ = intake.read(raw, [Arrival(1, 3, "tcp://a:1"), Arrival(2, 2, "tcp://b:1")])
    number_rows(batch, 7)
assert "pandas" not in sys.modules
"""


def test_no_message_makes_arrow_import_pandas() -> None:
    """The import takes 0.2 s, in which the queue of a fast publisher overflows, and 40 MB in each process."""
    subprocess.run([sys.executable, "-c", _RECEIVING], check=True, timeout=60)
