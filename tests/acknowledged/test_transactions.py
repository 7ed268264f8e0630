"""The committed transactions, and the digest that shows whether a repeated one is the same."""

from __future__ import annotations

import pyarrow as pa
import pytest
from xxhash import xxh3_64_intdigest

from zmq_datasource.acknowledged.protocol import as_text, digest_of
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import ConflictError

# Digests.


def digest(**columns: list[object]) -> int:
    return digest_of(pa.record_batch(columns))


def test_the_digest_of_a_row_is_the_one_in_the_documentation() -> None:
    assert as_text(digest(topic=[b"t"], value=[b"v"])) == "8f33520e4922b7a9"
    assert as_text(digest(value=[b"v"], topic=["t"])) == "8f33520e4922b7a9"


def test_a_row_is_a_chain_over_its_frames() -> None:
    frames = pa.array([[b"t", b"v"], [b"v"], [b"t", b"u", b"v"]], pa.list_(pa.binary()))
    rows = [digest_of(pa.record_batch({"frames": frames.slice(i, 1)})) for i in range(3)]
    assert rows[0] == digest(topic=[b"t"], value=[b"v"])
    assert rows[1] == digest(value=[b"v"]) == xxh3_64_intdigest(b"v")
    assert rows[2] == xxh3_64_intdigest(b"v", xxh3_64_intdigest(b"u", xxh3_64_intdigest(b"t")))
    assert digest_of(pa.record_batch({"frames": frames})) == sum(rows) % 2**64


def test_an_empty_topic_is_a_frame_and_null_is_none() -> None:
    assert digest(topic=[None], value=[b"v"]) == digest(value=[b"v"])
    assert digest(topic=[b""], value=[b"v"]) != digest(value=[b"v"])


def test_a_digest_depends_on_the_bytes_but_not_on_the_column_type() -> None:
    texts = ["a", "é", ""]
    columns = [pa.array(texts, kind) for kind in (pa.string(), pa.large_string())]
    columns += [
        column.cast(kind) for column, kind in zip(columns, (pa.binary(), pa.large_binary()), strict=True)
    ]
    frames = pa.record_batch({"frames": [[text.encode()] for text in texts]})
    assert {digest_of(pa.record_batch({"value": column})) for column in columns} == {digest_of(frames)}


def test_a_digest_depends_on_how_often_a_row_is_there() -> None:
    values = [b"%d" % number for number in range(100)]
    whole = digest(value=values)
    assert 0 <= whole < 2**64
    assert digest(value=values[::-1]) == whole
    assert (digest(value=values[:30]) + digest(value=values[30:])) % 2**64 == whole
    assert digest(value=[b"1", b"1"]) == 2 * digest(value=[b"1"]) % 2**64
    topics = [b"t"] * 100
    assert (
        digest(topic=topics, value=values)
        == sum(digest(topic=[t], value=[v]) for t, v in zip(topics, values, strict=True)) % 2**64
    )


def test_a_digest_is_written_modulo_2_to_the_64() -> None:
    assert [as_text(n) for n in (0, 255, 2**64 - 1, 2**64 + 1)] == [
        "0" * 16,
        "00000000000000ff",
        "f" * 16,
        "0" * 15 + "1",
    ]


# Comparing a repeated transaction.


@pytest.mark.parametrize(
    ("kept", "asked", "same"),
    [
        ("0005", "0005", True),
        ("0005", None, True),
        ("0005", "0006", False),
    ],
)
def test_a_repeated_transaction_has_the_same_rows(kept: str, asked: str | None, same: bool) -> None:
    committed = Transaction(7, "a", 2, kept)
    if same:
        committed.check_is("q", 7, 2, asked)
    else:
        with pytest.raises(
            ConflictError,
            match=r"^transaction 7 of q: it is in the log with 2 rows \(digest 0005\), and not with these 2 rows "
            r"\(digest 0006\)\. .* a source that cannot be read again$",
        ):
            committed.check_is("q", 7, 2, asked)
    with pytest.raises(ConflictError, match=r"not with these 3 rows"):
        committed.check_is("q", 7, 3, asked)
    with pytest.raises(
        ConflictError,
        match=r"^transaction 6 of q: the log already has transaction 7 of this producer.*no row of this one was taken",
    ):
        committed.check_is("q", 6, 2, asked)


def test_the_state_of_another_filler_has_no_transactions() -> None:
    kept = CommittedTransactions(SourceCounters(), 10)
    kept.commit("a", Transaction(1, "attempt", 1, "0005"))
    it = CommittedTransactions(SourceCounters(), 10)
    it.restore(kept.state().replace(b"transactions", b"other"))
    assert it.last("a") is None
    it.restore(kept.state())
    assert it.last("a") is not None


def test_of_the_producers_without_a_name_the_one_that_was_silent_longest_is_forgotten() -> None:
    """A batch write has ended. A Producer sends its second transaction."""
    it = CommittedTransactions(SourceCounters(), 2)
    names = "anonymous-producer", "anonymous-write", "anonymous-other"
    for name in names[:2]:
        it.commit(name, Transaction(0, "attempt", 1, None))
    it.pass_time(1)
    it.mark_heard(names[0])
    it.commit(names[2], Transaction(0, "attempt", 1, None))
    assert [it.newest(name) is not None for name in names] == [True, False, True]
