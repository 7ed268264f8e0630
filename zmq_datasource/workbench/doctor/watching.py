"""Receiving for a while, and counting: sizes, rate, topics, framing, gaps."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import Counter
from collections.abc import Sequence

import zmq

from zmq_datasource.errors import OptionError
from zmq_datasource.messages.framing import RawMessage, make_framing, name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.parser import parse
from zmq_datasource.sequences import Judge
from zmq_datasource.workbench.doctor.facts import Numbers, Traffic
from zmq_datasource.workbench.doctor.guess import SAMPLE, guess, keys_of
from zmq_datasource.workbench.doctor.link import Link

__all__ = ["ROUND", "Follower", "Watching", "receive_round"]

ROUND = 512
_BUCKET_SECONDS = 0.1
_MOST_SIZES = 1_000_000
_MOST_TOPICS, _SHOWN_TOPICS, _TOPIC_CHARACTERS = 10_000, 10, 60
_SAMPLE_BYTES = 64 << 20
_COUNTERS, _GAPS = 100_000, 100_000
# Behind in nine of ten looks: the doctor is the one who is slow.
_SATURATED = 0.9
# A frame's header: flags and length in one byte each up to 255 bytes, else in nine.
_SHORT, _LONG = 2, 9


def receive_round(sock: zmq.Socket[bytes], most: int = ROUND) -> list[RawMessage]:
    """What is there, without waiting, up to ``most`` messages."""
    messages: list[RawMessage] = []
    try:
        while len(messages) < most:
            frames = sock.recv_multipart(zmq.NOBLOCK)
            messages.append(frames[0] if len(frames) == 1 else frames)
    except zmq.Again:
        pass
    return messages


class Follower:
    """Follows the numbers of one endpoint, once its framing is known.

    Args:
        options: Of the source, its framing included.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._framing = make_framing(options)
        numbering = options.numbering
        self.by: Sequence[str] = () if numbering is None else numbering.by
        self._start = 0 if numbering is None else numbering.start
        # What was sent before the first message seen is told apart from what was lost.
        self.judge = None if numbering is None else Judge(numbering._replace(whole=False), _COUNTERS, _GAPS)
        self.first: dict[tuple[bytes, ...], int] = {}
        self.last: dict[tuple[bytes, ...], int] = {}
        self.malformed = 0

    def follow(self, messages: Sequence[RawMessage]) -> list[tuple[tuple[bytes, ...], int]]:
        """Judge messages in their order; return their counters and numbers."""
        if self._framing is None or not messages:
            return []
        fields = self._framing.decode(messages)
        self.malformed += len(fields.malformed)
        if self.judge is None or not fields.sequences:
            return []
        keys = keys_of(self.by, fields)
        self.judge.judge(keys, fields.sequences, lambda _: 0)
        numbered = list(zip(keys, fields.sequences, strict=True))
        for key, number in numbered:
            self.first.setdefault(key, number)
            self.last[key] = number
        return numbered

    @property
    def missed_first(self) -> int:
        """Messages of the beginning that were sent before the first that came."""
        return sum(max(0, number - self._start) for number in self.first.values())

    @property
    def lost_and_gaps(self) -> tuple[int, int]:
        """Messages that are missing, and in how many gaps."""
        if self.judge is None:
            return 0, 0
        return self.judge.totals.lost, sum(1 for gap in self.judge.gaps if gap.healed is None)

    def has_of(self, other: Follower) -> int:
        """How many of the messages that the other misses have come here."""
        if self.judge is None or other.judge is None:
            return 0
        found = 0
        for gap in other.judge.gaps:
            key = gap.key
            if gap.healed is not None or not isinstance(key, tuple) or key not in self.first:
                continue
            first, last = max(gap.first, self.first[key]), min(gap.last, self.last[key])
            missing_here = sum(
                max(0, min(last, own.last) - max(first, own.first) + 1) for own in self.judge.missing(key)
            )
            found += max(0, last - first + 1 - missing_here)
        return found


