"""Connections that are lost, with rows that a socket had accepted: sent again, or no longer counted as sent.

What a PUSH has accepted may be lost with a connection. Which rows were in it nobody knows, so all that
are ``in_flight`` are sent again; with ``noblock`` they no longer count as sent. A PUB sends to those who are there,
and no more: of it nothing is in flight.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from zmq_datasource.errors import ConnectionLostError
from zmq_datasource.options import WriteOptions
from zmq_datasource.sink.delivery import Delivery
from zmq_datasource.sink.in_flight import InFlight, Part
from zmq_datasource.sink.sending_socket import SendingSocket
from zmq_datasource.sink.unsent import Unsent

__all__ = ["Attempts", "Recovery"]

_log = logging.getLogger(__name__)

# How long libzmq may take from the end of a connection until it no longer queues anything for it.
_LETTING_GO_SECONDS = 0.05
# Before rows are sent again once more.
_LONGEST_PAUSE = 2.0
# How long a peer must bear what was sent again, before that counts as done.
_QUIET_SECONDS = 0.1
# How long a task with noblock may wait to see whether its queues are empty.
_GLANCE_SECONDS = 0.01
# How long to wait at the end of a task for a peer that has gone.
_RETURN_SECONDS = 0.5


class Recovery:
    """Keeps a task's rows while they are in flight, and deals with connections that are lost.

    Args:
        in_flight: Rows that sockets have accepted; none yet.
        delivery: Sends them again.
        unsent: Takes those that are not sent again.
    """

    def __init__(
        self, options: WriteOptions, in_flight: InFlight, delivery: Delivery, unsent: Unsent
    ) -> None:
        self._options = options
        self._in_flight = in_flight
        self._delivery = delivery
        self._unsent = unsent

    @property
    def may_repeat(self) -> bool:
        """Whether there is anything to send again, should a connection be lost now."""
        return not self._options.noblock and bool(self._in_flight.parts)

    @property
    def in_flight(self) -> bool:
        """Whether any row may still be lost with a connection."""
        return bool(self._in_flight.parts)

    def add(self, part: Part) -> None:
        """Note that these rows were sent."""
        if not self._unsent.keeps:
            part.forget()
        self._in_flight.add(part)

    def forget_what_has_left(self, sock: SendingSocket) -> None:
        """If that is due, see whether the queues are empty."""
        if not self._in_flight.due:
            return
        # Where only numbers are kept, it is not worth a wait.
        most = math.inf if self._unsent.keeps else _GLANCE_SECONDS
        empty = sock.settle(self._options.send_timeout, most)
        self._in_flight.looked(empty and not sock.losses() and sock.all_up)

    def recover(self, sock: SendingSocket, attempts: Attempts) -> bool:
        """Deal with the connections that were lost since this was last called.

        Returns:
            Whether rows were sent again.

        Raises:
            ConnectionLostError: Connections are lost faster than their rows can be sent again.
            SendTimeoutError: As when they were sent first.
        """
        repeated = False
        while losses := sock.losses():
            sock.deal_with(losses)
            if not self._in_flight.parts:
                break
            # libzmq tells of the end before it lets go of the connection's queue, which must get nothing more.
            time.sleep(_LETTING_GO_SECONDS)
            sock.refresh()
            if self._options.noblock:
                if not sock.ended_in_order(losses):
                    self.write_off()
                break
            sock.let_go()
            attempts.next()
            repeated |= self.send_again(sock)
            # A peer that cannot bear one of the rows hangs up again at once.
            sock.settle(self._options.send_timeout, quiet=_QUIET_SECONDS)
        return repeated

    def recover_at_end(self, sock: SendingSocket, attempts: Attempts) -> bool:
        """The same at the end of the task, when a consumer that has the last row may leave.

        Nobody can tell such a one from a peer that hung up because of a row it cannot bear, nor from a
        middlebox, unless by whether it comes back.
        """
        if sock.losses() and (self._options.noblock or not sock.wait_for_return(_RETURN_SECONDS)):
            losses = sock.losses()
            if sock.ended_in_order(losses):
                sock.deal_with(losses)
        return self.recover(sock, attempts)

    def send_again(self, sock: SendingSocket) -> bool:
        """Send all that are in flight; returns whether any was."""
        parts = list(self._in_flight.parts)
        _log.warning(
            "a connection to %s was lost: %d rows that may have been in it are sent again",
            self._options.endpoints,
            sum(part.sent for part in parts),
        )
        for part in parts:
            self._delivery.send(sock, part, again=True)
        return any(part.sent for part in parts)

    def write_off(self) -> None:
        """With ``noblock`` nothing is sent twice: what may be lost does not count as sent."""
        lost = self._unsent.write_off(self._in_flight.parts)
        self._in_flight.clear()
        _log.warning(
            "a connection to %s was lost: %d rows may have been in it, and do not count as sent",
            self._options.endpoints,
            lost,
        )


class Attempts:
    """How often, and for how long, what a lost connection may have had is sent again before that is in vain.

    Args:
        patience: At least for so many seconds.
        endpoints: For the error's text.
    """

    _TIMES = 3

    def __init__(
        self,
        patience: float,
        endpoints: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._patience, self._endpoints = patience, endpoints
        self._clock, self._sleep = clock, sleep
        self._deadline = clock() + patience
        self._times = 0

    def next(self) -> None:
        """Wait a moment before another attempt.

        Raises:
            ConnectionLostError: There have been enough.
        """
        if self._times >= self._TIMES and self._clock() >= self._deadline:
            raise ConnectionLostError(
                f"sending to {self._endpoints}: {self._times + 1} connections were lost, one after the other for "
                f"{self._patience}, before their rows had left. See why the peer or the network ends them (a row over "
                "the peer's zmq.maxmsgsize, for example), or raise sendTimeout"
            )
        if self._times:
            self._sleep(min(0.05 * 2**self._times, _LONGEST_PAUSE))
        self._times += 1
