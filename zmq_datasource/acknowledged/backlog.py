"""Received messages that wait to be obeyed: bounded for each sender and in all. Pure.

The rules:

* The socket is emptied into the backlog at once, even while nothing can be written. The reason is that libzmq bounds
  the messages of a connection, but not their bytes, and keeps the messages of a connection that has ended.
* A sender has at most ``most_each`` bytes here, or one message. Only a program that ignores the protocol sends more.
* All senders together have at most ``most_bytes``. Beyond that, a sender with fewer bytes displaces the newest message
  of the sender with the most.
* A message for which there is no room is dropped, as if it were lost with its connection: its sender sends it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Backlog"]

# A sender may have 8 MiB on the way, and send them again. All senders may have two messages of 1 MiB each.
_MOST_EACH, _MOST_BYTES = 16 << 20, 512 << 20

_T = TypeVar("_T")


@dataclass
class _Entry(Generic[_T]):
    peer: bytes
    size: int
    message: _T | None


class Backlog(Generic[_T]):
    """A queue of messages, oldest first.

    Args:
        most_each, most_bytes: The most bytes of one sender, and of all senders together.

    Attributes:
        bytes: Of all messages here.
        dropped: The number of messages for which there was no room.
    """

    def __init__(self, most_each: int = _MOST_EACH, most_bytes: int = _MOST_BYTES) -> None:
        self._most_each, self._most_bytes = most_each, most_bytes
        self._queue: deque[_Entry[_T]] = deque()
        self._of: dict[bytes, deque[_Entry[_T]]] = {}
        self._bytes_of: dict[bytes, int] = {}
        self.bytes = 0
        self.dropped = 0

    def __bool__(self) -> bool:
        return bool(self._of)

    def make_room(self, peer: bytes, size: int) -> bool:
        """Make room for a message. Returns False if there is none; otherwise ``add`` is next."""
        held = self._bytes_of.get(peer, 0)
        if (held and held + size > self._most_each) or size > self._most_bytes:
            self.dropped += 1
            return False
        while self.bytes + size > self._most_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            if self._bytes_of[largest] <= held + size:
                self.dropped += 1
                return False
            self._drop_newest(largest)
        return True

    def _drop_newest(self, peer: bytes) -> None:
        entry = self._of[peer].pop()
        entry.message = None
        self._discount(entry)
        self.dropped += 1

    def add(self, peer: bytes, size: int, message: _T) -> None:
        """Queue a message that ``make_room`` has admitted."""
        entry = _Entry(peer, size, message)
        self._queue.append(entry)
        self._of.setdefault(peer, deque()).append(entry)
        self._bytes_of[peer] = self._bytes_of.get(peer, 0) + size
        self.bytes += size

    def pop(self) -> tuple[bytes, int, _T] | None:
        """Remove and return the oldest message, with its sender and size; None if there is none."""
        while self._queue:
            entry = self._queue.popleft()
            if entry.message is not None:
                self._of[entry.peer].popleft()
                self._discount(entry)
                return entry.peer, entry.size, entry.message
        return None

    def _discount(self, entry: _Entry[_T]) -> None:
        self.bytes -= entry.size
        self._bytes_of[entry.peer] -= entry.size
        if not self._of[entry.peer]:
            del self._of[entry.peer], self._bytes_of[entry.peer]
