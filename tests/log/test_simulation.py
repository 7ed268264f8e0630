"""Writers, queries, tasks and followers of one log, stepped in an order that a seed decides, with kills and faults.

The processes are real code over a store in memory. Each request is a step, and one process runs at a time. Time passes
with the steps, and the wall clock jumps. The checker knows the promises only: ids are contiguous and never reused, the
same range gives the same rows, what is acknowledged stays until it is deleted, nothing is deleted that a query needs,
no lease is dropped before its timeout, and a follower sees each row once.
"""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from tests.log.orders import Request, Steps, World, answers
from tests.support import batch_of, facts_of
from zmq_datasource.errors import DataLossError, DiskFaultError, LogLockedError
from zmq_datasource.log.chunk import write_chunk
from zmq_datasource.log.follower import LogFollower
from zmq_datasource.log.head import read_head
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import CHUNKS_NAME, HEAD_NAME, READERS_NAME, Chunk, chunk_name
from zmq_datasource.log.leases import Reader
from zmq_datasource.log.merging import Merger
from zmq_datasource.log.reader import Deletions, read_index, read_slices, slices
from zmq_datasource.log.recovery import open_for_writing
from zmq_datasource.log.retention import Retention
from zmq_datasource.log.silence import Leases
from zmq_datasource.log.storage import LogStorage

Rows = dict[int, bytes]
TIMEOUT, DAY = 5.0, 86_400.0


class Killed(BaseException):
    """The end of a process, at any step."""


class Hold:
    """The lock of the log protects nothing here: each process that asks gets it. The name of a query is one's own."""

    lost = None

    def __init__(self, names: dict[str, Process], key: str, process: Process | None) -> None:
        self._names, self._key = names, key
        if process is not None and key.startswith(READERS_NAME):
            if key in names:
                raise LogLockedError(f"{key} is held by {names[key].name}")
            names[key] = process

    def release(self) -> None:
        self._names.pop(self._key, None)


class Need(NamedTuple):
    """What a query needs.

    Attributes:
        next: All ids from this one on; None until it has chosen.
        timeout: Seconds for which this holds without a sign of life.
        alive_at: When its lease was written.
        starts: How many writers had started by then.
    """

    next: int | None
    timeout: float
    alive_at: float
    starts: int


class Process:
    """A process of the simulation, which waits for its turn before each step."""

    def __init__(self, simulation: Simulation, name: str, run: Callable[[Process], None]) -> None:
        self.name, self.simulation = name, simulation
        self.storage = LogStorage(Connection(simulation, self))
        self.rng = random.Random(f"{simulation.seed} {name}")
        self.error: BaseException | None = None
        self.may_fail = True
        self.turn = threading.Semaphore(0)
        self.done = self.killed = False
        self.weight = self.rng.choice((1, 1, 10))
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Process], None]) -> None:
        self.turn.acquire()
        try:
            run(self)
        except Killed:
            pass
        except BaseException as e:
            self.error = e
        self.done = True
        for key in [key for key, holder in self.simulation.holds.items() if holder is self]:
            del self.simulation.holds[key]
        self.simulation.baton.release()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.step("wait", "")
        self.simulation.now += seconds

    def monotonic(self) -> float:
        return self.simulation.now

    def wall(self) -> float:
        return 1e9 + self.simulation.now + self.simulation.jump

    def step(self, verb: str, key: str) -> bool:
        """Wait for the next turn; return whether the answer is lost."""
        self.simulation.baton.release()
        self.turn.acquire()
        if self.killed:
            raise Killed
        self.simulation.history.append(f"{self.name} {verb} {key}")
        return self.may_fail and self.rng.random() < 0.005


