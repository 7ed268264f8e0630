"""Receiving for a while, and counting: sizes, rate, topics, framing, gaps."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import Counter
from collections.abc import Sequence

from zmq_datasource.host.printable import printable
from zmq_datasource.messages.framing import name_of
from zmq_datasource.messages.raw import RawMessage
from zmq_datasource.workbench.doctor.facts import Numbers, Traffic
from zmq_datasource.workbench.doctor.guess import SAMPLE, Guess, guess
from zmq_datasource.workbench.doctor.link import ROUND, Link
from zmq_datasource.workbench.doctor.watcher import SequenceWatcher, parse_framing

__all__ = ["Watching", "size_of"]

_BUCKET_SECONDS = 0.1
_MOST_SIZES = 1_000_000
_MOST_TOPICS, _SHOWN_TOPICS, _TOPIC_CHARACTERS = 10_000, 10, 60
_SAMPLE_BYTES = 64 << 20
# Behind in nine of ten looks: the doctor is the one who is slow.
_SATURATED = 0.9
# A frame's header: flags and length in one byte each up to 255 bytes, else in nine.
_SHORT, _LONG = 2, 9


def size_of(messages: Sequence[RawMessage]) -> int:
    """Bytes of all frames."""
    return sum(sum(map(len, each)) if isinstance(each, list) else len(each) for each in messages)


class _Tally:
    """Messages as they come, counted."""

    def __init__(self) -> None:
        self.messages = self.wire_bytes = self.largest_frame = 0
        self._bytes = self._looks = self._behind = 0
        self._began: float | None = None
        self._sizes = array("q")
        self._topics: Counter[bytes] = Counter()
        self._frames: Counter[int] = Counter()
        self._buckets: Counter[int] = Counter()

    def add(self, messages: Sequence[RawMessage]) -> None:
        self._looks += 1
        self._behind += len(messages) == ROUND
        if not messages:
            return
        now = time.monotonic()
        if self._began is None:
            self._began = now
        self.messages += len(messages)
        self._buckets[int((now - self._began) / _BUCKET_SECONDS)] += len(messages)
        for message in messages:
            frames = message if isinstance(message, list) else [message]
            sizes = [len(frame) for frame in frames]
            size = sum(sizes)
            self._bytes += size
            self.wire_bytes += size + sum(_SHORT if each < 256 else _LONG for each in sizes)
            self.largest_frame = max(self.largest_frame, *sizes)
            self._frames[len(frames)] += 1
            if len(self._sizes) < _MOST_SIZES:
                self._sizes.append(size)
            if len(frames) > 1 and (frames[0] in self._topics or len(self._topics) < _MOST_TOPICS):
                self._topics[frames[0]] += 1

    def traffic(self) -> Traffic | None:
        """What came so far; None if nothing did."""
        if self._began is None:
            return None
        seconds = max(_BUCKET_SECONDS, time.monotonic() - self._began)
        sizes = sorted(self._sizes)
        shown = self._topics.most_common(_SHOWN_TOPICS)
        return Traffic(
            messages=self.messages,
            bytes=self._bytes,
            seconds=round(seconds, 3),
            rate=round(self.messages / seconds, 1),
            peak=round(max(self._buckets.values()) / _BUCKET_SECONDS, 1),
            frames=dict(sorted(self._frames.items())),
            size_min=sizes[0],
            size_median=int(statistics.median_low(sizes)),
            size_p99=sizes[len(sizes) * 99 // 100],
            size_max=sizes[-1],
            largest_frame=self.largest_frame,
            topics=[(_shown(topic), count) for topic, count in shown],
            topics_more=len(self._topics) - len(shown),
            saturated=self._looks > 10 and self._behind >= _SATURATED * self._looks,
        )


class Watching:
    """What comes over a link, counted.

    Args:
        given: What the user set; with ``framing`` in it nothing is guessed.

    Attributes:
        framing: Of the messages, and what else to set so that they are read as here.
        watcher: Of their numbers, from when the framing is known.
        traffic: What came until ``end``; None if nothing did.
        published_rate: Messages a second that were sent until then, the missing ones included.
    """

    def __init__(self, link: Link, given: dict[str, str]) -> None:
        self._link = link
        self._given = given
        self._tally = _Tally()
        self._sample: list[RawMessage] = []
        self._sample_bytes = 0
        self._guesses = not any(name.lower() == "framing" for name in given)
        self.framing = Guess(str(link.options.framing), {})
        self.watcher = None if self._guesses else SequenceWatcher(link.options)
        self.traffic: Traffic | None = None
        self.published_rate = 0.0

    @property
    def messages(self) -> int:
        return self._tally.messages

    @property
    def largest_frame(self) -> int:
        """Bytes of the largest frame."""
        return self._tally.largest_frame

    @property
    def framing_options(self) -> dict[str, str]:
        return {"framing": self.framing.framing, **self.framing.options}

    @property
    def wire_bytes(self) -> float:
        """Bytes of one message on the wire, on average."""
        return self._tally.wire_bytes / self.messages if self.messages else 1.0

    @property
    def lost(self) -> int:
        """Messages that are missing so far, by their numbers."""
        return 0 if self.watcher is None else self.watcher.lost_and_gaps[0]

    def end(self) -> None:
        """Watching ends; what is taken from now on is followed, but no traffic as it is."""
        self._decide()
        self.traffic = self._tally.traffic()
        if self.traffic is not None:
            self.published_rate = (self.messages + self.lost) / self.traffic.seconds

    def take(self, most: int = ROUND) -> int:
        """Take in what is there, up to ``most`` messages; return how many it was."""
        messages = self._link.receive(most)
        self._tally.add(messages)
        if self.watcher is not None:
            self.watcher.follow(messages)
        else:
            self._sample += messages
            self._sample_bytes += size_of(messages)
            if len(self._sample) >= SAMPLE or self._sample_bytes >= _SAMPLE_BYTES:
                self._decide()
        return len(messages)

    def _decide(self) -> None:
        """Decide on the framing with what has come; everything so far is followed then."""
        if self.watcher is None:
            self.framing = guess(self._sample)
            self.watcher = SequenceWatcher(parse_framing({**self._given, **self.framing_options}))
            self.watcher.follow(self._sample)
            self._sample = []

    @property
    def numbers(self) -> Numbers:
        """What the numbers tell so far."""
        found = Numbers(framing=self.framing.framing, options=self.framing.options, guessed=self._guesses)
        return found if self.watcher is None else self.watcher.tell(found)


def _shown(topic: bytes) -> str:
    return printable(name_of(topic), _TOPIC_CHARACTERS)
