"""``format("zmq")``: checks the options and makes the reader or writer.

Spark makes the object in short processes and pickles it, so it has only text. Wrong options are refused here, when the
DataFrame is made or the query starts. A query has half a dozen such processes, and each waits for its imports. So a
reader or writer is imported only where it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from zmq_datasource.errors import OptionError
from zmq_datasource.host.locations import check_location
from zmq_datasource.messages.columns import spark_ddl
from zmq_datasource.options import BatchReadOptions, ReadOptions, StreamReadOptions, WriteOptions
from zmq_datasource.options.parser import parse

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator

# ruff: noqa: PLC0415


class ZmqDataSource(DataSource):
    """ZeroMQ as a source and a sink of Spark, for streams and batches.

    Attributes:
        accumulator: Brings the accounts of sinks to the driver; None with Spark Connect, or if Spark has found the
            class by itself.
    """

    accumulator: ClassVar[Accumulator[Any] | None] = None

    @classmethod
    def name(cls) -> str:
        return "zmq"

    def schema(self) -> str:
        """The columns of a read. Spark's first call when a DataFrame is made."""
        _refuse_create_table(self.options)
        options = parse(ReadOptions, self.options)
        _refuse_what_no_read_takes(self.options)
        _check_options(options)
        if options.view == "gaps":
            from zmq_datasource.spark.batch_reader import GAPS_DDL

            return GAPS_DDL
        if options.value_format == "arrow":
            raise OptionError(
                "valueFormat=arrow needs the schema of the values, as in .schema('city STRING, celsius DOUBLE')"
            )
        return spark_ddl(options.include_frames)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from zmq_datasource.spark.partition_reader import rows_for
        from zmq_datasource.spark.stream_reader import RefusedStreamReader, ZmqStreamReader

        try:
            options = parse(StreamReadOptions, self.options)
            _check_options(options)
            rows = rows_for(schema, options)
        except OptionError as e:
            return RefusedStreamReader(str(e))
        return ZmqStreamReader(options, rows)

    def reader(self, schema: StructType) -> DataSourceReader:
        from zmq_datasource.spark.batch_reader import ZmqGapReader, ZmqLiveReader, ZmqLogReader
        from zmq_datasource.spark.partition_reader import rows_for

        _refuse_nothing(self.options)
        options = parse(BatchReadOptions, self.options)
        _check_options(options)
        if options.view == "gaps":
            return ZmqGapReader(options)
        rows = rows_for(schema, options)
        return ZmqLogReader(options, rows) if options.has_log else ZmqLiveReader(options, rows)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from zmq_datasource.spark.columns import SinkColumns
        from zmq_datasource.spark.writers import ZmqStreamWriter

        options = parse(WriteOptions, self.options)
        _check_options(options)
        if options.transaction_id is not None:
            raise OptionError(
                "transactionId is for a batch write; each batch of a stream is a transaction of its query and number"
            )
        return ZmqStreamWriter(options, SinkColumns.of(schema, options), self.accumulator)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from zmq_datasource.spark.columns import SinkColumns
        from zmq_datasource.spark.writers import ZmqBatchWriter

        _refuse_nothing(self.options)
        if overwrite:
            raise OptionError(
                "mode('overwrite'): what was sent cannot be taken back, and a socket holds nothing to replace; use "
                "mode('append')"
            )
        options = parse(WriteOptions, self.options)
        _check_options(options)
        return ZmqBatchWriter(options, SinkColumns.of(schema, options), self.accumulator)


_NO_TABLES = (
    "Spark passes no options to a Python data source that CREATE TABLE ... USING names, so such a table can neither be "
    "read nor written; use CREATE TEMPORARY VIEW ... USING zmq OPTIONS (...), or spark.readStream, spark.read and write"
)


def _refuse_create_table(options: Mapping[str, str]) -> None:
    # Spark adds these two when it makes a table.
    if {"provider", "owner"} <= {name.lower() for name in options}:
        raise OptionError(f"CREATE TABLE ... USING zmq: {_NO_TABLES}")


def _refuse_nothing(options: Mapping[str, str]) -> None:
    if not options:
        raise OptionError(
            "no options are set: name the feed, as in .option('connect', 'tcp://feed:5556'). If this is a table: "
            f"{_NO_TABLES}"
        )


def _refuse_what_no_read_takes(options: Mapping[str, str]) -> None:
    """Refuse options that neither a stream nor a batch takes. At this call Spark does not tell which of them it is."""
    refusals = []
    for kind in (StreamReadOptions, BatchReadOptions):
        try:
            parse(kind, options)
        except OptionError as e:
            refusals.append(str(e))
        else:
            return
    stream, batch = refusals
    raise OptionError(
        stream if stream == batch else f"as a streaming read: {stream}; as a batch read: {batch}"
    )


def _check_options(options: ReadOptions | WriteOptions) -> None:
    """Check options without opening a socket."""
    from zmq_datasource.transport.spec import SocketSpec, check_socket_options

    if isinstance(options, ReadOptions):
        check_socket_options(SocketSpec.of_source(options))
        # Its file system may be away for a while without stopping the query, as that of metricsLocation.
        check_location("walStore", options.wal_store, reach=False)
    else:
        check_socket_options(SocketSpec.of_sink(options))
        check_location("metricsLocation", options.metrics_location, reach=False)
        check_location("deadLetterLocation", options.dead_letter_location)
