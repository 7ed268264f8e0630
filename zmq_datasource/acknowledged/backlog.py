"""Messages that are received and wait to be dealt with: bounded for each sender and in all. Pure.

The rules:

* The socket is emptied into the backlog at once, also while nothing can be written. libzmq bounds the messages of a
  connection and not their bytes, and it keeps those of a connection that has ended.
* A sender has at most ``most_each`` bytes here, or one message. Only a program that ignores the
  protocol sends more.
* All senders together have at most ``most_bytes``. Beyond that, the sender with the most bytes loses its newest
  message to one with less.
* A message that finds no room is dropped, as if it were lost with its connection: the sender sends it again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Backlog"]

# Twice what a sender may have on the way, because it may send that again; and two messages for each of its places.
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
        most_each, most_bytes: Bytes that one sender and all senders together may have here.

    Attributes:
        bytes: Of all messages here.
        dropped: Messages that have found no room.
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
        """Whether a message of a sender is admitted; another sender's may be dropped for it."""
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
        self._forget(entry)
        self.dropped += 1

    def add(self, peer: bytes, size: int, message: _T) -> None:
        """Queue a message that ``make_room`` has admitted."""
        entry = _Entry(peer, size, message)
        self._queue.append(entry)
        self._of.setdefault(peer, deque()).append(entry)
        self._bytes_of[peer] = self._bytes_of.get(peer, 0) + size
        self.bytes += size

    def take(self) -> tuple[bytes, int, _T] | None:
        """The oldest message, with its sender and size; None if there is none."""
        while self._queue:
            entry = self._queue.popleft()
            if entry.message is not None:
                self._of[entry.peer].popleft()
                self._forget(entry)
                return entry.peer, entry.size, entry.message
        return None

    def _forget(self, entry: _Entry[_T]) -> None:
        self.bytes -= entry.size
        self._bytes_of[entry.peer] -= entry.size
        if not self._of[entry.peer]:
            del self._of[entry.peer], self._bytes_of[entry.peer]
