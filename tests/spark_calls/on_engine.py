"""Runs scenarios on the reduced engine of the weather machine; a kill is an exception at the same call."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pyspark.sql.datasource import DataSourceStreamReader

from tests.spark_calls.reader import Recorder, RecordingReader, Settings
from tests.spark_calls.scenarios import SCENARIOS, Run
from tests.spark_calls.traces import Trace
from tests.weather.engine import Query, Trigger

__all__ = ["record_on_engine"]


def record_on_engine(name: str, directory: Path) -> list[list[str]]:
    """The traces of one scenario, the lines of each run."""
    lines = []
    for number, run in enumerate(SCENARIOS[name].runs):
        path, checkpoint = directory / f"{number}.trace", directory / "checkpoint"
        trace = Trace(path, checkpoint)
        settings = run.settings(path, checkpoint)
        recorders = [Recorder(one, _killed) for one in settings]
        query = Query(
            checkpoint,
            [partial(_reader, *each) for each in zip(settings, recorders, strict=True)],
            partial(_sink, recorders[0]),
            _trigger(run),
        )
        try:
            query.run(partial(trace.idle, run.last))
            end = "ended" if run.ends_by_itself else "stopped"
        except _KilledError:
            end = "killed"
            _cut(path)
        except RuntimeError as e:
            assert "told to fail" in str(e), e
            end = "failed"
        lines.append(trace.lines(end))
    return lines


def _reader(settings: Settings, recorder: Recorder) -> DataSourceStreamReader:
    return RecordingReader(settings, recorder)


def _sink(recorder: Recorder, number: int, items: list[tuple[int]]) -> None:
    recorder.call("sink.commit", number, sorted(value for (value,) in items))


def _trigger(run: Run) -> Trigger:
    match run.trigger:
        case {"processingTime": str(text)}:
            number, unit = text.split()
            assert unit == "milliseconds"
            return Trigger(interval=int(number) / 1000)
        case {"availableNow": True}:
            return Trigger(available_now=True)
        case {"once": True}:
            return Trigger(once=True)
    return Trigger()


class _KilledError(BaseException):
    pass


def _killed() -> None:
    raise _KilledError


def _cut(path: Path) -> None:
    """Take away what the engine did after it was killed."""
    lines = path.read_bytes().splitlines(keepends=True)
    held = next(number for number, line in enumerate(lines) if b'"held"' in line)
    path.write_bytes(b"".join(lines[: held + 1]))
