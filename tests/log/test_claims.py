"""Who wrote which ids in object storage: whatever order the steps of several writers come in, no id has two chunks."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from zmq_datasource.host.object_store import StoredObject
from zmq_datasource.log.claims import NO_CLAIM, Confirmed, Succession, new_claim
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.restoring import stored_chunks


def test_a_claim_is_higher_than_all_before() -> None:
    first = new_claim(NO_CLAIM)
    assert NO_CLAIM < first < new_claim(first) < new_claim("0000000999-ffffffffffffffff")


def test_the_succession_goes_by_what_each_writer_succeeds() -> None:
    a, b, c = "0000000001-" + "a" * 16, "0000000002-" + "b" * 16, "0000000003-" + "c" * 16
    keys = [
        Confirmed(a, NO_CLAIM, 0).key,
        Confirmed(b, a, 50).key,
        Confirmed(c, a, 100).key,
        f"{b}.json",
        "else",
    ]
    found = Succession(keys)
    # b confirmed its claim after c had listed: nothing that it put counts.
    assert [writer.claim for writer in found.writers] == [a, c]
    assert (found.writer_of(0), found.writer_of(99), found.writer_of(100)) == (a, a, c)
    assert (found.newest, found.highest) == (c, c)
    assert found.needed(100) == {Confirmed(c, a, 100).key, f"{c}.json"}


def test_a_claim_that_nobody_confirmed_is_the_highest_and_not_the_newest() -> None:
    a, b = "0000000001-" + "a" * 16, "0000000002-" + "b" * 16
    found = Succession([f"{a}.json", Confirmed(a, NO_CLAIM, 7).key, f"{b}.json"])
    assert (found.newest, found.highest) == (a, b)
    assert found.writer_of(6) is None


class _Store:
    """Object storage in memory: each step of a writer is one request."""

    def __init__(self) -> None:
        self.claims: set[str] = set()
        self.chunks: set[str] = set()
        self.durable: dict[int, str] = {}  # first id: who said so
        self.number = 0

    def objects(self) -> list[StoredObject]:
        return [StoredObject(key, 1, 0.0) for key in self.chunks]

    def writer(self, chunks: int) -> Iterator[None]:
        """Takes over and writes chunks of one id, a request between two steps."""
        claim = new_claim(Succession(self.claims).highest)
        yield
        self.claims.add(f"{claim}.json")
        yield
        if Succession(self.claims).highest > claim:
            return
        yield
        objects = self.objects()
        yield
        succession = Succession(self.claims)
        yield
        found = sorted(stored_chunks(objects, succession))
        end = ChunkIndex(found).end
        self.claims.add(Confirmed(claim, succession.newest, end).key)
        yield
        for _ in range(chunks):
            if Succession(self.claims).highest > claim:
                return
            yield
            self.chunks.add(f"{claim}/{chunk_name(end, end + 1)}")
            yield
            if Succession(self.claims).highest > claim:
                return
            assert end not in self.durable, f"id {end} is {self.durable[end]}'s, and {claim}'s"
            self.durable[end] = claim
            end += 1
            yield


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=120), st.integers(1, 4))
def test_no_order_of_steps_gives_an_id_two_chunks(order: list[int], chunks: int) -> None:
    store = _Store()
    writers = [store.writer(chunks) for _ in range(4)]
    for number in order:
        next(writers[number], None)
    found = {chunk.first: chunk for chunk in stored_chunks(store.objects(), Succession(store.claims))}
    by = {int(key.partition("/")[2][:20]): key.partition("/")[0] for key in store.chunks}
    # What was called durable is what a reader finds, from the writer that said so.
    for first, claim in store.durable.items():
        assert first in found, (first, by)
        assert Succession(store.claims).writer_of(first) == claim