class Connection(Steps):
    """The store in memory, as one process sees it; the checker's, with no process."""

    def __init__(self, simulation: Simulation, process: Process | None = None) -> None:
        super().__init__(())
        self._simulation, self._process = simulation, process

    def _ask(self, verb: str, *arguments: Any) -> Any:
        request, process = Request(verb, arguments), self._process
        lost = process is not None and process.step(verb, request.key)
        if lost and process is not None and process.rng.random() < 0.5:
            raise DiskFaultError(f"{request}: refused")
        answer = self._simulation.answer(request, process)
        if lost:
            raise DiskFaultError(f"{request}: no answer")
        return answer

    def hold(self, key: str, wait: float) -> Any:
        return Hold(self._simulation.holds, key, self._process)


class Simulation:
    """One log, its processes, and what must hold.

    Attributes:
        rows: Each row that was ever given an id in the log.
        needs: What each query needs, by the key of its lease.
        done: The checkpoint of each query.
        history: Each step, in order.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.world = World()
        self.rows: Rows = {}
        self.needs: dict[str, Need] = {}
        self.done: dict[str, int] = {}
        self.holds: dict[str, Process] = {}
        self.now, self.jump, self.starts = 0.0, 0.0, 0
        self.history: list[str] = []
        self.baton = threading.Semaphore(0)

    def answer(self, request: Request, process: Process | None) -> Any:
        """The store's answer, after a check of what it does."""
        before, key = self.world, request.key
        answer, self.world = next(answers(before, request))
        if request.verb == "put" and key in self.needs:
            self.needs[key] = self.needs[key]._replace(alive_at=self.now, starts=self.starts)
        elif request.verb == "put_new" and self.world != before:
            self._check_new(key, request.arguments[1])
        elif request.verb == "delete" and key in self.needs and process and process.name.startswith("writer"):
            need = self.needs.pop(key)
            # Each start of a writer may count a tenth of the timeout, by the wall clock.
            silent = self.now - need.alive_at + 0.1 * need.timeout * (self.starts - need.starts)
            assert silent >= need.timeout, f"{key} was dropped after {self.now - need.alive_at} s"
        return answer

    def _check_new(self, key: str, content: bytes) -> None:
        directory, _, name = key.partition("/")
        if directory == HEAD_NAME and key == max(
            it for it, _ in self.world.objects if it.startswith(HEAD_NAME)
        ):
            self.check_needs(json.loads(content)["deleted"])
        elif directory == CHUNKS_NAME and name == chunk_name(len(self.rows)):
            values = pa.ipc.open_file(pa.BufferReader(content)).read_all().column("value").to_pylist()
            self.rows |= dict(enumerate(values, len(self.rows)))

    def check_needs(self, deleted: int) -> None:
        """Nothing is deleted that a query needs whose lease is there."""
        for key, need in self.needs.items():
            assert need.next is None or deleted <= need.next, (
                f"{key} needs {need.next}, and {deleted} is deleted"
            )

    # The processes.

    def run(self) -> None:
        names = random.Random(self.seed)
        uuid.uuid4 = lambda: uuid.UUID(int=names.getrandbits(128))  # type: ignore[assignment]
        kinds = [writer, writer, writer, writer, reader, query, query, query, follower]
        waiting = [Process(self, f"{kind.__name__}{n}", kind) for n, kind in enumerate(kinds)]
        first = waiting.pop(0)
        running, processes = [first], [first, *waiting]
        stalls, jumps = self.rng.choice((0.01, 0.03, 0.1)), self.rng.choice((0.0, 0.005, 0.03))
        while running:
            if (waiting and self.rng.random() < 0.02) or (len(running) == 1 and waiting and running[0].done):
                running.append(waiting.pop(self.rng.randrange(len(waiting))))
            process = self.rng.choices(running, [it.weight for it in running])[0]
            if self.rng.random() < stalls:  # it is faster or slower from now on, or stalls for long
                process.weight = self.rng.choice((0.001, 1, 10))
            process.killed = process.killed or self.rng.random() < 0.001
            self.now += self.rng.choice((0.0, 0.01, 0.1))
            if self.rng.random() < jumps:
                self.jump = self.rng.choice((-365 * DAY, -8 * DAY, 0.0, 8 * DAY, 365 * DAY))
            process.turn.release()
            self.baton.acquire()
            if process.done:
                running.remove(process)
                if process.error is not None:
                    raise process.error
            if not running and waiting:
                running.append(waiting.pop(0))
        assert all(process.done for process in processes)
        self.check_end()

    def check_end(self) -> None:
        """All rows that are not deleted are there, also after the next writer has tidied up."""
        storage = LogStorage(Connection(self))
        if not self.world.objects:
            return
        begin = read_head(storage.store).deleted
        wanted = {id_: value for id_, value in self.rows.items() if id_ >= begin}
        assert read_all(storage) == wanted
        self.check_needs(begin)
        opened = open_for_writing(storage, 0.0)
        contents = ChunkIndex()
        contents.replace(opened.chunks)
        merger = Merger(storage, contents, 1 << 30, fan_in=2)
        merger.remove_leftovers()
        merger.merge_once()
        assert read_all(storage) == wanted
        assert len(storage.chunks()) == len(
            [it for it in contents.covering(begin, len(self.rows)) if not it.is_merged]
        )


