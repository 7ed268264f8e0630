"""Handle rows that were not sent: each is dropped or becomes a dead letter, and is counted with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from zmq_datasource.counters import SinkCounters
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import Row, StagedDeadLetters
from zmq_datasource.sink.in_flight import RowBatch

__all__ = ["Unsent"]

# The reason of rows that may have been lost with a connection.
_LOST = "connection_lost"
_LOG_SECONDS = 5.0


class Unsent:
    """Drops the rows that a task does not send, or keeps them as dead letters, and counts them.

    Args:
        dead_letters: Keeps the rows; None to drop them (``noblock``).
        counters: The counters of the task.

    Attributes:
        continues: Whether a task continues when a row cannot be sent. If not, the first such row fails the task.
        needs_rows: Whether the content of sent rows is kept as long as they may be lost with a connection: then the
            task sends them again, or makes them dead letters. If not, it keeps only their number.
    """

    def __init__(
        self,
        options: WriteOptions,
        dead_letters: StagedDeadLetters | None,
        counters: SinkCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noblock = options.noblock
        self._dead_letters = dead_letters
        self._counters = counters
        self._clock = clock
        self._logs: dict[str, LimitedLog] = {}
        self.continues = options.noblock or dead_letters is not None
        self.needs_rows = not options.noblock or dead_letters is not None

    def give_up(self, batch: RowBatch, at: int, has_peers: bool) -> None:
        """Drop or keep a row for which no queue has room.

        Args:
            at: Its position in ``batch``.
            has_peers: Whether a peer is connected.
        """
        reason = "no_peer" if not has_peers else "hwm" if self._noblock else "timeout"
        batch.given_up.add(at)
        if reason not in self._logs:
            done = "dropped" if self._dead_letters is None else "kept as dead letters"
            # Logs no line for each row, only their number every 5 s. A task that ends sooner logs nothing: the account
            # of the batch has the numbers.
            self._logs[reason] = LimitedLog(
                __name__, f"rows {done} ({reason})", self._clock, lines=0, seconds=_LOG_SECONDS
            )
        self._logs[reason].warn("a row was not sent")
        self._drop_or_keep(batch, at, reason)

    def write_off(self, batches: Iterable[RowBatch]) -> int:
        """Count rows as lost with a connection, and no longer as sent. Drop or keep them. Returns how many rows."""
        lost = 0
        for batch in batches:
            lost += batch.sent
            self._counters.sent -= batch.sent
            self._counters.bytes -= batch.sent_bytes
            if self._dead_letters is None:
                self._counters.dropped[_LOST] += batch.sent
                continue
            for at in range(len(batch)):
                if at not in batch.given_up:
                    self._drop_or_keep(batch, at, _LOST)
        return lost

    def _drop_or_keep(self, batch: RowBatch, at: int, reason: str) -> None:
        if self._dead_letters is None:
            self._counters.dropped[reason] += 1
        else:
            self._dead_letters.add(_row(batch, at), reason)
            self._counters.dead_lettered[reason] += 1


def _row(batch: RowBatch, at: int) -> Row:
    topic, value, frames = (
        None if column is None else column[at].as_py()
        for column in (batch.topics, batch.values, batch.frames)
    )
    return Row(topic, value, frames)
