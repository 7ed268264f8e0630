"""What is run under the weather, and the plain model that judges each: what was sent, what came, what is missing."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pyarrow import parquet

from tests.support import log_rows
from tests.support.publishers import Publisher
from tests.weather.bucket import location_in
from tests.weather.engine import read_end, read_output
from tests.weather.failpoints import POINTS
from tests.weather.faults import STORE_FAULTS
from tests.weather.machine import BrokenPromiseError, World
from zmq_datasource.errors import LogError
from zmq_datasource.log.bucket_store import bucket_at
from zmq_datasource.log.leases import LeaseFiles
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.state import read_saved_state, sections_of
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.options.types import Location
from zmq_datasource.source.facts import saved_sequences

__all__ = ["TOPOLOGIES", "Topology"]

_NETWORK = ("delay", "throttle", "reset", "reset-after", "half-open", "black-hole")
_DISK = ("enospc", "eio", "emfile", "slow")
_PROCESS = ("kill", "stop")
_CLOCK = ("clock-back", "clock-ahead", "clock-days-ahead")
# Failpoints, by what a process does.
_FILES_PUT = (
    *("log.store.before_write", "log.store.after_write", "log.store.after_sync"),
    *("log.store.before_link", "log.store.after_link", "log.store.after_unlink"),
)
_FILES_REPLACED = ("log.store.before_rename", "log.store.after_rename")
_PUTS = ("log.chunk.before_put", "log.chunk.after_put")
_MERGES = (
    *("log.merge", "log.chunk.before_delete", "log.chunk.after_delete"),
    *("log.store.before_delete", "log.store.after_delete"),
)
_RECEIVES = (*_PUTS, *_FILES_PUT, *_MERGES, "log.head", "log.recovery.after_lock")
_READS = ("log.position", *_FILES_REPLACED, "weather.")
_READS_BUCKET = ("log.position", "weather.")
_IN_BUCKET = (
    *("log.store.before_put", "log.store.after_put", "log.store.before_beat", "log.store.before_release"),
    *(*_PUTS, *_MERGES, "log.head", "log.recovery.after_lock"),
)
_ACCEPTS = (
    *("acknowledged.data.after_append", "acknowledged.staged", "acknowledged.commit.before_append"),
    *("acknowledged.commit.after_append", "acknowledged.committed", "acknowledged.file"),
)
_STAGES = (
    *("acknowledged.data.before_send", "acknowledged.end", "acknowledged.commit.before_send"),
    "acknowledged.commit.after_committed",
)
_JOURNALS = ("log.recovery", *_FILES_PUT, *_FILES_REPLACED, "log.position")
# Of the victims of damage at rest, those that every log has.
_FILES = ("chunk", "merged", "state", "position", "head", "log.json")
# Longer than walFlushInterval.
_QUIET_SECONDS = 2.5


class Topology:
    """One arrangement; built in a world before the weather comes.

    Attributes:
        possible: The weather that there can be, as (kind, target).
        reachable: The failpoints that there are, as (process, name).
        batches, rows, partitions: What a sink sends: batches of so many rows in each partition.
    """

    name: ClassVar[str]
    batches, rows, partitions = 30, 40, 2

    def __init__(self, world: World, seconds: float) -> None:
        self.world = world
        self.seconds = seconds
        self.wal = world.directory / "wal"
        self.query = world.directory / "query"
        self.possible: list[tuple[str, str]] = []
        self.reachable: list[tuple[str, str]] = []
        self.store = ""  # where the log is, if it is in a bucket

    def may(self, target: str, *kinds: str) -> None:
        self.possible += [(kind, target) for kind in kinds]

    def reaches(self, process: str, *beginnings: str) -> None:
        """Note that a process reaches the failpoints whose names begin so."""
        self.reachable += [
            (process, name) for name, point in POINTS.items() if name.startswith(beginnings) and point.weight
        ]

    def finish(self) -> None:
        """In fair weather: wait until all is through, and end everybody in good order."""
        raise NotImplementedError

    def check(self) -> str:
        """Judge; say what came of it in a few words.

        Raises:
            BrokenPromiseError: A promise did not hold.
        """
        raise NotImplementedError

    def reads(self) -> dict[str, str]:
        """The options of a batch query that reads the log."""
        return {"walStore": self.store} if self.store else {"walLocation": str(self.wal)}

    def known(self) -> dict[int, str]:
        """The values that the query has got, by id."""
        return {row[0]: row[3] for row in self.output()}

    # What all have in common.

    def source(self, name: str = "source", **options: str) -> None:
        self.world.process(
            name,
            "source",
            self.wal,
            directory=str(self.query),
            options={
                **({} if "walStore" in options else {"walLocation": str(self.wal)}),
                "failOnDataLoss": "true",
                **options,
            },
        )

    def metrics(self) -> dict[str, str]:
        """Options by which the sink writes its accounts; in half of the runs none."""
        if self.world.extras.random() < 0.5:
            return {}
        self.reaches("sink", "monitoring.")
        return {"metricsLocation": str(self.world.directory / "metrics")}

    def output(self, query: Path | None = None) -> list[list[Any]]:
        """The rows of a query, whose ids are contiguous, and none twice."""
        rows = read_output(query or self.query)
        numbers = [row[0] for row in rows]
        doubled = [number for number, count in Counter(numbers).items() if count > 1]
        if doubled:
            raise BrokenPromiseError(f"ids {doubled[:5]} were committed twice")
        if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise BrokenPromiseError(f"the ids of the query have holes or no order: {_holes(numbers)}")
        return rows

    def read_through(self, query: Path | None = None) -> bool:
        """Whether a query has committed all that the log has, and there is something."""
        done = (read_end(query or self.query) or {"next": 0})["next"]

        def is_read(log: LogStorage) -> bool:
            end = read_index(log).durable_end
            return bool(done == end and end)

        return self.sees(is_read)

    def sees(self, what: Callable[[LogStorage], bool]) -> bool:
        """Whether something is so in the log; not while there is none, it is damaged, or its store is away."""
        try:
            return what(self.storage())
        except LogError:
            return False

    def storage(self) -> LogStorage:
        """The log, as a process sees it that only reads."""
        return LogStorage(bucket_at(Location(self.store)) if self.store else str(self.wal))

    def files(self) -> Path:
        """Where the files of the log are."""
        return self.world.directory / "bucket" / "log" if self.store else self.wal

    def in_bucket(self, *machines: str) -> list[str]:
        """Have the log in a bucket, whose server and network have weather; the ``walStore`` of each machine."""
        endpoint = self.world.endpoint()
        self.store = location_in(endpoint, "log")
        self.world.process("bucket", "bucket", endpoint=endpoint, root=str(self.world.directory / "bucket"))
        self.world.wait_for(lambda: self.sees(lambda log: not log.chunks()), "the bucket is there", 30)
        self.world.explains = lambda error: "@bucket/log" in error and self.bucket_has_weather()
        self.may("bucket", *_PROCESS, *STORE_FAULTS)
        wires = [f"bucket-{machine}" for machine in machines]
        for wire in wires:
            self.may(wire, *_NETWORK)
        return [location_in(self.world.middlebox(wire, endpoint), "log") for wire in wires]

    def bucket_has_weather(self) -> bool:
        return any(event.target.startswith("bucket") for event in self.world.events)

    def sink(self, seconds: float, **options: str) -> None:
        """Start a sink, whose last batch is about so many seconds after its first."""
        self.journal = self.world.directory / "sink.jsonl"
        self.world.process(
            "sink",
            "sink",
            journal=str(self.journal),
            query="00000000-0000-0000-0000-000000000001",
            batches=self.batches,
            rows=self.rows,
            partitions=self.partitions,
            pause=seconds / self.batches,
            options={"connectTimeout": "5s", "sendTimeout": "10s", **options},
        )

    def due(self) -> set[str]:
        """The values that the sink has to send."""
        sent = itertools.product(range(self.batches), range(self.partitions), range(self.rows))
        return {f"{batch}:{partition}:{row}" for batch, partition, row in sent}

    def ended(self, name: str) -> Callable[[], bool]:
        return lambda: self.world.processes[name].ended


def _holes(numbers: list[int]) -> str:
    pairs = [(a, b) for a, b in itertools.pairwise(numbers) if b != a + 1]
    return ", ".join(f"{a} is followed by {b}" for a, b in pairs[:3])


class _SinkToSource(Topology):
    """Our sink's batches into our source."""

    def finish(self) -> None:
        self.world.wait_for(self.ended("sink"), "the sink has sent all of its batches")
        self.world.wait_for(self.read_through, "the query has read what was received")
        self.world.stop("source")


