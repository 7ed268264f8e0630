"""Receive from sockets in rounds, as record batches; and append these to a log.

A round waits for the first message, and then takes, without waiting, the messages that are there. So under load the
cost of a round is shared by many messages, and a slow feed has exact timestamps. A receiver belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Protocol, Self

import pyarrow as pa
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import SocketError
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.log import FillerFacts, LogWriter
from zmq_datasource.messages.columns import MESSAGE_SCHEMA
from zmq_datasource.options import ReadOptions
from zmq_datasource.source.channel import Channel, Replayer, make_channels
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.transport.core import Inbox, Tee
from zmq_datasource.transport.peers import count_connections

# How long a round waits for its first message, which ends the wait at once. The wait delays the thread's other duties.
# After some silence, housekeeping is the only other duty, so the wait is longer: received messages are sealed by then,
# unless walFlushInterval is longer than the silence.
WAIT_SECONDS, _SILENT_WAIT_SECONDS = 0.01, 0.25
_SILENT_SECONDS = 2.0
# Bounds of one round, over all sockets. They keep a round short, because the thread has other duties, and small: a
# round exceeds the bytes by one message at most, so it fits an Arrow batch.
ROUND_MESSAGES = 4096
ROUND_BYTES = 4 << 20
# A record batch is made when this many messages or bytes are pending. Spark is fastest with 10,000 rows and more.
BATCH_MESSAGES = 16_384
BATCH_BYTES = 8 << 20
_HOUSEKEEPING_SECONDS = 0.1
# How long messages are received after a stop at most. Messages that a PULL has taken come to no other receiver, so a
# PULL has longer. A SUB wants only those from before the stop.
_DRAIN_PULL_SECONDS, _DRAIN_SECONDS = 5.0, 1.0

# How long a replay may be silent before its request is repeated. Three requests in all are sent.
REPLAY_SECONDS = 5.0


class Publisher(Protocol):
    """Sends on what a receiver takes (``serving.publishing``). For the receiving thread.

    Attributes:
        socket: Has the subscriptions of others.
        tee: Sends to it.
    """

    socket: zmq.Socket[bytes]
    tee: Tee

    def open(self) -> None:
        """Open the socket.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
        """

    def pass_on_requests(self, upstream: Sequence[zmq.Socket[bytes]]) -> None:
        """Pass subscriptions on to XSUB sockets. Called in each round, also while receiving is paused."""

    def close(self) -> None:
        """Close the socket, once what was published has left, or some time has passed."""


class Receiver:
    """The SUB, XSUB or PULL sockets of a feed; use it in a ``with`` block, in one thread.

    Args:
        options: Socket type, endpoints, topics, framing and socket options.
        batch_bytes: The bytes at which a batch is ready and a round ends, which bound the memory.
        clock: Seconds since the epoch, for ``timestamp``.
        replay_timeout: Seconds without a reply after which a request for missing messages is repeated.
        publisher: Sends on what is received, as it came.

    Attributes:
        intake: Turns messages into rows. Restore its state, if at all, before the ``with`` block.
    """

    def __init__(
        self,
        options: ReadOptions,
        counters: SourceCounters,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.time,
        replay_timeout: float = REPLAY_SECONDS,
        publisher: Publisher | None = None,
    ) -> None:
        self._options = options
        self._publisher = publisher
        self._counters = counters
        self._batch_bytes = min(batch_bytes, BATCH_BYTES)
        self._clock = clock
        self.intake = Intake(options, counters)
        self.channels = make_channels(options, counters, self.intake.tracker, replay_timeout)
        self._incidents = Incidents(options)
        self._inbox = Inbox()
        self._arrivals: list[Arrival] = []
        self._replayers = [c.replayer for c in self.channels if c.replayer is not None]
        self._next_housekeeping = 0.0
        self._silent_from = time.monotonic() + _SILENT_SECONDS

    def __enter__(self) -> Self:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: A socket cannot be opened as asked.
        """
        with ExitStack() as stack:
            self._wakes = WakePipe()
            stack.callback(self._wakes.close)
            if self._publisher is not None:
                self._publisher.open()
                stack.callback(self._publisher.close)
            for channel in self.channels:
                channel.open()
                stack.callback(channel.close)
            self._opened = stack.pop_all()
        self._counters.rcvhwm = int(self.channels[0].socket.getsockopt(zmq.RCVHWM))
        for replayer in self._replayers:
            replayer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @property
    def pending(self) -> int:
        """The number of messages that were received and not taken yet."""
        return self._inbox.messages + sum(len(replayer.session.replies) for replayer in self._replayers)

    @property
    def pending_bytes(self) -> int:
        """The bytes of the pending messages."""
        return self._inbox.size + sum(replayer.session.reply_bytes for replayer in self._replayers)

    @property
    def waiting(self) -> bool:
        """Whether libzmq has messages that were not received."""
        return any(channel.waiting for channel in self.channels)

    @property
    def batch_ready(self) -> bool:
        """Whether to call ``take``: enough messages are pending, or a replay session is due."""
        if any(replayer.session.is_due(time.monotonic()) for replayer in self._replayers):
            return True
        return self.pending >= BATCH_MESSAGES or self.pending_bytes >= self._batch_bytes

    @property
    def failure(self) -> SocketError | None:
        """Why receiving must end, once the messages taken so far are in the log."""
        return self._incidents.failure

    def wake(self) -> None:
        """End the wait of ``receive``. Any thread may call this while the sockets are open."""
        self._wakes.wake()

    def receive(self, most: int = ROUND_MESSAGES, gather: float = 0.0) -> int:
        """Receive for one round: wait a moment for a message, then take what the sockets have, in turn.

        Args:
            most: The most messages to receive from publishers. Replies of a replay come on top.
            gather: For how many seconds the round goes on after the first message.

        Returns:
            The number of messages received.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        before = self.pending
        room = min(ROUND_BYTES, self._batch_bytes)
        wait = _SILENT_WAIT_SECONDS if now >= self._silent_from else WAIT_SECONDS
        # While a chunk is due soon, the wait for the first message must not outlast that.
        room -= self._take_messages(most, room, min(wait, gather) if gather else wait, gather)
        self._pass_on_requests()
        self._receive_replies(room)
        if received := self.pending - before:
            self._silent_from = time.monotonic() + _SILENT_SECONDS
        return received

    def _pass_on_requests(self) -> None:
        if self._publisher is not None:
            self._publisher.pass_on_requests([one.socket for one in self.channels if one.kind == "XSUB"])

    def _take_messages(self, most: int, room: int, wait: float, gather: float) -> int:
        """Take live messages, once there are some, or replies. Returns their bytes."""
        channels = [channel for channel in self.channels if not channel.waits_for_replay]
        alarms = [replayer.socket for replayer in self._replayers]  # a redial replaces them
        if self._publisher is not None:
            alarms.append(self._publisher.socket)
        began, before = self._clock(), self._inbox.size
        taken = self._inbox.take(
            [channel.socket for channel in channels],
            most,
            room,
            wait=wait,
            gather=gather,
            tee=None if self._publisher is None else self._publisher.tee,
            alarms=[self._wakes.descriptor, *alarms],
        )
        self._wakes.clear()
        messages = [0] * len(channels)
        for run in taken.runs:
            messages[run.source] += run.messages
            arrived = int(began * 1_000_000) + run.at
            self._arrivals.append(self._arrival(channels[run.source], run.messages, arrived))
        for source, channel in enumerate(channels):
            excess = taken.excess if source == taken.excess_source else 0
            channel.note_taken(messages[source], taken.empty[source], excess)
        return self._inbox.size - before

    def _receive_replies(self, room: int) -> None:
        """Receive the replies that are there, up to so many bytes, of which each publisher has an equal share."""
        for replayer in self._replayers:
            share = room // len(self._replayers)
            replayer.receive_replies(ROUND_MESSAGES, replayer.session.reply_bytes + share)

    def _arrival(self, channel: Channel, messages: int, timestamp: int) -> Arrival:
        return Arrival(timestamp, messages, channel.name, channel.connection())

    def take(self) -> pa.RecordBatch:
        """Take the pending messages, as a batch with ``messages.columns.MESSAGE_SCHEMA``."""
        batches = []
        if self._inbox.messages:
            arrivals, self._arrivals = self._arrivals, []
            batch, findings = self.intake.read(self._inbox.hand_over(), arrivals)
            batches.append(batch)
            self._incidents.act_on(findings)
        for channel in self.channels:
            if channel.replayer is not None:
                batches += self._take_replayed(channel, channel.replayer)
        if len(batches) == 1:
            return batches[0]
        return pa.concat_batches(batches) if batches else _NOTHING

    def _take_replayed(self, channel: Channel, replayer: Replayer) -> list[pa.RecordBatch]:
        tracker = self.intake.tracker
        assert tracker is not None, "a replay needs numbered messages"
        tracker.connections[channel.name.encode()] = channel.connection()
        replayer.session.live = channel.opened.watch.peers > 0
        batches = []
        replies = replayer.take()
        if replies:
            arrival = self._arrival(channel, len(replies), int(self._clock() * 1_000_000))
            batch, findings = self.intake.read_replies(replies, arrival)
            batches.append(batch)
            self._incidents.act_on(findings)
        self._incidents.report_lost(replayer.step(channel.waiting))
        return batches

    def keep_alive(self) -> None:
        """Keep the connections working while nothing is received; see ``Channel.keep_alive``."""
        for channel in self.channels:
            channel.keep_alive()
        self._pass_on_requests()
        count_connections(self._counters, [channel.opened.watch for channel in self.channels])
        self._incidents.flush()

    def extend_timeouts(self) -> None:
        """Keep connections alive, and extend the deadlines of replays. Called while nothing is received."""
        self.keep_alive()
        if self._publisher is not None and self._publisher.tee.pending:
            self._inbox.take([], 1, 1, tee=self._publisher.tee)
        for replayer in self._replayers:
            replayer.session.note_pause(time.monotonic())

    def report_absent(self) -> None:
        """Log, at the end of a read, the endpoints at which no peer has answered."""
        for channel in self.channels:
            channel.opened.watch.update()
            channel.opened.watch.report_absent(seconds=0.0)


class LogReceiver:
    """Appends the batches of a receiver to a log.

    Args:
        log: Open it before the ``with`` block. It reads the state of ``receiver.intake`` whenever it cuts.

    Attributes:
        drain_seconds: Limit of the time for which messages on their way are received after a stop.
    """

    def __init__(self, receiver: Receiver, log: LogWriter) -> None:
        self.receiver = receiver
        self._log = log
        self._has_pull = any(channel.kind == "PULL" for channel in receiver.channels)
        self.drain_seconds = _DRAIN_PULL_SECONDS if self._has_pull else _DRAIN_SECONDS
        self._appending = False
        self._refused = 0
        self._left = False
        self._has_failed = False

    def __enter__(self) -> Self:
        """Open the sockets: see ``Receiver``."""
        self.receiver.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._left = self._has_pull and self.receiver.waiting
        self.receiver.__exit__(*error)

    def receive(self, gather: float = 0.0) -> int:
        """Receive for one round, and append a batch that is ready. Returns the number of messages received.

        Raises:
            LogError: The log has failed for good.
            SocketError: Receiving must end. Messages that were received before are in the log.
        """
        received = self.receiver.receive(gather=gather)
        if self.receiver.batch_ready:
            self._append()
        return received

    def wake(self) -> None:
        """End a call of ``receive`` that waits or gathers. Any thread may call this."""
        self.receiver.wake()

    def cut(self) -> Future[int]:
        """Append the pending messages, and cut the log's chunk."""
        if self.receiver.pending or self.receiver.batch_ready:
            self._append()
        return self._log.cut()

    def finish(self, seconds: float) -> None:
        """Append the pending messages. ``seconds`` has no effect: no sender waits for an answer."""
        self.cut()

    def _append(self) -> None:
        self._appending = True
        received = self.receiver.pending
        try:
            messages = self.receiver.take()
            received = messages.num_rows  # without messages that become no row
            self._log.append(messages)
        except Exception:
            self._refused += received
            raise
        self._appending = False
        if self.receiver.failure is not None and not self._has_failed:
            self._has_failed = True  # raised once, so that what the sockets still have can be appended
            raise self.receiver.failure

    def extend_timeouts(self) -> None:
        self.receiver.extend_timeouts()

    def facts(self) -> FillerFacts:
        """The figures. Any thread may call this at any time."""
        tracker = self.receiver.intake.tracker
        known = () if tracker is None else (tracker.totals, len(tracker.expected), len(tracker.gaps))
        receiver = self.receiver
        pending = receiver.pending, receiver.pending_bytes
        return FillerFacts(*pending, self._appending, self._refused, self._left, *known)


# Made of nulls, because Arrow imports pandas, if it is installed, to look at Python objects.
_NOTHING = pa.record_batch([pa.nulls(0, field.type) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)
