"""From the columns of a DataFrame to messages: one for each row, or with ``valueFormat=arrow`` one for many rows."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructType

from zmq_datasource.errors import OptionError, RowError
from zmq_datasource.messages.arrow_values import values_of
from zmq_datasource.messages.columns import LOG_SCHEMA, as_binary
from zmq_datasource.options import WriteOptions

# About how many bytes of rows a message has with valueFormat=arrow. A larger row is a message of its own.
_ARROW_BYTES = 1 << 20
_FRAMES_TYPES = (ArrayType(BinaryType()), ArrayType(BinaryType(), containsNull=False))


@dataclass(frozen=True)
class SinkColumns:
    """The columns that make a message.

    Attributes:
        names: ``frames``, or ``value`` with or without ``topic``.
        same_topic: The topic of all messages, in place of the column (option ``topic``).
        table_bytes: The most bytes of a message if its value is a table of rows; None if each row is a message.
    """

    names: tuple[str, ...]
    same_topic: bytes | None = None
    table_bytes: int | None = None

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> SinkColumns:
        """Choose the columns that make the messages, and check the schema of the DataFrame.

        Raises:
            OptionError: A column is no part of a message or has a wrong type, or a needed column is missing.
        """
        same_topic = None if options.topic is None else options.topic.encode()
        if options.value_format == "arrow":
            if not schema.names:
                raise OptionError(
                    "writing rows without columns with valueFormat=arrow: there is nothing to send"
                )
            twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
            if twice:
                raise OptionError(
                    f"writing columns {twice} twice with valueFormat=arrow: give each a name of its own"
                )
            names = ("value",) if same_topic is None else ("topic", "value")
            return cls(names, same_topic, _ARROW_BYTES)
        given = set(schema.names)
        unknown = sorted(given - set(LOG_SCHEMA.names))
        if unknown:
            raise OptionError(
                f"writing columns {unknown}: a message has 'value' and optionally 'topic', or 'frames'; put the others "
                "into value, as in select(to_json(struct('*')).alias('value')), or send tables with valueFormat=arrow"
            )
        if "frames" in given and "value" in given:
            raise OptionError("writing both 'value' and 'frames': drop one of them")
        if "frames" not in given and "value" not in given:
            raise OptionError(f"writing columns {sorted(given)}: there is neither 'value' nor 'frames'")
        if "frames" in given and options.framing != "plain":
            raise OptionError(
                f"writing 'frames' with framing={options.framing}, which makes the frames itself: write 'value' and "
                "'topic'"
            )
        if "frames" in given and options.topic is not None:
            raise OptionError(
                f"option topic={options.topic!r} is for rows with 'value'; 'frames' contains the topic"
            )
        allowed = {"value": (StringType(), BinaryType()), "topic": (StringType(), BinaryType())}
        for name, types in {**allowed, "frames": _FRAMES_TYPES}.items():
            if name in given and schema[name].dataType not in types:
                raise OptionError(
                    f"writing column {name!r}: its type is {schema[name].dataType.simpleString()}, it must be "
                    f"{' or '.join(dict.fromkeys(t.simpleString() for t in types))}"
                )
        if "frames" in given:
            return cls(("frames",))
        with_topic = same_topic is not None or "topic" in given
        return cls(("topic", "value") if with_topic else ("value",), same_topic)

    def messages(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that make the messages, in which text is binary. A row whose ``value`` is null is no message.

        Raises:
            RowError: A row's ``frames`` cannot be a message.
        """
        if self.table_bytes is not None:
            batch = pa.RecordBatch.from_arrays([values_of(batch, self.table_bytes)], names=["value"])
        if "frames" in self.names:
            _check_frames(batch.column("frames"))
        made = {
            name: as_binary(batch.column(name))
            for name in self.names
            if self.same_topic is None or name == "value"
        }
        if self.same_topic is not None:
            made["topic"] = pa.repeat(pa.scalar(self.same_topic, pa.binary()), batch.num_rows)
        return pa.RecordBatch.from_arrays([made[name] for name in self.names], names=list(self.names))


def _check_frames(lists: pa.Array) -> None:
    lengths = pc.list_value_length(lists)
    if lists.null_count or pc.any(pc.equal(lengths, 0)).as_py() or lists.flatten().null_count:
        raise RowError("sending rows in which 'frames' is null, empty or has a null frame; filter them out")