class PushPull(_SinkToSource):
    """PUSH → PULL: nothing is lost as long as no process dies that holds it."""

    name = "push-pull"

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        self.noblock = world.random.random() < 0.3
        at = world.endpoint()
        before = world.middlebox("wire", at)
        self.source(socketType="PULL", bind=at, walRetention=world.retention)
        # What finds no room is a dead letter, and with a short queue much finds none.
        self.letters = world.directory / "letters" if world.extras.random() < 0.5 else None
        letters = {"deadLetterLocation": str(self.letters), "sendTimeout": "0s", "sndhwm": "10"}
        options = {
            "noblock": str(self.noblock and self.letters is None).lower(),
            "sndhwm": "1000",
            "linger": "10s",
        }
        options |= {**self.metrics(), **({} if self.letters is None else letters)}
        self.sink(seconds, socketType="PUSH", connect=before, **options)
        self.may("wire", *_NETWORK)
        self.may("source", *_DISK, *_PROCESS, "power", *_CLOCK)
        world.may_be_damaged("source", self.files(), *_FILES)
        self.may("sink", *_PROCESS)
        self.reaches("source", *_RECEIVES, *_READS)
        self.reaches("sink", "spark.", *(() if self.letters is None else ("sink.dead_letters",)))

    def accounts(self) -> list[dict[str, Any]]:
        accounts = [json.loads(line) for line in self.journal.read_text().splitlines()]
        done = [account for account in accounts if "batch" in account]
        for account in done:
            if account["rows"] != account["sent"] + account["dropped"] + account["deadLettered"]:
                raise BrokenPromiseError(f"the sink's account does not add up: {account}")
            if self.letters is not None and (kept := self.kept(account["batch"])) != account["deadLettered"]:
                raise BrokenPromiseError(f"{kept} dead letters are kept of a batch with {account}")
        if [account["batch"] for account in done] != list(range(self.batches)):
            raise BrokenPromiseError(
                f"the sink has not written each batch once: {[a['batch'] for a in done]}"
            )
        return done

    def kept(self, batch: int) -> int:
        """How many dead letters of a batch are where they are looked for."""
        assert self.letters is not None
        files = self.letters.glob(f"query=*/batch={batch}/*.parquet")
        return sum(parquet.read_metadata(file).num_rows for file in files)

    def check(self) -> str:
        accounts, rows = self.accounts(), self.output()
        came = Counter(row[3] for row in rows)
        for account in accounts:
            missing = [
                f"{account['batch']}:{p}:{r}"
                for p in range(self.partitions)
                for r in range(self.rows)
                if (value := f"{account['batch']}:{p}:{r}") not in came and not self.world.discarded(value)
            ]
            # What a receiver had and not sealed dies with it.
            unsent = account["dropped"] + account["deadLettered"]
            if len(missing) > unsent and not self.world.lossy("kill source", "power source"):
                raise BrokenPromiseError(
                    f"{len(missing)} rows of batch {account['batch']} never came, from {missing[0]} on; the sink says "
                    f"{account}"
                )
        return f"{sum(came.values())} rows, {sum(came.values()) - len(came)} of them again"


