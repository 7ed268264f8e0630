"""The command: ``python -m tests.soak --minutes 30 --plot docs/images/soak.png``.

All topologies of the weather machine run at once, with a steady load and some weather every few seconds, but nobody is
killed: what grows must show. Each second the memory, the open files and the threads of each process, the files of each
log, and how far each query is behind are noted. At the end the weather machine judges the counts, and this says whether
what was noted has stayed flat.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.weather.machine import BrokenPromiseError, World, draw
from tests.weather.topologies import TOPOLOGIES, Topology

# Those that end a process, or what it had noted.
_DEADLY = ("kill", "power", "lying-disk")
_BATCHES_PER_SECOND = 2.0
_BURST_SECONDS = 2.0
_EVENT_SECONDS = 10.0
_SAMPLE_SECONDS = 1.0
# What may be between the second third of the time and the last: caches fill, and samples differ.
_MOST_BYTES, _MOST_FILES, _MOST_THREADS = 24 << 20, 12, 4


class Sample(NamedTuple):
    """Of one process, or one log, at one time."""

    seconds: float
    of: str
    what: str
    value: float


class Sampler:
    """Notes what processes and logs hold, in a thread of its own."""

    def __init__(self, built: dict[str, tuple[World, Topology]]) -> None:
        self._built = built
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._began = time.monotonic()
        self.samples: list[Sample] = []

    def start(self) -> None:
        self._thread.start()

    def end(self) -> list[Sample]:
        self._ending.set()
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        while not self._ending.wait(_SAMPLE_SECONDS):
            for name, (world, topology) in self._built.items():
                for process in list(world.processes.values()):
                    if process.alive:
                        self._note_process(f"{name}/{process.name}", process.popen.pid)
                self._note("log", name, "files", sum(1 for _ in topology.files().rglob("*.arrow")))
                behind = _behind(topology)
                if behind is not None:
                    self._note("query", name, "seconds behind", behind)

    def _note_process(self, name: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
        except psutil.NoSuchProcess:
            return
        self._note("process", name, "memory", memory)
        self._note("process", name, "open files", files)
        self._note("process", name, "threads", threads)

    def _note(self, kind: str, name: str, what: str, value: float) -> None:
        self.samples.append(Sample(time.monotonic() - self._began, f"{kind} {name}", what, value))


def _behind(topology: Topology) -> float | None:
    """How long ago the rows were sent that the query has committed last, by the numbers of their batches."""
    journal = getattr(topology, "journal", None)
    if journal is None or journal.suffix != ".jsonl" or not journal.exists():
        return None
    lines = journal.read_bytes()[-4096:].splitlines()
    sent = [json.loads(line).get("batch") for line in lines if line.startswith(b'{"batch"')]
    newest = max((topology.query / "out").glob("[0-9]*"), default=None)
    if not sent or newest is None:
        return None
    rows = json.loads(newest.read_text())
    read = max((int(row[3].split(":")[0]) for row in rows), default=None)
    return None if read is None else max(0.0, (sent[-1] - read) / _BATCHES_PER_SECOND)


def _soak(name: str, world: World, topology: Topology, seconds: float, seed: int) -> str:
    """One topology, from the first of its weather to the judgement; what came of it."""
    possible = [pair for pair in topology.possible if pair[0] not in _DEADLY]
    events = sorted(draw(seed, possible, seconds, round(seconds / _EVENT_SECONDS)))
    load = getattr(topology, "load", None)
    ending = threading.Event()

    def go_on() -> None:
        while load is not None and not ending.wait(_BURST_SECONDS):
            load()

    loading = threading.Thread(target=go_on)
    loading.start()
    try:
        world.weather([event for event in events if event.at < seconds])
    finally:
        ending.set()
        loading.join()
    topology.finish()
    return topology.check()


def growth(samples: Sequence[Sample]) -> list[str]:
    """What has grown from the second third of the time to the last, by more than may be."""
    series: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        series[sample.of, sample.what].append(sample)
    allowed = {"memory": _MOST_BYTES, "open files": _MOST_FILES, "threads": _MOST_THREADS}
    found = []
    end = max((sample.seconds for sample in samples), default=0.0)
    for (of, what), values in series.items():
        if what not in allowed:
            continue
        middle = [s.value for s in values if end / 3 <= s.seconds < 2 * end / 3]
        last = [s.value for s in values if s.seconds >= 2 * end / 3]
        if middle and last and (grown := statistics.median(last) - statistics.median(middle)) > allowed[what]:
            found.append(f"{what} of {of} has grown by {grown:,.0f}")
    return found


def plot(samples: Sequence[Sample], path: Path, title: str) -> None:
    import matplotlib  # noqa: PLC0415

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    panels = [
        ("memory", "memory of a process, MiB", 1 << 20),
        ("open files", "open files of a process", 1),
        ("threads", "threads of a process", 1),
        ("files", "chunks in a log", 1),
        ("seconds behind", "a query is behind, seconds", 1),
    ]
    figure, axes = plt.subplots(len(panels), 1, figsize=(10, 13), sharex=True, layout="constrained")
    for axis, (what, label, unit) in zip(axes, panels, strict=True):
        series: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            if sample.what == what:
                series[sample.of].append(sample)
        for values in series.values():
            axis.plot([s.seconds / 60 for s in values], [s.value / unit for s in values], linewidth=0.8)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_title(title)
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0, help="draws the weather")
    parser.add_argument("--plot", type=Path, help="where to draw what was noted, as PNG or SVG")
    parser.add_argument("--topology", action="append", choices=sorted(TOPOLOGIES), help="only these")
    given = parser.parse_args()
    seconds, failures = given.minutes * 60, []
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    built: dict[str, tuple[World, Topology]] = {}
    words: dict[str, str] = {}
    names = given.topology or sorted(TOPOLOGIES)
    try:
        for name in names:
            (directory / name).mkdir()
            world = World(directory / name, given.seed)
            world.per_second, world.retention, world.look_seconds = _BATCHES_PER_SECOND, "30s", 1.0
            # A batch also takes the time that it takes, so that the load ends later than it would.
            world.settle_seconds += seconds / 2
            built[name] = world, TOPOLOGIES[name](world, seconds)

        def run(name: str) -> None:
            world, topology = built[name]
            try:
                words[name] = f"ok: {_soak(name, world, topology, seconds, given.seed)}"
            except Exception as e:
                kind = "" if isinstance(e, BrokenPromiseError) else "the machine itself: "
                words[name] = f"FAILED: {kind}{e!r}\n{world.tell()}"
                failures.append(name)

        sampler = Sampler(built)
        sampler.start()
        threads = [threading.Thread(target=run, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        samples = [sample for sample in sampler.end() if sample.seconds <= seconds]
    finally:
        for world, _ in built.values():
            world.__exit__(None, None, None)
        shutil.rmtree(directory, ignore_errors=True)
    for name in names:
        print(f"{name} [{len(built[name][0].events)} troubles]: {words.get(name)}")
    grown = growth(samples)
    print("\n".join(grown) or "nothing has grown")
    if given.plot:
        plot(
            samples,
            given.plot,
            f"{given.minutes:g} minutes, all paths at once, some trouble every {_EVENT_SECONDS:g} s",
        )
    sys.exit(1 if failures or grown else 0)


if __name__ == "__main__":
    main()
