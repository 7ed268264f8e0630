"""Topologies in which something changes while the programs run or between two runs: the store, options, receivers."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from tests.support.publishers import Publisher
from tests.weather.engine import read_end
from tests.weather.machine import BrokenPromiseError, World
from tests.weather.topologies import DealerRouter, Topology, TwoQueries, VllmReplay
from zmq_datasource.errors import MessageLossError
from zmq_datasource.log.reader_records import ReaderRecords
from zmq_datasource.log.state import read_saved_state
from zmq_datasource.source.facts import read_counters, read_gaps

__all__ = ["CHANGES"]

# The path is missing; an empty directory is in its place, as at a mount point; the directories have no files.
_AWAY = ("moved", "unmounted", "emptied")
# How long after the store is back a query may end with an error about it.
_AFTER_SECONDS = 15.0


class _Directory:
    """The directory of a log that goes away and comes back."""

    def __init__(self, root: Path) -> None:
        self._root, self._away = root, root.with_name(f"{root.name}.away")
        self._is_away = False
        self._troubled_until = 0.0

    def begin(self, kind: str) -> None:
        self._troubled_until = float("inf")
        self._root.rename(self._away)
        self._is_away = True
        if kind != "moved":
            self._root.mkdir()
        if kind == "emptied":
            for path in self._away.rglob("*"):
                if path.is_dir():
                    (self._root / path.relative_to(self._away)).mkdir(parents=True, exist_ok=True)

    def end(self, _: str) -> None:
        self._troubled_until = time.monotonic() + _AFTER_SECONDS
        if self._is_away:
            # What was written meanwhile is below the mount point, where it is not seen any more.
            while True:
                shutil.rmtree(self._root, ignore_errors=True)
                with suppress(OSError):  # it is being written to
                    self._away.rename(self._root)
                    break
            self._is_away = False

    def explains(self, error: str) -> bool:
        return time.monotonic() < self._troubled_until and str(self._root) in error


class StoreAway(DealerRouter):
    """DEALER → ROUTER, and the log's directory or bucket is away for a while: each batch whole and once."""

    name = "store-away"

    def source(self, name: str = "source", **options: str) -> None:
        if self.world.random.random() < 0.5:
            options.pop("serveLog", None)  # executors read a bucket themselves
            super().source(name, **options, walStore=self.in_bucket(name)[0])
        else:
            super().source(name, **options)
            self.world.troubles["store"] = _Directory(self.wal)
            self.may("store", *_AWAY * 5)
        # There is a log before it goes away: an emptied store looks like a new one to a program that has none.
        self.world.wait_for(lambda: read_end(self.query) is not None, "the query has begun", 30)


def _draw_own(chance: random.Random) -> tuple[dict[str, str], dict[str, str]]:
    """What two queries of a feed differ in: what concerns each of them, and how long the log is kept."""
    return (
        {
            "walRetention": "0s",
            "failOnDataLoss": "true",
            "maxMessagesPerTrigger": str(chance.choice((50, 5000))),
        },
        {"walRetention": "1d", "failOnDataLoss": "false", "minPartitions": str(chance.choice((1, 3)))},
    )


def _start_both(topology: Topology, second: Path, *options: dict[str, str]) -> None:
    """Start two queries that begin at ``earliest``, one after the other."""
    world = topology.world
    queries = (("source", topology.query), ("second", second))
    for count, ((name, directory), own) in enumerate(zip(queries, options, strict=True), 1):
        world.process(
            name,
            "source",
            topology.wal,
            directory=str(directory),
            options={"walLocation": str(topology.wal), "startingOffsets": "earliest", **own},
        )
        has_record = partial(
            topology.sees, lambda log, number=count: len(ReaderRecords(log).names()) >= number
        )
        world.wait_for(has_record, f"the query {name} has a position", 30)
        topology.may(name, "kill", "stop", "slow", "clock-back")
        # Not log.json, which has no checksum: with failOnDataLoss=false a query takes another id for another log.
        world.may_be_damaged(name, topology.wal, "chunk")


