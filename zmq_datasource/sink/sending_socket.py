"""A sink's socket and its peers: opened, waited for, and watched for connections that are lost.

Nothing is sent before a peer is there: a finished handshake (PUSH) or a subscription (PUB).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import zmq

from zmq_datasource.errors import NoPeerError
from zmq_datasource.options import WriteOptions
from zmq_datasource.transport.core import Outbox
from zmq_datasource.transport.kernel import ended_in_order
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["SendingSocket"]

_log = logging.getLogger(__name__)

# How long others may take to shake hands or to fail, once everybody is there. Whoever is refused while rows are under
# way is taken for a connection that was lost.
_SHAKING_SECONDS = 0.2


class SendingSocket:
    """A PUSH or PUB socket whose peers were waited for; used in one thread.

    Args:
        options: Endpoints, limits and timeouts.
        goes_on: Whether to do without peers that do not come in time, instead of raising.

    Attributes:
        watch: Who is up, and who was lost.
        has_peer: Whether anybody had come; if not, nothing is to be sent.

    Raises:
        OptionError, EndpointError: It cannot be opened as asked.
        NoPeerError: Nobody came within ``connectTimeout``, and without them it does not go on.
    """

    def __init__(self, options: WriteOptions, goes_on: bool) -> None:
        self._options = options
        self._open = OpenSocket(
            SocketSpec.of_sink(options),
            lambda sock: sock.setsockopt(zmq.SNDTIMEO, round(options.send_timeout * 1000)),
        )
        self._socket, self.watch = self._open.socket, self._open.watch
        self._subscriptions = 0
        self._absent: set[str] = set()
        self._dealt_with = 0
        self._connections: list[tuple[socket, bool]] = []
        self.has_peer = True
        try:
            self._wait_for_peers(goes_on)
        except BaseException:
            self._open.close(linger=0)
            raise

    # Peers.

    def _wait_for_peers(self, goes_on: bool) -> None:
        poller = zmq.Poller()
        poller.register(self.watch.monitor, zmq.POLLIN)
        if self._options.socket_type == "PUB":
            poller.register(self._socket, zmq.POLLIN)
        deadline = time.monotonic() + self._options.connect_timeout
        while True:
            self.watch.update()
            self.watch.redial()
            self._count_subscriptions()
            missing = self._missing()
            if not missing:
                self._wait_for_refusals()
                return
            left = deadline - time.monotonic()
            if left <= 0:
                break
            poller.poll(round(min(left, 0.5) * 1000))
        if not goes_on:
            raise NoPeerError(
                f"waiting {self._options.connect_timeout} for a peer of this {self._options.socket_type}: {missing}. "
                "Start the consumer, correct the endpoint, or raise connectTimeout"
            )
        _log.warning("no peer within %s: %s", self._options.connect_timeout, missing)
        self._go_on_without()

    def _wait_for_refusals(self) -> None:
        deadline = time.monotonic() + _SHAKING_SECONDS
        while self._options.socket_type == "PUSH" and self.watch.unsure:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.watch.monitor.poll(math.ceil(left * 1000))
            self.watch.update()

    def _missing(self) -> str:
        """Who is still to come, in words; empty when everybody is there."""
        options, watch = self._options, self.watch
        refusals = "".join(f" ({endpoint}: {why})" for endpoint, why in watch.refused.items())
        if options.socket_type == "PUB":
            here = min(self._subscriptions, watch.peers)
            if here >= options.min_subscribers:
                return ""
            return f"{here} of minSubscribers={options.min_subscribers} have subscribed{refusals}"
        absent = [str(e) for e in options.connect if not watch.up.get(str(e))]
        if absent:
            return f"no answer from {', '.join(absent)}{refusals}"
        if not watch.peers:
            return f"nobody has connected to {', '.join(map(str, options.bind))}{refusals}"
        return ""

    def _count_subscriptions(self) -> None:
        if self._options.socket_type != "PUB":
            return
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self._socket.recv()
            if message[:1] == b"\x01":
                self._subscriptions += 1
            elif message[:1] == b"\x00":
                self._subscriptions -= 1

    def _go_on_without(self) -> None:
        """Leave out the endpoints that did not answer, or send nothing at all."""
        self.has_peer = self.watch.peers > 0
        if self._options.socket_type == "PUB":
            self.has_peer = self.has_peer and self._subscriptions > 0
            return
        for endpoint in map(str, self._options.connect):
            if not self.watch.up.get(endpoint):
                # Its queue would swallow sndhwm messages for a peer that may never come.
                self._socket.disconnect(endpoint)
                self._absent.add(endpoint)

    def peers_now(self) -> int:
        """How many peers are up."""
        self.watch.update()
        return self.watch.peers

    @property
    def all_up(self) -> bool:
        """Whether no endpoint that was there has gone, whose queue waits for it."""
        return all(self.watch.up.get(str(e)) or str(e) in self._absent for e in self._options.connect)

    def wait_for_return(self, patience: float) -> bool:
        """Wait up to ``patience`` seconds until peers are there and no endpoint has gone."""
        deadline = time.monotonic() + patience
        while not (self.watch.peers and self.all_up):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.watch.monitor.poll(math.ceil(left * 1000))
            self.watch.update()
        return True

    # Messages.

    def give(self, rows: Outbox, start: int, end: int, wait: bool = False) -> int:
        """Send rows from ``start`` up to ``end`` as far as there is room; returns the one that finds none, or ``end``.

        Args:
            wait: Whether each waits for room up to ``sendTimeout``.
        """
        return rows.give(self._socket, start, end, wait)

    def refresh(self) -> None:
        """Have libzmq look at its mailbox: for room in queues, and for connections that have ended."""
        self._socket.getsockopt(zmq.EVENTS)

    def limit_waiting(self, milliseconds: int) -> None:
        """From now on a message waits no longer for room."""
        self._socket.setsockopt(zmq.SNDTIMEO, milliseconds)

    @property
    def sndhwm(self) -> int:
        """The send high-water mark, as libzmq says."""
        return int(self._socket.getsockopt(zmq.SNDHWM))

    # Connections.

    def hold(self) -> None:
        """Keep handles on the connections that are up, which tell later how they ended.

        While they are held, the peer of a connection that libzmq has closed does not learn of it.
        """
        self.let_go()
        self._connections = self.watch.hold()

    def let_go(self) -> None:
        """Close the handles on the connections."""
        for handle, _ in self._connections:
            handle.close()
        self._connections = []

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Hold nothing while this may take long, so that peers learn of a connection that libzmq has closed."""
        held = bool(self._connections)
        self.let_go()
        try:
            yield
        finally:
            if held:
                self.hold()

    def losses(self) -> int:
        """How many connections were lost that are not dealt with yet."""
        self.watch.update()
        return self.watch.cut - self._dealt_with

    def deal_with(self, losses: int) -> None:
        """Mark lost connections as dealt with."""
        self._dealt_with += losses

    def ended_in_order(self, losses: int) -> bool:
        """Whether so many of the connections that were held took nothing along when they ended."""
        return ended_in_order(self._connections, losses)

    def settle(self, patience: float, most: float = math.inf, quiet: float = 0.003) -> bool:
        """Wait until the queues are empty, and whether they are; as ``OpenSocket.settle``."""
        return self._open.settle(patience, most, quiet)

    def close(self, linger: int) -> tuple[bool, bool]:
        """Close, and wait up to ``linger`` milliseconds (-1: for ever) for what is queued; may be called again.

        Returns:
            Whether all of it has left, and whether a connection was lost meanwhile, perhaps with something in it.
        """
        try:
            flushed = self._open.closed or self._open.close(linger, self._connections)
        finally:
            self.let_go()
        return flushed, self._open.lost
