"""Runs scenarios on the installed Spark; those that are killed, in drivers of their own.

All runs of one round that are to be killed are in one driver. Each stays in the call that is held; when all do, the
driver is killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.spark_calls.reader import RecordedSink, RecordedSource
from tests.spark_calls.scenarios import SCENARIOS, Run, Scenario
from tests.spark_calls.traces import Trace
from tests.support import REPOSITORY, wait_for
from tests.support.streams import new_session

__all__ = ["drive", "record", "recording_session"]

_SECONDS = 300.0


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
            wait_for(at_their_calls, f"the held calls of {names}", _SECONDS)
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
    for s in started:
        name, trace = s.scenario.name, traces[s.scenario.name]
        query = _start(s, session)
        try:
            wait_for(partial(_is_over, query, s.run, trace), f"the end of {name}", _SECONDS)
            stopped = query.isActive
        finally:
            query.stop()
        error = query.exception()
        assert error is None or "told to fail" in str(error), error
        ends[name] = "stopped" if stopped else "ended" if error is None else "failed"
        # The process that calls the source ends by itself.
        wait_for(partial(_has_stopped, trace, len(s.run.last)), f"the stop of {name}", _SECONDS)
    return ends


def _is_over(query: StreamingQuery, run: Run, trace: Trace) -> bool:
    return not query.isActive or (not run.ends_by_itself and trace.idle(run.last))


def _has_stopped(trace: Trace, sources: int) -> bool:
    calls = [entry for entry in trace.entries() if ".stop(" in entry.get("call", "")]
    answered = {entry["answered"] for entry in trace.entries() if "answered" in entry}
    return sum(call["key"] in answered for call in calls) == sources


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
    for name in names:
        s = _Started(SCENARIOS[name], number, directory)
        _start(s, session)
        wait_for(Trace(s.path, s.checkpoint).held, f"the held call of {name}", _SECONDS)
    session.streams.awaitAnyTermination()
