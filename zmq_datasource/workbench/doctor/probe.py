"""Receive from one endpoint as the source does, and count its messages: rate, sizes, topics, pauses, numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import printable
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.messages.rows import name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.sequences import SequenceTracker
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.workbench.doctor.counting import SAMPLE, Counting, find_counting
from zmq_datasource.workbench.doctor.facts import Handshake, Numbers, Traffic

_TURN_MS = 20
# Bounds of a round. Messages are counted when there are so many, or after the seconds.
_ROUND_MESSAGES, _ROUND_BYTES, _COUNT_SECONDS = 4096, 4 << 20, 0.1
# After a handshake has failed, wait this long for one that succeeds: the peer may be starting.
_SECOND_CHANCE_SECONDS = 0.3
# At most so many different sizes, and so many different topics, are counted.
_MOST_COUNTED = 100_000
_SHOWN_TOPICS, _TOPIC_CHARACTERS, _TOPIC_BYTES = 10, 60, 256
_COUNTERS, _GAPS = 100_000, 100_000


class Probe:
    """Receives from one endpoint; use it in a ``with`` block.

    Args:
        options: The options of a source that reads this endpoint only.

    Attributes:
        is_old: Whether the peer is older than ZMTP 3. libzmq then reports no handshake, and the end of such a
            connection as a handshake that failed.
        messages: The messages received so far.
    """

    def __init__(self, options: ReadOptions, is_old: bool = False) -> None:
        self._options, self.is_old = options, is_old
        self._endpoint = str((*options.connect, *options.bind)[0])
        self._inbox = Inbox()
        self.messages = 0
        self._began = time.monotonic()
        self._decided_at: float | None = None
        self._first_at = self._last_at = self._counted_at = self._longest_pause = 0.0
        self._sizes: Counter[int] = Counter()
        self._frames: Counter[int] = Counter()
        self._topics: Counter[bytes] = Counter()
        self._tenths: Counter[int] = Counter()
        self._sample: list[list[bytes]] = []
        self._gaps = 0
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
        self._opened = OpenSocket(spec, self._subscribe, check_hosts=False)
        self._socket, self._watch = self._opened.socket, self._opened.watch
        return self

    def _subscribe(self, sock: zmq.Socket[bytes]) -> None:
        if self._options.socket_type == "SUB":
            for topic in self._options.topics:
                sock.setsockopt(zmq.SUBSCRIBE, topic.encode())

    def __exit__(self, *error: Any) -> None:
        """Close the socket, and drop the messages that were not taken."""
        self._opened.close(linger=0)

    def receive(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Receive for ``seconds``, or until ``until`` returns true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            if self._socket.poll(_TURN_MS):
                self._take()
            self.keep_alive()

    def keep_alive(self) -> None:
        """Let libzmq work, and read what it reports. Receives nothing.

        Call it every few hundred milliseconds or more often.
        """
        self._socket.getsockopt(zmq.EVENTS)
        self._watch.update()
        self._watch.redial()
        if self._decided_at is None and (self.is_up or self._watch.failures):
            self._decided_at = time.monotonic()

    @property
    def has_waiting(self) -> bool:
        """Whether the socket has messages to take."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    # The connection.

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, or was one."""
        watch = self._watch
        old = self.is_old and (watch.failures or watch.open_connections().inodes)
        return bool(watch.connections or self.messages or old)

    @property
    def is_decided(self) -> bool:
        """Whether the socket is connected; or, if it connects, a handshake has failed and none succeeded soon after."""
        if self.is_up or self._decided_at is None or self._options.bind:
            return self.is_up
        return time.monotonic() >= self._decided_at + _SECOND_CHANCE_SECONDS

    def handshake(self) -> Handshake:
        """The result of the handshake so far."""
        watch, seconds = self._watch, (self._decided_at or self._began) - self._began
        if self.is_up:
            lost = watch.lost + (watch.failures if self.is_old else 0)
            return Handshake(state="succeeded", seconds=seconds, lost=lost, faults=watch.protocol_errors)
        if not watch.failures:
            return Handshake()
        event = "" if watch.failure is None else str(watch.failure.name)
        return Handshake(state="failed" if event else "hung_up", event=event, seconds=seconds)

    # The messages.

    def _take(self) -> None:
        taken = self._inbox.take(self._socket, _ROUND_MESSAGES, _ROUND_BYTES)
        now = time.monotonic()
        self._watch.redialer.messages_read += taken.messages
        if taken.empty:
            self._watch.redialer.note_empty()
        if taken.messages:
            self._first_at = self._first_at or now
            self._longest_pause = max(self._longest_pause, now - (self._last_at or now))
            self._last_at = now
            self.messages += taken.messages
            self._tenths[int(10 * now)] += taken.messages
        if self._inbox.messages >= _ROUND_MESSAGES or now >= self._counted_at + _COUNT_SECONDS:
            self.count()
            self._counted_at = now

    def count(self) -> None:
        """Count and track the messages taken so far. Call it before the figures are read."""
        if not self._inbox.messages:
            return
        raw = self._inbox.hand_over()
        frames = raw.lists()
        lengths = pc.binary_length(frames.values).cast(pa.int64())
        ends = pa.concat_arrays([integers_of([0]), pc.cumulative_sum(lengths)])
        _add(self._sizes, pc.subtract(ends.take(frames.offsets[1:]), ends.take(frames.offsets[:-1])))
        _add(self._frames, raw.counts())
        _add(self._topics, pc.binary_slice(raw.first.drop_null(), 0, _TOPIC_BYTES))
        room = min(SAMPLE - len(self._sample), len(raw))
        self._sample += (raw.message(row) for row in range(room))
        if self._options.framing != "plain":
            now = int(time.time() * 1_000_000)
            arrival = Arrival(now, len(raw), self._endpoint, self._watch.connections)
            self._gaps += len(self._intake.read(raw, [arrival])[1].gaps)

    @property
    def malformed(self) -> int:
        """The messages that do not fit the framing."""
        return self._counters.malformed

    def numbers(self) -> Numbers | None:
        """The publishers' numbers so far; None if the framing has none, or no message with a number came."""
        tracker = self._intake.tracker
        if tracker is None or not tracker.expected:
            return None
        totals = tracker.totals
        return Numbers(
            counters=len(tracker.expected),
            lost=totals.lost,
            gaps=self._gaps,
            repeated=totals.duplicates,
            late=totals.late,
            restarts=totals.restarts,
        )

    def counting(self) -> Counting | None:
        """Numbers that count up in the first messages, if the framing has none."""
        if self._intake.tracker is not None:
            return None
        options = self._options
        return find_counting(self._sample, "" not in options.topics, options.socket_type == "PULL")

    def traffic(self) -> Traffic | None:
        """The figures of the messages received so far; None if there are none."""
        if not self.messages:
            return None
        now = time.monotonic()
        shown = self._topics.most_common(_SHOWN_TOPICS)
        return Traffic(
            messages=self.messages,
            seconds=max(0.1, now - self._first_at),
            peak=10.0 * max(self._tenths.values()),
            frames=tuple(sorted(self._frames.items())),
            size_median=_quantile(self._sizes, 0.5),
            size_p99=_quantile(self._sizes, 0.99),
            size_max=max(self._sizes),
            topics=tuple((printable(name_of(topic), _TOPIC_CHARACTERS), count) for topic, count in shown),
            more_topics=len(self._topics) - len(shown),
            longest_pause=self._longest_pause,
            silence=now - self._last_at,
        )


def _add(counts: Counter[Any], column: pa.Array) -> None:
    """Count the values of a column. Once there are ``_MOST_COUNTED`` different values, leave out new ones."""
    for entry in column.value_counts().to_pylist():
        if entry["values"] in counts or len(counts) < _MOST_COUNTED:
            counts[entry["values"]] += entry["counts"]


def _quantile(counts: Counter[int], share: float) -> int:
    """The quantile at ``share`` (0 to 1) of the counted values."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left < 0:
            break
    return value
