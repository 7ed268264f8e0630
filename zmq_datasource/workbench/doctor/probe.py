"""Receive from one endpoint as the source does, and count its messages: rate, sizes, topics, numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pyarrow.compute as pc
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import printable
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import SequenceTracker
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.workbench.doctor.counting import SAMPLE, find_counting
from zmq_datasource.workbench.doctor.facts import Handshake, Numbers, Traffic

_TURN_MS = 20
_ROUND_MESSAGES, _ROUND_BYTES = 4096, 4 << 20
# How many topics, counters and gaps are remembered at most.
_MOST_TOPICS, _COUNTERS, _GAPS = 100_000, 100_000, 100_000
_SHOWN_TOPICS, _TOPIC_CHARACTERS, _TOPIC_BYTES = 10, 60, 256


class Probe:
    """Receives from one endpoint; use it in a ``with`` block.

    Args:
        options: The options of a source that reads this endpoint only.

    Attributes:
        messages: The messages received so far.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._endpoint = str((*options.connect, *options.bind)[0])
        self._inbox = Inbox()
        self.messages = 0
        self._first_at = self._last_at = self._longest_pause = 0.0
        self._bytes = self._largest = 0
        self._topics: Counter[bytes] = Counter()
        self._sample: list[list[bytes]] = []
        self._counters = SourceCounters()
        self._intake = Intake(options, self._counters)
        if options.numbering is not None:
            # Numbers before the first one that comes are no loss: the doctor joins a feed that runs.
            self._intake.tracker = SequenceTracker(options.numbering._replace(whole=False), _COUNTERS, _GAPS)

    def __enter__(self) -> Self:
        """Open the socket.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
        """
        spec = SocketSpec.of_source(self._options)
        self._opened = OpenSocket(spec, self._subscribe)
        self._socket, self._watch = self._opened.socket, self._opened.watch
        return self

    def _subscribe(self, sock: zmq.Socket[bytes]) -> None:
        if self._options.socket_type == "SUB":
            for prefix in self._options.topics.prefixes:
                sock.setsockopt(zmq.SUBSCRIBE, prefix)

    def __exit__(self, *error: Any) -> None:
        """Close the socket, and drop the messages that were not taken."""
        self._opened.close(linger=0)

    def receive(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Receive for ``seconds``, or until ``until`` returns true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            if self._socket.poll(_TURN_MS):
                self._take()
            self._socket.getsockopt(zmq.EVENTS)
            self._watch.update()
            self._watch.redial()

    @property
    def has_waiting(self) -> bool:
        """Whether the socket has messages to take."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, or was one."""
        return bool(self._watch.connections or self.messages)

    def _take(self) -> None:
        taken = self._inbox.take([self._socket], _ROUND_MESSAGES, _ROUND_BYTES)
        if taken.empty[0]:
            self._watch.redialer.note_empty()
        if taken.messages:
            now = time.monotonic()
            self._first_at = self._first_at or now
            self._longest_pause = max(self._longest_pause, now - (self._last_at or now))
            self._last_at = now
            self.messages += taken.messages
            self._count(self._inbox.hand_over())

    def _count(self, raw: RawMessages) -> None:
        messages = raw.lists().to_pylist()
        sizes = [sum(map(len, message)) for message in messages]
        self._bytes += sum(sizes)
        self._largest = max(self._largest, *sizes)
        topics = pc.binary_slice(raw.first.drop_null(), 0, _TOPIC_BYTES).value_counts().to_pylist()
        for topic, count in (entry.values() for entry in topics):
            if topic in self._topics or len(self._topics) < _MOST_TOPICS:
                self._topics[topic] += count
        self._sample += messages[: SAMPLE - len(self._sample)]
        if self._options.framing != "plain":
            now = int(time.time() * 1_000_000)
            self._intake.read(raw, [Arrival(now, len(raw), self._endpoint, self._watch.connections)])

    def facts(self) -> dict[str, Any]:
        """The facts of a ``Feed`` that are known so far."""
        return {
            "handshake": self._handshake(),
            "traffic": self.traffic(),
            "numbers": self._numbers(),
            "malformed": self._counters.malformed,
            "counting": find_counting(self._sample) if self._intake.tracker is None else None,
        }

    def _handshake(self) -> Handshake:
        watch = self._watch
        if self.is_up:
            return Handshake(state="succeeded", lost=watch.lost, faults=watch.protocol_errors)
        return Handshake(state="failed" if watch.failures else "none")

    def traffic(self) -> Traffic | None:
        """The figures of the messages received so far; None if there are none."""
        if not self.messages:
            return None
        shown = self._topics.most_common(_SHOWN_TOPICS)
        return Traffic(
            messages=self.messages,
            seconds=max(0.1, time.monotonic() - self._first_at),
            longest_pause=self._longest_pause,
            silence=time.monotonic() - self._last_at,
            size_mean=round(self._bytes / self.messages),
            size_max=self._largest,
            topics=tuple((printable(name_of(topic), _TOPIC_CHARACTERS), count) for topic, count in shown),
        )

    def _numbers(self) -> Numbers | None:
        tracker = self._intake.tracker
        if tracker is None or not tracker.expected:
            return None
        totals = tracker.totals
        return Numbers(lost=totals.lost, repeated=totals.duplicates, late=totals.late)

    @property
    def lost(self) -> int | None:
        """The numbers that are missing so far; None without numbers."""
        numbers = self._numbers()
        return None if numbers is None else numbers.lost
