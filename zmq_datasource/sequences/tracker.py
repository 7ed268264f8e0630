"""Apply the rules of ``sequences`` to many messages in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.records import Counter, Gap, GapTable, Key, SequenceFindings, Totals
from zmq_datasource.sequences.runs import Run

# The table of gaps has at most this many rows.
MOST_GAPS = 10_000


class SequenceTracker:
    """Finds gaps, duplicates and restarts in publishers' sequences, and keeps a table of them.

    Args:
        numbering: How messages are counted.
        max_counters, max_gaps: How many counters and gaps it keeps.

    Attributes:
        connections: How many connections each endpoint has had, where messages are counted by endpoint. The receiver
            updates it before each call.
        expected: The number that each counter expects, the counter that was silent for longest first.
        counters: The other state of each counter.
    """

    def __init__(self, numbering: Numbering, max_counters: int, max_gaps: int = MOST_GAPS) -> None:
        self.numbering = numbering
        self.totals = Totals()
        self.gaps = GapTable(max_gaps)
        self.connections: dict[bytes, int] = {}
        self._max_counters = max_counters
        self._endpoint = numbering.by.index("endpoint") if "endpoint" in numbering.by else None
        self.expected: dict[Key, int] = {}
        self.counters: dict[Key, Counter] = {}
        # The connection of its endpoint that brought each counter's latest message to this process, and the one that
        # brought its latest live message.
        self._latest_connections: dict[Key, int] = {}
        self._live_connections: dict[Key, int] = {}
        self._new_gaps: list[Gap] = []  # of the present call

    # The live flow.

    def track(self, runs: Iterable[Run], when: Callable[[int], int]) -> SequenceFindings:
        """Track received messages. The runs of one counter must be in the order of arrival.

        Args:
            when: Returns when the message at a place was received, in microseconds since the epoch.
        """
        findings = SequenceFindings()
        received = set()
        for run in runs:
            key, first, count = run.key, run.first, run.count
            for offset in range(count):
                if self.expected.get(key) == first + offset:  # as expected, like all that follow in this run
                    self.expected[key] = first + count
                    break
                place = run.place(offset)
                self._track_one(key, first + offset, place, when(place), findings)
            received.add(key)
        for key in received:
            self._note_connection(key)
            self._live_connections[key] = self._connection(key)
        self._conclude(received, findings)
        return findings

    def _track_one(self, key: Key, number: int, row: int, when: int, findings: SequenceFindings) -> None:
        if key not in self.expected:
            self._add_counter(key, number, when)
            return
        expected, counter = self.expected[key], self.counters[key]
        gap = self.gaps.find(key, number) if number < expected else None
        may_restart = self.numbering.restarts
        if number == expected:
            self.expected[key] = number + 1
        elif may_restart and self._shows_restart(key, number, number < expected):
            self._restart(key, counter, number, when, findings)
        elif number > expected:
            self._add_gap(key, counter, expected, number - 1, when)
            self.expected[key] = number + 1
        elif gap is not None:
            self._heal(gap, number)
            self.totals.late += 1
        elif may_restart and not self.numbering.replayed and number < expected - self.numbering.window:
            self._restart(key, counter, number, when, findings)
        elif number < counter.floor:
            self.totals.late += 1
        else:
            self.totals.duplicates += 1
            findings.duplicates.append(row)

    def _add_counter(self, key: Key, number: int, when: int) -> None:
        """Add the counter of a first message."""
        # If counters were forgotten, this may be one of them, and its earlier messages were received.
        whole = self.numbering.whole and not self.totals.forgotten
        first = min(self.numbering.start, number) if whole else number
        self.counters[key] = Counter(first)
        self._note_connection(key)
        if first < number:
            self._add_gap(key, self.counters[key], first, number - 1, when)
        self.expected[key] = number + 1

    def _shows_restart(self, key: Key, number: int, lower: bool) -> bool:
        """Whether a number that is not the expected one proves a restart of a publisher."""
        if lower and self._endpoint is not None and not self._is_on_connection(key):
            # A connection keeps the order of messages: on the same one it would be a message sent again.
            return True
        if number != self.numbering.start:
            return False
        # A replay may have brought the first number before the live flow does. The live flow brings it once.
        return not self.numbering.replayed or self._live_connections.get(key) == self._connection(key)

    def _restart(
        self, key: Key, counter: Counter, number: int, when: int, findings: SequenceFindings
    ) -> None:
        self.totals.restarts += 1
        findings.restarts.append(key)
        self._lose(self.gaps.end_epoch(key), findings)
        counter.epoch += 1
        counter.floor = min(number, self.numbering.start)
        self._note_connection(key)
        if number > self.numbering.start:
            self._add_gap(key, counter, self.numbering.start, number - 1, when)
        self.expected[key] = number + 1

    def announce(self, key: Key, last: int, when: int, *, end: bool = False) -> SequenceFindings:
        """Track a publisher's announcement that its latest message had the number ``last``.

        Args:
            when: When it was received, in microseconds since the epoch.
            end: Whether the publisher sends no more.
        """
        findings = SequenceFindings()
        if key not in self.expected:
            self._add_counter(key, last + 1, when)
            self.expected[key] = last + 1
        elif last >= (expected := self.expected[key]):
            self._add_gap(key, self.counters[key], expected, last, when)
            self.expected[key] = last + 1
        self.counters[key].ended = end
        self._note_connection(key)
        self._conclude({key}, findings)
        return findings

    # Replays.

    def is_same_publisher(self, key: Key) -> bool:
        """Whether the endpoint's present connection is that of the latest message, or the counter is not known."""
        return key not in self.counters or self._is_on_connection(key)

    def track_replayed(self, key: Key, number: int, when: int, findings: SequenceFindings) -> bool:
        """Track a replayed message, which may be one that the live flow has not brought yet.

        Args:
            when: When it was received, in microseconds since the epoch.

        Returns:
            Whether the message is new. Otherwise it was received before.
        """
        if key not in self.expected:
            self._add_counter(key, number, when)
        elif number >= (expected := self.expected[key]):
            if number > expected:
                self._add_gap(key, self.counters[key], expected, number - 1, when)
            self.expected[key] = number + 1
            self._note_connection(key)
        elif (gap := self.gaps.find(key, number)) is not None:
            self._heal(gap, number)
        else:
            return False
        self._conclude({key}, findings)
        return True

    def give_up(self, gaps: Iterable[Gap]) -> None:
        """Note that no replay will bring what is missing here."""
        self._lose(gaps, SequenceFindings())

    def _connection(self, key: Key) -> int:
        if self._endpoint is None:
            return 0
        return self.connections.get(key if isinstance(key, bytes) else key[self._endpoint], 0)

    def _note_connection(self, key: Key) -> None:
        """Make ``is_same_publisher`` true: a message has come by the present connection, or a replay."""
        if self._endpoint is not None:
            self._latest_connections[key] = self._connection(key)

    def _is_on_connection(self, key: Key) -> bool:
        """Whether the endpoint's present connection has brought the counter's latest message."""
        return self._latest_connections.get(key) == self._connection(key)

    # Gaps and memory.

    def _add_gap(self, key: Key, counter: Counter, first: int, last: int, when: int) -> None:
        gap = Gap(key, counter.epoch, first, last, when)
        self.gaps.add(gap)
        self._new_gaps.append(gap)
        self.totals.lost += gap.size

    def _heal(self, gap: Gap, number: int) -> None:
        rest = self.gaps.fill(gap, number)
        if rest is not None:
            self._new_gaps.append(rest)
        self.totals.lost -= 1
        self.totals.healed += 1

    def _lose(self, gaps: Iterable[Gap], findings: SequenceFindings) -> None:
        for gap in gaps:
            if not gap.lost and gap.size:
                gap.lost = True
                findings.lost.append(gap)

    def _conclude(self, received: set[Key], findings: SequenceFindings) -> None:
        """Tell losses, and keep gaps and counters within their bounds. Called at the end of each call.

        Args:
            received: Counters that were not silent.
        """
        if not self.numbering.replayed:
            self._lose(self._new_gaps, findings)
        self._new_gaps.clear()
        self._move_to_end(received)
        for gap in self.gaps.shrink():
            self._lose([gap], findings)
            counter = self.counters[gap.key]
            counter.floor = max(counter.floor, gap.last + 1)
        while len(self.expected) > self._max_counters:
            key = next(iter(self.expected))
            self.totals.forgotten += not self.counters[key].ended
            del self.expected[key], self.counters[key]
            self._latest_connections.pop(key, None)
            self._live_connections.pop(key, None)
            self._lose(self.gaps.end_epoch(key), findings)

    def _move_to_end(self, keys: set[Key]) -> None:
        """Make these the counters that are forgotten last."""
        expected = self.expected
        for key in keys:
            expected[key] = expected.pop(key)
