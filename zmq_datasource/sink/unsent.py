"""Rows that were not sent: each is dropped or becomes a dead letter, is counted with its reason, and never silently."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from zmq_datasource.counters import SinkCounters
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import Row, StagedDeadLetters
from zmq_datasource.sink.in_flight import Part

__all__ = ["RefusalLog", "Unsent"]

_log = logging.getLogger(__name__)

# The reason of rows that were in flight when a connection was lost.
_LOST = "connection_lost"


class Unsent:
    """Decides about rows that a task does not send, and counts them.

    Args:
        dead_letters: Where they go; None drops them, with ``noblock``.
        counters: The task's account.

    Attributes:
        goes_on: Whether a task goes on without such a row. Otherwise it fails at the first.
        keeps: Whether sent rows must be kept while they are in flight: to be sent again, or as dead letters.
    """

    def __init__(
        self, options: WriteOptions, dead_letters: StagedDeadLetters | None, counters: SinkCounters
    ) -> None:
        self._noblock = options.noblock
        self._dead_letters = dead_letters
        self._counters = counters
        self._refusals = RefusalLog("kept as dead letters" if dead_letters is not None else "dropped")
        self.goes_on = options.noblock or dead_letters is not None
        self.keeps = not options.noblock or dead_letters is not None

    def give_up(self, part: Part, at: int, anybody: bool) -> None:
        """A row finds no room.

        Args:
            at: Its position in ``part``.
            anybody: Whether any peer is there.
        """
        reason = "no_peer" if not anybody else "hwm" if self._noblock else "timeout"
        self._refusals.note(reason)
        self._keep_or_drop(part, at, reason)

    def write_off(self, parts: Iterable[Part]) -> int:
        """What may be lost with a connection no longer counts as sent; returns how many rows."""
        lost = 0
        for part in parts:
            lost += part.sent
            self._counters.sent -= part.sent
            self._counters.bytes -= part.sent_bytes
            if self._dead_letters is None:
                self._counters.dropped[_LOST] += part.sent
                continue
            for at in range(len(part)):
                if at not in part.given_up:
                    self._keep_or_drop(part, at, _LOST)
        return lost

    def look(self) -> None:
        """To be called now and then, for the log."""
        self._refusals.look()

    def end(self) -> None:
        """Log what is still to be said: no more rows come."""
        self._refusals.end()

    def _keep_or_drop(self, part: Part, at: int, reason: str) -> None:
        if self._dead_letters is None:
            self._counters.dropped[reason] += 1
        else:
            self._dead_letters.add(_row(part, at), reason)
            self._counters.dead_lettered[reason] += 1


def _row(part: Part, at: int) -> Row:
    topic, value, frames = (
        None if column is None else column[at].as_py() for column in (part.topics, part.values, part.frames)
    )
    return Row(topic, value, frames)


class RefusalLog:
    """Logs that the rows of a long task are not being sent, and when that is over; of a short task its batch says it.

    A consumer that is a little too slow is full and has room again thousands of times a second: that
    is one state, not thousands.
    """

    _SECONDS = 5.0

    def __init__(self, done: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._done = done
        self._clock = clock
        self._reasons: Counter[str] = Counter()
        self._began = self._last = 0.0
        self._said = False

    def note(self, reason: str) -> None:
        """Count a row that was not sent."""
        self._last = self._clock()
        if not self._reasons:
            self._began = self._last
        self._reasons[reason] += 1
        if not self._said and self._last - self._began >= self._SECONDS:
            self._said = True
            _log.warning("rows are being %s: %s in %.0f s", self._done, self._summary(), self._SECONDS)

    def look(self) -> None:
        """To be called now and then."""
        if self._reasons and self._clock() - self._last >= self._SECONDS:
            self.end()

    def end(self) -> None:
        """Log how many rows were not sent."""
        if self._said:
            _log.warning(
                "rows are no longer %s: %s in %.0f s", self._done, self._summary(), self._last - self._began
            )
        self._said = False
        self._reasons.clear()

    def _summary(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self._reasons.items()))
