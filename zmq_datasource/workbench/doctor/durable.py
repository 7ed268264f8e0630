"""How far a log is behind the wire, by the publisher's own numbers.

What a receiver has taken from its socket and not yet sealed is nowhere but in its memory, where no
high-water mark governs it. From outside that is seen in one way: a number that was on the wire, and is not in
the log.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from zmq_datasource.errors import LogError
from zmq_datasource.log.reader import read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.framing import name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.source.location import log_storage
from zmq_datasource.workbench.doctor.facts import Durable, State
from zmq_datasource.workbench.doctor.watcher import SequenceWatcher

__all__ = ["compare"]

_TURN_SECONDS = 0.05
_TAIL_ROWS = 200_000


def compare(options: ReadOptions, watcher: SequenceWatcher | None, received: int, seconds: float) -> Durable:
    """Wait until the log holds what was seen on the wire, up to ``seconds``.

    Args:
        options: Say where the log is.
        watcher: What was seen on the wire.
        received: Messages that were seen.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage = log_storage(options)
    storage.log_id()
    by, last = ((), {}) if watcher is None else (watcher.by, watcher.last)
    wire = {tuple(map(name_of, key)): number for key, number in last.items()}
    newest: dict[tuple[str, ...], int] = {}
    began = time.monotonic()
    first_end = seen = None
    while True:
        index = read_index(storage)
        first_end = index.end if first_end is None else first_end
        with suppress(LogError, FileNotFoundError):  # a chunk that was just deleted: look again
            newest |= _newest(storage, max(seen or 0, index.earliest, index.end - _TAIL_ROWS), by)
            seen = index.end
        known = wire.keys() & newest.keys()
        missing = sum(max(0, wire[key] - newest[key]) for key in known)
        covered = bool(wire) and len(known) == len(wire) and not missing
        waited = time.monotonic() - began
        if covered or waited >= seconds or not wire:
            break
        time.sleep(_TURN_SECONDS)
    state: State = "behind" if known else "foreign"
    if covered:
        state = "covered"
    elif not index.end:
        state = "empty"
    elif not (wire and newest):
        state = "unnumbered"
    return Durable(
        location=str(options.wal_store or options.wal_location),
        state=state,
        missing={"behind": missing, "empty": received}.get(state, 0),
        seconds=round(waited, 3),
        grew=index.end > first_end,
    )


def _newest(storage: LogStorage, start: int, by: Sequence[str]) -> dict[tuple[str, ...], int]:
    """The last number of each counter in the rows from id ``start`` on."""
    newest = {}
    index = read_index(storage)
    for batch in read_slices(storage, slices(index.covering(start, index.end), start, index.end)):
        columns = [[""] * len(batch) if name == "endpoint" else batch.column(name).to_pylist() for name in by]
        for number, *key in zip(batch.column("sequence").to_pylist(), *columns, strict=True):
            if number is not None:
                newest[tuple(part or "" for part in key)] = number
    return newest
