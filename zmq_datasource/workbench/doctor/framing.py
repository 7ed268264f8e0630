"""Guesses which framing a feed has, and tracks its numbers, with the decoders and the tracker of the source.

A framing is possible if nearly all messages fit it. If it numbers messages, the numbers of each counter must also go up
in small steps, many of them by one. If no framing of the package is possible, the search goes on with a number at the
beginning of a frame, and then with one in JSON text (``framing=custom``). Of the possible framings, the guess is the
one with the largest share of steps by exactly one. This tells a counter for each topic from one for the whole feed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import OptionError
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.sequences import Gap, Key, SequenceTracker
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.workbench.doctor.facts import Numbers

__all__ = ["SAMPLE", "Numbered", "guess", "options_of", "per_topic"]

# A guess reads so many messages; fewer than _LEAST show nothing.
SAMPLE = 2000
_LEAST = 5
# So many messages are read first, to see whether the frames fit at all.
_FIRST = 32
_FITTING = 0.9
# Of the steps from one number to the next, at least a share of _UPWARDS must go up by less than _SMALL, and a share of
# _BY_ONE by exactly one.
_UPWARDS, _SMALL, _BY_ONE = 0.9, 100_000, 0.2
# A place that no framing of the package names needs more evidence: this share of its steps must be by one.
_SURELY = 0.9
# And its numbers must not be larger than this: a counter of 4 bytes with 4 other bytes beside it, read as a number of 8
# bytes, may go up by one, too.
_LARGEST = 2**48
_PRESETS = ("sequenced", "vllm", "bitcoin", "jupyter")
# A number in JSON is a time, and not a counter, if it is within a day of now in one of these units.
_CLOCKS, _CLOCK_SECONDS = (1, 10**3, 10**6, 10**9), 86_400
_MOST_PATHS, _MOST_DEPTH, _MOST_JSON_BYTES = 20, 4, 64 << 10
_COUNTERS, _GAPS = 100_000, 100_000


class Numbered:
    """The messages of one endpoint, read and tracked by the source's own intake.

    Args:
        options: The source's options, with the framing.
        endpoint: The endpoint, as the source names it.
        by_place: Whether ``noticed`` of a gap is the place of the message that showed the gap: how many messages came
            before it. If false, all gaps of a call of ``follow`` have the place of its first message.

    Attributes:
        messages: How many messages were followed.
        compared: How many numbers came twice in one call of ``follow``.
        unequal: How many of these numbers had different messages.
        copies: How many messages equal an earlier message with the same number.
        by: What has a counter of its own, as in ``sequenceBy``; empty without numbers.
        tracker: Tracks the counters; None without numbers. Numbers below the first one of a counter that came are no
            gap: only the publisher knows whether this subscriber had joined before it sent them.
    """

    def __init__(self, options: ReadOptions, endpoint: str = "", by_place: bool = False) -> None:
        self._endpoint, self._by_place = endpoint, by_place
        self._counted = SourceCounters()
        self._intake = Intake(options, self._counted)
        numbering = options.numbering
        self.by: tuple[str, ...] = () if numbering is None else numbering.by
        self.tracker: SequenceTracker | None = None
        if numbering is not None:
            self.tracker = SequenceTracker(numbering._replace(whole=False), _COUNTERS, _GAPS)
        self._intake.tracker = self.tracker
        self.messages = 0
        self.compared = self.unequal = self.copies = 0

    @property
    def malformed(self) -> int:
        """How many messages do not fit the framing."""
        return self._counted.malformed

    def follow(self, raw: RawMessages, connection: int = 0) -> None:
        """Track messages in their order.

        Args:
            connection: How many connections the endpoint has had.
        """
        if not len(raw):
            return
        arrivals = [Arrival(self.messages, len(raw), self._endpoint, connection)]
        if self._by_place:
            arrivals = [Arrival(self.messages + at, 1, self._endpoint, connection) for at in range(len(raw))]
        self.messages += len(raw)
        before = 0 if self.tracker is None else self.tracker.totals.duplicates
        rows, _ = self._intake.read(raw, arrivals)
        if self.tracker is not None and self.tracker.totals.duplicates > before:
            # The first frame is the topic, also where the framing does not say so.
            whole = rows.num_rows == len(raw)
            self._compare_equals(rows, raw.first if whole else rows.column("topic"))

    def _compare_equals(self, rows: pa.RecordBatch, topics: pa.Array) -> None:
        """Count the numbers that came twice, and how many of these have messages that differ in topic or value."""
        # Without Arrow's group_by, which imports pandas: during the import the queue of a fast feed would overflow.
        counter = ["publisher" if name == "endpoint" else name for name in self.by]
        columns = [rows.column(name).to_pylist() for name in (*counter, "sequence")]
        contents = zip(topics.to_pylist(), rows.column("value").to_pylist(), strict=True)
        first: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        equal: dict[tuple[Any, ...], bool] = {}
        for key, content in zip(zip(*columns, strict=True), contents, strict=True):
            if key in first:
                equal[key] = equal.get(key, True) and content == first[key]
                self.copies += content == first[key]
            first.setdefault(key, content)
        self.compared += len(equal)
        self.unequal += len(equal) - sum(equal.values())

    def newest(self) -> dict[tuple[str, ...], int]:
        """The last number of each counter, under the names that the log's rows have for it."""
        if self.tracker is None:
            return {}
        numbers = {_names(key): self.tracker.next_number(key) for key in self.tracker.expected}
        return {name: number - 1 for name, number in numbers.items() if number is not None}

    @property
    def gaps(self) -> list[Gap]:
        """The gaps that are not filled now."""
        return [] if self.tracker is None else [gap for gap in self.tracker.gaps if gap.healed is None]

    @property
    def lost(self) -> int:
        """Messages that are missing now."""
        return 0 if self.tracker is None else self.tracker.totals.lost

    @property
    def counters(self) -> dict[tuple[bytes, ...], Key]:
        """The counters by their names, without the endpoint: it differs between the two sides of a proxy."""
        if self.tracker is None:
            return {}
        return {_without_endpoint(key, self.by): key for key in self.tracker.expected}

    def count_of_missing(self, below: Numbered) -> int:
        """How many messages that are missing in ``below``, the other side of a proxy, have come here."""
        if self.tracker is None:
            return 0
        here = self.counters
        found = 0
        for gap in below.gaps:
            key = here.get(_without_endpoint(gap.key, below.by))
            if key is None:
                continue
            floor, end = self.tracker.counters[key].floor, self.tracker.next_number(key) or 0
            first, last = max(gap.first, floor), min(gap.last, end - 1)
            missing = (
                max(0, min(last, own.last) - max(first, own.first) + 1) for own in self.tracker.missing(key)
            )
            found += max(0, last - first + 1 - sum(missing))
        return found

    def figures(self, options: Mapping[str, str], guessed: bool) -> Numbers:
        """The figures so far; ``options`` are the framing and the options to set with it."""
        others = {name: value for name, value in options.items() if name != "framing"}
        known = {"framing": options["framing"], "options": others, "guessed": guessed}
        if self.tracker is None:
            return Numbers(**known, malformed=self.malformed)  # type: ignore[arg-type]
        start, totals = self.tracker.numbering.start, self.tracker.totals
        return Numbers(
            **known,  # type: ignore[arg-type]
            judged=bool(self.tracker.expected),
            counters=len(self.tracker.expected),
            missed_first=sum(max(0, counter.floor - start) for counter in self.tracker.counters.values()),
            lost=totals.lost,
            gaps=len(self.gaps),
            duplicates=totals.duplicates,
            late=totals.late,
            restarts=totals.restarts,
            malformed=self.malformed,
            compared=self.compared,
            unequal=self.unequal,
        )


