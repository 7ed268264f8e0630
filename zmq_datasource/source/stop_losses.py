"""Records, in a file of the log, how many messages the stops of a receiver have lost.

The next run logs the last loss, and the metrics count all of them. Each partition has one record, a small JSON file
with the sums since the log began, and the last stop with a loss::

    {"messages": 12, "stops": 2, "told": true,
     "last": {"at": "2026-01-01T00:00:00Z", "messages": null, "reason": "..."}}

``told`` says whether a run has logged the last stop. Opening the log writes the file, so a stop only replaces it, and a
full disk has room for that. The stop replaces it while the writer still has the partition's lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import RESTORE, LogError, LogFormatError
from zmq_datasource.log import STOPS_NAME, Filler, LogStorage, LogWriter
from zmq_datasource.source.receiving import ReceivingThread

__all__ = ["StopLoss", "StopLosses", "StopRecord", "loss_at_stop", "read_record"]

_log = logging.getLogger(__name__)

# The file fits into one sector of a disk, so it can be replaced even on a full disk.
_REASON_CHARACTERS = 200


class StopLoss(NamedTuple):
    """The loss at one stop.

    Attributes:
        messages: The number of messages that were received and could not be sealed.
        more: Whether messages were left in the socket when it was closed. Their number cannot be known.
        reason: Why the messages were lost.
    """

    messages: int
    more: bool
    reason: str

    def __str__(self) -> str:
        counted = f"{self.messages} received messages could not be sealed and are lost"
        unknown = "the messages that the socket had taken are lost, and their number is unknown"
        text = " and ".join([counted] * bool(self.messages) + [unknown] * self.more)
        return f"{text}: {self.reason}"


def loss_at_stop(
    socket_type: str, log: LogWriter, filler: Filler, receiving: ReceivingThread
) -> StopLoss | None:
    """What this stop has lost; None if nothing. Call it when the thread has ended, and again when the log is closed.

    Transactions lose nothing: their senders repeat what was not acknowledged.
    """
    if socket_type == "ROUTER":
        return None
    facts = filler.facts()
    still_sent = receiving.cut_off and socket_type == "PULL"
    lost, left = log.unsealed + facts.pending + facts.refused, still_sent or facts.left
    if not (lost or left):
        return None
    why = log.failure or log.fault or receiving.failure
    if why is None:
        after = f"{filler.drain_seconds:.0f} s after the stop" if still_sent else "at the end of the stop"
        why = f"messages still came {after}; stop a PUSH before its reader"
    return StopLoss(lost, left, str(why))


class StopRecord(NamedTuple):
    """The record of a log partition; for the attributes see the module."""

    messages: int = 0
    stops: int = 0
    told: bool = True
    last: Mapping[str, object] | None = None


def read_record(storage: LogStorage) -> StopRecord:
    """Read the record of a log partition. Another process may write it at the same time.

    Raises:
        LogError: The record cannot be read.
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
    """Writes the record of one log partition; for the partition's writer.

    Args:
        storage: The partition.
        counters: The counters that get the sums.
    """

    def __init__(self, storage: LogStorage, counters: SourceCounters) -> None:
        self._storage = storage
        self._counters = counters
        self._last: Mapping[str, object] | None = None

    def report_last_stop(self) -> None:
        """Add the recorded sums to the counters, and log the last stop with a loss, unless a run has logged it.

        Call it with the partition's lock.

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
                "the previous run of %s was stopped at %s and lost %s messages: %s (so far, %d stops have lost %d "
                "messages that were counted, besides losses of unknown number)",
                self._storage,
                last.get("at"),
                "an unknown number of" if messages is None else messages,
                last.get("reason"),
                counters.lossy_stops,
                counters.lost_at_stop,
            )
        self._write(told=True)

    def record(self, loss: StopLoss) -> None:
        """Add the loss at this stop to the record. A failure is only logged. Call it with the partition's lock."""
        counters = self._counters
        counters.lost_at_stop += loss.messages
        counters.lossy_stops += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        messages = None if loss.more else loss.messages
        self._last = {"at": at, "messages": messages, "reason": loss.reason[:_REASON_CHARACTERS]}
        try:
            self._write(told=False)
        except LogError as e:
            _log.error(
                "recording the messages that this stop has lost: %s. The next run will not report them", e
            )

    def _write(self, told: bool) -> None:
        counters = self._counters
        record = StopRecord(counters.lost_at_stop, counters.lossy_stops, told, self._last)
        self._storage.write_json(self._storage.key(STOPS_NAME), record._asdict())
