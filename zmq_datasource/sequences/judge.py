"""The rules of ``sequences``, applied to many messages a call.

A *position* is a number that never wraps: a counter's number plus its whole turns so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from zmq_datasource.options import Numbering
from zmq_datasource.sequences.gaps import Gap, GapTable, Key

__all__ = ["Counter", "Judge", "Key", "Totals", "Verdict"]


@dataclass
class Totals:
    """What was judged since the log began.

    Attributes:
        lost: Missing messages: gaps as far as they were not filled. What is forgotten stays in it.
        late: Messages that came after a higher number, and were kept.
        healed: Those of them that filled a gap.
        duplicates: Messages whose number was seen.
        restarts: Publishers that started anew.
        forgotten: Counters that were forgotten because there were too many.
    """

    lost: int = 0
    late: int = 0
    healed: int = 0
    duplicates: int = 0
    restarts: int = 0
    forgotten: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(slots=True)
class Counter:
    """What is known of one counter beside the number it expects.

    Attributes:
        epoch: How often it has started anew.
        turn: What to add to a number for its position.
        floor: The first position of which it is known whether it came.
        since: The serial of the first row that the table of gaps can have of its present epoch.
        topic: The topic last heard, where a replay may not say it.
    """

    floor: int
    since: int
    epoch: int = 0
    turn: int = 0
    topic: bytes | None = None


@dataclass(slots=True)
class _Ahead:
    """A replay was ahead of the live flow, which will bring the same messages once more.

    Attributes:
        expected: The number that follows the replayed ones.
        overlap: The next position that the live flow may bring again.
    """

    expected: int
    overlap: int


@dataclass
class Verdict:
    """About the messages of one call, by their place in it.

    Attributes:
        duplicates: Seen before.
        overlapping: Seen in a replay a moment ago; not the publisher's doing, so not counted.
        gaps: What is missing, newly.
        restarts: Counters that started anew.
        abandoned: Gaps that were known and cannot be filled any more, because the counter started
            anew or the table of gaps is full.
    """

    duplicates: list[int] = field(default_factory=list)
    overlapping: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    restarts: list[Key] = field(default_factory=list)
    abandoned: list[Gap] = field(default_factory=list)


class Judge:
    """Judges numbers, and remembers.

    Args:
        numbering: How they are counted.
        max_counters, max_gaps: Bounds of what is remembered.
    """

    def __init__(self, numbering: Numbering, max_counters: int, max_gaps: int) -> None:
        self.numbering = numbering
        self.totals = Totals()
        self.gaps = GapTable(max_gaps)
        self._max_counters = max_counters
        self._turn = None if numbering.end is None else numbering.end - numbering.start + 1
        # The number that each counter expects, the one not heard for longest first. None: see _ahead.
        self.expected: dict[Key, int | None] = {}
        self.counters: dict[Key, Counter] = {}
        self._ahead: dict[Key, _Ahead] = {}
        self.changed: dict[Key, None] = {}  # in the order of the last change
        self.removed: set[Key] = set()

    # The live flow.

    def judge(self, keys: Sequence[Key], numbers: Sequence[int], when: Callable[[int], int]) -> Verdict:
        """Judge messages in the order in which they came.

        Args:
            keys: For each message, which counter it belongs to.
            when: From a message's place to when it was received, in microseconds since the epoch.
        """
        verdict = Verdict()
        expected = self.expected
        if keys and keys.count(keys[0]) == len(keys) and self._runs_on(keys[0], numbers):
            expected[keys[0]] = numbers[-1] + 1
            self._touch({keys[0]})
            return verdict
        get = expected.get
        for row, (key, number) in enumerate(zip(keys, numbers, strict=True)):
            # The loop that every message passes: nothing but what the usual case needs.
            if get(key) == number:
                expected[key] = number + 1
            else:
                self._judge_one(key, number, row, when(row), verdict)
        self._touch(set(keys))
        self._forget(verdict)
        return verdict

    def _runs_on(self, key: Key, numbers: Sequence[int]) -> bool:
        first = numbers[0]
        return (
            self.expected.get(key) == first
            and numbers[-1] - first == len(numbers) - 1
            and list(numbers) == list(range(first, first + len(numbers)))
        )

    def _judge_one(self, key: Key, number: int, row: int, when: int, verdict: Verdict) -> None:
        if key not in self.expected:
            self._meet(key, number)
            self.expected[key] = number + 1
            return
        expected, counter = self._position_expected(key), self.counters[key]
        position = self._position(counter, expected, number)
        if self._overlaps(key, position, expected):
            verdict.overlapping.append(row)
            return
        gap = self.gaps.find(key, position) if position < expected else None
        if gap is not None:
            self._heal(gap, position, when)
        elif position == expected:
            self._expect(key, counter, position + 1)
        elif self._restarts(position, expected, number):
            self._restart(key, counter, number, when, verdict)
        elif position > expected:
            self._notice(key, counter, expected, position - 1, when, verdict)
            self._expect(key, counter, position + 1)
        elif position < counter.floor:
            self.totals.late += 1
        else:
            self.totals.duplicates += 1
            verdict.duplicates.append(row)

    def _meet(self, key: Key, floor: int) -> None:
        self.counters[key] = Counter(floor, self.gaps.next_serial)

    def _restarts(self, position: int, expected: int, number: int) -> bool:
        numbering = self.numbering
        return numbering.restarts and (number == numbering.start or position < expected - numbering.window)

    def _restart(self, key: Key, counter: Counter, number: int, when: int, verdict: Verdict) -> None:
        self.totals.restarts += 1
        verdict.restarts.append(key)
        verdict.abandoned += self.gaps.missing(key)
        self.gaps.end_epoch(key)
        counter.epoch += 1
        counter.since = self.gaps.next_serial
        counter.turn = 0
        counter.floor = min(number, self.numbering.start)
        if number > self.numbering.start:
            self._notice(key, counter, self.numbering.start, number - 1, when, verdict)
        self._expect(key, counter, number + 1)

    def announce(self, key: Key, last: int, when: int) -> Verdict:
        """A publisher says that ``last`` was the number of its last message so far."""
        verdict = Verdict()
        if key not in self.expected:
            self._meet(key, last + 1)
            self.expected[key] = last + 1
        else:
            expected, counter = self._position_expected(key), self.counters[key]
            position = self._position(counter, expected, last)
            if position >= expected:
                self._ahead.pop(key, None)
                self._notice(key, counter, expected, position, when, verdict)
                self._expect(key, counter, position + 1)
        self._touch({key})
        self._forget(verdict)
        return verdict

    # Replays.

    def begin(self, key: Key, number: int) -> None:
        """Expect ``number`` first, of a counter that was never heard."""
        if key not in self.expected:
            self._meet(key, number)
            self.expected[key] = number
            self._touch({key})

    def judge_replayed(self, key: Key, number: int, when: int, first: bool, verdict: Verdict) -> bool:
        """Judge a message that was asked for again.

        Args:
            first: Whether the live flow waits for this replay, which may then go ahead of it.

        Returns:
            Whether it was missing; if not, it was seen or the live flow will bring it.
        """
        if key not in self.expected:
            self._meet(key, number)
            self.expected[key] = None
            self._ahead[key] = _Ahead(number + 1, number)
            self._touch({key})
            return True
        expected, counter = self._position_expected(key), self.counters[key]
        position = self._position(counter, expected, number)
        gap = self.gaps.find(key, position) if position < expected else None
        if gap is not None:
            self._heal(gap, position, when)
        elif first and position >= expected:
            if position > expected:
                self._notice(key, counter, expected, position - 1, when, verdict)
            overlap = self._ahead[key].overlap if key in self._ahead else expected
            self._expect(key, counter, position + 1)
            self._ahead[key] = _Ahead(number + 1, overlap)
            self.expected[key] = None
        else:
            return False
        self._touch({key})
        self._forget(verdict)
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

    def _overlaps(self, key: Key, position: int, expected: int) -> bool:
        """Whether the live flow brings what a replay has brought already."""
        ahead = self._ahead.get(key)
        if ahead is None:
            return False
        overlaps = ahead.overlap <= position < expected and self.gaps.find(key, position) is None
        if overlaps:
            ahead.overlap = position + 1
        elif position < expected and self.gaps.find(key, position) is not None:
            return False  # the replay missed it, the live flow has it
        if not overlaps or ahead.overlap == expected:
            self.expected[key] = ahead.expected
            del self._ahead[key]
        return overlaps

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

    def _notice(self, key: Key, counter: Counter, first: int, last: int, when: int, verdict: Verdict) -> None:
        gap = self.gaps.add(key, counter.epoch, first, last, when)
        self.totals.lost += gap.size
        verdict.gaps.append(gap)

    def _heal(self, gap: Gap, position: int, when: int) -> None:
        self.gaps.fill(gap, position, when)
        self.totals.lost -= 1
        self.totals.late += 1
        self.totals.healed += 1

    def _touch(self, keys: set[Key]) -> None:
        self.removed -= keys
        expected, changed = self.expected, self.changed
        for key in keys:
            expected[key] = expected.pop(key)
            changed.pop(key, None)
            changed[key] = None

    def _forget(self, verdict: Verdict) -> None:
        for gap in self.gaps.shrink():
            verdict.abandoned.append(gap)
            counter = self.counters[gap.key]
            counter.floor = max(counter.floor, gap.last + 1)
            self._touch({gap.key})
        while len(self.expected) > self._max_counters:
            key = next(iter(self.expected))
            del self.expected[key], self.counters[key]
            self._ahead.pop(key, None)
            self.gaps.end_epoch(key)
            self.changed.pop(key, None)
            self.removed.add(key)
            self.totals.forgotten += 1
