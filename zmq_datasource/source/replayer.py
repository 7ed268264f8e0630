"""Ask one publisher's ROUTER for missing messages, beside the live flow. ``replay_session`` has the rules."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.framing.replay import TOPIC_WANTED, Reply
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.types import Endpoint, Endpoints
from zmq_datasource.sequences import Gap, SequenceTracker
from zmq_datasource.source.replay_session import ReplaySession
from zmq_datasource.transport.link import Link
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["Replayer"]

# The publisher sends a replay as fast as it can. Its own queue should limit the replay, not this one.
_RCVHWM = 100_000


class Replayer:
    """The socket of a replay session. It never waits, and belongs to the receiving thread.

    Args:
        options: The options of the feed, which also give the security and limits of this socket.
        endpoint: The endpoint of the publisher's live messages.
        replay_endpoint: The endpoint of its ROUTER.
        counters: The counters to increase.

    Attributes:
        session: The session.
    """

    def __init__(
        self,
        options: ReadOptions,
        endpoint: Endpoint,
        replay_endpoint: Endpoint,
        counters: SourceCounters,
    ) -> None:
        connect = Endpoints((replay_endpoint,))
        spec = SocketSpec(
            kind="DEALER",
            connect=connect,
            rcvhwm=max(options.rcvhwm, _RCVHWM),
            zmq=options.zmq,
            access=options.access,
        )
        self.session = ReplaySession(str(endpoint), str(connect), float(options.replay_timeout), counters)
        self._link = Link(spec, self.session, _ask_for_topics)

    def open(self) -> None:
        """Connect to the publisher's replay endpoint.

        Raises:
            EndpointError: The endpoint cannot be connected.
        """
        self._link.open()
        self.restart_silence()

    def close(self) -> None:
        self._link.close(linger=0)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The DEALER. The link replaces it after silence."""
        return self._link.socket

    def keep_alive(self) -> None:
        """Let the connection work; see ``Channel.keep_alive``."""
        self._link.check_connection()
        self._link.watch.report_absent()
        self.session.reachable = self._link.watch.peers > 0
        self.session.log.flush()

    def extend_deadlines(self) -> None:
        """See ``ReplaySession.extend_deadlines``."""
        self.session.extend_deadlines(time.monotonic())

    def restart_silence(self) -> None:
        """See ``ReplaySession.restart_silence``."""
        self.session.restart_silence(time.monotonic())

    @property
    def due(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.session.is_due(time.monotonic())

    def fetch_first(self, tracker: SequenceTracker, start: int) -> None:
        """See ``ReplaySession.fetch_first``."""
        self.session.fetch_first(tracker, start, time.monotonic())
        self._link.send_outbox()

    def receive(self, most: int, most_bytes: int) -> int:
        """Receive the replies that are there, up to so many messages and pending bytes. Returns their number."""
        session, receive, now = self.session, self._link.receive, time.monotonic()
        for taken in range(most):
            if session.pending_bytes >= most_bytes or (frames := receive()) is None:
                return taken
            session.receive(frames, now)
        return most

    def take(self, tracker: SequenceTracker) -> tuple[Sequence[Reply], bool]:
        """See ``ReplaySession.take``."""
        self._link.check_connection()
        taken = self.session.take(tracker, time.monotonic())
        self._link.send_outbox()
        return taken

    def step(self, tracker: SequenceTracker, live_waits: bool, start: int | None) -> list[Gap]:
        """See ``ReplaySession.step``."""
        given_up = self.session.step(tracker, live_waits, start, time.monotonic())
        self._link.send_outbox()
        return given_up


def _ask_for_topics(sock: zmq.Socket[bytes]) -> None:
    """Choose a routing id that asks a proxy for topics. To other publishers it is a routing id like any."""
    sock.setsockopt(zmq.ROUTING_ID, TOPIC_WANTED + uuid.uuid4().hex.encode())
