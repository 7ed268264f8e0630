"""The live flow: receive, journal, publish, in one thread that waits for nobody.

The rules:

* Nothing is published before it is in the journal.
* A round takes what is there, from every socket in turn. While a group is being written the next one
  gathers; when as much has gathered as may, the sockets wait, and the publishers' high-water marks decide.
* Subscriptions go upstream as they come, within ``RequestBounds``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

import zmq

from zmq_datasource.acknowledged.acceptor import Acceptor, AcceptorTerms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogFormatError
from zmq_datasource.host import failpoints
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.backend import NO_SUBSCRIBERS, REQUEST_BOUNDS, Backend, RequestBounds
from zmq_datasource.proxy.fronts import Front, now_us
from zmq_datasource.proxy.journal import Journal
from zmq_datasource.proxy.positions import read_positions
from zmq_datasource.proxy.specs import proxy_socket, round_bytes
from zmq_datasource.proxy.view import Progress
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["LiveFlow"]

_log = logging.getLogger(__name__)

# Whose transactions are remembered; then the one not heard for longest is forgotten.
_MOST_PRODUCERS = 10_000

_WAIT_MS = 100
# While something waits for room at a subscriber, of which no event tells.
_ROOM_WAIT_MS = 1
_HOUSEKEEPING_SECONDS = 0.1
_DRAIN_SECONDS, _QUIET_SECONDS = 1.0, 0.1
_DISK_SECONDS = 60.0
# At the end, how long a disk that refuses is waited for.
_REFUSED_SECONDS = 5.0


class LiveFlow:
    """Receives, journals and publishes; use it in a ``with`` block, in one thread.

    Args:
        options: What was asked for.
        on_written: Called when more is in the log, before that is published: with how far it has come.
        bounds: How much plain subscribers may ask for.

    Attributes:
        hold: The id from which on somebody still needs the messages; None keeps everything.
    """

    def __init__(
        self,
        options: ProxyOptions,
        on_written: Callable[[Progress], None],
        bounds: RequestBounds = REQUEST_BOUNDS,
    ) -> None:
        self._options = options
        self._bounds = bounds
        self._on_written = on_written
        self._wake: int | None = None
        self._on_wake: Callable[[], None] = lambda: None
        self.counters = SourceCounters()
        self.hold: int | None = None
        self._paused: str | None = None
        self.paused_seconds = 0.0
        self._acceptor: Acceptor | None = None
        self._backend: Backend | None = None
        self._fronts: list[Front] = []
        self._next_housekeeping = 0.0
        self._sealed_at = 0.0

    def __enter__(self) -> Self:
        """Become the log's writer and open the sockets, the subscribers' first.

        Raises:
            LogError: The log is held by another, damaged, or not writable.
            OptionError, EndpointError: A socket cannot be opened as asked.
        """
        options = self._options
        with ExitStack() as stack:
            self._written, self._notifies = os.pipe()
            for descriptor in (self._written, self._notifies):
                stack.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
            transactions = CommittedTransactions(self.counters, limit=_MOST_PRODUCERS)
            self.journal = Journal(options, self.counters, transactions, self._notify)
            self.journal.open()
            stack.callback(self.journal.close)
            # Before anything is received: what was acknowledged is in the log, or its ids would be given again.
            read_positions(self.journal.storage, self.journal.next_id)
            if not transactions.restore(self.journal.saved):
                raise LogFormatError(
                    f"opening {self.journal.storage}: it was filled by a query or zmq-datasource receive, "
                    "not by a proxy; give the proxy a walLocation of its own"
                )
            if options.publish:
                self._backend = Backend(options, self._bounds)
                stack.callback(self._backend.close)
            if options.bind or options.connect:
                self._xsub = self._open_front(
                    proxy_socket(options, "XSUB", options.bind, options.connect), stack
                )
                self._xsub.subscribe([b"\x01" + topic.encode() for topic in options.topics])
            if options.pull:
                self._open_front(proxy_socket(options, "PULL", options.pull), stack)
            if options.router:
                # Its answers have a queue of libzmq's own size, whatever subscribers have.
                spec = SocketSpec(
                    kind="ROUTER",
                    bind=options.router,
                    rcvhwm=options.rcvhwm,
                    zmq=options.zmq,
                    access=options.access,
                )
                terms = AcceptorTerms(options.transaction_timeout, options.wal_max_bytes)
                self._acceptor = stack.enter_context(
                    Acceptor(
                        spec,
                        terms,
                        self.counters,
                        self.journal.storage.staged_files(),
                        transactions,
                        self.journal,
                    )
                )
            self._poller = zmq.Poller()
            self._poller.register(self._written, zmq.POLLIN)
            if self._backend is not None:
                self._poller.register(self._backend.socket, zmq.POLLIN)
            self._listen(True)
            self._stack = stack.pop_all()
        _log.info("%s, next id %d", self.journal.storage, self.journal.next_id)
        return self

    def _open_front(self, spec: SocketSpec, stack: ExitStack) -> Front:
        front = Front(spec, round_bytes(self._options), self.counters)
        stack.callback(front.close)
        self._fronts.append(front)
        return front

    def _notify(self) -> None:
        with suppress(BlockingIOError):  # it is readable enough
            os.write(self._notifies, b"1")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def watch(self, descriptor: int, on_wake: Callable[[], None]) -> None:
        """Call ``on_wake`` whenever this is readable."""
        self._wake, self._on_wake = descriptor, on_wake
        self._poller.register(descriptor, zmq.POLLIN)

    def unwatch(self) -> None:
        """Stop watching the descriptor."""
        if self._wake is not None:
            self._poller.unregister(self._wake)
            self._wake = None

    # One round.

    def _listen(self, listen: bool) -> None:
        """Whether the publishers' sockets are waited for."""
        self._listening = listen
        socks = [front.socket for front in self._fronts]
        if self._acceptor is not None:
            socks.append(self._acceptor.socket)
        for sock in socks:
            if listen:
                self._poller.register(sock, zmq.POLLIN)
            else:
                self._poller.unregister(sock)

    def step(self) -> None:
        """Wait for something to do, and do it.

        Raises:
            LogError: The log can take nothing any more.
        """
        room = self._has_room()
        if room != self._listening:
            self._listen(room)
        waits_for_room = self._backend is not None and self._backend.behind
        # While paused it is seen to by the housekeeping.
        acceptor_busy = room and self._acceptor is not None and self._acceptor.busy
        ready = dict(self._poller.poll(_ROOM_WAIT_MS if waits_for_room or acceptor_busy else _WAIT_MS))
        if self._written in ready:
            os.read(self._written, 4096)
        if self._wake is not None and self._wake in ready:
            self._on_wake()
        if self._backend is not None and self._backend.socket in ready:
            requests = self._backend.take_requests()
            if requests and (self._options.bind or self._options.connect):
                self._xsub.subscribe(requests)
        if room:
            for front in self._fronts:
                if front.socket in ready:
                    self._take(front)
            if self._acceptor is not None and (self._acceptor.socket in ready or acceptor_busy):
                self._acceptor.receive(wait=False)
        self.journal.flush_if_idle()
        self._publish()
        self._keep_house()

    def _has_room(self) -> bool:
        journal = self.journal
        cause = (
            "the disk refuses"
            if journal.fault
            else "the log has reached walMaxBytes"
            if journal.full
            else None
        )
        if cause != self._paused:
            self._paused = cause
            if cause is not None:
                _log.warning("receiving paused: %s (whenFull=%s)", cause, self._options.when_full)
            else:
                _log.info("receiving goes on")
        journal.check()
        return not (cause or journal.behind or (self._backend is not None and self._backend.behind))

    def _take(self, front: Front) -> None:
        messages = front.receive()
        if len(messages):
            self.journal.append(messages, now_us())
            self.counters.last_received = time.time()

    def _publish(self) -> None:
        backend = self._backend
        if backend is not None and backend.behind:
            backend.go_on()
        written = list(self.journal.written())
        if written:
            # First whoever answers from the log: a subscriber that asks for what it has just seen must get it.
            self._on_written(self.journal.progress)
        for numbered in written:
            failpoints.reach("proxy.group.before_publish")
            if backend is not None:
                backend.publish(numbered)
            failpoints.reach("proxy.group.after_publish")

    def _keep_house(self) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping:
            return
        if self._paused is not None:
            self.paused_seconds += min(now - self._next_housekeeping + _HOUSEKEEPING_SECONDS, 1.0)
        self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        for front in self._fronts:
            front.keep_alive()
        if self._acceptor is not None:
            if self._listening:
                self._acceptor.receive(0, wait=False)
            else:
                self._acceptor.hold_still()
        if self._backend is not None:
            self._backend.look()
        if now - self._sealed_at >= self._options.wal_flush_interval and not self.journal.fault:
            self._sealed_at = now
            self.journal.seal()
        if self.hold is not None:
            self.journal.hold_from(self.hold)

    # The end.

    def drain(self) -> None:
        """Take what libzmq and the kernel hold, for a moment; publish all of it.

        Raises:
            LogError: The log can take nothing any more.
        """
        now = quiet_from = time.monotonic()
        deadline = now + _DRAIN_SECONDS
        self.journal.end_within(_REFUSED_SECONDS)
        while now < deadline and now - quiet_from < _QUIET_SECONDS:
            before = self.counters.received
            self.step_without_waiting()
            now = time.monotonic()
            if self.counters.received != before:
                quiet_from = now
        if self._acceptor is not None:
            self._acceptor.settle(_DISK_SECONDS)
        self.journal.flush()
        self.journal.wait(_DISK_SECONDS)
        self._publish()
        backend = self._backend
        if backend is None:
            return
        deadline = time.monotonic() + self._options.linger / 1000
        while backend.behind and time.monotonic() < deadline:
            time.sleep(_ROOM_WAIT_MS / 1000)
            backend.go_on()
        if backend.behind:
            _log.warning(
                "linger ran out: from id %d on nothing was published to plain subscribers; the log has it",
                backend.next_id,
            )

    def step_without_waiting(self) -> None:
        """Run one round that waits for no socket."""
        time.sleep(_ROOM_WAIT_MS / 1000)
        self._notify()
        self.step()

    def status(self) -> dict[str, Any]:
        """The proxy's status, as plain data."""
        counters = self.counters
        sides = [(front.name, front.peers) for front in self._fronts]
        if self._acceptor is not None:
            sides.append((f"ROUTER {self._options.router}", self._acceptor.connections))
        return {
            **self.journal.status(),
            "received": counters.received,
            "bytes": counters.bytes,
            "oversize": counters.oversize,
            "protocolErrors": sum(front.protocol_errors for front in self._fronts),
            "paused": self._paused is not None,
            "diskFault": self.journal.fault,
            "pausedSeconds": round(self.paused_seconds, 1),
            "publishers": [{"socket": name, "connections": peers} for name, peers in sides],
            **(NO_SUBSCRIBERS if self._backend is None else self._backend.status()),
        }