class VllmReplay(Topology):
    """A vLLM publisher with its replay socket: each message once, whatever happens between it and us."""

    name = "vllm-replay"

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        live, replay = world.endpoint(), world.endpoint()
        sndhwm = world.random.choice((10, 1000))
        self.publisher: Publisher = world.keep(
            Publisher("vllm", live, replay=replay, sndhwm=sndhwm, buffer=1_000_000)
        )
        for box in ("live", "replay"):
            self.may(box, *_NETWORK)
        self.start(world.middlebox("live", live), world.middlebox("replay", replay))
        self.publisher.ask("wait-subscriber")
        self.publisher.ask("send 1")
        world.wait_for(lambda: bool(read_output(self.query)), "the first message is read", 30)
        self.sent = 1

    def start(self, live: str, replay: str) -> None:
        """Start what subscribes to the publisher."""
        self.source(
            socketType="SUB",
            connect=live,
            replayEndpoint=replay,
            framing="vllm",
            walRetention=self.world.retention,
        )
        self.may("source", *_DISK, *_PROCESS, "power", *_CLOCK)
        self.reaches("source", *_RECEIVES, *_READS)
        self.world.may_be_damaged("source", self.files(), *_FILES)

    def load(self) -> None:
        burst = self.world.random.choice((1, 50, 500))
        self.sent = int(self.publisher.ask(f"send {burst}")["next"])

    def finish(self) -> None:
        self.wait_until_through(self.query)
        self.world.stop("source")

    def wait_until_through(self, *queries: Path) -> None:
        """Until all have read what was received, which is all that was sent and not given up."""

        def through() -> bool:
            known = len(read_output(self.query)) + len(self.given_up())
            read = all(self.read_through(query) for query in queries)
            return read and known >= self.sent

        self.world.wait_for(through, f"the query has all of {self.sent} messages")

    def check(self) -> str:
        numbers = [row[2] for row in self.output()]
        given_up = self.given_up()
        if sorted([*numbers, *given_up]) != list(range(self.sent)):
            doubled = [n for n, count in Counter(numbers).items() if count > 1]
            missing = sorted(set(range(self.sent)) - set(numbers) - given_up)
            raise BrokenPromiseError(
                f"of {self.sent} messages {len(missing)} are missing {missing[:3]}, {len(doubled)} came twice"
            )
        asked = self.publisher.ask("requests")["count"]
        return f"{self.sent} messages, {len(given_up)} known to be lost, {asked} replays asked for"

    def given_up(self) -> set[int]:
        """What is counted as lost. Only a replay endpoint that is away for long, or a source that is, explains it."""
        if not any(event.seconds > 10 for event in self.world.events):
            return set()
        saved = saved_sequences(sections_of(read_saved_state(self.storage())))
        # Not a gap that a replay may still fill: its messages may come after the query was asked whether it has all.
        gaps = [] if saved is None else [gap for gap in saved.gaps if gap.lost]
        return {at for gap in gaps for at in range(gap.first, gap.last + 1)}


