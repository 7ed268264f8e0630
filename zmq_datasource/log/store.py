"""The store of a log: whole objects that are put, opened, listed and deleted by their keys.

A key is a relative path, as in ``0/00000000000000000000.arrow``. There are two stores, with one contract: a directory
(``directory_store``) and a bucket (``bucket_store``). ``put_new`` fences writers: of two that put the same key, one
succeeds, and the other one learns that the key is taken. No clock and no lock decides that.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from zmq_datasource.errors import LogError

__all__ = ["Content", "Entry", "Hold", "Holding", "KeyTakenError", "Part", "Store"]

Part: TypeAlias = bytes | pa.Buffer
# Of an object: its parts, or a file near to the store that is whole and on the disk. The file keeps its own name, by
# which a call that is repeated knows it; nothing is written to it any more, and the caller removes the name.
Content: TypeAlias = Sequence[Part] | Path


class KeyTakenError(LogError):
    """The key of a new object has other content already."""


class Entry(NamedTuple):
    """One name in a directory of the store.

    Attributes:
        name: Without the directory.
        size: In bytes; 0 for a directory.
        modified: Seconds since the epoch, by the store's clock; 0 for a directory.
        is_directory: Whether it is a directory.
    """

    name: str
    size: int
    modified: float
    is_directory: bool


class Holding(NamedTuple):
    """The process that holds a key, and the note that it has left there."""

    who: str
    note: str


class Hold(Protocol):
    """A key that this process holds, until ``release``."""

    @property
    def lost(self) -> str | None:
        """The process that has taken the key from this one; None if this one holds it, as far as it has noticed."""

    def release(self) -> None:
        """Let another process hold the key. Its note stays."""


class Store(Protocol):
    """The objects below one location. Any thread may use it; a pickled one connects by itself.

    An object that was put is seen by every ``list`` and ``open`` that begins afterwards.

    Raises:
        DiskFaultError: In any call. The store refuses for now, does not answer, or is away: its root is missing.
            Nothing is retried here: the caller repeats the call.
        LogWriteError, LogFormatError: In any call. The store refuses for a reason that stays.
    """

    def __str__(self) -> str:
        """The location, without a secret."""

    def path_of(self, key: str) -> str:
        """The full path of a key, for messages, without a secret."""

    def exists(self) -> bool:
        """Whether the root is there."""

    def create(self, *directories: str) -> None:
        """Make the root and these directories, as far as they are missing. Call it only to open a log.

        Nothing else makes the root or a directory directly in it, so that a store which was unmounted or emptied is
        not begun a second time below the mount point.
        """

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        """What is directly in a directory, in no order; nothing if there is no such directory.

        It takes a while. Of the objects that are put meanwhile, each with a higher name than all before, it shows none
        without those before that one. Of what is deleted meanwhile it may show anything.

        Hidden names, which begin with a dot, are left out.

        Args:
            after: Only names that come after this one in the order of text. What is left out costs little.
        """

    def find(self, key: str) -> Entry | None:
        """What ``list`` shows of one object; None if there is none."""

    def open(self, key: str, whole: bool = True) -> pa.NativeFile:
        """Open an object for reading at any place.

        A later read may raise DiskFaultError, too, or OSError; FileNotFoundError if the object was deleted meanwhile.

        Args:
            whole: Whether most of it will be read, and not only the end.

        Raises:
            FileNotFoundError: There is no such object.
        """

    def put_new(self, key: str, content: Content) -> None:
        """Make a new object. It is whole and durable when this returns.

        If an error is raised the object may be there or not. Repeat the call then: it succeeds if the object is there
        with just this content, because an earlier call has put it and its answer was lost.

        Raises:
            KeyTakenError: There is an object of this key with other content.
        """

    def put(self, key: str, content: bytes) -> None:
        """Make an object, or replace it. It is whole and durable when this returns.

        Args:
            content: Text such as JSON, for which spaces at the end mean nothing: a full disk may add some.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""

    def hold(self, key: str, wait: float, note: str = "") -> Hold:
        """Hold a key, so that no other process holds it while this one lives.

        It says when a standby may begin, and which of two processes goes on. It protects no data: ``put_new`` does.

        Args:
            wait: Seconds to wait for the holder.
            note: One line for other processes; ``note`` and ``holder`` read it.

        Raises:
            LogLockedError: Another process holds it; the message names it.
        """

    def holder(self, key: str) -> Holding | None:
        """The process that holds a key now; None if it is free."""

    def note(self, key: str) -> str:
        """The note of the last process that has held a key; empty if there was none."""
