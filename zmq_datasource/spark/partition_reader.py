"""Runs in a task, on an executor: reads a range of ids as record batches, and makes Spark's rows of these.

There is a row for each message, or with ``valueFormat=arrow`` for each row in the values. Stateless.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.datasource import InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from zmq_datasource.errors import MalformedMessageError, OptionError
from zmq_datasource.host.log_lines import printable
from zmq_datasource.log import Chunk, Deletions, LogStorage, read_slices, retry_reading
from zmq_datasource.messages.arrow_values import ArrowValues, UnfitValueError
from zmq_datasource.messages.columns import row_schema
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.options import ReadOptions
from zmq_datasource.spark.worker import set_up_worker

if TYPE_CHECKING:
    from zmq_datasource.log import Store
    from zmq_datasource.source.chunk_server import LogAccess

_log = logging.getLogger(__name__)

# How long a task waits while no file can be opened or object storage is away. (In local mode Spark does not repeat a
# task that has failed.)
RETRY_SECONDS = 60.0

# A task logs this many values that do not fit, each with the reason. After that it logs only how many there were.
_MOST_LINES = 10


@dataclass(frozen=True)
class MessageRows:
    """Makes Spark's rows of messages: a row for each message. Spark pickles it for the executors."""

    include_frames: bool = False

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield to_rows(batch, self.include_frames)


@dataclass(frozen=True)
class TableRows:
    """Makes Spark's rows of messages: the rows of the values, each of which is a table."""

    values: ArrowValues
    mode: str

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in the order of the messages.

        Raises:
            MalformedMessageError: A value does not fit the schema (``FAILFAST``).
        """
        unfit = _Unfit(self.mode)
        for batch in batches:
            yield from self.values.rows(batch, unfit)
        unfit.end()


Rows: TypeAlias = MessageRows | TableRows


class _Unfit:
    """Logs why values do not fit the schema, or fails the query (``FAILFAST``)."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._count = 0

    def __call__(self, id_: int, why: UnfitValueError) -> None:
        what = f"reading the value of message {id_} as Arrow: {printable(str(why), 300)}"
        if self._mode == "FAILFAST":
            raise MalformedMessageError(
                f"{what}. Correct the schema, or set mode=PERMISSIVE or DROPMALFORMED; without valueFormat the message "
                "is read as it came"
            )
        self._count += 1
        if self._count <= _MOST_LINES:
            _log.warning("%s; %s", what, self._done)

    def end(self) -> None:
        if self._count > _MOST_LINES:
            _log.warning("%d values in all did not fit the schema; %s", self._count, self._done)

    @property
    def _done(self) -> str:
        return "it is left out" if self._mode == "DROPMALFORMED" else "it is a row of nulls"


def rows_for(schema: StructType, options: ReadOptions) -> Rows:
    """The rows of a read with these options and this schema.

    Raises:
        OptionError: The schema has other columns than the read, or a type that has no counterpart in Arrow.
    """
    if options.value_format == "arrow":
        try:
            values = ArrowValues(to_arrow_schema(schema, timezone="UTC"), options.mode == "PERMISSIVE")
        except (ValueError, TypeError, PySparkException) as e:  # a type without a counterpart in Arrow
            raise OptionError(f"the schema of valueFormat=arrow: {e}") from e
        return TableRows(values, str(options.mode))
    names = row_schema(options.include_frames).names
    if schema.names != names:
        raise OptionError(
            f"a schema was given ({', '.join(schema.names)}), but a ZeroMQ read always has the columns "
            f"{', '.join(names)}; remove .schema(...) and decode value with from_json, from_avro or from_protobuf, or "
            "set valueFormat=arrow if the values are Arrow IPC streams"
        )
    return MessageRows(options.include_frames)


@dataclass(eq=False, repr=False)
class LogInputPartition(InputPartition):
    """A share of a batch: slices of chunks of one log.

    Attributes:
        store: Where the log is.
        pieces: The slices, in the order of their ids.
        rows: Makes rows of messages.
        log_id: The log's id.
        fail_on_data_loss: The option ``failOnDataLoss``.
        access: How to fetch the chunks from the driver, on an executor that does not see the log; None if the driver
            does not serve them.
    """

    store: Store
    pieces: Sequence[Chunk]
    rows: Rows
    log_id: str
    fail_on_data_loss: bool
    access: LogAccess | None = None

    def __repr__(self) -> str:
        ids = f"{self.pieces[0].first}..{self.pieces[-1].end}" if self.pieces else "none"
        return f"LogInputPartition({str(self.store)!r}, ids {ids})"


def read_log_partition(share: LogInputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a share, in the order of their ids.

    Raises:
        DamagedChunkError: A chunk differs from the one that was written.
        DataLossError: A chunk is gone. If the log's writer has deleted it and ``failOnDataLoss`` is false, the rows
            continue after it instead.
        DiskFaultError: A chunk could not be read for ``RETRY_SECONDS``.
        LogFetchError: This machine does not see the log, and the driver does not answer.
        MalformedMessageError: A value does not fit the schema.
    """
    return share.rows.of(_batches(share))


def _batches(share: LogInputPartition) -> Iterator[pa.RecordBatch]:
    set_up_worker()
    storage = LogStorage(share.store, RETRY_SECONDS)
    deletions = partial(Deletions, storage, share.log_id, share.fail_on_data_loss)
    names = [piece.name for piece in share.pieces]
    if share.access is None or retry_reading(lambda: storage.sees(share.log_id, names), RETRY_SECONDS):
        yield from read_slices(storage, share.pieces, deletions=deletions())
        return
    # Imported only here, because it is not needed where the executors see the log.
    from zmq_datasource.source.remote_chunks import RemoteChunks  # noqa: PLC0415

    _log_not_seen(storage.root)
    with RemoteChunks(share.access, storage) as remote:
        yield from read_slices(remote, share.pieces, deletions=deletions(find=remote.find))


@cache
def _log_not_seen(log: str) -> None:
    """Log this once for each log."""
    _log.info("this machine does not see log %s; its chunks are read from the driver", log)
