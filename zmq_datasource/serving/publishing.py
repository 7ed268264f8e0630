"""The plain subscribers' side of a proxy: an XPUB, to which the compiled core sends what it receives (``Tee``).

Subscriptions go the other way, between the rounds of the receiver, within ``RequestBounds``. An XPUB does not report
what it drops for one subscriber, so nothing here counts drops: only how many messages have found a full queue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import zmq

from zmq_datasource.counters import figures
from zmq_datasource.options import ProxyOptions
from zmq_datasource.serving.figures import PublishedFigures
from zmq_datasource.serving.subscriptions import REQUEST_BOUNDS, RequestBounds, Subscribers, Subscriptions
from zmq_datasource.transport.core import Tee
from zmq_datasource.transport.opened import OpenSocket
from zmq_datasource.transport.spec import SocketSpec, frame_limit

_log = logging.getLogger(__name__)

# A longer topic ends the connection. libzmq keeps a topic in a tree with a node of about 50 bytes for each byte.
_MOST_TOPIC_BYTES = 4 << 10
# Requests of subscribers that are read in one round, so that receiving goes on in between.
_MOST_REQUESTS = 256
# In any call of the socket, libzmq moves requests from a connection's queue into its own memory until the queue is
# empty. With long topics that lasts as long as the subscriber sends. Of a connection that is cut, it still reads this
# queue and the kernel's buffer.
_REQUEST_HWM, _REQUEST_RCVBUF = 4, 64 << 10
# How long the end waits for plain subscribers: first for a message that waits for libzmq, and then for those that
# libzmq has queued. The log has all of them.
LINGER_SECONDS = 1.0
# How often connections are checked, at least so many times as long as a check takes.
_CHECK_SECONDS, _CHECK_PAUSES = 0.05, 20


class Publishing:
    """Publishes what a receiver takes; a ``source.receiver.Publisher``.

    Args:
        options: Endpoints, high-water mark, and ``slowSubscriber``.
        bounds: How much subscribers may ask for.
    """

    socket: zmq.Socket[bytes]
    tee: Tee

    def __init__(self, options: ProxyOptions, bounds: RequestBounds = REQUEST_BOUNDS) -> None:
        self._spec = SocketSpec.of_publisher(options)
        self._drops = options.slow_subscriber == "drop"
        self._counters = PublishedFigures()
        self._subscribers, self._subscriptions = Subscribers(bounds), Subscriptions(bounds)
        self._opened: OpenSocket | None = None
        self._rounds = 0  # of the thread that publishes: it is outside of libzmq when it counts one
        self._checking = threading.Lock()  # for the watch of the socket
        self._check_failure: Exception | None = None
        self._closing = threading.Event()
        self._checker = threading.Thread(target=self._check_subscribers, name="zmq-subscribers", daemon=True)

    def open(self) -> None:
        self._opened = OpenSocket(self._spec, self._prepare)
        self.socket = self._opened.socket
        self.tee = Tee(self.socket, self._drops)
        self._checker.start()

    def _prepare(self, sock: zmq.Socket[bytes]) -> None:
        sock.setsockopt(zmq.MAXMSGSIZE, frame_limit(_MOST_TOPIC_BYTES))
        sock.setsockopt(zmq.RCVHWM, _REQUEST_HWM)
        sock.setsockopt(zmq.RCVBUF, _REQUEST_RCVBUF)

    def pass_on_requests(self, upstream: Sequence[zmq.Socket[bytes]]) -> None:
        """Receive requests, and pass on those for publishers: new topics, and topics that are not needed any more.

        A topic beyond the bounds is not passed on. Its subscriber gets only the messages that the proxy receives for
        its own ``topics`` and for the topics that were passed on.

        Raises:
            Exception: The error with which the check of subscribers has ended.
        """
        if self._check_failure is not None:
            raise self._check_failure
        self._rounds += 1
        with suppress(zmq.Again):
            for _ in range(_MOST_REQUESTS):
                request = self.socket.recv(zmq.NOBLOCK)
                if self._subscriptions.change(request):
                    for sock in upstream:
                        sock.send(request)
        self._subscriptions.refusals.flush()

    def _check_subscribers(self) -> None:
        """Disconnect subscribers that ask for too much, several times a second; until ``close``."""
        assert self._opened is not None, "open has opened it"
        pause = _CHECK_SECONDS
        try:
            while not self._closing.wait(pause):
                began = time.monotonic()
                with self._checking:  # only this thread reads the socket's monitor
                    self._subscribers.check(self._opened.watch.open_connections(), began, self._rounds)
                pause = max(_CHECK_SECONDS, _CHECK_PAUSES * (time.monotonic() - began))
        except Exception as e:
            self._check_failure = e

    def figures(self) -> dict[str, Any]:
        """The figures of ``PublishedFigures``. Any thread may call this."""
        if self._opened is None:  # another process receives
            return figures(self._counters)
        with self._checking:
            peers = self._opened.watch.peers
        return figures(
            replace(
                self._counters,
                published=self.tee.published,
                subscribers=peers,
                topics=len(self._subscriptions.passed_on),
                full=self.tee.full,
                waited_seconds=round(self.tee.waited_seconds, 1),
            )
        )

    def close(self) -> None:
        """Close the socket; wait up to ``LINGER_SECONDS`` for queued messages."""
        assert self._opened is not None, "open has opened it"
        self._closing.set()
        self._checker.join()
        self.tee.finish(LINGER_SECONDS)
        if not self._opened.close(round(LINGER_SECONDS * 1000)):
            _log.warning("plain subscribers did not take all queued messages in time; the log has them")
