"""Runs scenarios on the installed Spark; those that are killed, in drivers of their own.

All runs of one round are in one driver, side by side. A query that is to be killed stays in the call that is held;
when all do, the driver is killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.spark_calls.reader import RecordedSink, RecordedSource
from tests.spark_calls.scenarios import SCENARIOS, Run, Scenario
from tests.spark_calls.traces import Trace
from tests.support import REPOSITORY
from tests.support.streams import new_session

__all__ = ["drive", "record", "recording_session"]

_SECONDS = 300.0
_AT_ONCE = 2


class _Started(NamedTuple):
    """One run of a scenario: where it is recorded, and what it is to do."""

    scenario: Scenario
    number: int
    directory: Path

    @property
    def run(self) -> Run:
        return self.scenario.runs[self.number]

    @property
    def checkpoint(self) -> Path:
        return self.directory / self.scenario.name

    @property
    def path(self) -> Path:
        return self.directory / f"{self.scenario.name}.{self.number}.trace"


def record(names: Iterable[str], directory: Path, session: SparkSession) -> dict[str, list[list[str]]]:
    """The traces of scenarios, recorded below a directory; what is not killed runs in the given session."""
    scenarios = [SCENARIOS[name] for name in names]
    lines: dict[str, list[list[str]]] = {scenario.name: [] for scenario in scenarios}
    for number in range(max(len(scenario.runs) for scenario in scenarios)):
        started = [_Started(s, number, directory) for s in scenarios if number < len(s.runs)]
        traces = {s.scenario.name: Trace(s.path, s.checkpoint) for s in started}
        if killed := [s for s in started if s.run.hold]:
            _run_and_kill(killed, traces)
        ends = _run_to_the_end([s for s in started if not s.run.hold], traces, session)
        for s in started:
            name = s.scenario.name
            lines[name].append(traces[name].lines(ends.get(name, "killed")))
    return lines


def _run_and_kill(started: list[_Started], traces: dict[str, Trace]) -> None:
    names = ",".join(s.scenario.name for s in started)
    command = [sys.executable, "-m", "tests.spark_calls", "--drive", names]
    command += ["--round", str(started[0].number), "--directory", str(started[0].directory)]
    with (started[0].directory / f"killed.{started[0].number}.log").open("wb") as log:
        driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=REPOSITORY)

        def at_their_calls() -> bool:
            assert driver.poll() is None, Path(log.name).read_text()
            return all(traces[s.scenario.name].held() for s in started)

        try:
            _wait_for(at_their_calls, f"the held calls of {names}")
        finally:
            if driver.poll() is None:
                _kill(driver.pid)
                driver.wait()
            assert driver.stdin is not None
            driver.stdin.close()


def _kill(pid: int) -> None:
    """Kill all processes of a driver at once: what sees another one die must not go on."""
    driver = psutil.Process(pid)
    family = driver.children(recursive=True)
    for act in ("suspend", "kill"):
        for process in [driver, *family]:
            with suppress(psutil.NoSuchProcess):
                getattr(process, act)()
    psutil.wait_procs(family)


def _run_to_the_end(
    started: list[_Started], traces: dict[str, Trace], session: SparkSession
) -> dict[str, str]:
    """How each run ended."""
    ends: dict[str, str] = {}
    queries: dict[str, StreamingQuery] = {}

    def start(s: _Started) -> None:
        queries[s.scenario.name] = _start(s, session)

    def over(s: _Started) -> bool:
        query, trace = queries[s.scenario.name], traces[s.scenario.name]
        if query.isActive and (s.run.ends_by_itself or not trace.idle(s.run.last)):
            return False
        stopped = query.isActive
        query.stop()
        error = query.exception()
        assert error is None or "told to fail" in str(error), error
        ends[s.scenario.name] = "stopped" if stopped else "ended" if error is None else "failed"
        # The process that calls the source ends by itself.
        _wait_for(lambda: _stops(trace) == len(s.run.last), f"the stop of {s.scenario.name}")
        return True

    try:
        _in_turn(started, start, over)
    finally:
        for query in queries.values():
            query.stop()
    return ends


def _in_turn(
    started: list[_Started], start: Callable[[_Started], None], over: Callable[[_Started], bool]
) -> None:
    """Start all, of which a few run at once: Spark gives up a Python process that does not connect within 10 s."""
    todo, running = list(started), list[_Started]()

    def goes_on() -> bool:
        while todo and len(running) < _AT_ONCE:
            running.append(todo.pop(0))
            start(running[-1])
        running[:] = [s for s in running if not over(s)]
        return not running and not todo

    _wait_for(goes_on, f"the end of {', '.join(s.scenario.name for s in started)}")


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    """Look ten times a second: all that is waited for reads whole traces."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {_SECONDS:.0f} s: {what}"
        time.sleep(0.1)


def _stops(trace: Trace) -> int:
    calls = [entry for entry in trace.entries() if ".stop(" in entry.get("call", "")]
    answered = {entry["answered"] for entry in trace.entries() if "answered" in entry}
    return sum(call["key"] in answered for call in calls)


def _start(s: _Started, session: SparkSession) -> StreamingQuery:
    session.dataSource.register(RecordedSource)
    session.dataSource.register(RecordedSink)
    settings = s.run.settings(s.path, s.checkpoint)
    frames = [
        session.readStream.format("recorded-source").options(**one.options()).load() for one in settings
    ]
    frame: DataFrame = frames[0]
    for other in frames[1:]:
        frame = frame.union(other)
    writer = frame.writeStream.format("recorded-sink").options(**settings[0].options())
    if s.run.trigger:
        writer = writer.trigger(**s.run.trigger)  # type: ignore[arg-type]
    return writer.option("checkpointLocation", str(s.checkpoint)).start()


def recording_session(directory: Path) -> SparkSession:
    """A session in which held tasks do not keep others from running."""
    session = new_session(directory, "local[12]", {"spark.sql.streaming.pollingDelay": "100"})
    session.sparkContext.setLogLevel("OFF")
    return session


def drive(names: Iterable[str], number: int, directory: Path) -> None:
    """A driver that starts the runs of one round, and is killed."""
    session = recording_session(directory)
    started = [_Started(SCENARIOS[name], number, directory) for name in names]

    def start(s: _Started) -> None:
        _start(s, session)

    def over(s: _Started) -> bool:
        return Trace(s.path, s.checkpoint).held()

    _in_turn(started, start, over)
    session.streams.awaitAnyTermination()