def read_all(storage: LogStorage) -> Rows:
    index = read_index(storage)
    return read(storage, index.all, index.earliest, index.durable_end)


def read(storage: LogStorage, chunks: Sequence[Chunk], start: int, end: int) -> Rows:
    found: Rows = {}
    deletions = Deletions(storage, storage.log_id(), fails=True)
    for batch in read_slices(storage, slices(chunks, start, end), deletions=deletions):
        found |= zip(batch.column("id").to_pylist(), batch.column("value").to_pylist(), strict=True)
    assert list(found) == list(range(start, end))
    return found


def repeated(act: Callable[[], Any]) -> Any:
    """The answer of an act that is repeated while the store refuses."""
    while True:
        try:
            return act()
        except DiskFaultError:
            pass


def writer(process: Process) -> None:
    """Writes, merges, looks at the leases and deletes in any order, until it has lost the log or is done."""
    storage, rng, simulation = process.storage, process.rng, process.simulation
    try:
        repeated(storage.open_log)
        opened = repeated(lambda: open_for_writing(storage, 0.0))
        contents = ChunkIndex()
        contents.replace(opened.chunks)
        leases = Leases(storage, clock=process.monotonic)
        retention = Retention(
            storage,
            contents,
            leases,
            seconds=rng.choice((0.0, 10.0)),
            max_bytes=1 << 30,
            chunk_bytes=1,
            clock=process.wall,
            monotonic=process.monotonic,
        )
        simulation.starts += 1
        repeated(lambda: retention.begin(opened.head))
        merger = Merger(storage, contents, 1 << 30, fan_in=2)
        repeated(merger.remove_leftovers)
        for number in range(rng.randint(2, 16)):
            act = rng.random()
            if act < 0.4 or not contents.chunks:
                first = contents.durable_end
                values = [b"%s.%d.%d" % (process.name.encode(), number, i) for i in range(rng.randint(1, 3))]
                batches = [batch_of(values)]
                facts = facts_of(batches, first)
                chunk = repeated(lambda: write_chunk(storage, batches, facts))  # noqa: B023
                assert dict(enumerate(values, first)).items() <= simulation.rows.items(), "acknowledged"
                contents.add(chunk)
            elif act < 0.6:
                repeated(merger.merge_once)
            else:
                for _ in range(rng.randint(1, 4)):
                    process.wait(rng.random())
                    retention.tidy()
        repeated(retention.end)
    except (LogLockedError, DataLossError):  # another writer has the log
        pass


def reader(process: Process) -> None:
    """Plans, and reads later."""
    storage, process.may_fail = process.storage, False  # a task repeats what the store refuses, with pauses
    for _ in range(4):
        repeated(storage.open_log)
        index = repeated(lambda: read_index(storage))
        try:
            chunks = index.all
            found = repeated(lambda: read(storage, chunks, index.earliest, index.durable_end))  # noqa: B023
        except DataLossError:  # deleted since
            assert repeated(lambda: read_index(storage)).earliest > index.earliest
        else:
            assert found.items() <= process.simulation.rows.items()


