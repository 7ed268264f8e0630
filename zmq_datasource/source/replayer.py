"""Ask one publisher's ROUTER for missing messages, beside the live flow. ``replay_session`` has the rules."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.framing.replay import TOPIC_WANTED, Reply
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.sequences import Gap, SequenceTracker
from zmq_datasource.source.replay_session import ReplaySession
from zmq_datasource.transport.link import Link
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["Replayer"]

# The publisher sends a replay as fast as it can. Its own queue should limit the replay, not this one.
_RCVHWM = 100_000


class Replayer(Link):
    """The DEALER of a replay session. It never waits, and belongs to the receiving thread.

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
        super().__init__(spec, self.session, _ask_for_topics)

    def keep_alive(self) -> None:
        """Keep the connection working; see ``Channel.keep_alive``."""
        self.check_connection()
        self.watch.report_absent()
        self.session.reachable = self.watch.peers > 0
        self.session.log.flush()

    def receive_replies(self, most: int, most_bytes: int) -> int:
        """Receive the replies that are there, at most ``most``, until ``most_bytes`` are pending. Returns how many."""
        session, receive, now = self.session, self.receive, time.monotonic()
        for received in range(most):
            if session.pending_bytes >= most_bytes or (frames := receive()) is None:
                return received
            session.receive(frames, now)
        return most

    def fetch_history(self, tracker: SequenceTracker, start: int) -> None:
        """See ``ReplaySession.fetch_history``."""
        self.session.fetch_history(tracker, start, time.monotonic())
        self.send_outbox()

    def take(self, tracker: SequenceTracker) -> tuple[Sequence[Reply], bool]:
        """See ``ReplaySession.take``."""
        self.check_connection()
        taken = self.session.take(tracker, time.monotonic())
        self.send_outbox()
        return taken

    def step(self, tracker: SequenceTracker, live_waits: bool, start: int | None) -> list[Gap]:
        """See ``ReplaySession.step``."""
        given_up = self.session.step(tracker, live_waits, start, time.monotonic())
        self.send_outbox()
        return given_up


def _ask_for_topics(sock: zmq.Socket[bytes]) -> None:
    """Set a routing id by which a proxy sends topics, too. To other publishers it means nothing."""
    sock.setsockopt(zmq.ROUTING_ID, TOPIC_WANTED + uuid.uuid4().hex.encode())