def _check_kept(topology: Topology) -> None:
    earliest = min(chunk.first for chunk in topology.storage().of(0).chunks())
    # Nothing tells that an oldest chunk was deleted by the weather.
    deleted = any(d.is_there and d.first is not None and d.first < earliest for d in topology.world.damages)
    if earliest and not deleted:
        raise BrokenPromiseError(f"one query keeps messages for a day, and the ids below {earliest} are gone")


class MixedOptions(TwoQueries):
    """Two queries on one feed that differ in what concerns each of them, and in how long the log is kept."""

    name = "mixed-options"

    def start_receivers(self) -> None:
        self.second = self.world.directory / "second"
        self.names = ("source", "second")
        feed = {"socketType": "PULL", "bind": self.at[0]}
        _start_both(self, self.second, *(feed | own for own in _draw_own(self.world.random)))

    def check(self) -> str:
        words = super().check()
        _check_kept(self)
        return words


class _Losses:
    """No weather of its own: a query with ``onLoss=fail`` may end because of a loss, and goes on after it."""

    def begin(self, _: str) -> None: ...

    def end(self, _: str) -> None: ...

    def explains(self, error: str) -> bool:
        return MessageLossError.__name__ in error


class MixedReplays(VllmReplay):
    """Two queries on a vLLM feed, one with a replay, each with another ``onLoss``: nothing is lost all the same."""

    name = "mixed-replays"

    def start(self, live: str, replay: str) -> None:
        self.second = self.world.directory / "second"
        chance = self.world.random
        own = _draw_own(chance)
        # Spark wraps the error that says why the query has failed.
        on_loss = chance.sample(("count", "warn", *(() if self.world.jvm else ("fail",))), 2)
        feed = {"socketType": "SUB", "connect": live, "framing": "vllm"}
        replays = chance.randrange(2)
        options = [feed | own[number] | {"onLoss": on_loss[number]} for number in range(2)]
        options[replays]["replayEndpoint"] = replay
        self.unfailing = [
            name for name, word in zip(("source", "second"), on_loss, strict=True) if word != "fail"
        ]
        self.world.troubles["losses"] = _Losses()
        _start_both(self, self.second, *options)

    def load(self) -> None:
        super().load()
        if self.world.random.random() < 0.1:  # these come from a replay alone
            self.sent = int(self.publisher.ask("skip 5")["next"])

    def finish(self) -> None:
        self.sent = int(self.publisher.ask("send 1")["next"])  # shows what was left out before it
        self.wait_until_through(self.query, self.second)
        self.world.stop("source", "second")

    def check(self) -> str:
        words = super().check()
        one, other = self.output(), self.output(self.second)
        if one != other:
            raise BrokenPromiseError(
                f"one query has {len(one)} rows, the other {len(other)}, and not the same"
            )
        for name in self.unfailing:
            if MessageLossError.__name__ in (self.world.directory / f"{name}.log").read_text(
                errors="replace"
            ):
                raise BrokenPromiseError(f"{name} has not onLoss=fail, and failed because of a loss")
        _check_kept(self)
        return words


