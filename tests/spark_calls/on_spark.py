"""Runs scenarios on the installed Spark."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.spark_calls.reader import RecordedSink, RecordedSource
from tests.spark_calls.scenarios import SCENARIOS, Run
from tests.spark_calls.traces import Trace
from tests.support import wait_for

__all__ = ["record_on_spark"]

_SECONDS = 300.0


def record_on_spark(name: str, directory: Path, session: SparkSession) -> list[list[str]]:
    """The traces of one scenario, the lines of each run."""
    directory.mkdir(parents=True)
    lines = []
    for number, run in enumerate(SCENARIOS[name].runs):
        path, checkpoint = directory / f"{number}.trace", directory / "checkpoint"
        trace = Trace(path, checkpoint)
        query = _start(run, path, checkpoint, session)
        try:
            wait_for(partial(_is_over, query, run, trace), f"the end of {name}", _SECONDS)
            stopped = query.isActive
        finally:
            query.stop()
        error = query.exception()
        assert error is None or "told to fail" in str(error), error
        # The process that calls the source ends by itself.
        wait_for(partial(_has_stopped, trace, len(run.last)), f"the stop of {name}", _SECONDS)
        lines.append(trace.lines("stopped" if stopped else "ended" if error is None else "failed"))
    return lines


def _is_over(query: StreamingQuery, run: Run, trace: Trace) -> bool:
    return not query.isActive or (not run.ends_by_itself and trace.idle(run.last))


def _has_stopped(trace: Trace, sources: int) -> bool:
    calls = [entry for entry in trace.entries() if ".stop(" in entry.get("call", "")]
    answered = {entry["answered"] for entry in trace.entries() if "answered" in entry}
    return sum(call["key"] in answered for call in calls) == sources


def _start(run: Run, path: Path, checkpoint: Path, session: SparkSession) -> StreamingQuery:
    session.dataSource.register(RecordedSource)
    session.dataSource.register(RecordedSink)
    settings = run.settings(path, checkpoint)
    frames = [
        session.readStream.format("recorded-source").options(**one.options()).load() for one in settings
    ]
    frame: DataFrame = frames[0]
    for other in frames[1:]:
        frame = frame.union(other)
    writer = frame.writeStream.format("recorded-sink").options(**settings[0].options())
    if run.trigger:
        writer = writer.trigger(**run.trigger)
    return writer.option("checkpointLocation", str(checkpoint)).start()
