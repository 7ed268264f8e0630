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
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec
import pyarrow as pa
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.dead_letters import DeadLetters
from zmq_datasource.errors import SocketError
from zmq_datasource.framing import RawMessage, decode_plain, subscriptions
from zmq_datasource.incidents import Incidents
from zmq_datasource.intake import Findings, Intake, Run
from zmq_datasource.messages import MAX_MESSAGE_BYTES, MESSAGE_SCHEMA
from zmq_datasource.option_types import Endpoints
from zmq_datasource.options import ReadOptions
from zmq_datasource.replayer import Replayer
from zmq_datasource.sockets import OpenSocket, count_connections, more_frames

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

# Bounds of one round: no round keeps the thread from its other duties for long, and none
# holds more than about this much (or one message) in Python objects.
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

    def __init__(self, options: ReadOptions, replayer: Replayer | None = None, counts: bool = True) -> None:
        self.name = options.endpoints
        self.options = options
        self.replayer = replayer
        self.counts = counts

    def open(self) -> None:
        self.opened = OpenSocket(self.options, self._prepare)
        self.socket = self.opened.socket
        self.more = more_frames(self.socket)
        if self.replayer is not None:
            self.replayer.open()

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        if self.options.socket_type == "SUB":
            for prefix in subscriptions(self.options.framing, self.options.topics):
                sock.setsockopt(zmq.SUBSCRIBE, prefix)

    def close(self) -> None:
        if self.replayer is not None:
            self.replayer.close()
        self.opened.close(self.options.linger)

    def connection(self) -> int:
        """How many connections there have been, where that tells something; as of now."""
        if not self.counts:
            return 0
        self.opened.watch.update()
        return self.opened.watch.connections

    @property
    def held(self) -> bool:
        """Whether the live flow waits for history."""
        return self.replayer is not None and self.replayer.first


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
        self._next_housekeeping = 0.0

    def __enter__(self) -> Self:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: They cannot be opened as asked.
        """
        # The first use of some of Arrow imports pandas where there is one: a third of a second in
        # which a fast publisher's queue would run over.
        decode_plain([b"", [b"", b""]], [(0, 2)])
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
                    channel.replayer.fetch_first(start)

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
        return len(self._messages) + sum(c.replayer.pending for c in self._channels if c.replayer)

    @property
    def pending_bytes(self) -> int:
        """Their bytes."""
        return self._live_bytes + sum(c.replayer.pending_bytes for c in self._channels if c.replayer)

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
        """One round: wait up to ``WAIT_MS`` for a message, then take what is there.

        Args:
            most: Take no more than this many messages from a socket.

        Returns:
            How many messages were taken; 0 if none came.
        """
        now = time.monotonic()
        if now >= self._next_housekeeping:
            self.keep_alive()
            self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        if self._poller is None:
            return self._receive_from(self._channels[0], most, 0)
        taken = 0
        ready = dict(self._poller.poll(WAIT_MS))
        for channel in self._channels:
            if channel.replayer is not None and channel.replayer.socket in ready:
                taken += channel.replayer.receive(most, self._batch_bytes)
            if channel.socket in ready and not channel.held:
                taken += self._receive_from(channel, most, int(zmq.NOBLOCK))
        return taken

    def _receive_from(self, channel: _Channel, most: int, first: int) -> int:
        # Local names and nothing but what bounds the round: this loop sets the source's speed.
        recv, noblock = channel.socket.recv, int(zmq.NOBLOCK)
        ask_more, more = channel.more
        messages = self._messages
        append, before = messages.append, len(messages)
        room = limit = min(_ROUND_BYTES, self._batch_bytes)
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
            pass
        if room < limit - MAX_MESSAGE_BYTES:
            room += self._discard_oversize(messages)
        taken = len(messages) - before
        if taken:
            self._runs.append(Run(timestamp, taken, channel.name, channel.connection()))
        self._live_bytes += limit - room
        return taken

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
        judge = self.intake.judge
        assert judge is not None, "options let no replay in without numbers"
        batches = []
        first, sock = replayer.first, replayer.socket
        replies = replayer.take(judge)
        if replies:
            run = Run(int(self._clock() * 1_000_000), len(replies), channel.name, channel.connection())
            batch, findings = self.intake.read_replies(replies, run, first)
            batches.append(batch)
            self._note(findings)
        live_waits = bool(int(channel.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
        given_up = replayer.step(judge, live_waits)
        self.intake.settle(given_up)
        self._incidents.lose(given_up)
        if (replayer.first, replayer.socket) != (first, sock):
            self._watch_sockets()
        return batches

    def _note(self, findings: Findings) -> None:
        self._incidents.take(findings)
        if self._options.replay_endpoint:
            self._incidents.lose([gap for gap in findings.abandoned if not gap.settled])

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
            if channel.replayer is not None:
                channel.replayer.keep_alive()
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


_NOTHING = pa.RecordBatch.from_pylist([], MESSAGE_SCHEMA)


def _channels(options: ReadOptions, counters: SourceCounters) -> list[_Channel]:
    numbering = options.numbering
    if numbering is None or "endpoint" not in numbering.by:
        return [_Channel(options, counts=False)]
    none = Endpoints()
    replays = options.replay_endpoint or [None] * len(options.connect)
    connecting = [
        _Channel(
            msgspec.structs.replace(options, connect=Endpoints((endpoint,)), bind=none),
            None if replay is None else Replayer(options, endpoint, replay, counters),
        )
        for endpoint, replay in zip(options.connect, replays, strict=True)
    ]
    binding = [
        _Channel(msgspec.structs.replace(options, connect=none, bind=Endpoints((endpoint,))))
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
