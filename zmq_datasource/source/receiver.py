"""Socket to Arrow: receiving sockets, drained in rounds, handed over as record batches.

A round waits for the first message and then takes what is there without waiting, so its cost
is spread over as many messages as have gathered, and a slow feed keeps exact timestamps. The
receiver belongs to one thread and starts none.

There is one socket for the whole feed, unless messages are counted by endpoint: libzmq does not
tell which of its connections a message came by, so then each endpoint has a socket of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec
import pyarrow as pa
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import SocketError
from zmq_datasource.messages.framing import RawMessage, subscriptions
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES, MESSAGE_SCHEMA, warm_up_arrow
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Endpoints
from zmq_datasource.sequences import Judge
from zmq_datasource.source.dead_letters import DeadLetters
from zmq_datasource.source.incidents import Incidents
from zmq_datasource.source.intake import Findings, Intake, Run
from zmq_datasource.source.replayer import Replayer
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import count_connections
from zmq_datasource.transport.pyzmq_internals import more_frames
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

# Bounds of one round over all sockets: no round keeps the thread from its other duties for long, and
# none takes more than about this much (or one message). So what is handed over always fits an Arrow batch.
ROUND_MESSAGES = 1024
_ROUND_BYTES = 4 << 20
# How long a round waits for its first message; the delay of the thread's other duties.
WAIT_MS = 10
# When to make a record batch of what was received: Spark is fastest with 10,000 rows and more.
BATCH_MESSAGES = 16_384
BATCH_BYTES = 8 << 20
_HOUSEKEEPING_SECONDS = 0.1


class _Channel:
    """One socket of the feed, and who heals what is missing from it."""

    def __init__(
        self,
        spec: SocketSpec,
        prefixes: Sequence[bytes],
        replayer: Replayer | None = None,
        counts: bool = True,
    ) -> None:
        self.name = spec.endpoints
        self._spec = spec
        self._prefixes = prefixes
        self.replayer = replayer
        self.counts = counts
        self.known_connections = 0

    def open(self) -> None:
        self.opened = OpenSocket(self._spec, self._prepare)
        self.socket = self.opened.socket
        self.more = more_frames(self.socket)
        self.unfinished = Unfinished(self.opened)
        if self.replayer is not None:
            self.replayer.open()

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        for prefix in self._prefixes:
            sock.setsockopt(zmq.SUBSCRIBE, prefix)

    def close(self) -> None:
        if self.replayer is not None:
            self.replayer.close()
        self.opened.close(self._spec.linger)

    def connection(self) -> int:
        """How many connections there have been, where that tells something; as of now."""
        if not self.counts:
            return 0
        self.opened.watch.update()
        return self.opened.watch.connections

    @property
    def held(self) -> bool:
        """Whether the live flow waits for history."""
        return self.replayer is not None and self.replayer.session.first


class Receiver:
    """The SUB or PULL sockets of a feed; use it in a ``with`` block, in one thread.

    Args:
        options: Socket type, endpoints, topics, framing and socket options.
        counters: Where to count.
        batch_bytes: Size at which a batch is ready and a round ends; what is held in memory.
        clock: Seconds since the epoch, for ``timestamp``.

    Attributes:
        intake: Reads and judges what comes; restore it, if at all, before the receiver is opened.
    """

    def __init__(
        self,
        options: ReadOptions,
        counters: SourceCounters,
        batch_bytes: int = BATCH_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._counters = counters
        self._batch_bytes = min(batch_bytes, BATCH_BYTES)
        self._clock = clock
        self.intake = Intake(options, counters)
        self._channels = _channels(options, counters)
        self._poller: zmq.Poller | None = None
        self._messages: list[RawMessage] = []
        self._runs: list[Run] = []
        self._live_bytes = 0
        self._turn = 0  # the channel that a round begins with
        self._next_housekeeping = 0.0

    def __enter__(self) -> Self:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: They cannot be opened as asked.
        """
        warm_up_arrow()
        with ExitStack() as stack:
            letters = None
            if self._options.dead_letter_location is not None:
                letters = stack.enter_context(
                    DeadLetters(self._options.dead_letter_location, self._options.framing, self._lose_letters)
                )
            self._incidents = Incidents(self._options, self.intake.judge, self._counters, letters)
            for channel in self._channels:
                channel.open()
                stack.callback(channel.close)
            self._opened = stack.pop_all()
        self._counters.rcvhwm = int(self._channels[0].socket.getsockopt(zmq.RCVHWM))
        self._ask_for_history()
        self._watch_sockets()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def _lose_letters(self, count: int) -> None:
        self._counters.dead_letters_lost += count

    def _ask_for_history(self) -> None:
        for channel in self._channels:
            if channel.replayer is not None:
                start = self.intake.first_sequence(channel.name)
                if start is not None:
                    channel.replayer.fetch_first(self._judge, start)

    def _watch_sockets(self) -> None:
        """Wait for all sockets at once, where there is more than one; not for a flow that is held."""
        if len(self._channels) == 1 and self._channels[0].replayer is None:
            return
        self._poller = zmq.Poller()
        for channel in self._channels:
            if not channel.held:
                self._poller.register(channel.socket, zmq.POLLIN)
            if channel.replayer is not None:
                self._poller.register(channel.replayer.socket, zmq.POLLIN)

    @property
    def carried(self) -> Intake:
        """What is to be kept with the rows."""
        return self.intake

    @property
    def pending(self) -> int:
        """Messages received but not handed over yet."""
        return len(self._messages) + sum(c.replayer.session.pending for c in self._channels if c.replayer)

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self._live_bytes + sum(c.replayer.session.pending_bytes for c in self._channels if c.replayer)

    @property
    def waiting(self) -> bool:
        """Whether libzmq holds messages that were not received."""
        return any(int(c.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for c in self._channels)

    @property
    def batch_ready(self) -> bool:
        """Whether enough has gathered for a batch of good size, or a replay has ended."""
        if any(c.replayer is not None and c.replayer.due for c in self._channels):
            return True
        return self.pending >= BATCH_MESSAGES or self.pending_bytes >= self._batch_bytes

    @property
    def failure(self) -> SocketError | None:
        """Why receiving must end, once what was taken so far is in the log."""
        return self._incidents.failure

    def receive(self, most: int = ROUND_MESSAGES) -> int:
        """One round: wait up to ``WAIT_MS`` for a message, then take what is there, from the sockets in turn.

        Args:
            most: Take no more than this many messages from a socket.

        Returns:
            How many messages were taken; 0 if none came.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        room = min(_ROUND_BYTES, self._batch_bytes)
        if self._poller is None:
            return self._receive_from(self._channels[0], most, 0, room)
        taken = 0
        ready = dict(self._poller.poll(WAIT_MS))
        for _ in self._channels:
            channel, replayer = self._channels[self._turn], self._channels[self._turn].replayer
            if replayer is not None and replayer.socket in ready:
                before = replayer.session.pending_bytes
                taken += replayer.receive(most, before + room)
                room -= replayer.session.pending_bytes - before
            if room > 0 and channel.socket in ready and not channel.held:
                before = self._live_bytes
                taken += self._receive_from(channel, most, int(zmq.NOBLOCK), room)
                room -= self._live_bytes - before
            self._turn = (self._turn + 1) % len(self._channels)
            if room <= 0:  # the others come first in the next round
                break
        return taken

    def _receive_from(self, channel: _Channel, most: int, first: int, limit: int) -> int:
        messages = self._messages
        before = len(messages)
        take = self._take_carefully if channel.unfinished.careful else self._take_quickly
        timestamp, room = take(channel, most, first, limit)
        if room < limit - MAX_MESSAGE_BYTES:
            room += self._discard_oversize(messages)
        taken = len(messages) - before
        if taken:
            channel.opened.watch.taken += taken
            self._runs.append(Run(timestamp, taken, channel.name, channel.connection()))
            if channel.replayer is not None:
                channel.replayer.heard()
        self._live_bytes += limit - room
        return taken

    def _take_quickly(self, channel: _Channel, most: int, first: int, room: int) -> tuple[int, int]:
        """Take messages until none is there, or no room; returns when the first came, and the room left."""
        # Local names and nothing but what bounds the round: this loop sets the source's speed.
        recv, noblock = channel.socket.recv, int(zmq.NOBLOCK)
        ask_more, more = channel.more
        append = self._messages.append
        timestamp = 0
        try:
            frame = recv(first)
            timestamp = int(self._clock() * 1_000_000)
            for turn in range(most):
                if turn:
                    frame = recv(noblock)
                ask_more()
                if more.value:
                    message = _rest(channel, frame)
                    append(message)
                    room -= sum(map(len, message))
                else:
                    append(frame)
                    room -= len(frame)
                if room <= 0:
                    break
        except zmq.Again:
            channel.opened.watch.found_empty()
        return timestamp, room

    def _take_carefully(self, channel: _Channel, most: int, first: int, room: int) -> tuple[int, int]:
        """The same, while some connection may be sending a message that never ends."""
        timestamp = 0
        try:
            for turn in range(most):
                message = channel.unfinished.receive(int(zmq.NOBLOCK) if turn else first)
                timestamp = timestamp or int(self._clock() * 1_000_000)
                self._messages.append(message if len(message) > 1 else message[0])
                room -= sum(map(len, message))
                if room <= 0:
                    break
        except zmq.Again:
            channel.opened.watch.found_empty()
        return timestamp, room

    def take(self) -> pa.RecordBatch:
        """Hand over what was received, as a batch with ``messages.MESSAGE_SCHEMA``."""
        messages, runs = self._messages, self._runs
        self._messages, self._runs, self._live_bytes = [], [], 0
        batches = []
        if messages:
            batch, findings = self.intake.read(messages, runs)
            batches.append(batch)
            self._note(findings)
        for channel in self._channels:
            if channel.replayer is not None:
                batches += self._take_replayed(channel, channel.replayer)
        if len(batches) == 1:
            return batches[0]
        return pa.concat_batches(batches) if batches else _NOTHING

    def _take_replayed(self, channel: _Channel, replayer: Replayer) -> list[pa.RecordBatch]:
        judge = self._judge
        connection = judge.connections[channel.name.encode()] = channel.connection()
        replayer.session.live = connection if channel.opened.watch.peers else None
        batches = []
        first, onwards, sock = replayer.session.first, replayer.session.onwards, replayer.socket
        replies, anew = replayer.take(judge)
        if replies:
            run = Run(int(self._clock() * 1_000_000), len(replies), channel.name, connection)
            batch, findings = self.intake.read_replies(replies, run, onwards, anew)
            batches.append(batch)
            self._note(findings)
        live_waits = bool(int(channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        given_up = replayer.step(judge, live_waits, self.intake.first_sequence(channel.name))
        self.intake.settle(given_up)
        self._incidents.lose(given_up)
        if (replayer.session.first, replayer.socket) != (first, sock):
            self._watch_sockets()
        return batches

    @property
    def _judge(self) -> Judge:
        judge = self.intake.judge
        assert judge is not None, "options let no replay in without numbers"
        return judge

    def _note(self, findings: Findings) -> None:
        self._incidents.take(findings)
        if self._options.replay_endpoint:
            self._incidents.lose([gap for gap in findings.abandoned if not gap.settled])

    @property
    def judge(self) -> Judge | None:
        """What the publishers' numbers tell; for reading its totals only."""
        return self.intake.judge

    def still_asking(self) -> bool:
        """Whether more may come by a replay; what follows the last messages is then asked for at once.

        May be called by any thread.
        """
        asking = [c.replayer.session.still_asking() for c in self._channels if c.replayer]  # each is hurried
        return any(asking)

    def settle(self, patience: float) -> None:
        """Nobody waits for an answer here."""

    def hold_still(self) -> None:
        """To be called while nothing is received: like ``keep_alive``, and replays may wait."""
        self.keep_alive()
        for channel in self._channels:
            if channel.replayer is not None:
                channel.replayer.postpone()

    def keep_alive(self) -> None:
        """Let libzmq and the connections do their work without receiving.

        A SUB renews its subscriptions after a publisher's restart only while its thread
        touches the socket; call this at least every few hundred milliseconds in a pause.
        """
        for channel in self._channels:
            channel.socket.getsockopt(zmq.EVENTS)
            watch = channel.opened.watch
            watch.update()
            watch.redial()
            watch.report_absent()
            channel.unfinished.look()
            if channel.replayer is not None:
                channel.replayer.keep_alive()
                if watch.connections != channel.known_connections:
                    channel.known_connections = watch.connections
                    channel.replayer.heard()
        count_connections(self._counters, [channel.opened.watch for channel in self._channels])
        self._incidents.flush()

    def report_absent(self) -> None:
        """Say, at the end of a read, at which endpoints nobody has answered."""
        for channel in self._channels:
            channel.opened.watch.update()
            channel.opened.watch.report_absent(leaving=True)

    def _discard_oversize(self, messages: list[RawMessage]) -> int:
        """Discard the last message if no row can hold it; return the bytes that were freed.

        Only the last one of a round can be so large, because it ends the round.
        """
        message = messages[-1]
        size = sum(map(len, message)) if isinstance(message, list) else len(message)
        if size <= MAX_MESSAGE_BYTES:
            return 0
        messages.pop()
        self._counters.oversize += 1
        _log.error(
            "discarded a message of %d bytes: a row holds at most %d; have it sent in parts",
            size,
            MAX_MESSAGE_BYTES,
        )
        return size


# Made of nulls, because Arrow imports pandas, where there is one, to look at Python objects.
_NOTHING = pa.record_batch([pa.nulls(0, field.type) for field in MESSAGE_SCHEMA], schema=MESSAGE_SCHEMA)


def _channels(options: ReadOptions, counters: SourceCounters) -> list[_Channel]:
    numbering = options.numbering
    spec, prefixes = SocketSpec.of_source(options), []
    if options.socket_type == "SUB":
        prefixes = list(subscriptions(options.framing, options.topics))
    if numbering is None or "endpoint" not in numbering.by:
        return [_Channel(spec, prefixes, counts=False)]
    none = Endpoints()
    replays = options.replay_endpoint or [None] * len(options.connect)
    connecting = [
        _Channel(
            msgspec.structs.replace(spec, connect=Endpoints((endpoint,)), bind=none),
            prefixes,
            None if replay is None else Replayer(options, endpoint, replay, counters),
        )
        for endpoint, replay in zip(options.connect, replays, strict=True)
    ]
    binding = [
        _Channel(msgspec.structs.replace(spec, connect=none, bind=Endpoints((endpoint,))), prefixes)
        for endpoint in options.bind
    ]
    return connecting + binding


def _rest(channel: _Channel, first: bytes) -> list[bytes]:
    """The whole message; its frames arrive together, so none of these waits."""
    message = [first]
    while channel.more.flag.value:
        message.append(channel.socket.recv(zmq.NOBLOCK))
        channel.more.ask()
    return message
