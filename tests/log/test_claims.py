"""Who wrote which ids in object storage: whatever order the steps of several writers come in, no id has two chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator

from zmq_datasource.host.object_store import StoredObject
from zmq_datasource.log.claims import NO_CLAIM, Confirmed, Succession, new_claim
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import chunk_name
from zmq_datasource.log.restoring import counted_chunks, stored_chunks


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
        self.counted: dict[int, str] = {}  # first id: whose chunk a reader has taken for good

    def objects(self) -> list[StoredObject]:
        return [StoredObject(key, 1, 0.0) for key in self.chunks]

    def succession(self) -> Succession:
        return Succession(self.claims)

    def writer(self, chunks: int) -> Iterator[None]:
        """Takes over and writes chunks of one id, a request between two steps."""
        claim = new_claim(self.succession().highest)
        yield
        self.claims.add(f"{claim}.json")
        yield
        if self.succession().highest > claim:
            return
        yield
        objects = self.objects()
        yield
        succession = self.succession()
        yield
        found = sorted(stored_chunks(objects, succession))
        end = ChunkIndex(found).end
        self.claims.add(Confirmed(claim, succession.newest, end).key)
        yield
        for _ in range(chunks):
            if self.succession().highest > claim:
                return
            yield
            for _ in range(2):  # the first answer was lost, and it puts the chunk again
                self.chunks.add(f"{claim}/{chunk_name(end, end + 1)}")
                yield
            if self.succession().highest > claim:
                return
            assert end not in self.durable, f"id {end} is {self.durable[end]}'s, and {claim}'s"
            self.durable[end] = claim
            end += 1
            yield

    def reader(self) -> Iterator[None]:
        """Lists chunks, then claims, again and again; what it counts it may give to a query."""
        known: set[str] = set()
        while True:
            objects = self.objects()
            yield
            succession = self.succession()
            chunks = counted_chunks(objects, succession, known)
            for chunk in chunks:
                writer = succession.writer_of(chunk.first)
                assert writer is not None
                assert self.counted.setdefault(chunk.first, writer) == writer
            names = {chunk.name for chunk in chunks}
            assert known <= names, "what has counted vanishes"
            known = names
            yield


def test_no_order_of_steps_gives_an_id_two_chunks() -> None:
    for seed in range(2000):
        chance = random.Random(seed)
        store = _Store()
        processes = [
            *(store.writer(chance.randrange(1, 5)) for _ in range(4)),
            store.reader(),
            store.reader(),
        ]
        for _ in range(40):  # each goes on for some steps, and then stalls
            process = chance.choice(processes)
            for _ in range(chance.randrange(1, 7)):
                next(process, None)
        for _ in store.writer(1):  # at last somebody settles it
            pass
        found = {chunk.first: chunk for chunk in stored_chunks(store.objects(), store.succession())}
        # What was called durable is what a reader finds, from the writer that said so; and what a reader has counted
        # stays: there is no other chunk for these ids.
        for first, claim in [*store.durable.items(), *store.counted.items()]:
            assert first in found, seed
            assert store.succession().writer_of(first) == claim, seed
