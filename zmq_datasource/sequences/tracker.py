"""Apply the rules of ``sequences`` to many messages in one call.

A *position* is a number that never wraps: each time that the counter wraps, the count of its numbers is added.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.records import Ahead, Counter, Gap, GapTable, Key, SequenceFindings, Totals
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
        self._turn = None if numbering.end is None else numbering.end + 1
        self._endpoint = numbering.by.index("endpoint") if "endpoint" in numbering.by else None
        self.expected: dict[Key, int] = {}
        self.counters: dict[Key, Counter] = {}
        self._ahead: dict[Key, Ahead] = {}
        # The connection of its endpoint that brought each counter's latest message to this process.
        self._latest_connections: dict[Key, int] = {}

    # The live flow.

    def track(self, runs: Iterable[Run], when: Callable[[int], int]) -> SequenceFindings:
        """Track received messages. The runs of one counter must be in the order of arrival.

        Args:
            when: Returns when the message at a place was received, in microseconds since the epoch.
        """
        findings = SequenceFindings()
        received = set()
        healed = self.totals.healed
        for run in runs:
            key, first, count = run.key, run.first, run.count
            for offset in range(count):
                if self.expected.get(key) == first + offset:  # as expected, like all that follow in this run
                    self.expected[key] = first + count
                    if self._ahead:
                        self._ahead.pop(key, None)  # the live flow has caught up
                    break
                place = run.place(offset)
                self._track_one(key, first + offset, place, when(place), findings)
            received.add(key)
        self._move_to_end(received)
        for key in received:
            self.note_connection(key)
        if findings.gaps and self.totals.healed != healed:
            findings.gaps = self._still_open(findings.gaps)
        self._forget(findings)
        return findings

    def _still_open(self, noticed: Iterable[Gap]) -> list[Gap]:
        """The open gaps that are left of gaps which this call has noticed, and perhaps filled by late messages."""
        ranges: dict[tuple[Key, int], list[Gap]] = {}
        for gap in noticed:
            ranges.setdefault((gap.key, gap.epoch), []).append(gap)
        found = []
        for gap in self.gaps:
            if gap.healed is None and (wholes := ranges.get((gap.key, gap.epoch))):
                at = bisect_right(wholes, gap.first, key=lambda whole: whole.first) - 1
                if at >= 0 and gap.last <= wholes[at].last:
                    found.append(gap)
        return found

    def _track_one(self, key: Key, number: int, row: int, when: int, findings: SequenceFindings) -> None:
        if key not in self.expected:
            self._add_counter(key, number, when, findings)
            return
        expected, counter = self._position_expected(key), self.counters[key]
        position = self._position(counter, expected, number)
        gap = self.gaps.find(key, position) if position < expected else None
        follows_replay = key in self._ahead and self._follows_replay(key, position, expected)
        if follows_replay and gap is None:
            if position >= counter.floor:
                self.totals.overlapping += 1
                findings.overlapping.append(row)
            else:  # older than the first message that the publisher had for the replay
                self.totals.late += 1
        elif position == expected:
            self._expect(key, counter, position + 1)
        elif not follows_replay and self._has_restarted(key, number, position < expected):
            self._restart(key, counter, number, when, findings)
        elif position > expected:
            self._add_gap(key, counter, expected, position - 1, when, findings)
            self._expect(key, counter, position + 1)
        elif gap is not None:
            self._heal(gap, position, when)
            self.totals.late += 1
        elif self.numbering.restarts and position < expected - self.numbering.window:
            self._restart(key, counter, number, when, findings)
        elif position < counter.floor:
            self.totals.late += 1
        else:
            self.totals.duplicates += 1
            findings.duplicates.append(row)

    def _add_counter(self, key: Key, number: int, when: int, findings: SequenceFindings) -> None:
        """Add the counter of a first message."""
        # If counters were forgotten, this may be one of them, and its earlier messages were received.
        begin = self.numbering.start if self.numbering.whole else self.numbering.counts_from
        whole = begin is not None and not self.totals.forgotten and number > begin
        first = begin if begin is not None and whole else number
        self.counters[key] = Counter(first, self.gaps.next_serial)
        self.note_connection(key)
        if whole:
            self._add_gap(key, self.counters[key], first, number - 1, when, findings)
        self.expected[key] = number + 1

    def _has_restarted(self, key: Key, number: int, lower: bool) -> bool:
        """Whether a number that is not the expected one proves a restart of the publisher."""
        if not self.numbering.restarts:
            return False
        # A connection keeps the order of messages: a lower number on the same one is a message sent again.
        new_connection = self._endpoint is not None and not self._is_on_connection(key)
        return number == self.numbering.start or (lower and new_connection)

    def _restart(
        self, key: Key, counter: Counter, number: int, when: int, findings: SequenceFindings
    ) -> None:
        self._ahead.pop(key, None)  # the replay was of messages before the restart
        self.totals.restarts += 1
        findings.restarts.append(key)
        findings.abandoned += self.gaps.missing(key)
        self.gaps.end_epoch(key)
        counter.epoch += 1
        counter.since = self.gaps.next_serial
        counter.sample = None
        counter.floor = min(number, self.numbering.start)
        self.note_connection(key)
        if number > self.numbering.start:
            self._add_gap(key, counter, self.numbering.start, number - 1, when, findings)
        self._expect(key, counter, number + 1)

    def announce(self, key: Key, last: int, when: int, *, end: bool = False) -> SequenceFindings:
        """Track a publisher's announcement that its latest message had the number ``last``.

        Args:
            when: When it was received, in microseconds since the epoch.
            end: Whether the publisher sends no more.
        """
        findings = SequenceFindings()
        if key not in self.expected:
            self._add_counter(key, last + 1, when, findings)
            self.expected[key] = last + 1
        else:
            expected, counter = self._position_expected(key), self.counters[key]
            position = self._position(counter, expected, last)
            if position >= expected:
                self._ahead.pop(key, None)
                self._add_gap(key, counter, expected, position, when, findings)
                self._expect(key, counter, position + 1)
        self.counters[key].ended = end
        self._move_to_end({key})
        self.note_connection(key)
        self._forget(findings)
        return findings

    # Replays.

    def restart(self, key: Key, when: int, findings: SequenceFindings) -> None:
        """Begin an epoch that expects the first number, because a replay has shown that the publisher has restarted."""
        counter = self.counters[key]
        self._restart(key, counter, self.numbering.start, when, findings)
        self._expect(key, counter, self.numbering.start)
        self._move_to_end({key})

    def is_same_publisher(self, key: Key) -> bool:
        """Whether the endpoint's present connection is that of the latest message, or the counter is not known."""
        return key not in self.counters or self._is_on_connection(key)

    def track_replayed(self, key: Key, number: int, when: int, findings: SequenceFindings) -> bool:
        """Track a replayed message. The replay may get ahead of the live flow.

        Args:
            when: When it was received, in microseconds since the epoch.

        Returns:
            Whether the message is new. Otherwise it was received before.
        """
        connection = self._connection(key)
        if key not in self.expected:
            self._add_counter(key, number, when, findings)
            self._ahead[key] = Ahead(connection, self.counters[key].floor)
        else:
            expected, counter = self._position_expected(key), self.counters[key]
            position = self._position(counter, expected, number)
            if position >= expected:
                if position > expected:
                    self._add_gap(key, counter, expected, position - 1, when, findings)
                self._expect(key, counter, position + 1)
                if key not in self._ahead or self._ahead[key].connection != connection:
                    self._ahead[key] = Ahead(connection, expected)
                self.note_connection(key)
            elif (gap := self.gaps.find(key, position)) is not None:
                self._heal(gap, position, when)
            else:
                return False
        self._move_to_end({key})
        self._forget(findings)
        return True

    def missing(self, key: Key) -> list[Gap]:
        """List the open gaps in a counter's present epoch, in order."""
        return self.gaps.missing(key)

    def next_number(self, key: Key) -> int | None:
        """The number that a counter expects; None if the counter is not known."""
        return self.expected.get(key)

    def _follows_replay(self, key: Key, position: int, expected: int) -> bool:
        """Whether a message of the live flow is one that the replay has brought or left out.

        Otherwise the live flow has caught up, or has changed: it has a new connection, or its numbers go back. Then the
        replay is no longer ahead.
        """
        ahead, floor = self._ahead[key], self.counters[key].floor
        if position < expected and ahead.connection == self._connection(key):
            if position >= ahead.position:
                ahead.position = position + 1
                return True
            if position < floor == ahead.position:
                return True
        del self._ahead[key]
        return False

    def _connection(self, key: Key) -> int:
        if self._endpoint is None:
            return 0
        return self.connections.get(key if isinstance(key, bytes) else key[self._endpoint], 0)

    def note_connection(self, key: Key) -> None:
        """Make ``is_same_publisher`` true: a message has come by the present connection, or a replay has shown it."""
        if self._endpoint is not None:
            self._latest_connections[key] = self._connection(key)

    def _is_on_connection(self, key: Key) -> bool:
        """Whether the endpoint's present connection has brought the counter's latest message."""
        return self._latest_connections.get(key) == self._connection(key)

    # Positions.

    def number(self, position: int) -> int:
        """The number at a position."""
        return position if self._turn is None else position % self._turn

    def _position_expected(self, key: Key) -> int:
        return self.expected[key] + self.counters[key].turn

    def _position(self, counter: Counter, expected: int, number: int) -> int:
        if self._turn is None:
            return number
        ahead = (number + counter.turn - expected) % self._turn
        return expected + (ahead if ahead <= self._turn // 2 else ahead - self._turn)

    def _expect(self, key: Key, counter: Counter, position: int) -> None:
        number = self.number(position - 1) + 1  # one past the last number is correct, and never arrives
        counter.turn = position - number
        self.expected[key] = number

    # Gaps and memory.

    def _add_gap(
        self, key: Key, counter: Counter, first: int, last: int, when: int, findings: SequenceFindings
    ) -> None:
        gap = self.gaps.add(key, counter.epoch, first, last, when)
        self.totals.lost += gap.size
        findings.gaps.append(replace(gap))  # a copy, because a late message changes the table's

    def _heal(self, gap: Gap, position: int, when: int) -> None:
        self.gaps.fill(gap, position, when)
        self.totals.lost -= 1
        self.totals.healed += 1

    def _move_to_end(self, keys: set[Key]) -> None:
        """Make these the counters that are forgotten last."""
        expected = self.expected
        for key in keys:
            expected[key] = expected.pop(key)

    def _forget(self, findings: SequenceFindings) -> None:
        """Keep gaps and counters within their bounds."""
        for gap in self.gaps.shrink():
            findings.abandoned.append(gap)
            counter = self.counters[gap.key]
            counter.floor = max(counter.floor, gap.last + 1)
        while len(self.expected) > self._max_counters:
            key = next(iter(self.expected))
            self.totals.forgotten += not self.counters[key].ended
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self.expected[key], self.counters[key]
        self._ahead.pop(key, None)
        self._latest_connections.pop(key, None)
        self.gaps.end_epoch(key)
