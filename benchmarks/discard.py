"""The cheapest sink in Python: what Spark alone takes for a row."""

from __future__ import annotations

from collections.abc import Iterator

from pyarrow import RecordBatch
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

__all__ = ["DiscardDataSource"]


class DiscardDataSource(DataSource):
    """``format("discard")`` looks at nothing and sends nothing."""

    @classmethod
    def name(cls) -> str:
        return "discard"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return _DiscardWriter()


class _DiscardWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()
