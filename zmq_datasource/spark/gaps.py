"""``view=gaps``: the gaps in publishers' sequences, as a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from zmq_datasource.log import read_saved_state
from zmq_datasource.options import BatchReadOptions
from zmq_datasource.source.facts import read_gaps, states_of_other_partitions
from zmq_datasource.source.location import log_storage
from zmq_datasource.spark.worker import set_up_worker

__all__ = ["GAPS_DDL", "ZmqGapReader"]

_SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("publisher", pa.string()),
        ("topic", pa.string()),
        ("endpoint", pa.string()),
        ("epoch", pa.int32()),
        ("first", pa.int64()),
        ("last", pa.int64()),
        ("messages", pa.int64()),
        ("noticed", pa.timestamp("us", tz="UTC")),
        ("healed", pa.timestamp("us", tz="UTC")),
    ]
)
GAPS_DDL = (
    "partition INT, publisher STRING, topic STRING, endpoint STRING, epoch INT, first BIGINT, last BIGINT, "
    "messages BIGINT, noticed TIMESTAMP, healed TIMESTAMP"
)


class ZmqGapReader(DataSourceReader):
    """Reads the gap table of a log, which may be written at the same time."""

    def __init__(self, options: BatchReadOptions) -> None:
        self._storage = log_storage(options)

    def partitions(self) -> Sequence[InputPartition]:
        self._storage.log_id()  # there is a log, of a format that we read
        return [InputPartition(partition) for partition in self._storage.partitions()] or [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield a row a gap, oldest first; ``healed`` is null while its messages are missing."""
        set_up_worker()
        self._storage.log_id()  # where the directory is not reached, nothing would look like "no gaps"
        storage = self._storage.of(partition.value)
        gaps = read_gaps(read_saved_state(storage), states_of_other_partitions(storage))
        rows = [{"partition": partition.value, **gap} for gap in gaps]
        yield pa.RecordBatch.from_pylist(rows, _SCHEMA)
