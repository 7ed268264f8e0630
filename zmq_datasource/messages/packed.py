"""Convert columns of messages to buffers for a socket, and back. The buffers have Arrow's layout:

| Column | Buffers |
| --- | --- |
| ``value`` | offsets (32 bits, from 0), data |
| ``topic`` | validity (empty: no nulls), offsets, data |
| ``frames`` | the lists' offsets, the frames' offsets, data |

Received buffers are checked in full before anything in them decides about memory or control.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.errors import ProtocolError
from zmq_datasource.messages.columns import FRAMES

MOST_ROWS = 1 << 18
MOST_BUFFERS = 5
_BUFFERS = {("value",): 2, ("topic", "value"): 5, ("value", "topic"): 5, ("frames",): 3}


def pack_columns(batch: pa.RecordBatch) -> tuple[list[str], list[object]]:
    """Pack the columns ``value``, ``topic`` and ``value``, or ``frames``. Returns their names and buffers."""
    buffers: list[object] = []
    for name in batch.schema.names:
        column = batch.column(name)
        if name == "frames":
            lists = _fresh(column.cast(FRAMES))
            buffers += [_offsets(lists), *_offsets_and_data(_fresh(lists.flatten()))]
        else:
            column = _fresh(_binary(column))
            if name == "topic":
                bits = (len(column) + 7) // 8
                buffers.append(column.buffers()[0].slice(0, bits) if column.null_count else b"")
            buffers += _offsets_and_data(column)
    return list(batch.schema.names), buffers


def unpack_columns(names: Sequence[str], rows: int, buffers: Sequence[bytes]) -> dict[str, pa.Array]:
    """Restore the columns from their names and buffers.

    Raises:
        ProtocolError: The names or the buffers are not valid.
    """
    count = _BUFFERS.get(tuple(names))
    if count is None or count != len(buffers):
        raise ProtocolError(f"data with columns {str(names)[:100]} and {len(buffers)} buffers")
    if not 0 < rows <= MOST_ROWS:
        raise ProtocolError(f"data with {rows} rows")
    rest = iter(pa.py_buffer(buffer) for buffer in buffers)
    columns = {}
    try:
        for name in names:
            if name == "frames":
                offsets, *child = rest
                frames = len(child[0]) // 4 - 1
                values = pa.Array.from_buffers(pa.binary(), frames, [None, *child])
                column = pa.Array.from_buffers(FRAMES, rows, [None, offsets], children=[values])
            else:
                validity = next(rest) if name == "topic" else None
                bitmap = validity if validity is not None and len(validity) else None
                column = pa.Array.from_buffers(pa.binary(), rows, [bitmap, next(rest), next(rest)])
            column.validate(full=True)
            columns[name] = column
    except (pa.ArrowException, ValueError, StopIteration) as e:
        raise ProtocolError(f"data whose column {name} is damaged: {e}") from e
    if "frames" in columns and pc.min(pc.list_value_length(columns["frames"])).as_py() == 0:
        raise ProtocolError("a message without frames")
    return columns


def _binary(column: pa.Array) -> pa.Array:
    return column if pa.types.is_binary(column.type) else pc.cast(column, pa.binary())


def _fresh(column: pa.Array) -> pa.Array:
    """Copy a slice, so that its offsets begin at 0 and its buffers have only its own rows."""
    if column.offset == 0 and not int.from_bytes(memoryview(_offsets(column))[:4], "little"):
        return column
    return pa.concat_arrays([column, column.slice(0, 0)])


def _offsets(column: pa.Array) -> pa.Buffer:
    """The offsets of the rows, without those behind them."""
    found = column.buffers()[1]
    size = 4 * (len(column) + 1)
    return pa.py_buffer(bytes(size)) if found is None or found.size < size else found.slice(0, size)


def _offsets_and_data(column: pa.Array) -> list[object]:
    offsets = _offsets(column)
    data = column.buffers()[2]
    size = int.from_bytes(memoryview(offsets)[-4:], "little")
    return [offsets, b"" if data is None else data.slice(0, size)]
