"""Receive from one endpoint with the source's own receiver, and measure and track its messages.

The receiver takes raw frames (framing ``plain``). If the user has not said which framing the messages have, the first
messages are a sample from which it is guessed. Then the source's intake reads and tracks all messages with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc
import zmq
from msgspec.structs import replace

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host.log_lines import printable
from zmq_datasource.messages.columns import integers_of, number
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.rows import name_of
from zmq_datasource.options import ReadOptions
from zmq_datasource.source.receiver import ROUND_BYTES, ROUND_MESSAGES, Receiver
from zmq_datasource.transport.connections import unread, unsent_by_peer
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.workbench.doctor.facts import Buffers, Handshake, Traffic
from zmq_datasource.workbench.doctor.framing import SAMPLE, Numbered, guess, options_of, per_topic

__all__ = ["Probe", "receive_all"]

_TURN_MS = 20
# After a handshake has failed, wait this long for one that succeeds: the peer may be starting.
_SECOND_CHANCE_SECONDS = 0.3
_SAMPLE_BYTES = 64 << 20
_BUCKET_SECONDS = 0.1
# At most so many different sizes, and so many different topics, are counted.
_MOST_COUNTED = 100_000
_SHOWN_TOPICS, _TOPIC_CHARACTERS, _TOPIC_BYTES = 10, 60, 256
# If this share of the rounds was full, the doctor was slower than the feed.
_SATURATED = 0.9
# The bytes of a frame's header on the wire. The flags take one byte. The length takes one byte up to 255, else eight.
_SHORT, _LONG = 2, 9


class Tally:
    """Counts messages by size, number of frames, topic and time, for ``Traffic``.

    Attributes:
        bytes: Of all messages.
        largest_frame: The bytes of the largest frame.
    """

    def __init__(self) -> None:
        self._rounds = self._full_rounds = 0
        self.bytes = self._wire_bytes = self.largest_frame = 0
        self._sizes: Counter[int] = Counter()
        self._frames: Counter[int] = Counter()
        self._topics: Counter[bytes] = Counter()
        self._buckets: Counter[int] = Counter()

    def add_round(self, is_full: bool) -> None:
        """Count a round of receiving, and whether it took as much as a round may take."""
        self._rounds += 1
        self._full_rounds += is_full

    def add(self, raw: RawMessages, timestamps: pa.Array) -> None:
        """Count messages, and add up their bytes."""
        frames = raw.lists()
        sizes = pc.binary_length(frames.values).cast(pa.int64())
        ends = pa.concat_arrays([integers_of([0]), pc.cumulative_sum(sizes)])
        size = pc.subtract(ends.take(frames.offsets[1:]), ends.take(frames.offsets[:-1]))
        headers = pc.if_else(pc.less(sizes, number(256)), number(_SHORT), number(_LONG))
        self.bytes += pc.sum(sizes).as_py()
        self._wire_bytes += pc.sum(sizes).as_py() + pc.sum(headers).as_py()
        self.largest_frame = max(self.largest_frame, pc.max(sizes).as_py())
        _add(self._sizes, size)
        _add(self._frames, raw.counts())
        _add(self._topics, pc.binary_slice(raw.first.drop_null(), 0, _TOPIC_BYTES))
        _add(self._buckets, pc.divide(timestamps.cast(pa.int64()), number(round(_BUCKET_SECONDS * 1e6))))

    @property
    def wire_bytes(self) -> float:
        """The average number of bytes of a message on the wire, with the headers of its frames."""
        return self._wire_bytes / max(1, self._frames.total())

    def traffic(self, messages: int, seconds: float) -> Traffic | None:
        """The figures of all messages; None if there are none.

        Args:
            messages: How many were received.
            seconds: From the first message until now.
        """
        if not self._sizes:
            return None
        seconds = max(_BUCKET_SECONDS, seconds)
        sizes = sorted(self._sizes)
        shown = self._topics.most_common(_SHOWN_TOPICS)
        return Traffic(
            messages=messages,
            bytes=self.bytes,
            seconds=round(seconds, 3),
            rate=round(messages / seconds, 1),
            peak=round(max(self._buckets.values()) / _BUCKET_SECONDS, 1),
            frames=dict(sorted(self._frames.items())),
            size_min=sizes[0],
            size_median=_quantile(self._sizes, sizes, 0.5),
            size_p99=_quantile(self._sizes, sizes, 0.99),
            size_max=sizes[-1],
            largest_frame=self.largest_frame,
            topics=[(printable(name_of(topic), _TOPIC_CHARACTERS), count) for topic, count in shown],
            topics_more=len(self._topics) - len(shown),
            saturated=self._rounds > 10 and self._full_rounds >= _SATURATED * self._rounds,
        )


class Probe:
    """Receives from one endpoint; use it in a ``with`` block.

    Args:
        options: The options of a source that reads this endpoint only.
        given: The same options as text, as the user has set them.
        framing: The framing and the options that belong to it, with which to read messages; None to guess them.
        by_place: See ``Numbered``.

    Attributes:
        messages: The number of messages taken so far.
        framing: The options that read the messages: ``framing``, and those that belong to it. ``plain`` until guessed.
        tally: Counts the messages that are flushed.
        numbered: Reads and tracks the messages; None until the framing is known.
        suggested: The options to change so that each topic has a counter of its own. Empty, unless messages show that
            each topic has one.
    """

    def __init__(
        self,
        options: ReadOptions,
        given: Mapping[str, str],
        framing: Mapping[str, str] | None = None,
        by_place: bool = False,
    ) -> None:
        as_frames = replace(options, framing="plain", dead_letter_location=None)
        self._bind, self._given = bool(options.bind), given
        self._endpoint = str((*options.connect, *options.bind)[0])
        self._receiver = Receiver(as_frames, SourceCounters())
        self.messages = 0
        self.framing = {"framing": "plain"} if framing is None else dict(framing)
        self.suggested: dict[str, str] = {}
        self._sample: list[RawMessages] | None = [] if framing is None else None
        self.numbered: Numbered | None = None
        if framing is not None:
            self.numbered = Numbered(options_of(given, framing), self._endpoint, by_place)
        self._first_at: float | None = None
        self.tally = Tally()

    def __enter__(self) -> Self:
        """Open the socket.

        Raises:
            OptionError, EndpointError: The socket cannot be opened with these options.
        """
        self._began = time.monotonic()
        self._connected_at: float | None = None
        self._failed_at: float | None = None
        self._receiver.__enter__()
        self.socket = self._receiver.channels[0].socket
        self._watch: PeerWatch = self._receiver.channels[0].opened.watch
        return self

    def __exit__(self, *error: Any) -> None:
        """Close the socket, and drop the messages that were not taken."""
        self._receiver.__exit__(*error)

    # The connection.

    def register(self, poller: zmq.Poller) -> None:
        """Register with a poller, which then wakes for messages and for events of the connection."""
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._watch.monitor, zmq.POLLIN)

    def keep_alive(self) -> None:
        """Let libzmq work, and note whether a handshake has succeeded or failed. Receives nothing.

        Call it every few hundred milliseconds or more often.
        """
        self._receiver.keep_alive()
        if self._watch.connections and self._connected_at is None:
            self._connected_at = time.monotonic()
        if self._watch.failures and self._failed_at is None:
            self._failed_at = time.monotonic()

    @property
    def has_connected(self) -> bool:
        """Whether a handshake has succeeded."""
        return self._connected_at is not None

    @property
    def connection_decided(self) -> bool:
        """Whether a handshake has succeeded; or, if the socket connects, has failed and none succeeded soon after."""
        failed = self._failed_at is not None and not self._bind
        return self.has_connected or (
            failed and time.monotonic() >= (self._failed_at or 0.0) + _SECOND_CHANCE_SECONDS
        )

    @property
    def disconnects(self) -> int:
        """The number of connections that were up and have ended."""
        return self._watch.lost

    @property
    def handshake(self) -> Handshake:
        """The result of the handshake so far."""
        watch = self._watch
        failure = None if watch.connections else watch.failure
        otherwise: Literal["failed", "hung_up", "none"] = (
            "failed" if failure is not None else "hung_up" if watch.failures else "none"
        )
        return Handshake(
            state="succeeded" if watch.connections else otherwise,
            event=None if failure is None else failure.name,
            seconds=round((self._connected_at or self._failed_at or self._began) - self._began, 6),
            waited=watch.began_alone or bool(self._bind and watch.connections),
            connections=watch.connections,
            disconnects=watch.lost,
        )

    def kernel_bytes(self) -> tuple[int | None, int | None]:
        """The bytes that wait in the kernel: in all our receive buffers, and in the peers' send buffers.

        A figure is None if this system does not show it, such as the send buffer of a peer on another machine.
        """
        with ExitStack() as stack:
            streams = [stack.enter_context(handle.sock) for handle in self._watch.handles()]
            return _sum(list(map(unread, streams))), _sum(list(map(unsent_by_peer, streams)))

    @property
    def buffers(self) -> Buffers:
        """The limits of our socket as libzmq and the kernel report them, and the bytes that wait in the kernel now."""
        ours, theirs = self.kernel_bytes()
        rcvbuf = sndbuf = None
        for stream in (handle.sock for handle in self._watch.handles()):
            with stream:
                rcvbuf = stream.getsockopt(SOL_SOCKET, SO_RCVBUF)
                sndbuf = stream.getsockopt(SOL_SOCKET, SO_SNDBUF)
        rcvhwm = int(self.socket.getsockopt(zmq.RCVHWM))
        return Buffers(rcvhwm=rcvhwm, rcvbuf=rcvbuf, sndbuf=sndbuf, queued=ours, peer_queued=theirs)

    # The messages.

    @property
    def waiting(self) -> bool:
        """Whether the socket has messages to take."""
        return self._receiver.waiting

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """Take up to ``most`` messages, and return their number. If none is there, wait a moment for one."""
        before = self._receiver.pending_bytes
        taken = self._receiver.receive(most)
        size = self._receiver.pending_bytes - before
        self.tally.add_round(taken >= ROUND_MESSAGES or size >= ROUND_BYTES)
        self.messages += taken
        if taken and self._first_at is None:
            self._first_at = time.monotonic()
        if self._receiver.batch_ready or (self._sample is not None and self._receiver.pending >= SAMPLE):
            self.flush()
        return taken

    def flush(self) -> None:
        """Count the messages taken so far, and track them once the framing is known."""
        rows = self._receiver.take()
        if not rows.num_rows:
            return
        raw = raw_messages(rows)
        self.tally.add(raw, rows.column("timestamp"))
        if self._sample is not None:
            self._sample.append(raw)
            if sum(map(len, self._sample)) >= SAMPLE or self.tally.bytes >= _SAMPLE_BYTES:
                self._decide(self._sample)
        else:
            self._follow(raw)

    def finish_sample(self) -> None:
        """Decide on the framing, even from a smaller sample than usual. Called after the last message."""
        self.flush()
        if self._sample is not None:
            self._decide(self._sample)

    def _decide(self, sample: Sequence[RawMessages]) -> None:
        """Guess the framing from a sample, and track the sample with it."""
        self._sample = None
        if sample:
            joined = RawMessages.of_lists(pa.concat_arrays([raw.lists() for raw in sample]))
            self.framing = guess(joined, self._given)
        self.numbered = Numbered(options_of(self._given, self.framing), self._endpoint)
        for raw in sample:
            self._follow(raw)

    def _follow(self, raw: RawMessages) -> None:
        """Track messages, and suggest a counter for each topic if different messages have the same number."""
        assert self.numbered is not None
        unequal = self.numbered.unequal
        self.numbered.follow(raw, self._watch.connections)
        by = self.numbered.by
        if self.numbered.unequal > unequal and "topic" not in by and not self.suggested:
            self.suggested = per_topic(raw, {**self._given, **self.framing}, by) or {}

    @property
    def lost(self) -> int:
        """How many messages are missing so far, as their sequence numbers show."""
        self.flush()
        return 0 if self.numbered is None else self.numbered.lost

    def traffic(self) -> Traffic | None:
        """The figures of the messages received so far; None if there are none."""
        self.flush()
        if self._first_at is None:
            return None
        return self.tally.traffic(self.messages, time.monotonic() - self._first_at)


def receive_all(probes: Sequence[Probe], seconds: float, until: Callable[[], bool] = lambda: False) -> None:
    """Receive from all probes at once, for ``seconds`` or until ``until`` returns true."""
    poller = zmq.Poller()
    for probe in probes:
        probe.register(poller)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        ready = dict(poller.poll(_TURN_MS))
        for probe in probes:
            if probe.socket in ready:
                probe.receive()
            if probe.socket not in ready or not probe.has_connected:
                probe.keep_alive()


def _add(counts: Counter[Any], column: pa.Array) -> None:
    """Count the values of a column. Once there are ``_MOST_COUNTED`` different values, leave out new ones."""
    for entry in column.value_counts().to_pylist():
        if entry["values"] in counts or len(counts) < _MOST_COUNTED:
            counts[entry["values"]] += entry["counts"]


def _quantile(counts: Counter[int], ordered: Sequence[int], share: float) -> int:
    """The quantile at ``share`` (0 to 1) of the counted values. ``ordered`` has each different value once, sorted."""
    left = share * counts.total()
    for value in ordered:
        left -= counts[value]
        if left < 0:
            return value
    return ordered[-1]


def _sum(figures: list[int | None]) -> int | None:
    """The sum; None if a figure is unknown, or there is none."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known and len(known) == len(figures) else None
