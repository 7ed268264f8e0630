"""The source that tutorials write: what comes at once goes into a list, its length is the offset.

Nothing is durable, every row is a Python tuple, and everything passes through the driver.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from pyspark.sql.datasource import DataSource, SimpleDataSourceStreamReader
from pyspark.sql.types import StructType

__all__ = ["TutorialDataSource"]

# Bounds of one read, so that a fast feed does not keep it from ever returning.
_MOST_MESSAGES = 10_000
_MOST_BYTES = 64 << 20


class TutorialDataSource(DataSource):
    """``format("tutorial")``; the option ``connect`` names the feed."""

    @classmethod
    def name(cls) -> str:
        return "tutorial"

    def schema(self) -> str:
        return "value BINARY"

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        return _TutorialReader(self.options["connect"])


class _TutorialReader(SimpleDataSourceStreamReader):
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] | None = None
        self._kept: list[tuple[bytes]] = []
        self._first = 0  # the offset of what is kept

    def initialOffset(self) -> dict[str, int]:
        return {"count": 0}

    def read(self, start: dict[str, int]) -> tuple[Iterator[tuple[bytes]], dict[str, int]]:
        if self._socket is None:
            self._socket = zmq.Context.instance().socket(zmq.PULL)
            self._socket.connect(self._endpoint)
        rows: list[tuple[bytes]] = []
        size = 0
        while len(rows) < _MOST_MESSAGES and size < _MOST_BYTES:
            try:
                value = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            rows.append((value,))
            size += len(value)
        self._kept.extend(rows)
        return iter(rows), {"count": start["count"] + len(rows)}

    def readBetweenOffsets(self, start: dict[str, int], end: dict[str, int]) -> Iterator[tuple[bytes]]:
        return iter(self._kept[start["count"] - self._first : end["count"] - self._first])

    def commit(self, end: dict[str, int]) -> None:
        del self._kept[: end["count"] - self._first]
        self._first = end["count"]
