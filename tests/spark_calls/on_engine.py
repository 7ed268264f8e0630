"""Runs scenarios on the reduced engine of the weather machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pyspark.sql.datasource import DataSourceStreamReader

from tests.spark_calls.reader import Recorder, RecordingReader, Settings
from tests.spark_calls.scenarios import SCENARIOS
from tests.spark_calls.traces import Trace
from tests.weather.engine import Query

__all__ = ["record_on_engine"]


def record_on_engine(name: str, directory: Path) -> list[list[str]]:
    """The traces of one scenario, the lines of each run."""
    lines = []
    for number, run in enumerate(SCENARIOS[name].runs):
        path, checkpoint = directory / f"{number}.trace", directory / "checkpoint"
        trace = Trace(path, checkpoint)
        settings = run.settings(path, checkpoint)
        recorders = [Recorder(one) for one in settings]
        query = Query(
            checkpoint,
            [partial(_reader, *each) for each in zip(settings, recorders, strict=True)],
            partial(_sink, recorders[0]),
            available_now=run.ends_by_itself,
        )
        try:
            query.run(partial(trace.idle, run.last))
            end = "ended" if run.ends_by_itself else "stopped"
        except RuntimeError as e:
            assert "told to fail" in str(e), e
            end = "failed"
        lines.append(trace.lines(end))
    return lines


def _reader(settings: Settings, recorder: Recorder) -> DataSourceStreamReader:
    return RecordingReader(settings, recorder)


def _sink(recorder: Recorder, number: int, items: list[tuple[int]]) -> None:
    recorder.call("sink.commit", number, sorted(value for (value,) in items))