def _names(key: Key) -> tuple[str, ...]:
    return tuple(name_of(part) for part in (key if isinstance(key, tuple) else (key,)))


def _without_endpoint(key: Key, by: tuple[str, ...]) -> tuple[bytes, ...]:
    parts = key if isinstance(key, tuple) else (key,)
    return tuple(part for name, part in zip(by, parts, strict=True) if name != "endpoint")


def options_of(given: Mapping[str, str], framing: Mapping[str, str]) -> ReadOptions:
    """The source's options with a framing that was found; without counting if the options refuse its counters."""
    try:
        return parse(ReadOptions, {**given, **framing})
    except OptionError:  # for example, a filter leaves out some of the messages that the publisher counts
        return parse(ReadOptions, {**given, **framing, "sequenceBy": "none"})


def guess(raw: RawMessages, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Guess the option ``framing``, and the options to set with it; ``plain`` if no framing is recognised.

    Args:
        raw: Some messages of the feed, in their order.
        given: The other options of the source. A framing with counters that these options refuse is the last choice.
    """
    if len(raw) < _LEAST:
        return {"framing": "plain"}
    raw = raw.take(pa.arange(0, min(len(raw), SAMPLE)))
    for candidates in (_presets(raw), _places(raw), _json_paths(raw)):
        best, chosen = -1.0, None
        for options in candidates:
            fit = _fit(raw, options)
            if fit is not None and not _allowed({**(given or {}), **options}):
                fit -= 1
            if fit is not None and fit > best:
                best, chosen = fit, options
        if chosen is not None:
            return chosen
    return {"framing": "plain"}


def per_topic(raw: RawMessages, options: Mapping[str, str], by: tuple[str, ...]) -> dict[str, str] | None:
    """What to change in ``options`` so that each topic has its own counter; None if the numbers do not fit that."""
    change = {"sequenceBy": ",".join((*by, "topic"))}
    if options["framing"] == "custom" and "topicFrame" not in options:
        change["topicFrame"] = "0"
    fit = _fit(raw, {**options, **change})
    return change if fit is not None and fit >= _SURELY else None


def _allowed(options: dict[str, str]) -> bool:
    try:
        parse(ReadOptions, {"connect": "tcp://feed:1", **options})
    except OptionError:
        return False
    return True


def _fit(raw: RawMessages, options: Mapping[str, str]) -> float | None:
    """The share of steps by exactly one, or 1.0 without numbers; None if the messages do not have this framing."""
    try:
        parsed = parse(ReadOptions, {"connect": "tcp://feed:1", **options})
    except OptionError:  # for example, it has no topic to count by
        return None
    for part in (raw.take(pa.arange(0, min(len(raw), _FIRST))), raw):
        numbered = Numbered(parsed)
        numbered.follow(part)
        if numbered.malformed > (1 - _FITTING) * len(part):
            return None
    tracker = numbered.tracker
    if tracker is None:
        return 1.0
    steps = len(raw) - numbered.malformed - len(tracker.expected) - numbered.copies
    if steps < _LEAST - 1:
        return None
    totals = tracker.totals
    back = totals.late + totals.duplicates + totals.restarts - numbered.copies
    far = sum(gap.size >= _SMALL for gap in tracker.gaps)
    by_one = 1 - (back + len(tracker.gaps)) / steps
    is_preset = options["framing"] != "custom" and "sequenceBy" not in options
    if not is_preset and max(numbered.newest().values()) > _LARGEST:
        return None
    upwards = 1 - (back + far) / steps
    least = _BY_ONE if is_preset else _SURELY
    return by_one if upwards >= _UPWARDS and by_one >= least else None


def _presets(raw: RawMessages) -> Iterator[dict[str, str]]:
    """Each framing of the package, as it is and with the other way of counting: by topic, or over all topics."""
    for name in _PRESETS:
        yield {"framing": name}
        numbering = parse(ReadOptions, {"connect": "tcp://feed:1", "framing": name}).numbering
        if numbering is not None:
            by = [part for part in numbering.by if part != "topic"]
            yield {
                "framing": name,
                "sequenceBy": ",".join(by if "topic" in numbering.by else [*by, "topic"]),
            }


def _places(raw: RawMessages) -> Iterator[dict[str, str]]:
    """A number at the beginning of a frame, in 8 or 4 bytes of either order."""
    for frame in _frames(raw):
        least = pc.min(pc.binary_length(raw.frame(frame))).as_py()
        for width in (8, 4):
            for endian in ("be", "le"):
                if least >= width:
                    yield from _counted(f"{frame}:0:u{8 * width}{endian}", frame)


def _json_paths(raw: RawMessages) -> Iterator[dict[str, str]]:
    """A whole number at a path of a frame with JSON text, unless it is constant or a time."""
    first = raw.take(pa.arange(0, min(len(raw), _FIRST)))
    for frame in _frames(raw):
        texts = [_numbers_in(content) for content in first.frame(frame).to_pylist()]
        for path in list(texts[0])[:_MOST_PATHS]:
            values = {text.get(path) for text in texts}
            if len(values) > 1 and not _is_time(texts[0][path]):
                yield from _counted(f"{frame}:$.{path}", frame)


def _frames(raw: RawMessages) -> range:
    """The indexes of the frames; none if messages have different numbers of frames."""
    fewest, most = pc.min_max(raw.counts()).as_py().values()
    return range(most if fewest == most else 0)


def _counted(place: str, frame: int) -> Iterator[dict[str, str]]:
    """Numbers at this place, counted over the whole feed, and for each topic."""
    options = {"framing": "custom", "sequenceAt": place}
    yield options
    if frame > 0:
        yield {**options, "topicFrame": "0", "sequenceBy": "endpoint,topic"}


def _numbers_in(content: bytes) -> dict[str, int]:
    """The whole numbers in JSON text, by their paths."""
    if not content.lstrip().startswith(b"{") or len(content) > _MOST_JSON_BYTES:
        return {}
    try:
        return dict(_walk(msgspec.json.decode(content), ()))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict) and len(path) < _MOST_DEPTH:
        for name, inner in value.items():
            if name and "." not in name:
                yield from _walk(inner, (*path, name))
    elif isinstance(value, int) and not isinstance(value, bool) and path:
        yield ".".join(path), value


def _is_time(value: int) -> bool:
    return any(abs(value / unit - time.time()) < _CLOCK_SECONDS for unit in _CLOCKS)
