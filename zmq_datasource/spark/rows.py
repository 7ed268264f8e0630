"""The rows of a read: one for each message, or with ``valueFormat=arrow`` the rows in the values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from zmq_datasource.errors import MalformedMessageError, OptionError
from zmq_datasource.host.printable import printable
from zmq_datasource.messages.arrow_types import UnfitValueError
from zmq_datasource.messages.arrow_values import ArrowValues
from zmq_datasource.messages.framing import to_rows
from zmq_datasource.messages.schemas import row_schema
from zmq_datasource.options import ReadOptions

__all__ = ["MessageRows", "Rows", "TableRows", "rows_for"]

_log = logging.getLogger(__name__)

# A task logs what is wrong with this many values, and only the number of all.
_MOST_LINES = 10


class Rows:
    """Makes rows for Spark of messages. Spark sends it to the executors."""

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in the order of the messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class MessageRows(Rows):
    """A row for each message."""

    include_frames: bool = False

    def of(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield to_rows(batch, self.include_frames)


@dataclass(frozen=True)
class TableRows(Rows):
    """The rows of the values, each of which is a table."""

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


class _Unfit:
    """Logs what is wrong with values, or fails the query (``FAILFAST``)."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._count = 0

    def __call__(self, partition: int, id_: int, why: UnfitValueError) -> None:
        what = f"reading the value of message {id_} of log partition {partition} as Arrow: {printable(str(why), 300)}"
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
        OptionError: The read has other columns, or a type of the schema has no counterpart in Arrow.
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
