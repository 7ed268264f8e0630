"""Of several writers one counts, in every order of their steps: see ``tests.log.orders``.

The numbers of orders say how many are gone through at least.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pytest

from tests.log.orders import Check, Note, Now, Process, Request, Steps, World, every_order
from tests.support import batch_of, facts_of
from zmq_datasource.errors import DataLossError, DiskFaultError, LogFormatError, LogLockedError
from zmq_datasource.log.chunk import write_chunk
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.head import HeadWriter, read_head
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import LOG_NAME, Chunk, parse_name
from zmq_datasource.log.merging import Merger
from zmq_datasource.log.reader import Deletions, read_index, read_slices, slices
from zmq_datasource.log.recovery import open_for_writing
from zmq_datasource.log.storage import LogStorage

T = TypeVar("T")
Rows = dict[int, bytes]


@pytest.fixture(autouse=True)
def without_clock_and_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogStorage, "request_interval", 0.0)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=_running[0].encode().rjust(16)[::-1]))


# The name of the process that runs now.
_running = [""]


# What must hold.


class Counted(NamedTuple):
    """A chunk of the log: the first one that was put at the end of the one before."""

    first: int
    rows: tuple[bytes, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.rows)


class OneLog(Check):
    """The chunks that count have contiguous ids, and no process sees any other.

    The account of a world is these chunks, also those that were deleted.

    Attributes:
        errors: What each process has ended with.
    """

    def __init__(self, *errors: type[Exception]) -> None:
        self._allowed = (LogLockedError, DataLossError, *errors)
        self._looked: set[Any] = set()
        self.errors: dict[str, set[str]] = {}

    def step(self, name: str, request: Request, before: World, after: World) -> tuple[Counted, ...]:
        log: tuple[Counted, ...] = before.account
        first, _ = parse_name(request.key.rpartition("/")[2]) or (None, None)
        now = after.get(request.key)
        if request.verb != "put_new" or first != (log[-1].end if log else 0) or now is None:
            return log
        return (*log, Counted(first, _values(now.content)))

    def note(self, name: str, note: Note, world: World) -> None:
        rows = _rows(world.account)
        about, found = note.about
        if note.what == "acknowledged":
            assert LogStorage(Now(world)).log_id() == about, (
                f"{name} has acknowledged {found} in a log that is gone"
            )
        else:
            assert list(found) == list(about), f"{name} has read {list(found)} of {about}"
        assert found.items() <= rows.items(), f"{name} has {note.what} {found}, which is not in {rows}"

    def end(self, name: str, error: Exception | None, world: World) -> None:
        assert error is None or isinstance(error, self._allowed), repr(error)
        self.errors.setdefault(name, set()).add(type(error).__name__ if error else "")

    def state(self, world: World) -> None:
        if (world.objects, world.account) in self._looked or world.get(LOG_NAME) is None:
            return
        self._looked.add((world.objects, world.account))
        wanted = _rows(world.account, read_head(Now(world)).deleted)
        _, found = _read_all(LogStorage(Now(world)))
        assert found == wanted, f"a reader that begins now gets {found}, not {wanted}"


def _values(content: bytes) -> tuple[bytes, ...]:
    return tuple(pa.ipc.open_file(pa.BufferReader(content)).read_all().column("value").to_pylist())


def _rows(chunks: Iterable[Counted], begin: int = 0) -> Rows:
    rows = {id_: value for chunk in chunks for id_, value in enumerate(chunk.rows, chunk.first)}
    return {id_: value for id_, value in rows.items() if id_ >= begin}


# The processes.


def writer(name: str, *chunks: int, deletes: bool = False, merges: bool = False, tries: int = 1) -> Process:
    """One that opens the log and writes chunks of so many rows.

    Args:
        deletes: Whether it deletes all but the newest chunk after each.
        merges: Whether it merges all but the newest chunk after each, before it deletes.
        tries: How often it does what the store does not answer.
    """

    def run(store: Steps) -> None:
        storage = LogStorage(store)
        _running[0] = name
        _retry(tries, lambda: storage.open_log(name))
        opened = _retry(tries, lambda: open_for_writing(storage, 0.0))
        end = opened.chunks.durable_end
        contents = ChunkIndex()
        contents.replace(opened.chunks)
        merger = Merger(storage, contents, 1 << 30, fan_in=2)
        if merges:
            merger.remove_leftovers()
        for number, count in enumerate(chunks):
            first, end = end, end + count
            rows = [b"%s%d.%d" % (name.encode(), number, i) for i in range(count)]
            batches = [batch_of(rows)]
            facts = facts_of(batches, first)
            try:
                chunk = _retry(tries, lambda: write_chunk(storage, batches, facts))  # noqa: B023 - called at once
            except LogLockedError:
                store.may_delete = False
                with suppress(LogLockedError):
                    _delete_below(storage, contents, opened.head, first)
                raise
            store.tell("acknowledged", (opened.log_id, dict(enumerate(rows, first))))
            contents.add(chunk)
            if merges:
                merger.merge_once()
            if deletes:
                with suppress(LogLockedError):
                    _delete_below(storage, contents, opened.head, end)

    return run


def _delete_below(storage: LogStorage, contents: ChunkIndex, head: HeadWriter, end: int) -> None:
    """What ``Retention`` does, without leases: see test_lease_orders for these."""
    storage.check_writer()
    gone = contents.delete_below(end)
    if head.head.deleted < contents.earliest:
        head.write(msgspec.structs.replace(head.head, deleted=contents.earliest))
    for chunk in gone:
        storage.delete_chunk(chunk)


def _retry(tries: int, act: Callable[[], T]) -> T:
    for _ in range(tries - 1):
        try:
            return act()
        except DiskFaultError:
            pass
    return act()


def reader(store: Steps) -> None:
    """One that plans and reads all there is."""
    store.tell("read", _read_all(LogStorage(store)))


def follower(looks: int) -> Process:
    """One that reads what has come, at each look."""

    def run(store: Steps) -> None:
        storage = LogStorage(store)
        log = LogFollower(storage, clock=lambda: 0.0)
        end = 0
        for look in [log.open, *[log.refresh_now] * (looks - 1)]:
            look()
            start, end = max(end, log.earliest), log.durable_end
            store.tell("read", _read(storage, log.covering(start, end), range(start, end)))

    return run


def _read_all(storage: LogStorage) -> tuple[range, Rows]:
    storage.log_id()
    index = read_index(storage)
    return _read(storage, index.all, range(index.earliest, index.durable_end))


def _read(storage: LogStorage, chunks: Iterable[Chunk], planned: range) -> tuple[range, Rows]:
    """Which ids are planned, and what is read of them."""
    found: Rows = {}
    pieces = slices(list(chunks), planned.start, planned.stop)
    for batch in read_slices(storage, pieces, deletions=Deletions(storage, storage.log_id(), fails=True)):
        ids = batch.column("id").to_pylist()
        assert not found.keys() & set(ids)
        found |= zip(ids, batch.column("value").to_pylist(), strict=True)
    return planned, found


def written(*chunks: int) -> World:
    """A log with these chunks, after its writer has ended."""
    store = Now(World(account=()), OneLog())
    writer("0", *chunks)(store)
    return store.world


EMPTY = World(account=())


def at_least(orders: int, world: World, check: OneLog | None = None, /, **given: Any) -> dict[str, set[str]]:
    """Go through every order; what each process has ended with."""
    check = check or OneLog()
    options = {name: given.pop(name) for name in ("begun", "still", "torn") if name in given}
    tried = every_order(world, given, check, **options)
    print(tried)
    assert tried.orders >= orders
    return check.errors


PUT = "put_new chunks/"
STALLED = {"A": PUT}
END = "its end"
BOTH = {"", "LogLockedError"}


def test_of_two_writers_each_id_has_one() -> None:
    ended = at_least(10**6, written(2, 1), A=writer("A", 2, 1), B=writer("B", 1, 1))
    assert ended == {"A": BOTH, "B": BOTH}


def test_a_writer_that_has_stalled_writes_nothing_that_counts_when_its_ids_were_taken_or_deleted() -> None:
    """Also where the log begins just where its chunk ends."""
    ended = at_least(
        10**5,
        written(2, 1),
        A=writer("A", 2, deletes=True),
        B=writer("B", 1, 1, 1, deletes=True),
        begun=STALLED,
    )
    assert ended == {"A": BOTH, "B": BOTH}


def test_a_writer_that_has_stalled_puts_a_chunk_that_counts_for_nobody_when_its_ids_were_merged() -> None:
    """What its put is answered does not matter: it acknowledges nothing."""
    ended = at_least(
        10**4, written(2, 1), A=writer("A", 2), B=writer("B", 1, 1, 1, merges=True), begun=STALLED
    )
    assert ended == {"A": BOTH, "B": BOTH}


def test_a_writer_that_stalls_in_a_merge_changes_nothing_for_its_successor() -> None:
    """It may put the merged chunk late, and so overlap with others, or delete its parts late."""
    for begun in ("put_new merged", "delete chunks"):
        at_least(
            10**3,
            written(2, 1),
            A=writer("A", 1, 1, merges=True),
            B=writer("B", 1, merges=True, deletes=True),
            begun={"A": begun},
        )


@pytest.mark.parametrize("other", [reader, follower(2)], ids=["reader", "follower"])
def test_a_reader_and_a_follower_find_the_rows_of_merged_chunks(other: Process) -> None:
    two = {"B": writer("B", 1, merges=True), "R": other}
    ended = at_least(10, written(2, 1), **two, begun={"B": "put_new merged"}, torn=True)
    assert ended["R"] == {""}


@pytest.mark.slow
def test_of_two_that_create_a_log_one_gives_out_the_first_id() -> None:
    ended = at_least(
        10**9, EMPTY, A=writer("A", 2, deletes=True), B=writer("B", 1, 1, deletes=True), still=("readers",)
    )
    assert ended == {"A": BOTH, "B": BOTH}


@pytest.mark.slow
def test_of_three_writers_each_id_has_one() -> None:
    three = {"A": writer("A", 2), "B": writer("B", 1, 1, deletes=True), "C": writer("C", 1, deletes=True)}
    at_least(10**6, written(1), **three, begun={"A": PUT, "C": PUT})


@pytest.mark.parametrize(
    ("orders", "others"),
    [
        pytest.param(10**6, {"B": writer("B", 1, 1, deletes=True)}, marks=pytest.mark.slow),
        (10**5, {"B": writer("B", 1, 1, deletes=True), "C": writer("C", 1)}),
    ],
    ids=["two writers", "three"],
)
def test_a_reader_gets_the_rows_that_count_or_an_error(orders: int, others: dict[str, Process]) -> None:
    begun = dict.fromkeys(("A", *others), PUT)
    ended = at_least(orders, written(1), A=writer("A", 2), R=reader, **others, begun=begun)
    assert "" in ended["R"] <= {"", "DataLossError"}


@pytest.mark.slow
def test_a_follower_gets_the_rows_that_count_or_an_error() -> None:
    two = {"A": writer("A", 2), "B": writer("B", 1, 1, deletes=True)}
    ended = at_least(10**7, written(1), **two, R=follower(2), begun={"A": PUT, "B": PUT})
    assert "" in ended["R"] <= {"", "DataLossError"}


def test_a_follower_that_is_behind_adds_no_stray_of_a_forgotten_writer() -> None:
    """One is in the place of its newest chunk, and one in the place of the next, up to where the log begins."""
    at_least(
        10**3,
        EMPTY,
        A=writer("A", 1),
        B=writer("B", 1),
        R=follower(2),
        C=writer("C", 3),
        D=writer("D", 1, 1, deletes=True),
        E=writer("E", 1, 1, deletes=True),
        F=writer("F", 1),
        begun={"A": PUT, "B": END, "R": "find", "C": PUT, "D": END, "E": END, "F": END},
    )


@pytest.mark.slow
def test_a_listing_that_takes_a_while_hides_no_chunk_from_a_reader() -> None:
    two = {"B": writer("B", 1, 1, deletes=True), "R": reader}
    ended = at_least(10**5, written(2, 1), **two, begun={"B": PUT}, torn=True)
    assert ended["B"] == {""}


@pytest.mark.slow
def test_a_listing_that_takes_a_while_hides_no_chunk_from_a_writer() -> None:
    two = {"B": writer("B", 1, 1, deletes=True), "C": writer("C", 1)}
    at_least(10**6, written(1), **two, begun={"B": PUT}, torn=True)


@pytest.mark.slow
def test_a_step_whose_answer_is_lost_is_repeated() -> None:
    world = written(1)._replace(faults=1)
    two = {"A": writer("A", 2, tries=2), "B": writer("B", 1, 1, tries=2, deletes=True)}
    at_least(10**5, world, OneLog(DiskFaultError), **two, begun=STALLED)


class Emptied(OneLog):
    """Nothing is acknowledged in a log that is not there any more.

    All chunks that were put since count: a log that is made again may go on after what an earlier writer puts.
    """

    def __init__(self) -> None:
        super().__init__(DiskFaultError, LogFormatError)

    def step(self, name: str, request: Request, before: World, after: World) -> tuple[Counted, ...]:
        if request.verb == "empty":
            return ()
        if request.verb == "put_new" and before.get(request.key) != (held := after.get(request.key)):
            first, _ = parse_name(request.key.rpartition("/")[2]) or (None, None)
            if first is not None and held is not None:
                return (*before.account, Counted(first, _values(held.content)))
        return tuple(before.account)

    def state(self, world: World) -> None:
        """A reader of the log that was there gets an error: there is none, or another one."""


@pytest.mark.parametrize(
    ("orders", "others"),
    [(10, {}), pytest.param(10**6, {"B": writer("B", 1)}, marks=pytest.mark.slow)],
    ids=["", "and made again"],
)
def test_in_a_store_that_is_emptied_between_two_steps_nothing_is_acknowledged(
    orders: int, others: dict[str, Process]
) -> None:
    errors = at_least(
        orders,
        written(2, 1),
        Emptied(),
        A=writer("A", 2, 1),
        E=lambda store: store.empty(),
        **others,
        still=("readers",),
    )
    assert errors["A"] >= {"", "DiskFaultError"}
