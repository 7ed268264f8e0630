"""Socket to Arrow: receiving sockets, drained in rounds, handed over as record batches.

A round waits for the first message and then takes what is there without waiting, so its cost
is spread over as many messages as have gathered, and a slow feed keeps exact timestamps. The
receiver belongs to one thread and starts none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyarrow as pa
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import NoPeerError, SocketError
from zmq_datasource.messages.schemas import MESSAGE_SCHEMA
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Location
from zmq_datasource.sequences import SequenceTracker
from zmq_datasource.source.channel import SILENT_MS, WAIT_MS, Channel, make_channels
from zmq_datasource.source.dead_letters import MAX_BESIDE_LOG_BYTES, DeadLetters
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.intake import Arrival, Findings, Intake
from zmq_datasource.source.replayer import Replayer
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.peers import count_connections

__all__ = ["BATCH_MESSAGES", "ROUND_BYTES", "ROUND_MESSAGES", "Receiver"]

# Bounds of one round over all sockets: no round keeps the thread from its other duties for long, and
# none takes more than about this much (or one message). So what is handed over always fits an Arrow batch.
ROUND_MESSAGES = 4096
ROUND_BYTES = 4 << 20
# When to make a record batch of what was received: Spark is fastest with 10,000 rows and more.
BATCH_MESSAGES = 16_384
BATCH_BYTES = 8 << 20
_HOUSEKEEPING_SECONDS = 0.1
# A feed is silent if nothing has come for so long. What was received is sealed by then, or 0.1 s late.
_SILENT_SECONDS = 2.0


class Receiver:
    """The SUB or PULL sockets of a feed; use it in a ``with`` block, in one thread.

    Args:
        options: Socket type, endpoints, topics, framing and socket options.
        counters: Where to count.
        batch_bytes: Size at which a batch is ready and a round ends; what is held in memory.
        clock: Seconds since the epoch, for ``timestamp``.
        beside_log: Where messages that do not fit are kept, up to a bound, if ``deadLetterLocation`` is not set.

    Attributes:
        intake: Reads and tracks what comes; restore it, if at all, before the receiver is opened.
        channels: Its sockets.
    """

    def __init__(
        self,
        options: ReadOptions,
        counters: SourceCounters,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.time,
        beside_log: Location | None = None,
    ) -> None:
        self._options = options
        self._beside_log = beside_log
        self._counters = counters
        self._batch_bytes = min(batch_bytes, BATCH_BYTES)
        self._clock = clock
        self.intake = Intake(options, counters)
        self.channels = make_channels(options, counters)
        self._poller: zmq.Poller | None = None
        self._inbox = Inbox()
        self._arrivals: list[Arrival] = []
        self._replayers = [c.replayer for c in self.channels if c.replayer is not None]
        self._turn = 0  # the channel that a round begins with
        self._next_housekeeping = 0.0
        self._no_peer: NoPeerError | None = None
        self._silent_from = time.monotonic() + _SILENT_SECONDS

    def __enter__(self) -> Self:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: They cannot be opened as asked.
        """
        with ExitStack() as stack:
            dead_letters = self._dead_letters()
            if dead_letters is not None:
                stack.enter_context(dead_letters)
            self._incidents = Incidents(self._options, self.intake.tracker, dead_letters)
            for channel in self.channels:
                channel.open()
                stack.callback(channel.close)
            self._opened = stack.pop_all()
        self._counters.rcvhwm = int(self.channels[0].socket.getsockopt(zmq.RCVHWM))
        self._ask_for_history()
        self._watch_sockets()
        self._await_peers_until = time.monotonic() + self._options.connect_timeout
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def _dead_letters(self) -> DeadLetters | None:
        location, max_bytes = self._options.dead_letter_location, None
        if location is None:
            location, max_bytes = self._beside_log, MAX_BESIDE_LOG_BYTES
        if location is None:
            return None
        return DeadLetters(location, self._options.framing, self._lose_dead_letters, max_bytes)

    def _lose_dead_letters(self, count: int) -> None:
        self._counters.dead_letters_lost += count

    def _ask_for_history(self) -> None:
        for channel in self.channels:
            if channel.replayer is not None:
                start = self.intake.first_sequence(channel.name)
                if start is not None:
                    channel.replayer.fetch_first(self._tracker, start)

    def _watch_sockets(self) -> None:
        """Wait for all sockets at once, where there is more than one; not for a flow that is held."""
        if len(self.channels) == 1 and not self._replayers:
            return
        self._poller = zmq.Poller()
        for channel in self.channels:
            if not channel.held:
                self._poller.register(channel.socket, zmq.POLLIN)
        for replayer in self._replayers:
            self._poller.register(replayer.socket, zmq.POLLIN)

    @property
    def pending(self) -> int:
        """Messages received but not handed over yet."""
        return self._inbox.messages + sum(replayer.session.pending for replayer in self._replayers)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the pending messages."""
        return self._inbox.size + sum(replayer.session.pending_bytes for replayer in self._replayers)

    @property
    def waiting(self) -> bool:
        """Whether libzmq holds messages that were not received."""
        return any(channel.waiting for channel in self.channels)

    @property
    def batch_ready(self) -> bool:
        """Whether enough has gathered for a batch of good size, or a replay has ended."""
        if any(replayer.due for replayer in self._replayers):
            return True
        return self.pending >= BATCH_MESSAGES or self.pending_bytes >= self._batch_bytes

    @property
    def failure(self) -> SocketError | None:
        """Why receiving must end, once what was taken so far is in the log."""
        return self._incidents.failure or self._no_peer

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """One round: wait a moment for a message, then take what is there, from the sockets in turn.

        Args:
            most: Take no more than this many messages from a socket.

        Returns:
            How many messages were taken; 0 if none came.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        room = min(ROUND_BYTES, self._batch_bytes)
        if self._poller is None:
            channel = self.channels[0]
            channel.wait_up_to(SILENT_MS if now >= self._silent_from else WAIT_MS)
            return self._receive_from(channel, most, room, True)
        taken = 0
        ready = dict(self._poller.poll(WAIT_MS))
        for _ in self.channels:
            channel, replayer = self.channels[self._turn], self.channels[self._turn].replayer
            if replayer is not None and replayer.socket in ready:
                before = replayer.session.pending_bytes
                taken += replayer.receive(most, before + room)
                room -= replayer.session.pending_bytes - before
            if room > 0 and channel.socket in ready and not channel.held:
                before = self._inbox.size
                taken += self._receive_from(channel, most, room, False)
                room -= self._inbox.size - before
            self._turn = (self._turn + 1) % len(self.channels)
            if room <= 0:  # the others come first in the next round
                break
        return taken

    def _receive_from(self, channel: Channel, most: int, room: int, wait: bool) -> int:
        taken = channel.take(self._inbox, most, room, wait)
        if taken.messages:
            self._silent_from = time.monotonic() + _SILENT_SECONDS
            timestamp = int(self._clock() * 1_000_000)
            self._arrivals.append(Arrival(timestamp, taken.messages, channel.name, channel.connection()))
        return taken.messages

    def take(self) -> pa.RecordBatch:
        """Hand over what was received, as a batch with ``messages.schemas.MESSAGE_SCHEMA``."""
        batches = []
        if self._inbox.messages:
            arrivals, self._arrivals = self._arrivals, []
            messages = self._inbox.messages
            batch, findings = self.intake.read(self._inbox.hand_over(), arrivals)
            batches.append(batch)
            self._note(findings, messages)
        for channel in self.channels:
            if channel.replayer is not None:
                batches += self._take_replayed(channel, channel.replayer)
        if len(batches) == 1:
            return batches[0]
        return pa.concat_batches(batches) if batches else _NOTHING

    def _take_replayed(self, channel: Channel, replayer: Replayer) -> list[pa.RecordBatch]:
        tracker = self._tracker
        connection = tracker.connections[channel.name.encode()] = channel.connection()
        replayer.session.live = connection if channel.opened.watch.peers else None
        batches = []
        first, onwards, sock = replayer.session.first, replayer.session.onwards, replayer.socket
        replies, anew = replayer.take(tracker)
        if replies:
            arrival = Arrival(int(self._clock() * 1_000_000), len(replies), channel.name, connection)
            batch, findings = self.intake.read_replies(replies, arrival, onwards, anew)
            batches.append(batch)
            self._note(findings, len(replies))
        given_up = replayer.step(tracker, channel.waiting, self.intake.first_sequence(channel.name))
        self.intake.mark_final(given_up)
        self._incidents.lose(given_up)
        if (replayer.session.first, replayer.socket) != (first, sock):
            self._watch_sockets()
        return batches

    @property
    def _tracker(self) -> SequenceTracker:
        tracker = self.intake.tracker
        assert tracker is not None, "options let no replay in without numbers"
        return tracker

    def _note(self, findings: Findings, messages: int) -> None:
        self._incidents.take(findings, messages)
        if self._options.replay_endpoint:
            self._incidents.lose([gap for gap in findings.abandoned if not gap.final])

    def still_asking(self) -> bool:
        """Whether more may come by a replay; what follows the last messages is then asked for at once.

        May be called by any thread.
        """
        asking = [replayer.session.still_asking() for replayer in self._replayers]  # each is hurried
        return any(asking)

    def postpone(self) -> None:
        """Keep connections alive, and let replays wait. Called while nothing is received."""
        self.keep_alive()
        for replayer in self._replayers:
            replayer.postpone()

    def keep_alive(self) -> None:
        """Let libzmq and the connections do their work without receiving; see ``Channel.keep_alive``."""
        for channel in self.channels:
            channel.keep_alive()
        count_connections(self._counters, [channel.opened.watch for channel in self.channels])
        self._incidents.flush()
        if self._options.connect_timeout and time.monotonic() >= self._await_peers_until:
            self._check_peers()

    def _check_peers(self) -> None:
        self._await_peers_until = math.inf  # an endpoint that has answered once may go away and come back
        watches = [channel.opened.watch for channel in self.channels]
        missing = [endpoint for watch in watches for endpoint in watch.never_up]
        if missing:
            refusals = "".join(f"; {at}: {why}" for watch in watches for at, why in watch.refused.items())
            self._no_peer = NoPeerError(
                f"waiting {self._options.connect_timeout} for the publishers of {self._options.socket_type}: no answer "
                f"from {', '.join(missing)}{refusals}. Start the publisher, correct the endpoint, raise "
                "connectTimeout, or leave it out to wait without end"
            )

    def report_absent(self) -> None:
        """Say, at the end of a read, at which endpoints nobody has answered."""
        for channel in self.channels:
            channel.opened.watch.update()
            channel.opened.watch.report_absent(leaving=True)


# Made of nulls, because Arrow imports pandas, where there is one, to look at Python objects.
_NOTHING = pa.record_batch([pa.nulls(0, field.type) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)
