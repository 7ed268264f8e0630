"""The command: runs seeds, a line each."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.weather.failpoints import Count, Event, add_up, draw_strikes, table
from tests.weather.machine import BrokenPromiseError, RefusedError, World, draw, draw_damage
from tests.weather.topologies import TOPOLOGIES, Topology

# For so long the weather begins; what has begun then goes on for its time.
_SECONDS = 3.0


class Outcome(NamedTuple):
    """What came of a seed."""

    seed: int
    topology: str
    weather: str
    failure: str
    words: str
    seconds: float
    most_bytes: int
    details: str
    counts: Mapping[str, Count]


def run(
    seed: int,
    topology: str | None = None,
    keep: str | None = None,
    failpoint: str | None = None,
    *,
    damage: bool = False,
) -> Outcome:
    """Run one seed, whose number alone decides what is drawn.

    Args:
        failpoint: How the names begin of the failpoints that are struck at, one at least; any, unless given.
        damage: Damage a file at rest in any case, and not in one seed of four.
    """
    name = topology or random.Random(f"topology {seed}").choice(sorted(TOPOLOGIES))
    directory = Path(keep or tempfile.mkdtemp(prefix=f"weather-{seed}-"))
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    events = []
    failure = words = details = ""
    most_bytes = 0
    counts: Mapping[str, Count] = {}
    try:
        with World(directory, seed) as world:
            try:
                built = TOPOLOGIES[name](world, _SECONDS * 1.3)
                events = list(draw(seed, built.possible, _SECONDS))
                events += _draw_strikes(seed, built, failpoint, _SECONDS)
                events += draw_damage(seed, world.at_rest, _SECONDS, damage)
                words = _judge(world, built, events)
            except BrokenPromiseError as e:
                failure, details = str(e), world.tell()
            except Exception as e:
                failure, details = f"the machine itself: {e!r}", world.tell()
            most_bytes, events, counts = world.most_bytes, world.events, world.counts()
    finally:
        if keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    return Outcome(
        seed,
        name,
        "; ".join(map(str, events)),
        failure,
        words,
        time.monotonic() - began,
        most_bytes,
        details,
        counts,
    )


def _draw_strikes(seed: int, built: Topology, failpoint: str | None, seconds: float) -> Iterator[Event]:
    lose_power = [target for kind, target in built.possible if kind == "power"]
    reachable = [pair for pair in built.reachable if pair[1].startswith(failpoint or "")]
    return draw_strikes(seed, reachable, lose_power, seconds, least=int(failpoint is not None))


def _judge(world: World, topology: Topology, events: list[Event]) -> str:
    """Have the weather come and go, and see to the promises."""
    try:
        with _loading(topology):
            world.weather(events)
        topology.finish()
    except RefusedError as e:
        topology.output()  # no id twice, none left out
        return f"refused, {e}"
    world.audit(topology.reads(), topology.known())
    words = topology.check()
    damages = "".join(f"; {damage}" for damage in world.damages)
    return f"{words}{damages}{''.join(f'; refused by {error}' for error in world.refusals)}"


@contextlib.contextmanager
def _loading(topology: object) -> Iterator[None]:
    """Have a topology that makes its load itself go on with it meanwhile."""
    load = getattr(topology, "load", None)
    if load is None:
        yield
        return
    end = threading.Event()

    def go_on() -> None:
        while not end.wait(0.05):
            load()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    """Run the seeds that are asked for, some side by side; their outcomes in order."""
    seeds: Iterator[int] = iter(range(given.first, given.first + given.seeds))
    if given.minutes:
        end = time.monotonic() + given.minutes * 60
        seeds = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(given.first))
    running: deque[Future[Outcome]] = deque()
    with ProcessPoolExecutor(given.jobs) as pool:
        for seed in seeds:
            drawn = seed, given.topology, given.keep, given.failpoint
            running.append(pool.submit(run, *drawn, damage=given.damage))
            if len(running) > given.jobs:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.weather", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to run")
    parser.add_argument("--minutes", type=float, help="run seeds for so long, however many they are")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), help="this one for every seed")
    parser.add_argument("--jobs", type=int, default=2, help="how many to run side by side")
    parser.add_argument(
        "--failpoint", metavar="NAME", help="strike at those whose names begin so, in every seed"
    )
    parser.add_argument("--damage", action="store_true", help="damage files at rest in every seed")
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep what one seed has left behind there")
    parser.add_argument(
        "--every-failpoint", action="store_true", help="fail if a failpoint was reached in none of the seeds"
    )
    given = parser.parse_args()
    if given.keep and given.seeds != 1:
        parser.error("--keep is for one seed: add --seeds 1")
    counts: Counter[str] = Counter()
    most_bytes: Counter[str] = Counter()
    failed = []
    reached: list[Mapping[str, Count]] = []
    for outcome in _outcomes(given):
        reached.append(outcome.counts)
        counts[f"{outcome.topology}: {'failed' if outcome.failure else 'ok'}"] += 1
        most_bytes[outcome.topology] = max(most_bytes[outcome.topology], outcome.most_bytes)
        print(
            f"seed {outcome.seed} {outcome.topology} [{outcome.weather}]: "
            f"{'FAILED: ' + outcome.failure if outcome.failure else 'ok: ' + outcome.words} "
            f"({outcome.seconds:.1f} s, {outcome.most_bytes >> 20} MiB)",
            flush=True,
        )
        if outcome.failure:
            failed.append(outcome.seed)
            again = f" --topology {given.topology}" if given.topology else ""
            again += f" --failpoint {given.failpoint}" if given.failpoint else ""
            again += " --damage" if given.damage else ""
            print(outcome.details)
            print(f"    again: python -m tests.weather --first {outcome.seed} --seeds 1{again}", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print("most memory of a process, MiB:", ", ".join(f"{name} {b >> 20}" for name, b in most_bytes.items()))
    total = add_up(reached)
    print(table(total))
    never = [name for name, count in total.items() if not count.reached]
    if given.every_failpoint and never:
        print(f"failpoints that no seed has reached: {', '.join(never)}")
    sys.exit(1 if failed or (given.every_failpoint and never) else 0)


if __name__ == "__main__":
    main()