class DealerRouter(_SinkToSource):
    """DEALER → ROUTER: each batch whole and once, whoever dies."""

    name = "dealer-router"
    batches, rows = 20, 50

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        at = world.endpoint()
        retention = world.random.choice(("0s", world.retention))
        served = {}
        if world.extras.random() < 0.4:  # to executors that do not see the directory
            served = {"serveLog": world.endpoint()}
            self.reaches("source", "source.chunk")
        self.source(socketType="ROUTER", bind=at, walRetention=retention, **served)
        self.sink(seconds, socketType="DEALER", connect=world.middlebox("wire", at))
        self.may("wire", *_NETWORK)
        self.may("source", *_DISK, *_PROCESS, "power", *_CLOCK)
        world.may_be_damaged("source", self.files(), *_FILES)
        self.may("sink", *_PROCESS)
        self.reaches("source", *_RECEIVES, *_READS, *_ACCEPTS)
        self.reaches("sink", "spark.", *_STAGES)

    def check(self) -> str:
        came = Counter(row[3] for row in self.output())
        _exactly_once(self.due(), came)
        return f"{len(came)} rows"


class RouterDurable(Topology):
    """Producer → receiver → durable subscriber: everything, in order, and nothing again that was acknowledged."""

    name = "router-durable"

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        router, durable = world.endpoint(), world.endpoint()
        self.transactions, self.rows = 30, 20
        world.process(
            "receive",
            "receive",
            self.wal,
            options={
                "socketType": "ROUTER",
                "bind": router,
                "durable": durable,
                "walLocation": str(self.wal),
                "walMaxBytes": "1m",
                # The log is compared with what was sent, also after a clock has gone an hour ahead.
                "walRetention": "1d",
                # Of the rows that wait for this, none is lost: a transaction is sealed when it is committed.
                "walFlushInterval": world.extras.choice(("500ms", "2s", "5s")),
            },
        )
        world.process(
            "producer",
            "producer",
            endpoint=world.middlebox("in", router),
            name="weather",
            transactions=self.transactions,
            rows=self.rows,
            pause=seconds / self.transactions,
        )
        self.journal = world.directory / "durable.txt"
        self.last = f"{self.transactions - 1}:{self.rows - 1}"
        world.process(
            "durable",
            "durable",
            endpoint=world.middlebox("out", durable),
            name="weather",
            journal=str(self.journal),
            last=self.last,
        )
        self.may("in", *_NETWORK)
        self.may("out", *_NETWORK)
        self.may("receive", *_DISK, *_PROCESS, "power", *_CLOCK[:2])
        world.may_be_damaged("receive", self.wal, *_FILES, "subscriber")
        self.may("producer", *_PROCESS)
        self.may("durable", *_PROCESS)
        self.reaches("receive", *_JOURNALS, *_MERGES, "log.head", *_ACCEPTS, "serving.batch.")
        self.reaches("producer", *_STAGES)
        self.reaches("durable", "serving.ack.")

    def known(self) -> dict[int, str]:
        return {}

    def _lines(self) -> list[str]:
        return self.journal.read_text().splitlines() if self.journal.exists() else []

    def finish(self) -> None:
        self.world.wait_for(self.ended("producer"), "the producer has flushed all of its transactions")

        def through() -> bool:
            got = [
                line.split()[1]
                for line in self._lines()
                if line.startswith("got ") and line.endswith(f" {self.last}")
            ]
            return bool(got) and f"acked {got[-1]}" in self._lines()

        self.world.wait_for(through, "the durable subscriber has acknowledged the last message")
        self.world.stop("durable", "receive")

    def check(self) -> str:
        log = log_rows(self.wal)
        values = {row["id"]: row["value"].decode() for row in log.select(["id", "value"]).to_pylist()}
        due = {f"{number}:{row}" for number in range(self.transactions) for row in range(self.rows)}
        _exactly_once(due, Counter(values.values()))
        got: set[int] = set()
        acked = last = -1
        for line in self._lines():
            word, *rest = line.split()
            match word:
                case "began":
                    last = -1
                case "acked":
                    acked = max(acked, int(rest[0]))
                case "got":
                    number = int(rest[0])
                    if number <= acked:
                        raise BrokenPromiseError(f"id {number} came again though {acked} was acknowledged")
                    if number <= last:
                        raise BrokenPromiseError(f"id {number} came after id {last} in one session")
                    if values.get(number) != rest[1]:
                        raise BrokenPromiseError(
                            f"id {number} came as {rest[1]!r}, the log has {values.get(number)!r}"
                        )
                    got.add(number)
                    last = number
        if missing := sorted(values.keys() - got):
            raise BrokenPromiseError(f"the subscriber never got ids {missing[:5]}, {len(missing)} in all")
        return f"{len(values)} messages, each at least once"


