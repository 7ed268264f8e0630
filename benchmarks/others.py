"""What ours is compared with: a source and a sink in Python that do nothing, and the source of the tutorials."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import chain

import zmq
from pyarrow import RecordBatch
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

# A feed that never pauses would keep a read from ever returning. Nothing else limits it.
_SECONDS = 1.0
_LOOK_EVERY = 32  # messages between two looks at the clock
_SILENCE_MS = 5


class NothingDataSource(DataSource):
    """``format("nothing")`` has one more row after each start of its query, and drops what is written to it."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return "value BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _NothingReader()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _NothingWriter()


class _NothingReader(DataSourceStreamReader):
    _latest: int | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"count": 0}

    def latestOffset(self, start: dict[str, int], limit: object = None) -> dict[str, int]:
        if self._latest is None:
            self._latest = start["count"] + 1
        return {"count": self._latest}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(end["count"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[bytes]]:
        yield (b"row",)


class _NothingWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class TutorialDataSource(DataSource):
    """``format("tutorial")``: the source that tutorials write, as its author would write it for speed.

    Each trigger drains the socket, until nothing comes for a moment: a reader that is faster than its feed finds the
    queue empty again and again, and a micro-batch for every few messages would be slow. Nothing is durable, every row
    is a Python tuple, and everything passes through the driver. What was read is kept until it is committed, as Spark
    asks, in the lists that it was read into. The option ``connect`` names the feed, ``seconds`` bounds a read.
    """

    @classmethod
    def name(cls) -> str:
        return "tutorial"

    def schema(self) -> str:
        return "value BINARY"

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        return _TutorialReader(self.options["connect"], float(self.options.get("seconds", _SECONDS)))


class _TutorialReader(SimpleDataSourceStreamReader):
    def __init__(self, endpoint: str, seconds: float) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._socket: zmq.Socket[bytes] | None = None
        self._kept: deque[tuple[int, list[tuple[bytes]]]] = deque()  # by the offset that each ends with

    def initialOffset(self) -> dict[str, int]:
        return {"count": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[bytes]], dict[str, int]]:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.PULL)
            self._socket.setsockopt(zmq.RCVTIMEO, _SILENCE_MS)
            self._socket.connect(self._endpoint)
        rows: list[tuple[bytes]] = []
        receive, add = self._socket.recv, rows.append
        deadline = time.monotonic() + self._seconds
        try:
            while time.monotonic() < deadline:
                for _ in range(_LOOK_EVERY):
                    add((receive(),))
        except zmq.Again:
            pass
        end = start["count"] + len(rows)
        if rows:
            self._kept.append((end, rows))
        return iter(rows), {"count": end}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[bytes]]:
        return chain.from_iterable(rows for last, rows in self._kept if start["count"] < last <= end["count"])

    def commit(self, end: dict[str, int]) -> None:
        while self._kept and self._kept[0][0] <= end["count"]:
            self._kept.popleft()