class _Receivers:
    """The number of receivers of a query: another one, one or two, after each stop in good order."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def begin(self, _: str) -> None:
        process = self._world.processes[self._name]
        process.signal(signal.SIGCONT)
        if process.alive:
            process.stop()
        process.kill()  # which lets go of what belongs to the run that has ended
        options = process.settings["options"]
        options["receivers"] = "1" if options["receivers"] == "2" else "2"

    def end(self, _: str) -> None:
        process = self._world.processes[self._name]
        if not process.alive:
            process.start()

    def explains(self, _: str) -> bool:
        return False


class ReceiversChange(Topology):
    """Numbered publishers, and a query with one receiver, two, or one again: losses are known, nothing comes twice."""

    name = "receivers-change"
    publishers = 3

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, seconds)
        world.strikes_first = False  # the machine waits here for the source, and cannot start it again
        stack: ExitStack = world.keep(ExitStack())
        endpoints = [world.endpoint() for _ in range(self.publishers)]
        self.senders = [
            stack.enter_context(Publisher("sequenced", at, publisher=f"rank-{number}"))
            for number, at in enumerate(endpoints)
        ]
        connect = ",".join(world.middlebox(f"wire-{number}", at) for number, at in enumerate(endpoints))
        self.source(
            socketType="SUB",
            connect=connect,
            receivers="1",
            framing="sequenced",
            deduplicate="true",
            walRetention=world.retention,
            startingOffsets="earliest",
        )
        self.sent = [0] * self.publishers
        self._wait_for_source()
        world.troubles["receivers"] = _Receivers(world, "source")
        for number in range(self.publishers):
            self.may(f"wire-{number}", "delay", "reset", "half-open")
        self.may("receivers", *["other-number"] * 3 * self.publishers)
        self.may("source", "kill", "stop")

    def _wait_for_source(self) -> None:
        """Until the query hears each publisher, which has then sent one more message."""
        for number, sender in enumerate(self.senders):
            sender.ask("wait-subscriber")
            self.sent[number] = int(sender.ask("send 1")["next"])

    def load(self) -> None:
        number = self.world.random.randrange(self.publishers)
        burst = self.world.random.choice((1, 10, 100))
        self.sent[number] = int(self.senders[number].ask(f"send {burst}")["next"])
        if self.world.random.random() < 0.2:
            self.senders[number].ask("repeat 2")

    def finish(self) -> None:
        last: set[tuple[str, int]] = set()

        def through() -> bool:
            # What is sent before the subscription is there again is lost, and only a later message tells.
            for number, sender in enumerate(self.senders):
                if (f"rank-{number}", self.sent[number] - 1) not in last:
                    self.sent[number] = int(sender.ask("send 1")["next"])
            time.sleep(0.3)
            last.update((row[1], row[2]) for row in self.output())
            return self.read_through() and all(
                (f"rank-{number}", self.sent[number] - 1) in last for number in range(self.publishers)
            )

        self.world.wait_for(through, "the query has the last message of each publisher")
        self.world.stop("source")

    def check(self) -> str:
        seen = Counter((row[1], row[2]) for row in self.output())
        if doubled := [key for key, count in seen.items() if count > 1]:
            raise BrokenPromiseError(f"{doubled[:3]} came twice though deduplicate is on")
        missing = {
            (f"rank-{number}", sequence)
            for number in range(self.publishers)
            for sequence in range(self.sent[number])
        } - seen.keys()
        lost, counted = self._lost()
        if unknown := sorted(missing - lost):
            raise BrokenPromiseError(
                f"{unknown[:3]} never came, {len(unknown)} in all, and no partition knows it"
            )
        if counted != len(missing):
            raise BrokenPromiseError(f"{len(missing)} messages never came, and messagesLost says {counted}")
        return f"{len(seen)} rows, {counted} known to be lost"

    def _lost(self) -> tuple[set[tuple[str, int]], int]:
        """The messages in the gap tables of all partitions, and how many these count as lost."""
        lost: set[tuple[str, int]] = set()
        counted = 0
        for partition in self.storage().partitions():
            saved = read_saved_state(self.storage().of(partition))
            for gap in read_gaps(saved):
                if gap["healed"] is None:
                    lost |= {(gap["publisher"], number) for number in range(gap["first"], gap["last"] + 1)}
            _, totals = read_counters(saved)
            counted += 0 if totals is None else totals.lost
        return lost, counted


CHANGES: dict[str, type[Topology]] = {
    topology.name: topology for topology in (StoreAway, MixedOptions, MixedReplays, ReceiversChange)
}
