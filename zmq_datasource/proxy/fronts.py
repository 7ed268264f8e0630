"""The publishers' side: what comes from XSUB and PULL sockets, as it came."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.messages.schemas import MAX_MESSAGE_BYTES
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.peers import PeerWatch
from zmq_datasource.transport.spec import SocketSpec
from zmq_datasource.transport.unfinished import Unfinished

__all__ = ["Front", "now_us"]

_log = logging.getLogger(__name__)

# Most messages of one round, as in ``receiver``; its bytes are bounded by the options.
ROUND_MESSAGES = 4096


class Front:
    """One receiving socket of a proxy; belongs to one thread.

    Args:
        spec: Its type, endpoints and high-water marks.
        round_bytes: Bytes after which a round ends; its last message may be larger.
        counters: Where to count what is discarded.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
    """

    def __init__(self, spec: SocketSpec, round_bytes: int, counters: SourceCounters) -> None:
        self.name = f"{spec.kind} {spec.endpoints}"
        self._round_bytes = round_bytes
        self._counters = counters
        opened = self._opened = OpenSocket(spec)
        self.socket = opened.socket
        self._unfinished = Unfinished(opened)
        self._inbox = Inbox()

    def subscribe(self, requests: Sequence[bytes]) -> None:
        """Pass on what subscribers ask for: a byte 1 or 0, then the topic."""
        for request in requests:
            self.socket.send(request)

    def receive(self) -> RawMessages:
        """What is there, up to the bounds of a round, as raw messages."""
        inbox = self._inbox
        while inbox.messages < ROUND_MESSAGES and inbox.size < self._round_bytes:
            taken = self._unfinished.take(
                inbox, ROUND_MESSAGES - inbox.messages, self._round_bytes - inbox.size, wait=False
            )
            if taken.excess:
                self._counters.oversize += 1
                _log.error(
                    "%s: discarded a message of %d bytes: a row holds at most %d",
                    self.name,
                    taken.excess,
                    MAX_MESSAGE_BYTES,
                )
            if taken.empty:
                self._opened.watch.found_empty()
                break
        self._opened.watch.taken += inbox.messages
        return inbox.hand_over()

    @property
    def watch(self) -> PeerWatch:
        """What is known of its connections."""
        return self._opened.watch

    @property
    def peers(self) -> int:
        """Connections that are up."""
        return self._opened.watch.peers

    @property
    def protocol_errors(self) -> int:
        """Connections that were ended because of what the peer sent."""
        return self._opened.watch.protocol_errors

    def keep_alive(self) -> None:
        """Let the connections do their work."""
        self.socket.getsockopt(zmq.EVENTS)
        watch = self._opened.watch
        watch.update()
        watch.redial()
        watch.report_absent()
        self._unfinished.look()

    def close(self) -> None:
        self._opened.close(linger=0)


def now_us() -> int:
    """Microseconds since the epoch."""
    return int(time.time() * 1_000_000)
