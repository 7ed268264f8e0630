"""Gives any range of the log again by vLLM's replay protocol, from the publisher's side.

A request is ``[b"", start]`` with a number of 8 bytes, big-endian; or of 16, which are start and end of a half-open
range. Each reply is ``[b"", id, value]``, after the last one ``[b"", eight 0xFF, b""]``. A client whose routing id
begins with ``topic:`` gets the topic too, ``[b"", topic, id, value]``: the protocol has no place where to ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import zmq

from zmq_datasource.errors import LogError
from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.framing.replay import END, TOPIC_WANTED
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.router import Router
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.transport.core import Column, Outbox, SameColumn, columns_of
from zmq_datasource.transport.kernel import find_dead_peers

__all__ = ["ReplayServer"]

# One turn's replies have left before the next ones are read, so this is what waits for a client, or one message.
_TURN_ROWS, _TURN_BYTES = 256, 4 << 20
_MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES = 1024, 2


@dataclass
class _Replay:
    cursor: Cursor
    end: int
    batch: pa.RecordBatch | None = None  # of this turn
    outbox: Outbox | None = None  # all of it but the last row
    at: int = 0  # the next row of it
    sent: zmq.MessageTracker | None = None  # the last reply of the turn before


class ReplayServer:
    """Use it in one thread. All its clients are served in turn, from files.

    Args:
        options: Where it is bound.
        view: The log.

    Attributes:
        most_clients: How many are served at once.
        is_held_up: Whether replies wait for a client to take those before, of which no event tells.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    most_clients = 64
    is_held_up = False

    def __init__(self, options: ProxyOptions, view: LogView) -> None:
        self._view = view
        self.router = Router(
            options, options.replay, _TURN_ROWS, _MOST_REQUEST_BYTES, _MOST_REQUEST_FRAMES, find_dead_peers
        )
        self._replays: dict[bytes, _Replay] = {}
        self._faults = LimitedLog(__name__, "requests for a replay that make no sense")
        self._errors = LimitedLog(__name__, "unexpected errors of replays")
        self.requests = 0
        self.sent = 0

    def _take(self, peer: bytes, frames: list[bytes]) -> None:
        wanted = frames[-1] if frames else b""
        if len(frames) != 2 or frames[0] or len(wanted) not in (8, 16):
            self._faults.warn("a request for a replay makes no sense: %d frames", len(frames))
            return
        if peer not in self._replays and len(self._replays) >= self.most_clients:
            self._faults.warn("a replay is refused: %d others are served", self.most_clients)
            return
        self.requests += 1
        start = int.from_bytes(wanted[:8], "big")
        end = int.from_bytes(wanted[8:], "big") if len(wanted) == 16 else self._view.end
        cursor = Cursor(self._view, max(start, self._view.earliest))
        self._replays[peer] = _Replay(cursor, min(end, self._view.end))

    def step(self) -> bool:
        """Give every client a turn.

        Returns:
            Whether there is more to do at once.
        """
        self.is_held_up = self.router.stuck = False
        busy = False
        for request in self.router.inbox():
            self._take(request.peer, request.frames)
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
            except Exception as e:  # the protocol has no word for it, so the client asks again
                self._errors.fault("a replay ends with an unexpected error: %r", e, error=e)
                del self._replays[peer]
        self.is_held_up = self.is_held_up or self.router.stuck
        self._faults.flush()
        self._errors.flush()
        return busy

    def close(self) -> None:
        """Close the socket, and all files."""
        self._replays.clear()
        self.router.close()

    @property
    def clients(self) -> int:
        return len(self._replays)

    def _serve(self, peer: bytes, replay: _Replay) -> bool:
        """Whether there is more to do for this client at once."""
        if replay.sent is not None and not replay.sent.done:
            self.is_held_up = True
            return False
        with_topics = peer.startswith(TOPIC_WANTED)
        if replay.batch is None and not self._read(peer, replay, with_topics):
            if replay.cursor.position < replay.end:
                return True  # deleted meanwhile: it is looked at again
            last = [END, b""] if not with_topics else [b"", END, b""]
            if self.router.send([peer, b"", *last]):
                del self._replays[peer]
            return False
        assert replay.batch is not None
        rows = replay.batch.num_rows - 1
        if replay.outbox is not None and replay.at < rows:
            reached = self.router.give(replay.outbox, replay.at, rows)
            self.sent += reached - replay.at
            replay.at = reached
            if reached < rows:
                return False
        replay.sent = self.router.send_tracked(_last_reply(peer, replay.batch, with_topics))
        if replay.sent is None:
            return False
        self.sent += 1
        replay.batch = replay.outbox = None
        return True

    def _read(self, peer: bytes, replay: _Replay, with_topics: bool) -> bool:
        cursor = replay.cursor
        cursor.skip_lost()  # what the log has no more is not replayed, as by any publisher
        if cursor.position >= replay.end:
            return False
        replay.batch = cursor.read(min(_TURN_ROWS, replay.end - cursor.position), _TURN_BYTES)
        if replay.batch is None:
            return False
        replay.at = 0
        if replay.batch.num_rows > 1:
            replay.outbox = Outbox(_replies(peer, replay.batch, with_topics), replay.batch.num_rows)
        return True


def _replies(peer: bytes, batch: pa.RecordBatch, with_topics: bool) -> list[Column]:
    """What rows of the log are as replies."""
    first = batch.column("id")[0].as_py()
    address = [SameColumn(peer), SameColumn(b"")]
    if with_topics:
        return [*address, *columns_of(raw_messages(batch), first)]
    _, number, *others = columns_of(raw_messages(batch), first)
    return [*address, number, *others]


def _last_reply(peer: bytes, batch: pa.RecordBatch, with_topics: bool) -> list[bytes]:
    last = batch.slice(batch.num_rows - 1)
    frames = raw_messages(last).message(0)
    topic, *others = frames if len(frames) > 1 else [b"", *frames]
    number = int(last.column("id")[0].as_py()).to_bytes(8, "big")
    return [peer, b"", *([topic] if with_topics else []), number, *others]
