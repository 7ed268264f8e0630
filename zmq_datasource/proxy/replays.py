"""Gives any range of the log again: vLLM's replay protocol, from the publisher's side.

A request is ``[b"", start]`` with a number of 8 bytes, big-endian; or of 16, which are start and end of a
half-open range. Each reply is ``[b"", id, value]``, after the last one ``[b"", eight 0xFF, b""]``. A client
whose routing id begins with ``topic:`` gets the topic too, ``[b"", topic, id, value]``: the protocol itself
has no place where to ask for it, and a publisher that does not know it is not disturbed.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from zmq_datasource.errors import LogError
from zmq_datasource.framing.replay import END, TOPIC_WANTED
from zmq_datasource.limited_log import LimitedLog
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.rows import messages_of
from zmq_datasource.proxy.view import Cursor, LogView
from zmq_datasource.sockets import OpenSocket

__all__ = ["ReplayServer"]

_TURN_ROWS, _TURN_BYTES = 512, 4 << 20
_TURN_MESSAGES = 256
_MOST_REQUESTS = 256
_MOST_CLIENTS = 64
# A client that takes nothing for so long has given up.
_PATIENCE_SECONDS = 60.0
# Messages that are queued for a client in libzmq, which is what bounds memory.
_SNDHWM = 50


@dataclass
class _Replay:
    cursor: Cursor
    end: int
    topics: bool
    moved: float
    pending: deque[list[bytes]] = field(default_factory=deque)


class ReplayServer:
    """A ROUTER; in one thread. All its clients are served in turn, from files.

    Args:
        options: Where it is bound.
        view: The log.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, options: ProxyOptions, view: LogView) -> None:
        self._view = view
        self._opened = OpenSocket(options.socket("ROUTER", bind=options.replay), _prepare)
        self.socket = self._opened.socket
        self._replays: dict[bytes, _Replay] = {}
        self._faults = LimitedLog(__name__, "requests for a replay that make no sense")
        self._stuck = False
        self._inbox: list[list[bytes]] = []
        self.requests = 0
        self.sent = 0

    def receive(self) -> None:
        """Take what is asked for; ``step`` answers."""
        with suppress(zmq.Again):
            while len(self._inbox) < _MOST_REQUESTS:
                self._inbox.append(self.socket.recv_multipart(zmq.NOBLOCK))

    def _read_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for peer, *frames in inbox:
            self._faults.flush()
            wanted = frames[-1] if frames else b""
            if len(frames) != 2 or frames[0] or len(wanted) not in (8, 16):
                self._faults.warn("a request for a replay makes no sense: %d frames", len(frames))
                continue
            if peer not in self._replays and len(self._replays) >= _MOST_CLIENTS:
                self._faults.warn("a replay is refused: %d others are served", _MOST_CLIENTS)
                continue
            self.requests += 1
            start = int.from_bytes(wanted[:8], "big")
            end = int.from_bytes(wanted[8:], "big") if len(wanted) == 16 else self._view.end
            self._replays[peer] = _Replay(
                Cursor(self._view, max(start, self._view.earliest)),
                min(end, self._view.end),
                peer.startswith(TOPIC_WANTED),
                time.monotonic(),
            )

    def step(self) -> bool:
        """Give every client a turn.

        Returns:
            Whether there is more to do at once.
        """
        busy = False
        self._stuck = False
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
        return busy

    @property
    def stuck(self) -> bool:
        """Whether somebody waits whose queue was full."""
        return self._stuck

    @property
    def clients(self) -> int:
        return len(self._replays)

    def _serve(self, peer: bytes, replay: _Replay) -> bool:
        for _ in range(_TURN_MESSAGES):
            if not replay.pending and not self._read(replay):
                if replay.cursor.position < replay.end:
                    return True  # deleted under our hands: look again
                # As a reply, with an empty topic where topics are told.
                last = [END, b""] if not replay.topics else [b"", END, b""]
                if self._send([peer, b"", *last]):
                    del self._replays[peer]
                return False
            if not self._send([peer, b"", *replay.pending[0]]):
                if time.monotonic() - replay.moved > _PATIENCE_SECONDS:
                    del self._replays[peer]
                return False
            replay.pending.popleft()
            replay.moved = time.monotonic()
            self.sent += 1
        return True

    def _read(self, replay: _Replay) -> bool:
        cursor = replay.cursor
        cursor.skip_lost()  # what the log has no more is not replayed, as by any publisher
        if cursor.position >= replay.end:
            return False
        batch = cursor.read(min(_TURN_ROWS, replay.end - cursor.position), _TURN_BYTES)
        if batch is None:
            return False
        messages = messages_of(batch)
        for at, position in enumerate(batch.column("id").to_pylist()):
            topic, *rest = (
                messages.frames(at) if messages.topics[at] is not None else [b"", messages.values[at]]
            )
            number = position.to_bytes(8, "big")
            replay.pending.append([topic, number, *rest] if replay.topics else [number, *rest])
        return True

    def _send(self, frames: list[bytes]) -> bool:
        for attempt in range(2):
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
                return True
            except zmq.Again:
                self._stuck = True
                if not attempt:
                    self.socket.getsockopt(zmq.EVENTS)
        return False

    def close(self) -> None:
        self._opened.close(linger=0)


def _prepare(sock: zmq.Socket[bytes]) -> None:
    sock.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sock.setsockopt(zmq.MAXMSGSIZE, 1024)
    sock.setsockopt(zmq.RCVHWM, 1000)
    sock.setsockopt(zmq.SNDHWM, _SNDHWM)
