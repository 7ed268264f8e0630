"""How far a log is behind the wire, by the publisher's own numbers.

What a receiver has taken from its socket and not yet sealed is nowhere but in its memory, where no
high-water mark governs it. From outside that is seen in one way: a number that was on the wire, and is not in
the log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from zmq_datasource.errors import LogError
from zmq_datasource.log.reader import read_index, read_slices, slices
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.framing import name_of
from zmq_datasource.workbench.doctor.facts import Durable
from zmq_datasource.workbench.doctor.watching import Follower

__all__ = ["compare"]

_TURN_SECONDS = 0.05
_TAIL_ROWS = 200_000


def compare(location: str, follower: Follower | None, received: int, seconds: float) -> Durable:
    """Wait until the log holds what was seen on the wire, up to ``seconds``.

    Args:
        follower: What was seen on the wire.
        received: Messages that were seen.

    Raises:
        LogError: There is no log, or it cannot be read.
    """
    storage = LogStorage(location)
    storage.log_id()
    wire = {} if follower is None else {_text(key): number for key, number in follower.last.items()}
    by = () if follower is None else tuple(follower.by)
    began = time.monotonic()
    first_end: int | None = None
    seen = 0
    newest: dict[tuple[str, ...], int] = {}
    while True:
        index = read_index(storage)
        first_end = index.end if first_end is None else first_end
        start = max(seen, index.earliest, index.end - _TAIL_ROWS)
        with suppress(LogError, FileNotFoundError):  # a chunk that was just deleted: look again
            _read_newest(storage, start, by, newest)
            seen = index.end
        waited = round(time.monotonic() - began, 3)
        missing = sum(max(0, number - newest[key]) for key, number in wire.items() if key in newest)
        known = [key for key in wire if key in newest]
        if wire and len(known) == len(wire) and not missing:
            return Durable(location=location, state="covered", seconds=waited, grew=index.end > first_end)
        if waited >= seconds or not wire:
            break
        time.sleep(_TURN_SECONDS)
    grew = index.end > first_end
    if not index.end:
        return Durable(location=location, state="empty", missing=received, seconds=waited)
    if not wire or not newest:
        return Durable(location=location, state="unnumbered", seconds=waited, grew=grew)
    if not known:
        return Durable(location=location, state="foreign", seconds=waited, grew=grew)
    return Durable(location=location, state="behind", missing=missing, seconds=waited, grew=grew)


def _read_newest(
    storage: LogStorage, start: int, by: tuple[str, ...], newest: dict[tuple[str, ...], int]
) -> None:
    """Add the last number of each counter in the rows from id ``start`` on."""
    index = read_index(storage)
    for batch in read_slices(storage, slices(index.covering(start, index.end), start, index.end)):
        columns: Mapping[str, list[str | None]] = {
            "publisher": batch.column("publisher").to_pylist(),
            "topic": batch.column("topic").to_pylist(),
            "endpoint": [""] * batch.num_rows,
        }
        keys = zip(*(columns[name] for name in by), strict=True) if by else ()
        for key, number in zip(keys, batch.column("sequence").to_pylist(), strict=False):
            if number is not None:
                newest[tuple(part or "" for part in key)] = number


def _text(key: tuple[bytes, ...]) -> tuple[str, ...]:
    return tuple(name_of(part) for part in key)
