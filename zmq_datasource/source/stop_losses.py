"""What a stop could not keep, recorded beside the log: the next run logs it, and the metrics count it.

The record is one small JSON file of the partition, with the sums since the log began and the last such stop::

    {"messages": 12, "stops": 2, "told": true,
     "last": {"at": "2026-01-01T00:00:00Z", "messages": null, "reason": "..."}}

It is written when the log is opened, and replaced while the writer still has the partition's lock. So a stop finds the
room for it also on a full disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import RESTORE, LogError, LogFormatError
from zmq_datasource.log import STOPS_NAME, LogStorage

__all__ = ["StopLoss", "StopLosses", "StopRecord", "read_record"]

_log = logging.getLogger(__name__)

# A file of one sector can be replaced where it is.
_REASON_CHARACTERS = 200


class StopLoss(NamedTuple):
    """What one stop has lost.

    Attributes:
        messages: How many were received and could not be sealed.
        more: Whether the socket was closed with messages that it had taken; how many cannot be known.
        reason: Why.
    """

    messages: int
    more: bool
    reason: str

    def __str__(self) -> str:
        counted = f"{self.messages} received messages could not be sealed and are lost"
        unknown = "the messages that the socket had taken are lost, and their number is unknown"
        text = " and ".join([counted] * bool(self.messages) + [unknown] * self.more)
        return f"{text}: {self.reason}"


class StopRecord(NamedTuple):
    """What is recorded of a log partition; for the attributes see the module."""

    messages: int = 0
    stops: int = 0
    told: bool = True
    last: Mapping[str, object] | None = None


def read_record(storage: LogStorage) -> StopRecord:
    """What was lost at the stops of a log partition's writers; another process may write it at the same time.

    Raises:
        LogError: It cannot be read.
    """
    match storage.read_json(storage.key(STOPS_NAME)):
        case None:
            return StopRecord()
        case {
            "messages": int(messages),
            "stops": int(stops),
            "told": bool(told),
            "last": (None | {}) as last,
        }:
            return StopRecord(messages, stops, told, last)
    raise LogFormatError(
        f"reading {storage.path_of(STOPS_NAME)}: it is not the record of losses at stops. {RESTORE}"
    )


class StopLosses:
    """The record of one log partition; for its writer.

    Args:
        storage: Of the partition.
        counters: Where the sums go.
    """

    def __init__(self, storage: LogStorage, counters: SourceCounters) -> None:
        self._storage = storage
        self._counters = counters
        self._last: Mapping[str, object] | None = None

    def open(self) -> None:
        """Take up the sums, and log the last stop with a loss, once; with the lock of the partition.

        Raises:
            LogError: The record cannot be read or written.
        """
        counters = self._counters
        record = read_record(self._storage)
        counters.lost_at_stop, counters.lossy_stops = record.messages, record.stops
        last = self._last = record.last
        if last is not None and not record.told:
            messages = last.get("messages")
            _log.warning(
                "the run of %s before this one was stopped at %s and lost %s messages: %s (in all, %d stops have lost "
                "%d messages and those of unknown number)",
                self._storage,
                last.get("at"),
                "an unknown number of" if messages is None else messages,
                last.get("reason"),
                counters.lossy_stops,
                counters.lost_at_stop,
            )
        self._write(told=True)

    def record(self, loss: StopLoss) -> None:
        """Add what this stop has lost; with the lock of the partition. A disk that refuses is logged."""
        counters = self._counters
        counters.lost_at_stop += loss.messages
        counters.lossy_stops += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        messages = None if loss.more else loss.messages
        self._last = {"at": at, "messages": messages, "reason": loss.reason[:_REASON_CHARACTERS]}
        try:
            self._write(told=False)
        except LogError as e:
            _log.error("recording what this stop has lost: %s. The next run cannot tell of it", e)

    def _write(self, told: bool) -> None:
        counters = self._counters
        record = StopRecord(counters.lost_at_stop, counters.lossy_stops, told, self._last)
        self._storage.write_json(self._storage.key(STOPS_NAME), record._asdict())
