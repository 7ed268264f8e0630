"""The publishers' side of the live process: an XSUB and a PULL for messages, and a ROUTER for transactions."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import ExitStack
from typing import NamedTuple

import pyarrow as pa
import zmq

from zmq_datasource.acknowledged.acceptor import Acceptor, Terms
from zmq_datasource.acknowledged.attempt_files import AttemptFiles
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.columns import data_bytes
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.journal import Journal
from zmq_datasource.source.channel import Channel
from zmq_datasource.source.receiver import ROUND_BYTES, ROUND_MESSAGES
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.spec import SocketSpec


class Received(NamedTuple):
    """The messages of a round.

    Attributes:
        raw: The messages.
        arrivals: When they came, in microseconds since the epoch, and how many at a time.
    """

    raw: RawMessages
    arrivals: list[tuple[int, int]]

    def rows(self) -> pa.RecordBatch:
        """Rows of them, for the log."""
        return decode_plain(self.raw, self.arrivals)


class Front:
    """Receives messages, which ``take`` returns. Transactions go to the journal at their commit.

    In one thread.
    """

    def __init__(self, options: ProxyOptions, counters: SourceCounters) -> None:
        self._options = options
        self._counters = counters
        self._round_bytes = min(options.chunk_bytes, ROUND_BYTES)
        self._inbox = Inbox()
        self._arrivals: list[tuple[int, int]] = []  # when messages came, and how many
        self._channels: dict[str, Channel] = {}
        self._xsub: zmq.Socket[bytes] | None = None
        self._acceptor: Acceptor | None = None
        self._is_polled = False
        self._stack = ExitStack()

    def open(self, transactions: CommittedTransactions, journal: Journal) -> None:
        """Open the sockets.

        Raises:
            OptionError, EndpointError: A socket cannot be opened as asked; none stays open.
        """
        options = self._options
        with ExitStack() as stack:
            if options.bind or options.connect:
                spec = SocketSpec.of_proxy(options, "XSUB", options.bind, options.connect)
                self._xsub = self._open(spec, stack)
                self.subscribe([b"\x01" + prefix for prefix in options.topics.prefixes])
            if options.pull:
                self._open(SocketSpec.of_proxy(options, "PULL", options.pull), stack)
            if options.router:
                # Without sndhwm, which is for subscribers: the answers to senders are few.
                spec = SocketSpec(
                    kind="ROUTER",
                    bind=options.router,
                    rcvhwm=options.rcvhwm,
                    zmq=options.zmq,
                    allowed_clients=options.allowed_clients,
                )
                terms = Terms(options.transaction_timeout, options.wal_max_bytes)
                files = AttemptFiles(journal.storage.directory)
                self._acceptor = stack.enter_context(
                    Acceptor(spec, terms, self._counters, files, transactions, journal)
                )
            self._stack = stack.pop_all()

    def _open(self, spec: SocketSpec, stack: ExitStack) -> zmq.Socket[bytes]:
        channel = Channel(spec, self._counters, counts_connections=False)
        channel.open()
        stack.callback(channel.close)
        self._channels[f"{spec.kind} {spec.endpoints}"] = channel
        return channel.socket

    def close(self) -> None:
        """Close the sockets."""
        self._stack.close()

    def subscribe(self, requests: Collection[bytes]) -> None:
        """Pass requests to subscribe, or to unsubscribe, on to the publishers."""
        if self._xsub is not None:
            for request in requests:
                self._xsub.send(request)

    def poll_with(self, poller: zmq.Poller, is_polled: bool) -> None:
        """Let a poller wait for the sockets, or not."""
        if is_polled == self._is_polled:
            return
        self._is_polled = is_polled
        socks = [channel.socket for channel in self._channels.values()]
        if self._acceptor is not None:
            socks.append(self._acceptor.socket)
        for sock in socks:
            if is_polled:
                poller.register(sock, zmq.POLLIN)
            else:
                poller.unregister(sock)

    @property
    def is_busy(self) -> bool:
        """Whether the ROUTER has taken messages that are not processed yet."""
        return self._acceptor is not None and self._acceptor.busy

    def receive(self, ready: Collection[object] | None) -> None:
        """Take messages off the sockets, up to a round's size from each.

        Args:
            ready: The sockets that have messages; None to try all of them.
        """
        for channel in self._channels.values():
            if ready is None or channel.socket in ready:
                taken = self._inbox.take([channel.socket], ROUND_MESSAGES, self._round_bytes)
                channel.note_taken(taken.messages, taken.empty[0], taken.excess)
                if taken.messages:
                    now = self._counters.last_received = time.time()
                    self._arrivals.append((int(now * 1_000_000), taken.messages))
        acceptor = self._acceptor
        if acceptor is not None and (ready is None or acceptor.busy or acceptor.socket in ready):
            acceptor.receive(wait=False)

    @property
    def messages(self) -> int:
        """How many messages were received since the last ``take``."""
        return self._inbox.messages

    @property
    def received(self) -> int:
        """How many messages were received since the log began."""
        return self._counters.received + self._inbox.messages

    def take(self) -> Received:
        """Return the messages that were received since the last call; they count as received from now on."""
        arrivals, self._arrivals = self._arrivals, []
        raw = self._inbox.hand_over()
        self._counters.count(len(raw), data_bytes(raw.last))
        return Received(raw, arrivals)

    def keep_alive(self, is_receiving: bool) -> None:
        """Keep the connections of all sockets working. Called ten times a second, also while nothing is received.

        Args:
            is_receiving: Whether the ROUTER may receive; if not, its senders are not timed out.
        """
        for channel in self._channels.values():
            channel.keep_alive()
        if self._acceptor is not None and is_receiving:
            self._acceptor.receive(0, wait=False)
        elif self._acceptor is not None:
            self._acceptor.extend_timeouts()

    def finish(self, seconds: float) -> None:
        """Wait up to so many seconds until the log has written the transactions, and answer their senders."""
        if self._acceptor is not None:
            self._acceptor.finish(seconds)

    @property
    def protocol_errors(self) -> int:
        """How many connections were ended because of what the publisher sent."""
        return sum(channel.opened.watch.protocol_errors for channel in self._channels.values())

    def publishers(self) -> list[dict[str, object]]:
        """The sockets, each with the number of its connections."""
        connections = {name: channel.opened.watch.peers for name, channel in self._channels.items()}
        if self._acceptor is not None:
            connections[f"ROUTER {self._options.router}"] = self._acceptor.connections
        return [{"socket": name, "connections": peers} for name, peers in connections.items()]
