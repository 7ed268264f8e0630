"""Asks one publisher's ROUTER for messages again, beside the live flow; ``replay_session`` has the rules."""

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

# The publisher sends as fast as it can: its own queue is what limits a replay.
_RCVHWM = 100_000


class Replayer:
    """Carries a session of replays. Never waits; belongs to the receiving thread.

    Args:
        options: Security and limits of the socket are those of the feed.
        endpoint: Where the publisher's live messages come from.
        replay_endpoint: Its ROUTER.
        counters: Where to count.

    Attributes:
        session: What is asked for, and what has come.
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
        self._link = Link(spec, self.session, _name)

    def open(self) -> None:
        """Connect to the publisher's replay endpoint.

        Raises:
            EndpointError: The endpoint cannot be connected.
        """
        self._link.open()
        self.heard()

    def close(self) -> None:
        self._link.close(linger=0)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The DEALER; it is replaced after each silence."""
        return self._link.socket

    def keep_alive(self) -> None:
        """Let the connection do its work."""
        self._link.check_connection()
        self._link.watch.report_absent()
        self.session.reachable = self._link.watch.peers > 0
        self.session.log.flush()

    def postpone(self) -> None:
        """Put deadlines off while nobody reads the socket."""
        self.session.postpone(time.monotonic())

    def heard(self) -> None:
        """The live flow has brought something, or has a new connection."""
        self.session.heard(time.monotonic())

    @property
    def due(self) -> bool:
        """Whether ``step`` has something to do."""
        return self.session.is_due(time.monotonic())

    def fetch_first(self, tracker: SequenceTracker, start: int) -> None:
        """Ask for history, for which the live flow waits: until it has come, or nothing comes."""
        self.session.fetch_first(tracker, start, time.monotonic())
        self._link.send_outbox()

    def receive(self, most: int, most_bytes: int) -> int:
        """Take the replies that are there.

        Returns:
            How many there were.
        """
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


def _name(sock: zmq.Socket[bytes]) -> None:
    """A proxy then tells each message's topic; to a publisher a name is a name."""
    sock.setsockopt(zmq.ROUTING_ID, TOPIC_WANTED + uuid.uuid4().hex.encode())
