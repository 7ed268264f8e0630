"""A source and a sink of numbers that write each call into a trace file.

The source makes its own data: two numbers at a time, up to ``last``. At each position but the first it answers once
that there is nothing new. So the calls depend on no clock. An offset is ``{"next": 4}``, the next number.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

__all__ = ["RecordedSink", "RecordedSource", "Recorder", "RecordingReader", "Settings", "numbers_written"]


_STEP = 2


@dataclass(frozen=True)
class Settings:
    """What one run of one source does; options of the DataFrame.

    Attributes:
        trace: The file to which each call is appended, as a line of JSON.
        checkpoint: The query's checkpoint; each line says what it holds.
        source: The name of the source in the trace.
        first: The answer of ``initialOffset``.
        last: Where the data ends.
        late: Whether there is nothing new at the first position either, when Spark first asks. 1 is yes.
        fail: The text of a call (``traces``) that raises.
    """

    trace: str
    checkpoint: str
    source: str = "a"
    first: int = 0
    last: int = 4
    late: int = 0
    fail: str = ""

    def options(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, options: dict[str, str]) -> Settings:
        # Spark's options have lower-case keys, as these names.
        given = {name: options[name] for name in cls.__dataclass_fields__ if name in options}
        return cls(**{name: int(v) if name in ("first", "last", "late") else v for name, v in given.items()})


class Recorder:
    """Appends calls to a trace, and fails at the call that is to fail."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def call(self, name: str, *arguments: object, answer: Callable[[], Any] = lambda: None) -> Any:
        key = os.urandom(8).hex()
        text = f"{name}({', '.join(map(shown, arguments))})"
        self._write({"call": text, "key": key})
        if self._settings.fail == text:
            self._write({"answered": key, "text": "raises"})
            raise RuntimeError(f"told to fail: {text}")
        value = answer()
        answered = "" if value is None else f"-> {shown(value)}"
        self._write({"answered": key, "text": answered})
        return value

    def _write(self, line: dict[str, Any]) -> None:
        line |= {"pid": os.getpid(), "source": self._settings.source}
        line |= numbers_written(Path(self._settings.checkpoint))
        with open(self._settings.trace, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")


def numbers_written(checkpoint: Path) -> dict[str, int]:
    """The newest batch in each of a checkpoint's two logs; -1 for none."""
    found = {}
    for kind in ("offsets", "commits"):
        names = os.listdir(checkpoint / kind) if (checkpoint / kind).is_dir() else []
        found[kind] = max((int(name) for name in names if name.isdecimal()), default=-1)
    return found


def shown(value: object) -> str:
    """An argument or answer in a trace."""
    match value:
        case {"next": next_}:
            return str(next_)
        case ReadLimit():
            return type(value).__name__
        case list():
            return f"[{', '.join(map(shown, value))}]"
        case Numbers():
            return f"{value.start}-{value.end}"
    return str(value)


class Numbers(InputPartition):
    """The numbers from ``start`` to ``end``, without the end."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(None)
        self.start, self.end = start, end


class RecordingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, settings: Settings, recorder: Recorder | None = None) -> None:
        self._settings = settings
        self._recorder = recorder or Recorder(settings)
        self._asked = set() if settings.late else {settings.first}
        self._target: int | None = None

    def initialOffset(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._call("initialOffset", answer=lambda: {"next": self._settings.first})
        return answer

    def getDefaultReadLimit(self) -> ReadLimit:
        answer: ReadLimit = self._call("getDefaultReadLimit", answer=lambda: ReadMaxRows(_STEP))
        return answer

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._settings.last
        self._call("prepareForTriggerAvailableNow")

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        answer: dict[str, Any] = self._call(
            "latestOffset", start, limit, answer=lambda: {"next": self._next(start["next"], limit)}
        )
        return answer

    def _next(self, start: int, limit: ReadLimit) -> int:
        if self._target is None and start not in self._asked:
            self._asked.add(start)
            return start
        return max(start, min(start + _STEP, self._settings.last))

    def reportLatestOffset(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._call(
            "reportLatestOffset", answer=lambda: {"next": self._settings.last}
        )
        return answer

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        def shares() -> list[InputPartition]:
            return [Numbers(start["next"], end["next"])] if start != end else []

        answer: list[InputPartition] = self._call("partitions", start, end, answer=shares)
        return answer

    def commit(self, end: dict[str, Any]) -> None:
        self._call("commit", end)

    def stop(self) -> None:
        self._call("stop")

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        assert isinstance(partition, Numbers)
        self._call("read", partition)
        for number in range(partition.start, partition.end):
            yield (number,)

    def _call(self, name: str, *arguments: object, answer: Callable[[], Any] = lambda: None) -> Any:
        return self._recorder.call(f"{self._settings.source}.{name}", *arguments, answer=answer)


class RecordedSource(DataSource):
    """The format ``recorded-source``."""

    @classmethod
    def name(cls) -> str:
        return "recorded-source"

    def schema(self) -> str:
        return "number int"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        # Spark sends it when a query stops; it would end the process before or in stop(), as it happens.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return RecordingReader(Settings.of(dict(self.options)))


class _Written(WriterCommitMessage):
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


class _RecordingWriter(DataSourceStreamWriter):
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return _Written([row.number for row in iterator])

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        numbers = sorted(n for message in messages if isinstance(message, _Written) for n in message.numbers)
        Recorder(self._settings).call("sink.commit", batchId, numbers)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None: ...


class RecordedSink(DataSource):
    """The format ``recorded-sink``, whose ``commit`` comes when a batch's tasks are done."""

    @classmethod
    def name(cls) -> str:
        return "recorded-sink"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return _RecordingWriter(Settings.of(dict(self.options)))
