"""The flow of messages in the live process: receive, publish, append, and seal when it is time; in one thread.

It waits for a subscriber only a few milliseconds at a time, and never for the disk.

The rules:

* A round takes the messages that are there, from every socket in turn, publishes them as they came, and appends them
  to the log in memory.
* What the log cannot take is not received, so not published: while the log is full, or the disk refuses, or a whole
  chunk waits for the disk, the sockets wait, and the publishers' high-water marks decide.
* What was received is sealed as ``sealing`` says. A transaction is sealed at once, and then acknowledged.
* Subscriptions are passed on to publishers as they come, within ``RequestBounds``.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from typing import Any, Self

import zmq

from zmq_datasource.acknowledged.transactions import CommittedTransactions
from zmq_datasource.counters import SourceCounters, figures
from zmq_datasource.errors import LogFormatError, LogWriteError
from zmq_datasource.host import failpoints
from zmq_datasource.messages.framing import raw_messages
from zmq_datasource.messages.raw import RawMessages
from zmq_datasource.options import ProxyOptions
from zmq_datasource.proxy.backend import LINGER_SECONDS, REQUEST_BOUNDS, Backend, RequestBounds
from zmq_datasource.proxy.figures import NO_SUBSCRIBERS, LiveFigures
from zmq_datasource.proxy.front import Front
from zmq_datasource.proxy.journal import Journal

_log = logging.getLogger(__name__)

# Producers whose transactions are remembered; beyond that the one that was silent for longest is forgotten.
_MOST_PRODUCERS = 10_000

_WAIT_MS = 100
# While a subscriber's queue has no room (no event reports it), while the ROUTER has messages that are not processed
# yet, and at the end.
_SHORT_WAIT_MS = 1
_HOUSEKEEPING_SECONDS = 0.1
# At the end, messages are received for so long, or until none has come for so long.
_DRAIN_SECONDS, _QUIET_SECONDS = 1.0, 0.1
# At the end, how long to wait for a slow disk, and for a disk that refuses.
_DISK_SECONDS, _REFUSED_SECONDS = 60.0, 5.0


class LiveFlow:
    """Receives, publishes and writes; use it in a ``with`` block, in one thread.

    Args:
        options: The options of the proxy.
        bounds: How much plain subscribers may ask for.

    Attributes:
        asked_end: A durable subscriber has asked for what follows this id, and found nothing.
    """

    def __init__(self, options: ProxyOptions, bounds: RequestBounds = REQUEST_BOUNDS) -> None:
        self._options = options
        self._bounds = bounds
        self.counters = SourceCounters()
        self._pause: str | None = None
        self._paused_seconds = 0.0
        self._front = Front(options, self.counters)
        self._backend: Backend | None = None
        self._poller = zmq.Poller()
        self._next_housekeeping = 0.0
        self.asked_end = -1

    def __enter__(self) -> Self:
        """Open the log for writing, and then the sockets, first that of the subscribers.

        Raises:
            LogError: Another process writes the log, or it is damaged, or not writable.
            OptionError, EndpointError: A socket cannot be opened as asked.
        """
        with ExitStack() as stack:
            transactions = CommittedTransactions(self.counters, limit=_MOST_PRODUCERS)
            self.journal = journal = Journal(self._options, transactions)
            stack.callback(self._close_journal)
            if not transactions.restore(journal.log.saved):
                raise LogFormatError(
                    f"opening {journal.storage}: it was filled by a query or zmq-datasource receive, "
                    "not by a proxy; give the proxy a walLocation of its own"
                )
            self._poller.register(journal.wakes.descriptor, zmq.POLLIN)
            if self._options.publish:
                self._backend = Backend(self._options, self._bounds)
                stack.callback(self._backend.close)
                self._poller.register(self._backend.socket, zmq.POLLIN)
            self._front.open(transactions, journal)
            stack.callback(self._front.close)
            self._stack = stack.pop_all()
        _log.info("%s, next id %d", journal.storage, journal.log.next_id)
        return self

    def _close_journal(self) -> None:
        """Write the received messages; if the disk refuses, log how many are lost."""
        try:
            try:
                self._pass_on()
            finally:
                self.journal.close()
        finally:
            if lost := self.journal.unsealed + self._front.messages:
                _log.error("%d received messages could not be written and are lost", lost)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # One round.

    def step(self, wait: bool = True) -> None:
        """Wait for something to do, and do it.

        Args:
            wait: With False it waits for a millisecond, and tries all sockets.

        Raises:
            LogError: The log cannot be written any more.
        """
        front, backend = self._front, self._backend
        has_room = self._has_room()
        front.poll_with(self._poller, has_room)
        is_soon = not wait or (has_room and front.is_busy) or self._waits_for_subscribers
        ready = dict(self._poller.poll(_SHORT_WAIT_MS if is_soon else self._wait_ms()))
        self.journal.wakes.clear()
        if backend is not None and backend.socket in ready:
            front.subscribe(backend.take_requests())
        if has_room:
            front.receive(ready if wait else None)
        self._pass_on()
        if time.monotonic() >= self.journal.seal_time(self.asked_end):
            self.journal.cut()
        if backend is not None:
            backend.rounds += 1
        self._keep_house(has_room)

    def wake(self) -> None:
        """End the wait of ``step``, from another thread."""
        self.journal.wakes.wake()

    def _wait_ms(self) -> int:
        """How long there is nothing to do if nothing comes."""
        seconds = self.journal.seal_time(self.asked_end) - time.monotonic()
        return max(0, min(_WAIT_MS, math.ceil(1000 * min(seconds, 1.0))))

    @property
    def _waits_for_subscribers(self) -> bool:
        return self._backend is not None and self._backend.has_pending

    def _has_room(self) -> bool:
        """Whether messages may be received; logs when that changes."""
        log = self.journal.log
        cause = "the disk refuses" if log.fault else "the log has reached walMaxBytes" if log.full else None
        if cause != self._pause:
            self._pause = cause
            if cause is not None:
                _log.warning("receiving is paused: %s (whenFull=%s)", cause, self._options.when_full)
            else:
                _log.info("receiving again")
        self._check_log()
        return not (cause or self.journal.is_behind or self._waits_for_subscribers)

    def _check_log(self) -> None:
        if self.journal.log.failure is not None:
            raise self.journal.log.failure

    def _pass_on(self) -> None:
        """Publish what was received, and append it to the log."""
        if self._backend is not None:
            self._backend.publish_pending()
        for rows in self.journal.take_committed():  # the log has them
            self._publish(raw_messages(rows))
        if self._front.messages:
            self._check_log()  # first: messages that stay in the front are counted as lost
            received = self._front.take()
            self._publish(received.raw)
            self.journal.append(received.rows())

    def _publish(self, messages: RawMessages) -> None:
        failpoints.reach("proxy.round.before_publish")
        if self._backend is not None:
            self._backend.publish(messages)
        failpoints.reach("proxy.round.after_publish")

    def _keep_house(self, is_receiving: bool) -> None:
        now = time.monotonic()
        if now < self._next_housekeeping:
            return
        if self._pause is not None:
            self._paused_seconds += min(now - self._next_housekeeping + _HOUSEKEEPING_SECONDS, 1.0)
        self._next_housekeeping = now + _HOUSEKEEPING_SECONDS
        self._front.keep_alive(is_receiving)
        if self._backend is not None:
            self._backend.keep_house()

    # The end.

    def drain(self) -> None:
        """Receive the messages that libzmq and the kernel hold, for up to a second; publish and write them.

        Raises:
            LogError: The log cannot be written any more.
        """
        now = quiet_since = time.monotonic()
        deadline = now + _DRAIN_SECONDS
        self.journal.log.end_within(_REFUSED_SECONDS)
        while now < deadline and now - quiet_since < _QUIET_SECONDS:
            before = self.received
            self.step(wait=False)
            now = time.monotonic()
            if self.received != before:
                quiet_since = now
        self._front.finish(_DISK_SECONDS)
        try:
            self.journal.cut().result(_DISK_SECONDS)
        except TimeoutError as e:
            raise LogWriteError(
                f"writing the log in {self.journal.storage.root}: no answer for {_DISK_SECONDS:.0f} s"
            ) from e
        if self._backend is not None:
            self._backend.publish_within(LINGER_SECONDS)

    @property
    def received(self) -> int:
        """How many messages were received since the log began, written or not."""
        return self._front.received

    def status(self) -> dict[str, Any]:
        """The live process's part of the proxy's status."""
        log, front = self.journal.log, self._front
        numbers = LiveFigures(
            next_id=self.journal.next_id,
            earliest_id=log.earliest,
            log_bytes=int(log.size),
            received=front.received,
            bytes=self.counters.bytes,
            oversize=self.counters.oversize,
            protocol_errors=front.protocol_errors,
            paused=self._pause is not None,
            paused_seconds=round(self._paused_seconds, 1),
        )
        return {
            **figures(numbers),
            "diskFault": log.fault,
            "publishers": front.publishers(),
            **(NO_SUBSCRIBERS if self._backend is None else self._backend.status()),
        }
