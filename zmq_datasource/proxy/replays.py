"""Gives any range of the log again: vLLM's replay protocol, from the publisher's side.

A request is ``[b"", start]`` with a number of 8 bytes, big-endian; or of 16, which are start and end of a
half-open range. Each reply is ``[b"", id, value]``, after the last one ``[b"", eight 0xFF, b""]``. A client
whose routing id begins with ``topic:`` gets the topic too, ``[b"", topic, id, value]``: the protocol itself
has no place where to ask for it, and a publisher that does not know it is not disturbed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.columns import data_bytes
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.replay import END, TOPIC_WANTED
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.router import Router
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.proxy.wire import PATIENCE_SECONDS, Wire, Wires
from zmq_datasource.transport.core import (
    Column,
    Outbox,
    SameColumn,
    columns_of,
)

__all__ = ["ReplayServer"]

_TURN_ROWS, _TURN_BYTES = 256, 4 << 20
_MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES = 1024, 2
# What waits for a client: so many messages, and so many bytes (where the system tells) beside those of one message.
_SNDHWM, _WINDOW = 50, 4 << 20


@dataclass
class _Replay:
    cursor: Cursor
    end: int
    topics: bool
    wire: Wire
    moved: float
    pending: Outbox | None = None
    rows: int = 0
    size: int = 0  # the bytes of their values, which is less than what leaves: nothing is to wait for ever
    left: int | None = None  # what had left at the last look
    at: int = 0  # of these, the next one to be sent


class ReplayServer:
    """Use it in one thread. All its clients are served in turn, from files.

    Args:
        options: Where it is bound.
        view: The log.

    Attributes:
        most_clients: How many are served at once, with those that still have to take what they were given.
        look_seconds: How often it looks for clients that take nothing.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    most_clients = 64
    look_seconds = 1.0

    def __init__(self, options: ProxyOptions, view: LogView) -> None:
        self._view = view
        self.router = Router(options, options.replay, _SNDHWM, _MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES)
        self._replays: dict[bytes, _Replay] = {}
        self._wires = Wires()
        self._next_look = 0.0
        self._faults = LimitedLog(__name__, "requests for a replay that make no sense")
        self._errors = LimitedLog(__name__, "unexpected errors of replays")
        self.requests = 0
        self.sent = 0

    def _read_inbox(self) -> None:
        for peer, frames, descriptor, _ in self.router.inbox():
            self._faults.flush()
            self._errors.flush()
            try:
                self._take(peer, frames, descriptor)
            except Exception as e:
                self._fail(peer, e)

    def _fail(self, peer: bytes, error: Exception) -> None:
        """Something unexpected ends one replay; the protocol has no word for it, so its client asks again."""
        self._errors.fault("a replay ends with an unexpected error: %r", error, error=error)
        self._replays.pop(peer, None)

    def _take(self, peer: bytes, frames: list[bytes], descriptor: int) -> None:
        wanted = frames[-1] if frames else b""
        if len(frames) != 2 or frames[0] or len(wanted) not in (8, 16):
            self._faults.warn("a request for a replay makes no sense: %d frames", len(frames))
            return
        if peer not in self._replays and self._are_too_many():
            self._faults.warn("a replay is refused: %d others are served", self.most_clients)
            return
        self.requests += 1
        start = int.from_bytes(wanted[:8], "big")
        end = int.from_bytes(wanted[8:], "big") if len(wanted) == 16 else self._view.end
        self._replays[peer] = _Replay(
            Cursor(self._view, max(start, self._view.earliest)),
            min(end, self._view.end),
            peer.startswith(TOPIC_WANTED),
            self._wires.of(descriptor),
            time.monotonic(),
        )

    def _are_too_many(self) -> bool:
        in_use = self._wires_in_use
        if len(in_use) + len(self._wires.left_over(in_use)) < self.most_clients:
            return False
        self._wires.look(in_use, time.monotonic())  # who has taken all by now makes place
        return len(in_use) + len(self._wires.left_over(in_use)) >= self.most_clients

    @property
    def _wires_in_use(self) -> list[Wire]:
        return [replay.wire for replay in self._replays.values()]

    def step(self) -> bool:
        """Give every client a turn.

        Returns:
            Whether there is more to do at once.
        """
        busy = False
        self.router.stuck = False
        self._read_inbox()
        for peer, replay in list(self._replays.items()):
            try:
                busy = self._serve(peer, replay) or busy
            except LogError as e:
                self._faults.warn("a replay ends early: %s", e)
                del self._replays[peer]
            except zmq.ZMQError as e:
                if e.errno != zmq.EHOSTUNREACH:
                    raise
                del self._replays[peer]  # gone
            except Exception as e:
                self._fail(peer, e)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + self.look_seconds
            self._wires.look(self._wires_in_use, now)
        return busy

    @property
    def clients(self) -> int:
        return len(self._replays)

    def _serve(self, peer: bytes, replay: _Replay) -> bool:
        if replay.pending is None and not self._read(peer, replay):
            if replay.cursor.position < replay.end:
                return True  # deleted under our hands: look again
            # As a reply, with an empty topic where replies have topics.
            last = [END, b""] if not replay.topics else [b"", END, b""]
            if self.router.send([peer, b"", *last]):
                del self._replays[peer]
            else:
                self._lose_patience(peer, replay)
            return False
        assert replay.pending is not None
        if replay.wire.queued >= _WINDOW:
            self._lose_patience(peer, replay)
            if replay.wire.queued >= _WINDOW:
                self.router.stuck = True
                return False
        reached = self.router.give(replay.pending, replay.at, replay.rows)
        if reached > replay.at:
            self.sent += reached - replay.at
            replay.wire.add(replay.size * (reached - replay.at) // replay.rows)
            replay.at, replay.moved = reached, time.monotonic()
        if reached < replay.rows:
            self._lose_patience(peer, replay)
            return False
        replay.pending = None
        return True

    def _lose_patience(self, peer: bytes, replay: _Replay) -> None:
        """Hang up on a client that has taken nothing for long."""
        replay.wire.look()
        if replay.wire.left != replay.left:  # a large message is on its way
            replay.left, replay.moved = replay.wire.left, time.monotonic()
        if time.monotonic() - replay.moved > PATIENCE_SECONDS:
            self._faults.warn("a client of a replay has taken nothing for %.0f s", PATIENCE_SECONDS)
            replay.wire.hang_up()
            del self._replays[peer]

    def _read(self, peer: bytes, replay: _Replay) -> bool:
        cursor = replay.cursor
        cursor.skip_lost()  # what the log has no more is not replayed, as by any publisher
        if cursor.position >= replay.end:
            return False
        batch = cursor.read(min(_TURN_ROWS, replay.end - cursor.position), _TURN_BYTES)
        if batch is None:
            return False
        replay.pending = Outbox(_replies(peer, batch, replay.topics), batch.num_rows)
        replay.rows, replay.at, replay.size = batch.num_rows, 0, data_bytes(batch.column("value"))
        return True


def _replies(peer: bytes, batch: pa.RecordBatch, topics: bool) -> list[Column]:
    """What rows of the log are as replies."""
    first = batch.column("id")[0].as_py()
    address = [SameColumn(peer), SameColumn(b"")]
    if topics:
        return [*address, *columns_of(raw_messages(batch), first)]
    _, number, *others = columns_of(raw_messages(batch), first)
    return [*address, number, *others]