class TwoQueries(Topology):
    """Two queries on one feed: one receives, the other follows and takes its place; both have everything, the same.

    Nothing is lost as long as no receiver dies.

    Attributes:
        loses: What happens to a receiver that loses what it holds.
    """

    name = "two-queries"
    receivers = ("source", "second")
    loses: ClassVar[tuple[str, ...]] = ("kill",)

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        self.at = world.endpoint()
        before = world.middlebox("wire", self.at)
        self.start_receivers()
        waits = {"connectTimeout": "20s", "sendTimeout": "20s", "linger": "10s"}
        self.sink(seconds, socketType="PUSH", connect=before, **waits)
        self.may("wire", *_NETWORK)
        self.may("sink", *_PROCESS)
        self.reaches("sink", "spark.")

    def start_receivers(self) -> None:
        self.second = self.world.directory / "second"
        keeping = self.draw_keeping()
        for name, directory in (("source", self.query), ("second", self.second)):
            options = {
                "socketType": "PULL",
                "bind": self.at,
                "walLocation": str(self.wal),
                "startingOffsets": "earliest",
                **keeping[name],
            }
            self.world.process(name, "source", self.wal, directory=str(directory), options=options)
            self.may(name, *_DISK, *_PROCESS, *_CLOCK)
            self.reaches(name, *_RECEIVES, *_READS, "source.takeover")
            self.world.may_be_damaged(name, self.wal, *_FILES)
        self.wait_for_readers()

    def draw_keeping(self) -> dict[str, dict[str, str]]:
        """Options of each query by which chunks stay, or go as soon as both queries, which have names, are done."""
        self.names = self.receivers if self.world.extras.random() < 0.5 else ()
        if not self.names:
            return {name: {"walRetention": self.world.retention} for name in self.receivers}
        return {name: {"walRetention": "0s", "reader": name} for name in self.names}

    def wait_for_readers(self) -> None:
        """Until nothing can be deleted that a query has not read."""
        self.world.wait_for(
            lambda: self.sees(lambda log: len(LeaseFiles(log).entries()) >= len(self.receivers)),
            "both queries are there",
            60,
        )

    def may_lose(self) -> bool:
        """Whether a receiver may have ended with what it held."""
        return self.world.lossy(*(f"{how} {name}" for how in self.loses for name in self.receivers))

    def read_by(self, *queries: Path) -> None:
        """Wait until all have read what was received, and nothing more has been sealed for a while."""
        self.world.wait_for(self.ended("sink"), "the sink has sent all of its batches")
        seen: tuple[Any, float] = (None, 0.0)

        def note(log: LogStorage) -> bool:
            nonlocal seen
            chunks = log.chunks()
            if chunks != seen[0]:
                seen = chunks, time.monotonic()
            return True

        def settled() -> bool:
            self.sees(note)
            quiet = time.monotonic() - seen[1] > _QUIET_SECONDS
            return quiet and all(self.read_through(query) for query in queries)

        self.world.wait_for(settled, "the queries have read what was received")

    def check_rows(self, rows: list[list[Any]]) -> None:
        came = Counter(row[3] for row in rows)
        due = self.due()
        missing = sorted(value for value in due - came.keys() if not self.world.discarded(value))
        # What a receiver had and not sealed dies with it.
        if missing and not self.may_lose():
            raise BrokenPromiseError(f"{len(missing)} of {len(due)} rows never came, {missing[:3]}")

    def finish(self) -> None:
        self.read_by(self.query, self.second)
        self.world.stop("source", "second")

    def check(self) -> str:
        one, other = self.output(), self.output(self.second)
        if one != other:
            raise BrokenPromiseError(
                f"one query has {len(one)} rows, the other {len(other)}, and not the same"
            )
        self.check_rows(one)
        return f"{len(one)} rows, to both"


