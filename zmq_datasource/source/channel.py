"""The receiving sockets of a feed, each with its connections, and with the DEALER that fills its gaps (``Replayer``).

A feed has one socket, unless messages are counted by endpoint. libzmq does not say by which of its connections a
message arrived, so then each endpoint has a socket of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec
import zmq

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.columns import MAX_MESSAGE_BYTES
from zmq_datasource.messages.framing.replay import Reply
from zmq_datasource.options import ReadOptions
from zmq_datasource.options.socket import Endpoint, Endpoints
from zmq_datasource.sequences import Gap, SequenceTracker
from zmq_datasource.source.replay_session import ReplaySession
from zmq_datasource.transport.link import Link
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

# The publisher sends a replay as fast as it can. Its own queue should limit the replay, not this one.
_RCVHWM = 100_000


class Channel:
    """One receiving socket, and its replayer if its publisher has a replay endpoint. For the receiving thread.

    Args:
        prefixes: The topics of a SUB or an XSUB.
        replayer: Asks the publisher for missing messages.
        counts_connections: Whether to count connections. That is needed only if messages are counted by endpoint.
    """

    def __init__(
        self,
        spec: SocketSpec,
        counters: SourceCounters,
        prefixes: Sequence[bytes] = (),
        replayer: Replayer | None = None,
        counts_connections: bool = True,
    ) -> None:
        self.name = spec.endpoints
        self.kind = spec.kind
        self._spec = spec
        self._counters = counters
        self._prefixes = prefixes
        self.replayer = replayer
        self._counts_connections = counts_connections
        self._known_connections = 0

    def open(self) -> None:
        """Open the socket, and the replayer's.

        Raises:
            OptionError, EndpointError: A socket cannot be opened as asked; nothing stays open.
        """
        self.opened = OpenSocket(self._spec, self._prepare)
        self.socket = self.opened.socket
        if self.replayer is not None:
            try:
                self.replayer.open()
            except BaseException:
                self.opened.close(linger=0)
                raise

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        for prefix in self._prefixes:
            if self.kind == "XSUB":
                sock.send(b"\x01" + prefix)
            else:
                sock.setsockopt(zmq.SUBSCRIBE, prefix)

    def close(self) -> None:
        if self.replayer is not None:
            self.replayer.close(linger=0)
        self.opened.close(linger=0)

    def connection(self) -> int:
        """The number of the socket's newest connection, from 1; 0 if connections are not counted."""
        if not self._counts_connections:
            return 0
        self.opened.watch.update()
        return self.opened.watch.connections

    @property
    def waiting(self) -> bool:
        """Whether libzmq has messages that were not received."""
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def waits_for_replay(self) -> bool:
        """Whether the live flow is not received yet, because a replay brings older messages first."""
        return self.replayer is not None and self.replayer.session.holds_live

    def keep_alive(self) -> None:
        """Keep the connections working while nothing is received; call it every few hundred milliseconds.

        A SUB renews its subscriptions after a publisher's restart only while its thread uses the socket.
        """
        self.socket.getsockopt(zmq.EVENTS)
        watch = self.opened.watch
        watch.update()
        watch.redial()
        watch.report_absent()
        if self.replayer is not None:
            self.replayer.keep_alive()
            if watch.connections != self._known_connections:
                self._known_connections = watch.connections
                self.replayer.session.note_live(time.monotonic())

    def note_taken(self, messages: int, is_empty: bool, excess: int) -> None:
        """Note what ``Inbox.take`` has taken from the socket. A message too large for a row is counted.

        Args:
            is_empty: Whether the socket had no more messages.
            excess: The size of a message that was discarded because it is too large; 0 if there was none.
        """
        if messages and self.replayer is not None:
            self.replayer.session.note_live(time.monotonic())
        if excess:
            self._counters.oversize += 1
            _log.error(
                "%s: discarded a message of %d bytes: a row holds at most %d; have it sent in parts",
                self.name,
                excess,
                MAX_MESSAGE_BYTES,
            )
        if is_empty:
            self.opened.watch.redialer.note_empty()


class Replayer(Link):
    """The DEALER of a replay session. It never waits, and belongs to the receiving thread.

    Args:
        options: The options of the feed, which also give the security and limits of this socket.
        connect: The endpoint of the publisher's ROUTER.
        session: The session.
    """

    def __init__(self, options: ReadOptions, connect: Endpoint, session: ReplaySession) -> None:
        spec = SocketSpec(
            kind="DEALER",
            connect=Endpoints((connect,)),
            rcvhwm=max(options.rcvhwm, _RCVHWM),
            zmq=options.zmq,
            allowed_clients=options.allowed_clients,
        )
        self.session = session
        super().__init__(spec, session)

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
            if session.reply_bytes >= most_bytes or (frames := receive()) is None:
                return received
            session.receive(frames, now)
        return most

    def start(self) -> None:
        """See ``ReplaySession.start``."""
        self.session.start(time.monotonic())
        self.send_outbox()

    def take(self) -> Sequence[Reply]:
        """See ``ReplaySession.take``."""
        self.check_connection()
        return self.session.take(time.monotonic())

    def step(self, live_waits: bool) -> Sequence[Gap]:
        """See ``ReplaySession.step``. Call it after each ``take``."""
        given_up = self.session.step(live_waits, time.monotonic())
        self.send_outbox()
        return given_up


def make_channels(
    options: ReadOptions,
    counters: SourceCounters,
    tracker: SequenceTracker | None,
    replay_timeout: float,
) -> list[Channel]:
    """Make the channels of a feed. They are not open yet."""
    numbering = options.numbering
    specs = SocketSpec.all_of_source(options)
    if numbering is None or "endpoint" not in numbering.by:
        return [Channel(spec, counters, _prefixes(options, spec), counts_connections=False) for spec in specs]

    def channel(spec: SocketSpec, replayer: Replayer | None = None, **endpoints: Endpoints) -> Channel:
        one = msgspec.structs.replace(spec, **{"connect": Endpoints(), "bind": Endpoints()} | endpoints)
        return Channel(one, counters, _prefixes(options, spec), replayer)

    def replayer(publisher: Endpoint, replays: Endpoint) -> Replayer:
        assert tracker is not None, "messages are numbered"
        first = numbering.start if options.replay_from == "earliest" else None
        session = ReplaySession(str(publisher), str(replays), replay_timeout, counters, tracker, first)
        return Replayer(options, replays, session)

    replays = options.replay_endpoint or [None] * len(options.connect)
    return [
        *(
            channel(specs[0], None if at is None else replayer(endpoint, at), connect=Endpoints((endpoint,)))
            for endpoint, at in zip(options.connect, replays, strict=True)
        ),
        *(channel(spec, bind=Endpoints((endpoint,))) for spec in specs for endpoint in spec.bind),
    ]


def _prefixes(options: ReadOptions, spec: SocketSpec) -> Sequence[bytes]:
    return options.topics.prefixes if spec.kind in ("SUB", "XSUB") else []
