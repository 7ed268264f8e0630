"""A sink's socket. It waits for peers before it sends, and watches its connections, so that a loss is noticed.

A peer of a PUSH has come when its handshake has succeeded; a peer of a PUB, when it has also subscribed.
"""

from __future__ import annotations

import logging
import math
import os
import socket as stdlib_socket
import time

import zmq

from zmq_datasource.errors import NoPeerError
from zmq_datasource.options import WriteOptions
from zmq_datasource.transport.connections import had_read_everything
from zmq_datasource.transport.core import Outbox
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec

_log = logging.getLogger(__name__)

# How long a consumer that restarts may be away at the end of a task. It gets the rows again.
_RETURN_SECONDS = 0.5


class SendingSocket:
    """A PUSH or PUB socket that has waited for its peers; for one thread.

    Args:
        options: Endpoints, limits and timeouts.
        continues: Whether to continue without the peers that have not come in time, instead of raising an error.

    Attributes:
        watch: The connections that are up, and the number of lost ones.
        has_peer: Whether a peer had come when waiting ended. If not, the task sends nothing.

    Raises:
        OptionError, EndpointError: The socket cannot be opened with these options.
        NoPeerError: The peers have not come within ``connectTimeout``.
    """

    def __init__(self, options: WriteOptions, continues: bool) -> None:
        self._options = options
        self._is_pub = options.socket_type == "PUB"
        self._open = OpenSocket(SocketSpec.of_sink(options), self._prepare)
        self._socket, self.watch = self._open.socket, self._open.watch
        self._subscriptions = 0
        self._losses = 0  # how many of ``watch.possibly_lost`` were taken
        self._held: dict[int, stdlib_socket.socket] = {}  # by inode
        self.has_peer = True
        try:
            self._wait_for_peers(continues)
        except BaseException:
            self._open.close(linger=0)
            raise

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        # Without IMMEDIATE a PUSH that connects fills a queue for a peer that may never come, and keeps the queue of a
        # connection that is lost, whose rows are sent again anyway.
        if not self._is_pub:
            sock.setsockopt(zmq.IMMEDIATE, 1)

    # Peers.

    def _wait_for_peers(self, continues: bool) -> None:
        poller = zmq.Poller()
        poller.register(self.watch.monitor, zmq.POLLIN)
        if self._is_pub:
            poller.register(self._socket, zmq.POLLIN)
        deadline = time.monotonic() + self._options.connect_timeout
        while True:
            self.watch.update()
            self.watch.redial()
            self._count_subscriptions()
            missing = self._missing()
            if not missing:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                break
            poller.poll(round(min(left, 0.5) * 1000))
        if not continues:
            raise NoPeerError(
                f"waiting {self._options.connect_timeout} for a peer of this {self._options.socket_type}: {missing}. "
                "Start the consumer, correct the endpoint, or raise connectTimeout"
            )
        _log.warning("no peer within %s: %s", self._options.connect_timeout, missing)
        self.has_peer = self.watch.peers > 0 and (not self._is_pub or self._subscriptions > 0)

    def _missing(self) -> str:
        """The peers that have not come yet, in words. Empty if all are there."""
        options, watch = self._options, self.watch
        refusals = "".join(f" ({endpoint}: {reason})" for endpoint, reason in watch.refused.items())
        if self._is_pub:
            here = min(self._subscriptions, watch.peers)
            if here >= options.min_subscribers:
                return ""
            return f"{here} of minSubscribers={options.min_subscribers} have subscribed{refusals}"
        absent = [str(e) for e in options.connect if not watch.up.get(str(e))]
        if absent:
            return f"no answer from {', '.join(absent)}{refusals}"
        if not watch.peers:
            return f"no peer has connected to {', '.join(map(str, options.bind))}{refusals}"
        return ""

    def _count_subscriptions(self) -> None:
        while self._is_pub and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            message = self._socket.recv()
            if message[:1] == b"\x01":
                self._subscriptions += 1
            elif message[:1] == b"\x00":
                self._subscriptions -= 1

    def peers_now(self) -> int:
        """The number of peers that are connected."""
        self.watch.update()
        return self.watch.peers

    # Messages.

    def send(self, messages: Outbox, start: int, end: int, wait: float = 0.0) -> int:
        """Send messages from ``start`` up to ``end``, as far as the queues have room.

        Args:
            wait: How many seconds to wait for room, in all.

        Returns:
            The position of the message for which there is no room, or ``end``.
        """
        return messages.give(self._socket, start, end, wait)

    @property
    def sndhwm(self) -> int:
        """The send high-water mark that libzmq reports."""
        return int(self._socket.getsockopt(zmq.SNDHWM))

    # The end.

    def hold_connections(self) -> None:
        """Take a second handle on each connection, which shows later how the connection has ended."""
        for sock in self.watch.open_connections().handles():
            if self._held.setdefault(os.fstat(sock.fileno()).st_ino, sock) is not sock:
                sock.close()

    def take_losses(self, at_end: bool = False) -> int:
        """The number of connections that were lost since the last call.

        Args:
            at_end: Whether the task has no more rows, so that consumers may leave. If all have left, and had read
                everything, no connection counts.
        """
        self.watch.update()
        before, self._losses = self._losses, self.watch.possibly_lost
        losses, deadline = self._losses - before, time.monotonic() + _RETURN_SECONDS
        if losses:
            while at_end and not self.watch.peers and (left := deadline - time.monotonic()) > 0:
                self.watch.monitor.poll(math.ceil(left * 1000))
                self.watch.update()
            if at_end and not self.watch.peers and had_read_everything(self._held.values(), losses):
                losses = 0
            self._release()
        return losses

    def _release(self) -> None:
        for sock in self._held.values():
            sock.close()
        self._held = {}

    def wait_until_flushed(self, stall_seconds: float, most: float = math.inf, quiet: float = 0.003) -> bool:
        """Wait until all queues are empty. See ``OpenSocket.wait_until_flushed``."""
        return self._open.wait_until_flushed(stall_seconds, most, quiet)

    def close(self, linger: int) -> bool:
        """Wait until the queued messages have left, and close the socket. May be called again.

        Args:
            linger: How many milliseconds to wait; -1 waits without a limit.

        Returns:
            Whether all messages have left.
        """
        self._release()
        return self._open.socket.closed or self._open.close(linger)
