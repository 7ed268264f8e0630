"""Infers from libzmq's monitor which connections of a socket have shaken hands. Pure.

The monitor names the file descriptor of a connection when it begins and ends, but a handshake that succeeds or fails
is only reported for an endpoint. With several connections at one endpoint it is not known which one is meant. Then the
newest is assumed, because a silent peer is usually an old one, and ``unsure`` says so.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["End", "Handshakes"]


class End(NamedTuple):
    """The end of a connection.

    Attributes:
        was_up: Its handshake had succeeded.
        may_have_been_up: Its handshake had not succeeded, or the handshake of another connection was taken for its own.
        hung_up: The peer ended the connection during the handshake, and libzmq reported no failure.
    """

    was_up: bool = False
    may_have_been_up: bool = False
    hung_up: bool = False


class Handshakes:
    """Follows the events of all endpoints of one socket."""

    def __init__(self) -> None:
        # By endpoint: the descriptors of connections that have not shaken hands, oldest first, with their numbers.
        self._shaking: dict[str, dict[int, int]] = {}
        self._numbers = itertools.count()
        # Descriptors of connections that have certainly shaken hands.
        self._sure: set[int] = set()
        # By endpoint: for connections up to this number it is not known which of them have shaken hands.
        self._unsure: dict[str, int] = {}
        # Endpoints with a failed handshake, until its connection ends.
        self._failed: set[str] = set()

    @property
    def shaking(self) -> int:
        """How many connections have not shaken hands."""
        return sum(map(len, self._shaking.values()))

    @property
    def unsure(self) -> bool:
        """Whether it is unknown for some connections whether they have shaken hands."""
        return any(
            shaking and next(iter(shaking.values())) <= self._unsure.get(endpoint, -1)
            for endpoint, shaking in self._shaking.items()
        )

    def connected(self, endpoint: str, descriptor: int) -> None:
        """A connection was made, and its handshake begins."""
        shaking = self._shaking.setdefault(endpoint, {})
        shaking.pop(descriptor, None)
        self._sure.discard(descriptor)
        shaking[descriptor] = next(self._numbers)

    def succeeded(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has succeeded."""
        self._remove_newest(endpoint)

    def failed(self, endpoint: str) -> None:
        """One of the handshakes at an endpoint has failed; the end of its connection follows."""
        self._failed.add(endpoint)

    def ended(self, endpoint: str, descriptor: int) -> End:
        """A connection has ended."""
        sure = descriptor in self._sure
        self._sure.discard(descriptor)
        shaking = self._shaking.get(endpoint, {})
        number = shaking.pop(descriptor, None)
        failed = endpoint in self._failed and not sure
        if not (sure and shaking):  # else the failure belongs to one that still shakes hands
            self._failed.discard(endpoint)
        if number is not None:
            return End(may_have_been_up=number <= self._unsure.get(endpoint, -1), hung_up=not failed)
        # This one counted as up. If a handshake has failed and another connection still shakes hands, then either that
        # one was up and this one failed, or this one was up and that one failed.
        if failed and self._remove_newest(endpoint):
            return End(may_have_been_up=True)
        return End(was_up=True)

    def _remove_newest(self, endpoint: str) -> bool:
        """Count the newest connection that still shakes hands as one that has; False if there is none."""
        shaking = self._shaking.get(endpoint)
        if not shaking:
            return False
        several = len(shaking) > 1
        descriptor, number = shaking.popitem()
        if several:
            self._unsure[endpoint] = number
        elif number > self._unsure.get(endpoint, -1):
            self._sure.add(descriptor)
        return True
