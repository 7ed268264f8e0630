"""A source and a sink in Python that do nothing: what Spark alone takes."""

from __future__ import annotations

from collections.abc import Iterator

from pyarrow import RecordBatch
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType


class NothingDataSource(DataSource):
    """``format("nothing")`` has one more row after each start of its query, and drops what is written to it."""

    @classmethod
    def name(cls) -> str:
        return "nothing"

    def schema(self) -> str:
        return "value BINARY"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return _Reader()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _Writer()


class _Reader(DataSourceStreamReader):
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


class _Writer(DataSourceArrowWriter):
    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()