class TwoMachines(TwoQueries):
    """Two queries on two machines with a log in a bucket: one that stalls is taken for dead, and comes back.

    Each machine has a network to the bucket of its own, so that one may be cut off while the other one is not.
    """

    name = "two-machines"
    # Another machine has gone on by the time it comes back.
    loses = ("kill", "stop", "power", "slow", "enospc", "eio", "emfile")

    def start_receivers(self) -> None:
        self.second = self.world.directory / "second"
        stores = self.in_bucket("source", "second")
        keeping = self.draw_keeping()
        for name, directory, store in zip(self.receivers, (self.query, self.second), stores, strict=True):
            options = {
                "socketType": "PULL",
                "bind": self.at,
                "walStore": store,
                "startingOffsets": "earliest",
            }
            self.world.process(
                name,
                "machine",
                self.world.directory / f"disk-{name}",
                directory=str(directory),
                options=options | keeping[name],
            )
            self.may(name, *_DISK, *_PROCESS, *_CLOCK)
            self.reaches(name, *_IN_BUCKET, *_READS_BUCKET, "source.takeover")
        self.world.may_be_damaged("source", self.files(), *_FILES)
        self.wait_for_readers()

    def may_lose(self) -> bool:
        return super().may_lose() or self.bucket_has_weather()


def _exactly_once(due: set[str], came: Counter[str]) -> None:
    doubled = [value for value, count in came.items() if count > 1]
    if doubled:
        raise BrokenPromiseError(f"{len(doubled)} rows came twice, {sorted(doubled)[:3]}")
    if missing := sorted(due - came.keys()):
        raise BrokenPromiseError(f"{len(missing)} of {len(due)} rows never came, {missing[:3]}")
    if strange := sorted(came.keys() - due):
        raise BrokenPromiseError(f"rows that nobody has sent: {strange[:3]}")


TOPOLOGIES: dict[str, type[Topology]] = {
    topology.name: topology
    for topology in (
        PushPull,
        VllmReplay,
        DealerRouter,
        RouterDurable,
        TwoQueries,
        TwoMachines,
    )
}
