"""Arrow to socket: one sending socket for one task, every row accounted for.

A sent message is one that the socket *accepted*. ``finish`` waits until it has left this process, or says
that it cannot tell. Until then ``recovery`` vouches for it.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType
from typing import Self

import pyarrow as pa

from zmq_datasource.counters import SinkCounters
from zmq_datasource.errors import FlushTimeoutError, NoPeerError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.dead_letters import StagedDeadLetters
from zmq_datasource.sink.delivery import Delivery
from zmq_datasource.sink.in_flight import KEEP, InFlight, Part
from zmq_datasource.sink.recovery import Attempts, Recovery
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.sink.unsent import Unsent

__all__ = ["Sender"]

_log = logging.getLogger(__name__)

# How long to wait at the end for the queue of a peer that has gone to turn out empty.
_GONE_MS = 500


class Sender:
    """A PUSH or PUB socket; use it in a ``with`` block, in one thread.

    Leaving the block without ``finish`` (an error on the way) gives up what is still queued:
    the task failed, and Spark will run it again.

    Args:
        dead_letters: Where rows go that cannot be sent; None drops them (``noblock``) or fails.
        publisher: Who numbers the messages, with ``framing=sequenced``. A row that is dropped keeps
            its number, so that a receiver sees that it is missing.
        keep: Bytes of sent rows that are kept at least, to be sent again should a connection be lost.

    Attributes:
        counters: The account so far; final after ``finish``.
    """

    def __init__(
        self,
        options: WriteOptions,
        dead_letters: StagedDeadLetters | None = None,
        publisher: str = "",
        keep: int = KEEP,
    ) -> None:
        self._options = options
        self.counters = SinkCounters()
        self._unsent = Unsent(options, dead_letters, self.counters)
        self._delivery = Delivery(options, self._unsent, self.counters, publisher.encode())
        self._recovery = Recovery(options, InFlight(keep), self._delivery, self._unsent)

    def __enter__(self) -> Self:
        """Open the socket and wait for the peers.

        Raises:
            OptionError, EndpointError: It cannot be opened as asked.
            NoPeerError: Nobody came within ``connectTimeout`` (with ``noblock`` or dead letters, the
                rows are dropped or become dead letters instead).
        """
        self._socket = SendingSocket(self._options, self._unsent.goes_on)
        return self

    @property
    def socket(self) -> SendingSocket:
        """What rows leave through. It is replaced where ``finish`` has to connect again."""
        return self._socket

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close(linger=0)

    def send_values(self, values: pa.Array, topics: pa.Array | None = None) -> None:
        """Send one message a value; with topics, each that is not null goes in front of its value.

        Args:
            values, topics: Binary, of 32 or 64 bit offsets; no value is null.

        Raises:
            SendTimeoutError: The queues stayed full for ``sendTimeout`` (without ``noblock``).
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
        """
        self._take(Part(values, topics, None, self.counters.rows))

    def send_frames(self, messages: pa.Array) -> None:
        """Send messages of one or more frames each.

        Args:
            messages: Lists of binary, none of them empty or null, nor any of their frames.

        Raises:
            SendTimeoutError, ConnectionLostError: As in ``send_values``.
        """
        self._take(Part(None, None, messages, self.counters.rows))

    def _take(self, part: Part) -> None:
        sock, noblock = self._socket, self._options.noblock
        self._recovery.recover(sock, self._attempts())
        sock.let_go()
        # What a PUB sends is for those who are there, and no more.
        recovers = self._options.socket_type != "PUB"
        if recovers:  # now: a consumer that has the last row may leave before this thread runs again
            sock.hold()
        self._unsent.look()
        self._delivery.send(sock, part)
        if not recovers:
            return
        self._recovery.add(part)
        if not noblock and not sock.losses():
            sock.hold()  # also of those that have come meanwhile
        self._recovery.forget_what_has_left(sock)

    def _attempts(self) -> Attempts:
        return Attempts(self._options.send_timeout, self._options.endpoints)

    def finish(self) -> SinkCounters:
        """Close and wait up to ``linger`` for the queues to empty.

        Raises:
            FlushTimeoutError: They did not; with ``noblock`` this is counted instead.
            NoPeerError: A connection was lost, and nobody is there to send its rows to again.
            ConnectionLostError, SendTimeoutError: As in ``send_values``.
        """
        attempts = self._attempts()
        linger = math.inf if self._options.linger < 0 else self._options.linger / 1000
        self._recovery.recover_at_end(self._socket, attempts)
        self._delivery.announce_end(self._socket)
        self._unsent.end()
        while True:
            deadline = time.monotonic() + linger
            self._socket.hold()
            if linger:
                self._socket.settle(linger, linger)
            if self._recovery.recover_at_end(self._socket, attempts):
                self._delivery.announce_end(self._socket)
                continue
            if self._close(deadline):
                return self.counters
            attempts.next()
            self._connect_again()
            self._recovery.send_again(self._socket)
            self._delivery.announce_end(self._socket)

    def _connect_again(self) -> None:
        try:
            self._socket = SendingSocket(self._options, self._unsent.goes_on)
        except NoPeerError as e:
            raise NoPeerError(f"sending rows again whose connection was lost: {e}") from e

    def _close(self, deadline: float) -> bool:
        """Close; False if a connection was lost whose rows are to be sent again."""
        options, counters, sock = self._options, self.counters, self._socket
        counters.peers = sock.watch.peers
        counters.sndhwm = sock.sndhwm
        may_repeat = self._recovery.may_repeat
        left = -1 if deadline == math.inf else max(1, round((deadline - time.monotonic()) * 1000))
        gone = may_repeat and not sock.all_up
        if gone:
            # libzmq does not connect any more once it lingers: what is queued for who has gone stays there.
            left = _GONE_MS if left < 0 else min(left, _GONE_MS)
        if options.socket_type == "PUSH" and not self._recovery.in_flight:  # nothing that still counts
            left = 0
        flushed, lost = sock.close(left)
        flushed = flushed or not left
        if lost and self._recovery.in_flight:
            if may_repeat:
                return False
            self._recovery.write_off()
        if not flushed and gone:
            return False
        if not flushed and counters.sent:
            if not options.noblock:
                raise FlushTimeoutError(
                    f"flushing after {counters.sent} messages: linger={options.linger} ran out with messages still "
                    "queued; how many, libzmq cannot tell. Raise linger, or set noblock=true to accept the loss"
                )
            counters.unflushed_tasks += 1
            _log.warning(
                "linger=%s ran out with messages still queued; how many is not knowable", options.linger
            )
        if options.socket_type == "PUB" and sock.watch.lost:
            _log.warning("%d peers left during the task; what was queued for them is lost", sock.watch.lost)
        return True
