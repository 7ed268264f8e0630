"""The live flow: receive, journal, publish, in one thread that waits for nobody.

The rules:

* Nothing is published before it is in the journal, and what is published are the rows that were written.
* A round takes what is there, from every socket in turn. While a group is being written the next one gathers, and
  no message wakes the thread: it looks once a millisecond. So a fast feed has few large groups. When as much has
  gathered as may, the sockets wait, and the publishers' high-water marks decide.
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

import msgspec
import zmq

from zmq_datasource.acknowledged.acceptor import Acceptor, AcceptorTerms
from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import LogFormatError, LogWriteError
from zmq_datasource.host import failpoints
from zmq_datasource.messages.columns import data_bytes
from zmq_datasource.messages.framing import decode_plain
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.backend import NO_SUBSCRIBERS, REQUEST_BOUNDS, Backend, RequestBounds
from zmq_datasource.proxy.journal import Journal
from zmq_datasource.proxy.positions import read_positions
from zmq_datasource.proxy.specs import proxy_socket
from zmq_datasource.proxy.view import Progress
from zmq_datasource.source.channel import Channel
from zmq_datasource.source.receiver import BATCH_MESSAGES, ROUND_BYTES, ROUND_MESSAGES
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.spec import SocketSpec

__all__ = ["LiveFlow"]

_log = logging.getLogger(__name__)

# Whose transactions are remembered; then the one not heard for longest is forgotten.
_MOST_PRODUCERS = 10_000

_WAIT_MS = 100
# While something waits for room at a subscriber, of which no event tells, and while a group is being written.
_SHORT_WAIT_MS = 1
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
        self._paused: str | None = None
        self.paused_seconds = 0.0
        self._acceptor: Acceptor | None = None
        self._backend: Backend | None = None
        self._channels: dict[str, Channel] = {}
        self._round_bytes = min(options.chunk_bytes, ROUND_BYTES)
        self._inbox = Inbox()
        self._arrivals: list[tuple[int, int]] = []
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
            self.journal = Journal(options, transactions, self._notify)
            log = self.journal.log
            self.journal.open()
            stack.callback(self._close_log)
            # Before anything is received: what was acknowledged is in the log, or its ids would be given again.
            read_positions(self.journal.storage, log.next_id)
            if not transactions.restore(log.saved):
                raise LogFormatError(
                    f"opening {self.journal.storage}: it was filled by a query or zmq-datasource receive, "
                    "not by a proxy; give the proxy a walLocation of its own"
                )
            if options.publish:
                self._backend = Backend(options, self._bounds)
                stack.callback(self._backend.close)
            if options.bind or options.connect:
                self._xsub = self._open(proxy_socket(options, "XSUB", options.bind, options.connect), stack)
                for topic in options.topics:
                    self._xsub.send(b"\x01" + topic.encode())
            if options.pull:
                self._open(proxy_socket(options, "PULL", options.pull), stack)
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
            self._listening = False
            self._stack = stack.pop_all()
        _log.info("%s, next id %d", self.journal.storage, log.next_id)
        return self

    def _open(self, spec: SocketSpec, stack: ExitStack) -> zmq.Socket[bytes]:
        """Open a socket of the publishers' side. When it is closed, it waits for nothing."""
        channel = Channel(msgspec.structs.replace(spec, linger=0), self.counters, counts=False)
        channel.open()
        stack.callback(channel.close)
        self._channels[f"{spec.kind} {spec.endpoints}"] = channel
        return channel.socket

    def _close_log(self) -> None:
        """Write what was received, and release the log; says how much is lost where the disk refuses."""
        log = self.journal.log
        try:
            try:
                self._append()
            finally:
                log.close()
        finally:
            if lost := log.unsealed + self._inbox.messages:
                _log.error("%d received messages could not be written and are lost", lost)

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
        if listen == self._listening:
            return
        self._listening = listen
        socks = [channel.socket for channel in self._channels.values()]
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
        gathers = room and self.journal.log.writing
        self._listen(room and not gathers)
        waits_for_room = self._backend is not None and self._backend.behind
        # While paused it is seen to by the housekeeping.
        acceptor_busy = room and self._acceptor is not None and self._acceptor.busy
        soon = waits_for_room or acceptor_busy or gathers
        ready = dict(self._poller.poll(_SHORT_WAIT_MS if soon else _WAIT_MS))
        if self._written in ready:
            os.read(self._written, 4096)
        if self._wake is not None and self._wake in ready:
            self._on_wake()
        if self._backend is not None and self._backend.socket in ready:
            requests = self._backend.take_requests()
            if self._options.bind or self._options.connect:
                for request in requests:
                    self._xsub.send(request)
        if room:
            for channel in self._channels.values():
                if gathers or channel.socket in ready:
                    self._take(channel)
            if self._acceptor is not None and (gathers or acceptor_busy or self._acceptor.socket in ready):
                self._acceptor.receive(wait=False)
        if not self.journal.log.writing or self._gathered_enough:
            self._append()
        self._publish()
        self._keep_house(room)

    def _has_room(self) -> bool:
        log = self.journal.log
        cause = "the disk refuses" if log.fault else "the log has reached walMaxBytes" if log.full else None
        if cause != self._paused:
            self._paused = cause
            if cause is not None:
                _log.warning("receiving paused: %s (whenFull=%s)", cause, self._options.when_full)
            else:
                _log.info("receiving goes on")
        self._check_log()
        # A chunk's bytes wait for the disk: no more should be received before it goes on.
        behind = log.busy and log.unsealed_bytes + self._inbox.size >= self._options.chunk_bytes
        return not (cause or behind or (self._backend is not None and self._backend.behind))

    def _check_log(self) -> None:
        """Raise why the log can take nothing any more, if that is so."""
        if self.journal.log.failure is not None:
            raise self.journal.log.failure

    def _take(self, channel: Channel) -> None:
        taken = channel.receive(self._inbox, ROUND_MESSAGES, self._round_bytes, wait=False)
        if taken.messages:
            now = self.counters.last_received = time.time()
            self._arrivals.append((int(now * 1_000_000), taken.messages))

    @property
    def _gathered_enough(self) -> bool:
        """Whether what has gathered is a group of good size, for which the log is not waited for."""
        return self._inbox.messages >= BATCH_MESSAGES or self._inbox.size >= self._round_bytes

    def _append(self) -> None:
        """Have what was received written."""
        if not self._inbox.messages:
            return
        self._check_log()  # what stays in the inbox is counted as lost
        arrivals, self._arrivals = self._arrivals, []
        rows = decode_plain(self._inbox.hand_over(), arrivals)
        self.counters.received += rows.num_rows
        self.counters.bytes += data_bytes(rows.column("value"))
        self.journal.append_whole([rows])
        self.journal.cut()

    def _publish(self) -> None:
        backend = self._backend
        if backend is not None and backend.behind:
            backend.go_on()
        written = list(self.journal.written())
        if written:
            # First whoever answers from the log: a subscriber that asks for what it has just seen must get it.
            self._on_written(self.journal.progress)
        for rows in written:
            failpoints.reach("proxy.group.before_publish")
            if backend is not None:
                backend.publish(rows)
            failpoints.reach("proxy.group.after_publish")

    def _keep_house(self, room: bool) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping:
            return
        if self._paused is not None:
            self.paused_seconds += min(now - self._next_housekeeping + _HOUSEKEEPING_SECONDS, 1.0)
        self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        for channel in self._channels.values():
            channel.keep_alive()
        if self._acceptor is not None:
            if room:
                self._acceptor.receive(0, wait=False)
            else:
                self._acceptor.keep_alive_in_pause()
        if self._backend is not None:
            self._backend.look()
        log = self.journal.log
        if now - self._sealed_at >= self._options.wal_flush_interval and not log.fault:
            self._sealed_at = now
            log.cut()  # so that Spark sees it

    # The end.

    def drain(self) -> None:
        """Take what libzmq and the kernel hold, for a moment; publish all of it.

        Raises:
            LogError: The log can take nothing any more.
        """
        now = quiet_from = time.monotonic()
        deadline = now + _DRAIN_SECONDS
        self.journal.log.end_within(_REFUSED_SECONDS)
        while now < deadline and now - quiet_from < _QUIET_SECONDS:
            before = self.received
            self.step_without_waiting()
            now = time.monotonic()
            if self.received != before:
                quiet_from = now
        if self._acceptor is not None:
            self._acceptor.finish(_DISK_SECONDS)
        self._append()
        try:
            self.journal.cut().result(_DISK_SECONDS)
        except TimeoutError as e:
            raise LogWriteError(
                f"writing the log in {self.journal.storage.root}: no answer for {_DISK_SECONDS:.0f} s"
            ) from e
        self._publish()
        backend = self._backend
        if backend is None:
            return
        deadline = time.monotonic() + self._options.linger / 1000
        while backend.behind and time.monotonic() < deadline:
            time.sleep(_SHORT_WAIT_MS / 1000)
            backend.go_on()
        if backend.behind:
            _log.warning(
                "linger ran out: from id %d on nothing was published to plain subscribers; the log has it",
                backend.next_id,
            )

    def step_without_waiting(self) -> None:
        """Run one round that waits for no socket."""
        time.sleep(_SHORT_WAIT_MS / 1000)
        self._notify()
        self.step()

    @property
    def received(self) -> int:
        """How many messages were received since the log began, written or not."""
        return self.counters.received + self._inbox.messages

    def status(self) -> dict[str, Any]:
        """The proxy's status, as plain data."""
        counters, log = self.counters, self.journal.log
        watches = {name: channel.opened.watch for name, channel in self._channels.items()}
        sides = [(name, watch.peers) for name, watch in watches.items()]
        if self._acceptor is not None:
            sides.append((f"ROUTER {self._options.router}", self._acceptor.connections))
        return {
            "nextId": log.next_id,
            "earliestId": log.earliest,
            "logBytes": int(log.size),
            "received": self.received,
            "bytes": counters.bytes,
            "oversize": counters.oversize,
            "protocolErrors": sum(watch.protocol_errors for watch in watches.values()),
            "paused": self._paused is not None,
            "diskFault": log.fault,
            "pausedSeconds": round(self.paused_seconds, 1),
            "publishers": [{"socket": name, "connections": peers} for name, peers in sides],
            **(NO_SUBSCRIBERS if self._backend is None else self._backend.status()),
        }
