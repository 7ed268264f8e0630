"""Measures how far a log is behind the wire, by the publisher's own numbers.

Messages that a receiver has taken from its socket and not yet sealed are only in its memory, and no high-water mark
limits them. From outside, one thing shows them: a number that was on the wire is not in the log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from zmq_datasource.errors import LogError
from zmq_datasource.log import LogStorage, read_index, read_slices, slices
from zmq_datasource.options import ReadOptions
from zmq_datasource.source.location import log_storage
from zmq_datasource.workbench.doctor.facts import Durable, State
from zmq_datasource.workbench.doctor.framing import Numbered

__all__ = ["compare"]

_Newest: TypeAlias = dict[tuple[str, ...], int]

_TURN_SECONDS = 0.05
_TAIL_ROWS = 200_000


def compare(options: ReadOptions, watched: Sequence[Numbered], received: int, seconds: float) -> Durable:
    """Wait until the log holds what was seen on the wire, up to ``seconds``.

    Args:
        options: The options that say where the log is.
        watched: The messages that were seen on the wire, for each endpoint.
        received: How many messages were seen.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage = log_storage(options)
    storage.log_id()
    by = next((numbered.by for numbered in watched if numbered.by), ())
    wire: _Newest = {}
    for numbered in watched:
        if numbered.by == by:
            _keep_newest(wire, numbered.newest())
    newest: _Newest = {}
    began = time.monotonic()
    first_end: int | None = None
    seen: dict[int, int] = {}
    while True:
        end = 0
        for partition in storage.partitions():
            part = storage.of(partition)
            index = read_index(part)
            end += index.end
            with suppress(LogError, FileNotFoundError):  # a chunk was just deleted: the next turn reads again
                start = max(seen.get(partition, 0), index.earliest, index.end - _TAIL_ROWS)
                _keep_newest(newest, _newest(part, start, by))
                seen[partition] = index.end
        first_end = end if first_end is None else first_end
        there = _by_our_endpoint(by, wire, newest)
        known = wire.keys() & there.keys()
        missing = sum(max(0, wire[key] - there[key]) for key in known)
        covered = bool(wire) and len(known) == len(wire) and not missing
        waited = time.monotonic() - began
        if covered or waited >= seconds or not wire:
            break
        time.sleep(_TURN_SECONDS)
    state: State = "behind" if known else "foreign"
    if covered:
        state = "covered"
    elif not end:
        state = "empty"
    elif not (wire and newest):
        state = "unnumbered"
    return Durable(
        location=str(options.wal_store or options.wal_location),
        state=state,
        missing={"behind": missing, "empty": received}.get(state, 0),
        seconds=round(waited, 3),
        grew=end > first_end,
    )


def _keep_newest(numbers: _Newest, more: _Newest) -> None:
    for name, number in more.items():
        numbers[name] = max(number, numbers.get(name, number))


def _by_our_endpoint(by: Sequence[str], wire: Mapping[tuple[str, ...], int], there: _Newest) -> _Newest:
    """The log's numbers by our names. If each side has one endpoint, it is the same one, even under two names."""
    if "endpoint" not in by:
        return there
    at = by.index("endpoint")
    ours, theirs = {name[at] for name in wire}, {name[at] for name in there}
    if not len(ours) == len(theirs) == 1:
        return there
    return {(*name[:at], *ours, *name[at + 1 :]): number for name, number in there.items()}


def _newest(storage: LogStorage, start: int, by: Sequence[str]) -> _Newest:
    """The last number of each counter in the rows from id ``start`` on."""
    newest = {}
    # The log's rows have the endpoint in the column ``publisher``.
    names = ["publisher" if name == "endpoint" else name for name in by]
    index = read_index(storage)
    for batch in read_slices(storage, slices(index.covering(start, index.end), start, index.end)):
        columns = [batch.column(name).to_pylist() for name in names]
        for number, *key in zip(batch.column("sequence").to_pylist(), *columns, strict=True):
            if number is not None:
                newest[tuple(part or "" for part in key)] = number
    return newest
