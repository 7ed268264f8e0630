"""What a query learns of the process that receives: its figures, and the losses that it has noticed."""

from __future__ import annotations

import threading

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogError, SocketError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import Chunk, LogStorage, read_saved_state, sections_of
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.source.facts import read_counters, saved_sequences
from zmq_datasource.source.incidents import Incidents


class FollowedReceiver:
    """The state of the process that receives, as the log's newest chunk has it. Any thread may call it.

    Applies the query's ``onLoss`` to the losses that this process notices while the query runs.

    Attributes:
        counters: The counters of that process; None until one chunk was read.
        totals: The totals of its sequence tracker; None if messages are not numbered.
    """

    def __init__(self, storage: LogStorage, options: StreamReadOptions) -> None:
        self._storage = storage
        self._is_numbered = options.numbering is not None
        self._incidents = Incidents(options)
        self._faults = LimitedLog(__name__, "states that could not be read")
        self._reading = threading.Lock()
        self._read_to = -1
        self._next_loss: int | None = (
            None  # losses with a smaller number are older than the query, or reported
        )
        self.counters: SourceCounters | None = None
        self.totals: Totals | None = None

    @property
    def failure(self) -> SocketError | None:
        """Why the query must end (``onLoss=fail``)."""
        return self._incidents.failure

    def look_for_losses(self, newest: Chunk | None) -> None:
        """Read the state of the log's newest chunk, if messages are numbered."""
        if self._is_numbered:
            self.read(newest)

    def read(self, newest: Chunk | None) -> None:
        """Read the state of the log's newest chunk, unless it was read before."""
        end = 0 if newest is None else newest.end
        with self._reading:  # the threads of the query and of its monitor read
            if self._read_to == end:
                return
            try:
                saved = read_saved_state(self._storage, None if newest is None else newest.first)
                self._act_on(saved)
                self.counters, self.totals = read_counters(saved)
                self._read_to = end
            except LogError as e:
                self._faults.warn("%s", e)

    def end_with(self, saved: bytes) -> None:
        """Act on the last state of that process: it has ended, and this process receives in its place."""
        with self._reading:
            self._act_on(saved)
            self._is_numbered = False  # from here on, the receiver of this process reports losses

    def _act_on(self, saved: bytes) -> None:
        """Report the new losses in a saved state."""
        sequences = saved_sequences(sections_of(saved)) if self._is_numbered else None
        before, self._next_loss = self._next_loss, 0 if sequences is None else sequences.losses
        if sequences is not None and before is not None:
            self._incidents.numbering = sequences.numbering
            new = (gap for gap in sequences.gaps if gap.loss is not None and gap.loss >= before)
            self._incidents.report_lost(sorted(new, key=lambda gap: gap.loss or 0))

    def close(self) -> None:
        """Log how many warnings the rate limit has left out."""
        self._faults.flush()
        self._incidents.flush()
