"""The head of a log: the small record of its writer, which readers and the next writer read.

Each change is a new object, ``head/<serial>.json``, made by ``put_new``. The one with the highest serial counts. So a
writer that was stopped, and has been replaced, changes nothing: the next serial is taken, or a higher one is there.

A chunk whose ids lie below ``deleted`` counts for nobody: it is about to be deleted, or a stopped writer has put it
late, under a key that was free again.

The head before is kept. On a full disk it is deleted first, and the next one takes its room. So a log on a full disk
can be opened, and emptied by its readers.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Sequence
from typing import Annotated

import msgspec

from zmq_datasource.errors import DiskFaultError, KeyTakenError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.log.files import gone
from zmq_datasource.log.layout import HEAD_NAME, MOST_LISTINGS
from zmq_datasource.log.records import encode_record, read_record
from zmq_datasource.log.store import Store

_NAME = re.compile(r"([0-9]{20})\.json")
_Id = Annotated[int, msgspec.Meta(ge=0)]


class Head(msgspec.Struct, frozen=True):
    """The record of a log's writer.

    Attributes:
        announced: A new reader begins here or later.
        deleted: All ids below this one are deleted, or about to be.
        receives: What the writer receives, and on which terms: names of options and their values as text.
        silent: For how many seconds writers have seen no change of a lease, by its ``beat``: see ``silence``.
        at: As of when ``silent`` is, in seconds since the epoch.
        writer: A random name, so that a writer recognises its own head after a put whose answer was lost.
    """

    announced: _Id = 0
    deleted: _Id = 0
    receives: dict[str, str] = {}
    silent: dict[str, float] = {}
    at: float = 0.0
    writer: str = ""


def read_head(store: Store) -> Head:
    """The head that counts now; one of zeros if no writer has put any. Takes three requests.

    Raises:
        LogError: It cannot be read, or is damaged.
    """
    return _newest(store)[1]


def overtaken(store: Store, why: str) -> LogLockedError:
    """The error of a writer in whose place another one writes the log."""
    return LogLockedError(
        f"writing to log {store}: {why}. Messages that this process has received and not sealed are lost. Start it "
        "again: then it follows or takes over"
    )


class HeadWriter:
    """Puts the heads of one writer. Any thread may call it.

    Args:
        store: The store of the log.
        writer: A name that no other writer of the log has; random, unless given.

    Attributes:
        head: The head that this writer has put last.
    """

    def __init__(self, store: Store, writer: str | None = None) -> None:
        self._store = store
        self._writer = writer or uuid.uuid4().hex[:12]
        self._serial = -1
        self._lock = threading.Lock()
        self.head = Head()

    def take_over(self) -> Head:
        """Put the next head with the same values, so that an earlier writer can put none. Called with the lock.

        Raises:
            LogError: As ``write``, and ``read_head``.
        """
        self._serial, head = _newest(self._store)
        head = self.write(head)
        return head if self._serial else self.write(head)  # from the beginning there are two

    def write(self, head: Head) -> Head:
        """Put the next head. The caller may repeat the call after an error of the store.

        Raises:
            LogLockedError: Another writer has put a head, and this one does not count.
            LogWriteError: The store refuses.
        """
        head = msgspec.structs.replace(head, writer=self._writer)
        with self._lock:
            try:
                self._put(head)
            except DiskFaultError:
                if not self._delete(_serials(self._store), self._serial):
                    raise
                self._put(head)
            self._serial += 1
            failpoints.reach("log.head.after_put")
            serials = _serials(self._store)
            # A writer that was stopped may put a serial that was deleted meanwhile. Then there are higher ones.
            if serials and serials[-1] > self._serial:
                raise self._replaced(serials[-1])
            self._delete(serials, self._serial - 1)
            self.head = head
            return head

    def _put(self, head: Head) -> None:
        failpoints.reach("log.head.before_put")
        while True:
            try:
                self._store.put_new(_key(self._serial + 1), [encode_record(head)])
                return
            except KeyTakenError:
                self._count_own()

    def _delete(self, serials: Sequence[int], below: int) -> bool:
        """Delete the heads below a serial, the oldest first; return whether there were any."""
        older = [serial for serial in serials if serial < below]
        for serial in older:
            self._store.delete(_key(serial))
        return bool(older)

    def check(self) -> None:
        """Check that no other writer has taken over.

        A writer deletes the heads before its own, the oldest first. So if this writer's head is there after a look for
        the next one has found none, no other writer had put one at the time of that look.

        Raises:
            LogLockedError: Another writer has put a head.
            DiskFaultError: This writer's head is not there any more, or the store refuses.
        """
        with self._lock:
            self._count_own()
            mine = _read(self._store, self._serial)
            if mine is not None and mine.writer == self._writer:
                return
            if mine is not None or _highest(self._store) > self._serial:
                raise self._replaced(self._serial + 1)
            raise gone(f"writing to log {self._store}", self._store.path_of(_key(self._serial)))

    def _count_own(self) -> None:
        """Count the heads that this writer has put, and for which it got no answer.

        Raises:
            LogLockedError: Another writer has put the next head.
        """
        while (found := _read(self._store, self._serial + 1)) is not None:
            if found.writer != self._writer:
                raise self._replaced(self._serial + 1)
            self._serial += 1

    def _replaced(self, serial: int) -> LogLockedError:
        return overtaken(self._store, f"another process has put {self._store.path_of(_key(serial))}")


def _newest(store: Store) -> tuple[int, Head]:
    """The highest serial and its head; -1 and a head of zeros if there is none."""
    serial = _highest(store)
    for _ in range(MOST_LISTINGS):
        head = Head() if serial < 0 else _read(store, serial)
        # Listed again: a serial that has been deleted meanwhile may have been put late, by a stopped writer.
        before, serial = serial, _highest(store)
        if serial == before and head is not None:
            return serial, head
    path = store.path_of(HEAD_NAME)
    raise DiskFaultError(f"reading {path}: there was another head in each of {MOST_LISTINGS} listings")


def _highest(store: Store) -> int:
    return max(_serials(store), default=-1)


def _serials(store: Store) -> list[int]:
    return sorted(int(it[1]) for entry in store.list(HEAD_NAME) if (it := _NAME.fullmatch(entry.name)))


def _read(store: Store, serial: int) -> Head | None:
    return read_record(store, _key(serial), Head, "the head of a log")


def _key(serial: int) -> str:
    return f"{HEAD_NAME}/{serial:020d}.json"