class Watching:
    """What comes over a link, counted.

    Args:
        given: What the user set; with ``framing`` in it nothing is guessed.
    """

    def __init__(self, link: Link, given: dict[str, str]) -> None:
        self._link = link
        self._given = given
        self._sizes = array("q")
        self._topics: Counter[bytes] = Counter()
        self._frames: Counter[int] = Counter()
        self._buckets: Counter[int] = Counter()
        self._messages = self._bytes = self._wire_bytes = self._largest_frame = 0
        self._began: float | None = None
        self._looks = self._behind = 0
        self._traffic: Traffic | None = None
        self._published_rate = 0.0
        self._sample: list[RawMessage] = []
        self._sample_bytes = 0
        self._guessed = not any(name.lower() == "framing" for name in given)
        self._framing, self._extra = str(link.options.framing), dict[str, str]()
        self.follower = None if self._guessed else Follower(link.options)

    @property
    def messages(self) -> int:
        return self._messages

    @property
    def largest_frame(self) -> int:
        """Bytes."""
        return self._largest_frame

    @property
    def framing_options(self) -> dict[str, str]:
        """What to set so that messages are read as here."""
        return {"framing": self._framing, **self._extra}

    @property
    def wire_bytes(self) -> float:
        """Of one message on the wire, on average."""
        return self._wire_bytes / self._messages if self._messages else 1.0

    @property
    def lost(self) -> int:
        """Messages that are missing so far, by their numbers."""
        return 0 if self.follower is None else self.follower.lost_and_gaps[0]

    @property
    def published_rate(self) -> float:
        """Messages a second that were sent, the missing ones included; as of the end of watching."""
        return self._published_rate

    def end(self) -> None:
        """Watching ends; what is taken from now on is followed, but no traffic as it is."""
        self.decide()
        self._traffic = self._summary()
        if self._traffic is not None:
            self._published_rate = (self._messages + self.lost) / self._traffic.seconds

    def take(self, most: int = ROUND) -> int:
        """Take in what is there, up to ``most`` messages; return how many it was."""
        messages = receive_round(self._link.socket, most)
        self._looks += 1
        self._behind += len(messages) == ROUND
        if messages:
            self._count(messages)
            if self.follower is not None:
                self.follower.follow(messages)
            else:
                self._collect(messages)
        return len(messages)

    def _count(self, messages: Sequence[RawMessage]) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self._messages += len(messages)
        self._buckets[int((now - self._began) / _BUCKET_SECONDS)] += len(messages)
        for message in messages:
            frames = message if isinstance(message, list) else [message]
            sizes = [len(frame) for frame in frames]
            size = sum(sizes)
            self._bytes += size
            self._wire_bytes += size + sum(_SHORT if each < 256 else _LONG for each in sizes)
            self._largest_frame = max(self._largest_frame, *sizes)
            self._frames[len(frames)] += 1
            if len(self._sizes) < _MOST_SIZES:
                self._sizes.append(size)
            if len(frames) > 1 and (frames[0] in self._topics or len(self._topics) < _MOST_TOPICS):
                self._topics[frames[0]] += 1

    def _collect(self, messages: Sequence[RawMessage]) -> None:
        self._sample += messages
        self._sample_bytes += sum(
            sum(map(len, message)) if isinstance(message, list) else len(message) for message in messages
        )
        if len(self._sample) >= SAMPLE or self._sample_bytes >= _SAMPLE_BYTES:
            self.decide()

    def decide(self) -> None:
        """Decide on the framing with what has come; everything so far is followed then."""
        if self.follower is not None:
            return
        found = guess(self._sample)
        self._framing, self._extra = found.framing, found.options
        options = {**self._given, **self.framing_options}
        try:
            parsed = parse(ReadOptions, options)
        except OptionError:  # a filter leaves some of what the publisher counts over
            parsed = parse(ReadOptions, {**options, "sequenceBy": "none"})
        self.follower = Follower(parsed)
        self.follower.follow(self._sample)
        self._sample = []

    @property
    def traffic(self) -> Traffic | None:
        """What came until ``end``; None if nothing did."""
        return self._traffic

    def _summary(self) -> Traffic | None:
        if self._began is None:
            return None
        seconds = max(_BUCKET_SECONDS, time.monotonic() - self._began)
        sizes = sorted(self._sizes)
        shown = self._topics.most_common(_SHOWN_TOPICS)
        return Traffic(
            messages=self._messages,
            bytes=self._bytes,
            seconds=round(seconds, 3),
            rate=round(self._messages / seconds, 1),
            peak=round(max(self._buckets.values()) / _BUCKET_SECONDS, 1),
            frames=dict(sorted(self._frames.items())),
            size_min=sizes[0],
            size_median=int(statistics.median_low(sizes)),
            size_p99=sizes[len(sizes) * 99 // 100],
            size_max=sizes[-1],
            largest_frame=self._largest_frame,
            topics=[(_shown(topic), count) for topic, count in shown],
            topics_more=len(self._topics) - len(shown),
            saturated=self._looks > 10 and self._behind >= _SATURATED * self._looks,
        )

    @property
    def numbers(self) -> Numbers:
        """What the numbers tell so far."""
        follower = self.follower
        judge = None if follower is None else follower.judge
        shared = {"framing": self._framing, "options": self._extra, "guessed": self._guessed}
        if follower is None or judge is None:
            return Numbers(**shared, malformed=0 if follower is None else follower.malformed)  # type: ignore[arg-type]
        totals = judge.totals
        lost, gaps = follower.lost_and_gaps
        return Numbers(
            **shared,  # type: ignore[arg-type]
            judged=bool(follower.last),
            counters=len(follower.last),
            missed_first=follower.missed_first,
            lost=lost,
            gaps=gaps,
            duplicates=totals.duplicates,
            late=totals.late,
            restarts=totals.restarts,
            malformed=follower.malformed,
        )


def _shown(topic: bytes) -> str:
    text = name_of(topic)
    return text if len(text) <= _TOPIC_CHARACTERS else f"{text[:_TOPIC_CHARACTERS]}…"
