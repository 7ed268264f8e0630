"""The rules of ``sequences``, applied to many messages a call.

A *position* is a number that never wraps: a counter's number plus its whole turns so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from msgspec.structs import replace

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.gaps import Gap, GapTable, Key
from zmq_datasource.sequences.records import Ahead, Counter, SequenceFindings, Totals
from zmq_datasource.sequences.runs import Run

__all__ = ["SequenceTracker"]


class SequenceTracker:
    """Finds gaps, duplicates and restarts in publishers' sequences, and remembers them.

    Args:
        numbering: How they are counted.
        max_counters, max_gaps: Bounds of what is remembered.

    Attributes:
        connections: How many connections each endpoint has had, where messages are counted by
            endpoint; to be kept up to date by whoever receives, before each call.
        division: How the feed is divided among receivers; set it after ``state.restore``.
    """

    def __init__(self, numbering: Numbering, max_counters: int, max_gaps: int) -> None:
        self.numbering = numbering
        self.totals = Totals()
        self.gaps = GapTable(max_gaps)
        self.connections: dict[bytes, int] = {}
        self.division = ""
        self._max_counters = max_counters
        self._turn = None if numbering.end is None else numbering.end - numbering.start + 1
        self._endpoint = numbering.by.index("endpoint") if "endpoint" in numbering.by else None
        # The number that each counter expects, the one not heard for longest first. None: see _ahead.
        self.expected: dict[Key, int | None] = {}
        self.counters: dict[Key, Counter] = {}
        self._ahead: dict[Key, Ahead] = {}
        # Which connection of its endpoint each was last heard on, if that was in this process.
        self._heard_on: dict[Key, int] = {}
        # What another partition of the log knows better, until it is heard here.
        self._elsewhere: dict[Key, SequenceTracker] = {}

    # Counters that move from one partition of the log to another.

    def look_beside(self, other: SequenceTracker) -> None:
        """Learn which counters another partition knows better; ``take_up`` moves them here one by one.

        A counter that was heard there in the present division stays there. Its namesake, if this partition has heard
        one in the present division, is another counter.

        The open gaps of a counter that is known better there leave this table at once. ``totals`` stay: each partition
        counts what it has noticed itself, so the sums over all partitions are exact, and one partition may have healed
        more than it lost.

        Args:
            other: The tracker of that partition, restored; it is read until all of its counters were taken up.
        """
        for key in other.expected:
            known = self._elsewhere.get(key, self)
            stays_there = other.counters[key].division == self.division
            if key in known.expected:
                namesakes = stays_there and known.counters[key].division == self.division
                if namesakes or other._age(key) <= known._age(key):
                    continue
            elif stays_there or self.totals.forgotten:
                continue  # one that was forgotten here may have been heard here later than there
            self._elsewhere.pop(key, None)
            if not stays_there:
                self._elsewhere[key] = other
            if key in self.expected:
                self.gaps.drop_missing(key)
                self._drop(key)
        while len(self._elsewhere) > self._max_counters:
            del self._elsewhere[next(iter(self._elsewhere))]

    def take_up(self, key: Key) -> None:
        """Go on with a counter where another partition has left it, if one has; call before it is used."""
        other = self._elsewhere.pop(key, None)
        if other is None:
            return
        left = other.counters[key]
        self.counters[key] = replace(left, since=self.gaps.next_serial, moves=left.moves + 1)
        self.expected[key] = other.next_number(key)
        for gap in other.missing(key):
            self.gaps.add(key, gap.epoch, gap.first, gap.last, gap.noticed).settled = gap.settled
        self._touch({key})

    def _age(self, key: Key) -> tuple[int, int, int]:
        """Greater for the partition that had a counter later."""
        counter = self.counters[key]
        return counter.moves, counter.epoch, self._position_expected(key)

    # The live flow.

    def track(self, runs: Iterable[Run], when: Callable[[int], int]) -> SequenceFindings:
        """Track messages in the order in which they came; what one counter tells says nothing of another.

        Args:
            when: From a message's place to when it was received, in microseconds since the epoch.
        """
        findings = SequenceFindings()
        heard = set()
        for run in runs:
            key, first, count = run.key, run.first, run.count
            self.take_up(key)
            for offset in range(count):
                if self.expected.get(key) == first + offset:  # and so it is with all that follow
                    self.expected[key] = first + count
                    break
                place = run.place(offset)
                self._track_one(key, first + offset, place, when(place), findings)
            heard.add(key)
        self._hear(heard)
        self._forget(findings)
        return findings

    def _track_one(self, key: Key, number: int, row: int, when: int, findings: SequenceFindings) -> None:
        if key not in self.expected:
            self._meet(key, number, when, findings)
            return
        expected, counter = self._position_expected(key), self.counters[key]
        position = self._position(counter, expected, number)
        gap = self.gaps.find(key, position) if position < expected else None
        if key in self._ahead and gap is None and self._comes_after_replay(key, position, expected):
            if position >= self._ahead[key].begin:
                self.totals.overlapping += 1
                findings.overlapping.append(row)
            else:  # older than all that the publisher had to replay
                self.totals.late += 1
        elif position == expected:
            self._expect(key, counter, position + 1)
        elif self._begins_anew(key, counter, number, position < expected):
            self._restart(key, counter, number, when, findings)
        elif position > expected:
            self._notice(key, counter, expected, position - 1, when, findings)
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

    def _meet(self, key: Key, number: int, when: int, findings: SequenceFindings) -> None:
        """The first message of a counter."""
        # A forgotten publisher that is heard again is none whose beginning was missed.
        whole = self.numbering.whole and not self.totals.forgotten and number > self.numbering.start
        first = self.numbering.start if whole else number
        self.counters[key] = Counter(first, self.gaps.next_serial)
        self._note_connection(key)
        if whole:
            self._notice(key, self.counters[key], first, number - 1, when, findings)
        self.expected[key] = number + 1

    def _begins_anew(self, key: Key, counter: Counter, number: int, lower: bool) -> bool:
        """Whether a number that is not the expected one is certainly of a publisher that has restarted.

        One connection keeps the order, so a lower number on a new one is.
        """
        if not self.numbering.restarts:
            return False
        new_connection = self._endpoint is not None and not self._is_on_connection(key)
        return number == self.numbering.start or (lower and new_connection)

    def _restart(
        self, key: Key, counter: Counter, number: int, when: int, findings: SequenceFindings
    ) -> None:
        self._ahead.pop(key, None)  # what was replayed was of the publisher before it
        self.totals.restarts += 1
        findings.restarts.append(key)
        findings.abandoned += self.gaps.missing(key)
        self.gaps.end_epoch(key)
        counter.epoch += 1
        counter.since = self.gaps.next_serial
        counter.sample = None
        counter.floor = min(number, self.numbering.start)
        self._note_connection(key)
        if number > self.numbering.start:
            self._notice(key, counter, self.numbering.start, number - 1, when, findings)
        self._expect(key, counter, number + 1)

    def announce(self, key: Key, last: int, when: int, *, end: bool = False) -> SequenceFindings:
        """A publisher says that ``last`` was the number of its last message so far; or for ever."""
        findings = SequenceFindings()
        self.take_up(key)
        if key not in self.expected:
            self._meet(key, last + 1, when, findings)
            self.expected[key] = last + 1
        else:
            expected, counter = self._position_expected(key), self.counters[key]
            position = self._position(counter, expected, last)
            if position >= expected:
                self._ahead.pop(key, None)
                self._notice(key, counter, expected, position, when, findings)
                self._expect(key, counter, position + 1)
        self.counters[key].ended = end
        self._hear({key})
        self._forget(findings)
        return findings

    # Replays.

    def begin(self, key: Key, number: int) -> None:
        """Expect ``number`` first, of a counter that was never heard."""
        if key not in self.expected:
            self.counters[key] = Counter(number, self.gaps.next_serial)
            self.expected[key] = number
            self._touch({key})

    def begin_anew(self, key: Key, when: int, findings: SequenceFindings) -> None:
        """A replay has shown that the publisher has restarted: expect its first number."""
        counter = self.counters[key]
        self._restart(key, counter, self.numbering.start, when, findings)
        self._expect(key, counter, self.numbering.start)
        self._touch({key})

    def is_certain(self, key: Key) -> bool:
        """Whether its endpoint's present connection is to the publisher that was last heard."""
        return key not in self.counters or self._is_on_connection(key)

    def make_certain(self, key: Key) -> None:
        """A replay has shown that it is the publisher that was last heard."""
        self._note_connection(key)

    def track_replayed(
        self, key: Key, number: int, when: int, onwards: bool, findings: SequenceFindings
    ) -> bool:
        """Track a message that was asked for again.

        Args:
            onwards: Whether the replay may go ahead of the live flow, and not only fill gaps.

        Returns:
            Whether it was missing; if not, it was seen or the live flow will bring it.
        """
        self.take_up(key)
        if key not in self.expected:
            if not onwards:
                return False
            self.begin(key, number)
        expected, counter = self._position_expected(key), self.counters[key]
        position = self._position(counter, expected, number)
        gap = self.gaps.find(key, position) if position < expected else None
        if gap is not None:
            self._heal(gap, position, when)
        elif onwards and position >= expected:
            if position > expected:
                self._notice(key, counter, expected, position - 1, when, findings)
            connection, ahead = self._connection(key), self._ahead.get(key)
            begin = position if ahead is None else ahead.begin
            heard = ahead.heard if ahead is not None and ahead.connection == connection else None
            self._expect(key, counter, position + 1)
            self._ahead[key] = Ahead(number + 1, begin, connection, heard)
            self.expected[key] = None
            self._note_connection(key)
        else:
            return False
        self._touch({key})
        self._forget(findings)
        return True

    def missing(self, key: Key) -> list[Gap]:
        """The open gaps of a counter's present epoch."""
        return self.gaps.missing(key)

    def next_number(self, key: Key) -> int | None:
        """The number that a counter expects; None if it was never heard."""
        if key not in self.expected:
            return None
        expected = self.expected[key]
        return self._ahead[key].expected if expected is None else expected

    def next_numbers(self) -> list[int]:
        """The same of all counters, in the order of ``expected``."""
        numbers = list(self.expected.values())
        if self._ahead:
            numbers = list(map(self.next_number, self.expected))
        return cast("list[int]", numbers)  # without a replay ahead there is no None

    def _comes_after_replay(self, key: Key, position: int, expected: int) -> bool:
        """Whether the live flow, in its order, is still behind what a replay has brought.

        If not, it has caught up, or is another flow: a new connection, or numbers that go back, or
        that were tracked before the replay.
        """
        ahead = self._ahead[key]
        if (
            position < expected
            and ahead.connection == self._connection(key)
            and (ahead.heard is None or position > ahead.heard)
            and (position >= ahead.begin or position < self.counters[key].floor)
        ):
            ahead.heard = position
            return True
        self.expected[key] = ahead.expected
        del self._ahead[key]
        return False

    def _connection(self, key: Key) -> int:
        if self._endpoint is None:
            return 0
        return self.connections.get(key if isinstance(key, bytes) else key[self._endpoint], 0)

    def _note_connection(self, key: Key) -> None:
        if self._endpoint is not None:
            self._heard_on[key] = self._connection(key)

    def _is_on_connection(self, key: Key) -> bool:
        """Whether a counter was heard on its endpoint's present connection."""
        return self._heard_on.get(key) == self._connection(key)

    # Positions.

    def number(self, position: int) -> int:
        """The number at a position."""
        if self._turn is None:
            return position
        return (position - self.numbering.start) % self._turn + self.numbering.start

    def _position_expected(self, key: Key) -> int:
        expected = self.next_number(key)
        assert expected is not None, key
        return expected + self.counters[key].turn

    def _position(self, counter: Counter, expected: int, number: int) -> int:
        if self._turn is None:
            return number
        ahead = (number + counter.turn - expected) % self._turn
        return expected + (ahead if ahead <= self._turn // 2 else ahead - self._turn)

    def _expect(self, key: Key, counter: Counter, position: int) -> None:
        number = self.number(position - 1) + 1  # one past the last number of a turn is fine, and never comes
        counter.turn = position - number
        self.expected[key] = number

    # Gaps and memory.

    def _notice(
        self, key: Key, counter: Counter, first: int, last: int, when: int, findings: SequenceFindings
    ) -> None:
        gap = self.gaps.add(key, counter.epoch, first, last, when)
        self.totals.lost += gap.size
        findings.gaps.append(gap)

    def _heal(self, gap: Gap, position: int, when: int) -> None:
        self.gaps.fill(gap, position, when)
        self.totals.lost -= 1
        self.totals.healed += 1

    def _hear(self, keys: set[Key]) -> None:
        self._touch(keys)
        for key in keys:
            self._note_connection(key)

    def _touch(self, keys: set[Key]) -> None:
        expected = self.expected
        for key in keys:
            self.counters[key].division = self.division
            expected[key] = expected.pop(key)

    def _forget(self, findings: SequenceFindings) -> None:
        for gap in self.gaps.shrink():
            findings.abandoned.append(gap)
            counter = self.counters[gap.key]
            counter.floor = max(counter.floor, gap.last + 1)
            self._touch({gap.key})
        while len(self.expected) > self._max_counters:
            key = next(iter(self.expected))
            self.totals.forgotten += not self.counters[key].ended
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self.expected[key], self.counters[key]
        self._ahead.pop(key, None)
        self._heard_on.pop(key, None)
        self.gaps.end_epoch(key)