class Quiet(Reader):
    """A lease without its thread: the query writes it."""

    def _keep(self) -> None:
        pass


def query(process: Process) -> None:
    """Comes and goes, reads, moves, and is silent for a while."""
    storage, rng, needs, done = (
        process.storage,
        process.rng,
        process.simulation.needs,
        process.simulation.done,
    )
    repeated(storage.open_log)
    name = rng.choice((None, "desk", process.name))
    query = name or process.name
    for _ in range(rng.randint(1, 3)):
        try:
            lease = repeated(lambda: Quiet(storage, name, TIMEOUT))
        except LogLockedError:  # another one has the name, or a writer is dropping it
            process.wait(1.0)
            continue
        key = f"{READERS_NAME}/{lease.name}.json"
        known = needs.setdefault(key, Need(None, TIMEOUT, process.simulation.now, 0))
        announced = repeated(lease.open)
        earliest = repeated(lambda: read_index(storage)).earliest
        if query not in done:
            begins = lease.found is not None and lease.found.begins
            done[query] = lease.found.next if lease.found is not None and begins else max(announced, earliest)
            repeated(lambda: lease.begin(done[query]))  # noqa: B023
        assert known.next is None or earliest <= done[query], f"{key} needs {done[query]}, not {earliest}"
        done[query] = max(done[query], earliest)
        needs[key] = needs[key]._replace(next=done[query])
        for _ in range(rng.randint(0, 5)):
            process.wait(rng.choice((0.1, 1.0, 2.0)))
            done[query] = _read_on(process, done[query])
            lease.move(done[query])
            needs[key] = needs[key]._replace(next=done[query])
            if rng.random() < 0.7:
                repeated(lease.write)
        lease.close()
        process.wait(rng.choice((0.0, 1.0, TIMEOUT)))


def _read_on(process: Process, start: int) -> int:
    """Read some of what follows an id; return the id after it."""
    process.may_fail = False  # a task repeats what the store refuses, with pauses
    index = read_index(process.storage)
    assert index.earliest <= start
    end = process.rng.randint(start, max(start, index.durable_end))
    found = read(process.storage, index.covering(start, end), start, end)
    assert found.items() <= process.simulation.rows.items()
    process.may_fail = True
    return end


def follower(process: Process) -> None:
    """Reads each row once."""
    storage, process.may_fail = process.storage, False
    repeated(storage.open_log)
    log, seen = LogFollower(storage, clock=lambda: 0.0), 0
    repeated(log.open)
    for _ in range(6):
        repeated(log.refresh_now)
        start, end = max(seen, log.earliest), log.durable_end
        assert end >= seen
        try:
            chunks = log.covering(start, end)
            found = repeated(lambda: read(storage, chunks, start, end))  # noqa: B023
        except DataLossError:
            continue
        assert found.items() <= process.simulation.rows.items()
        seen = end


@pytest.fixture(autouse=True)
def without_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogStorage, "request_interval", 0.0)
    monkeypatch.setattr(Retention, "look_seconds", 0.0)
    monkeypatch.setattr(uuid, "uuid4", uuid.uuid4)  # the processes replace it


def simulate(seeds: range) -> None:
    for seed in seeds:
        try:
            Simulation(seed).run()
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise


def test_two_runs_of_a_seed_are_alike() -> None:
    histories = []
    for _ in range(2):
        simulation = Simulation(7)
        simulation.run()
        histories.append(simulation.history)
    assert histories[0] == histories[1]
    assert len(histories[0]) > 100


def test_a_log_keeps_its_promises_in_any_order_of_steps() -> None:
    simulate(range(200))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(200, 10_000, 490))
def test_a_log_keeps_its_promises_in_ten_thousand_orders(first: int) -> None:
    simulate(range(first, first + 490))
