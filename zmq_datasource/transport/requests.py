"""Asking: what every session of ours does as a client. Pure, like all sessions.

The rules:

* One request is open at a time, until it is answered. The peer gives a repeated request the same answer.
* A request that is not answered is said again: after some seconds without a byte, and on every new connection.
* After more seconds without a byte the connection itself is made anew, where the session asks for that.
"""

from __future__ import annotations

import math

from zmq_datasource.transport.link import Session

__all__ = ["RequestSession"]


class RequestSession(Session):
    """A session that asks; what it asks is its subclass's, which says by ``_hears`` that a message has come.

    Args:
        ask_again: Seconds without a byte after which an open request is said again.
        redial: Seconds without a byte after which the connection is made anew; never, unless given.

    Attributes:
        waiting: Whether a request is open.
    """

    def __init__(self, ask_again: float, redial: float = math.inf) -> None:
        super().__init__()
        self.ask_again, self.redial_after = ask_again, redial
        self.waiting = False
        self._asked = self._heard = 0.0
        self._last_word = 0.0  # as _heard, on all connections

    def _asks(self, now: float) -> None:
        """A request is said now, for the first time or again."""
        if not self.waiting:  # a peer that is not asked says nothing: its silence begins now
            self._heard, self._last_word = max(self._heard, now), max(self._last_word, now)
        self.waiting, self._asked = True, now

    def _is_answered(self) -> None:
        """The open request is answered."""
        self.waiting = False

    def _say_again(self, now: float) -> None:
        """Say what was said and not answered, if there is something."""
        raise NotImplementedError

    def connected(self, now: float) -> None:
        self.outbox.clear()  # it was for the connection before, and what matters of it is said again
        self._heard = now
        self._say_again(now)

    def _hears(self, now: float) -> None:
        """The peer is there."""
        self._heard = self._last_word = now

    def alive(self, now: float) -> None:
        self._hears(now)

    def wake(self, now: float) -> None:
        """Say an open request again, or make the connection anew, if it is time."""
        if not self.waiting:
            return
        if now - self._heard > self.redial_after:
            self.redial = True
            self.connected(now)
        elif now - max(self._heard, self._asked) > self.ask_again:
            self._say_again(now)
