"""Numbers in columns: the counter of each message, and the runs in which a counter's numbers go up by one.

Nearly always a number follows the one before it. So the tracker looks only at the beginning of each run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.sequences.records import Key


@dataclass(frozen=True)
class Keys:
    """The counter of each message.

    Attributes:
        names: The counters, each once.
        codes: For each message, the place of its counter in ``names``; None if there is only one.
    """

    names: Sequence[Key]
    codes: pa.Array | None = None

    @classmethod
    def of(cls, names: pa.Array) -> Keys:
        """Make keys from a binary column with the name of each message's counter."""
        encoded = names.dictionary_encode()
        distinct = encoded.dictionary.to_pylist()
        return cls(distinct, None if len(distinct) == 1 else encoded.indices)

    @classmethod
    def joined(cls, parts: Sequence[Keys]) -> Keys:
        """Combine keys by one name each into the keys of counters that have several names."""
        names: list[tuple[bytes, ...]] = [()]
        codes: pa.Array | None = None
        for part in parts:
            more = [name for name in part.names if isinstance(name, bytes)]
            if part.codes is not None or codes is not None:
                joined = pc.multiply(_integers([0])[0] if codes is None else codes, _integers([len(more)])[0])
                if part.codes is not None:
                    joined = pc.add(part.codes.cast(pa.int64()), joined)
                encoded = joined.dictionary_encode()
                combined, codes = encoded.dictionary.to_pylist(), encoded.indices.cast(pa.int64())
            else:
                combined = [0]
            # Name only the combinations that occur: peers could make any number of possible ones.
            names = [(*names[code // len(more)], more[code % len(more)]) for code in combined]
        return cls(names, None if len(names) == 1 else codes)


class Run:
    """Messages of one counter with numbers that go up by one.

    Attributes:
        key: The counter.
        first: The number of the first message.
        count: The number of messages.
    """

    __slots__ = ("_at", "_places", "count", "first", "key")

    def __init__(self, key: Key, first: int, count: int, at: int, places: pa.Array | None) -> None:
        self.key, self.first, self.count = key, first, count
        self._at, self._places = at, places

    def place(self, offset: int) -> int:
        """The place of the run's message ``offset`` among all messages."""
        at = self._at + offset
        return at if self._places is None else int(self._places[at].as_py())


def runs_of(keys: Keys, numbers: pa.Array) -> list[Run]:
    """Find the runs, in the order in which their first messages arrived.

    Args:
        numbers: Of one message or more, in a column of 64 bits.
    """
    if keys.codes is None:
        places = None
        breaks = _breaks(numbers, None)
    else:
        places = pc.array_sort_indices(
            keys.codes
        )  # the sort is stable: messages of one counter keep their order
        codes = keys.codes.take(places)
        numbers = numbers.take(places)
        breaks = _breaks(numbers, codes)
    begins, ends = [0, *breaks], [*breaks, len(numbers)]
    firsts = _at(numbers, begins)
    if places is None:
        return [
            Run(keys.names[0], first, end - at, at, None)
            for first, at, end in zip(firsts, begins, ends, strict=True)
        ]
    named = [keys.names[code] for code in _at(codes, begins)]
    runs = [
        Run(name, first, end - at, at, places)
        for name, first, at, end in zip(named, firsts, begins, ends, strict=True)
    ]
    return sorted(runs, key=lambda run: run.place(0))


def _at(column: pa.Array, places: Sequence[int]) -> list[int]:
    if len(places) == 1:
        return [column[places[0]].as_py()]
    listed: list[int] = column.take(_integers(places)).to_pylist()
    return listed


def _integers(numbers: Sequence[int]) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(array("q", numbers))])


def _breaks(numbers: pa.Array, codes: pa.Array | None) -> list[int]:
    """The places at which a run begins, without the first one."""
    ends = pc.not_equal(pc.subtract(numbers[1:], numbers[:-1]), _integers([1])[0])
    if codes is not None:
        ends = pc.or_(ends, pc.not_equal(codes[1:], codes[:-1]))
    if not ends.true_count:
        return []
    return [at + 1 for at in pc.indices_nonzero(ends).to_pylist()]
