"""The store of a log: whole objects that are put, opened, listed and deleted by their keys.

A key is a relative path, as in ``chunks/00000000000000000000.arrow``. There are two stores with one contract: a
directory (``directory_store``) and a bucket (``bucket_store``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

Part: TypeAlias = bytes | pa.Buffer
# The parts of an object, in order. A directory writes each one as it comes, a bucket has all of them in memory.
Content: TypeAlias = Iterable[Part]


class Entry(NamedTuple):
    """An object in a listing.

    Attributes:
        name: Without the directory.
        size: In bytes.
        modified: Seconds since the epoch, by the store's clock.
    """

    name: str
    size: int
    modified: float


class Hold(Protocol):
    """A key that this process holds, until ``release``."""

    @property
    def lost(self) -> str | None:
        """The process that has taken the key from this one; None if this process has noticed none."""

    def release(self) -> None:
        """Release the key."""


class Store(Protocol):
    """The objects below one location. Any thread may use it. It can be pickled, and then connects again.

    Every ``list`` and ``open`` that begins after a put sees the object. A store that is away, as an unmounted
    directory, has no objects, and takes none.

    Raises:
        DiskFaultError: By any call: the store refuses for now, or does not answer. The caller repeats the call.
        LogWriteError, LogFormatError: By any call: the store refuses for a reason that stays.
    """

    def __str__(self) -> str:
        """The location, without a secret."""

    def path_of(self, key: str) -> str:
        """The full path of a key, for messages, without a secret."""

    def create(self, *directories: str) -> None:
        """Make the root and these directories, if they are missing. Called only to open a log.

        No other call makes a directory. So no second store begins below the mount point of a store that was unmounted.
        """

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """List the objects directly in a directory, in no order; none if there is no such directory.

        A listing takes time. If objects are put meanwhile in the order of their names, it shows an object only together
        with those put before it. Objects that are deleted meanwhile may be in it or not. What else is in the directory
        may be in it, too: other directories, and temporary files.
        """

    def find(self, key: str) -> Entry | None:
        """The entry of one object in ``list``; None if there is none."""

    def open(self, key: str) -> pa.NativeFile:
        """Open an object for reading at any place.

        A later read may also raise DiskFaultError or OSError, and FileNotFoundError if the object is deleted.

        Raises:
            FileNotFoundError: There is no such object.
        """

    def put_new(self, key: str, content: Content) -> None:
        """Make a new object. It is whole and durable when this returns.

        After an error the object may be there or not. Then the call may be repeated: it succeeds if the object is there
        with exactly this content, because then an earlier call has put it, and its answer was lost.

        Raises:
            KeyTakenError: There is an object of this key with other content.
        """

    def put(self, key: str, content: bytes) -> None:
        """Make or replace an object. It is whole and durable when this returns.

        Args:
            content: Text such as JSON, in which spaces at the end have no meaning: on a full disk some may be added.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""

    def hold(self, key: str, wait: float) -> Hold:
        """Hold a key, so that no other process holds it while this one lives.

        A hold says when a standby may begin, and which of two processes continues. It protects no data: ``put_new``
        does.

        Args:
            wait: Seconds to wait for the holder.

        Raises:
            LogLockedError: Another process holds the key; the error names it.
        """

    def holder(self, key: str) -> str | None:
        """The name of the process that holds a key now; None if it is free. Asking refuses the key to no process."""
