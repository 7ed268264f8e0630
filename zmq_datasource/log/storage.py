"""A log in a store: its id, its chunks, and the rules for writing them."""

from __future__ import annotations

import errno
import json
import socket
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from zmq_datasource.errors import (
    RESTORE,
    DiskFaultError,
    KeyTakenError,
    LogError,
    LogFormatError,
    LogLockedError,
    NoLogError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.log.bucket_store import bucket_at
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.fence import Fence
from zmq_datasource.log.files import MOUNT_AGAIN, gone
from zmq_datasource.log.head import overtaken
from zmq_datasource.log.layout import (
    CHUNKS_NAME,
    FORMAT_VERSION,
    HEAD_NAME,
    LOCK_NAME,
    LOG_NAME,
    MERGED_NAME,
    MOST_LISTINGS,
    READERS_NAME,
    Chunk,
    chunk_name,
    key_of,
    parse_name,
)
from zmq_datasource.log.records import read_object
from zmq_datasource.log.store import Content, Entry, Hold, Store
from zmq_datasource.options.types import Location

_DIRECTORIES = (CHUNKS_NAME, HEAD_NAME, MERGED_NAME, READERS_NAME)

T = TypeVar("T")


class LogStorage:
    """A log in a store.

    Args:
        store: The store of the log; or the URI of a bucket; or the absolute path or ``file:`` URI of a directory.
        retry_seconds: Seconds for which reading a chunk is repeated while the store refuses.

    Attributes:
        fence: Checks, in each put of a chunk and in ``check_writer``, that no other writer has the log. None if this
            object only reads.

    Raises:
        OptionError: The location is none of these.
        DiskFaultError, LogWriteError: By each method: see ``Store``.
    """

    def __init__(self, store: Store | Location | str, retry_seconds: float = 0.0) -> None:
        if isinstance(store, Location):
            store = bucket_at(store)
        self.store: Store = DirectoryStore(store) if isinstance(store, str) else store
        self.retry_seconds = retry_seconds
        self.fence: Fence | None = None

    @property
    def root(self) -> str:
        """The location of the log, as text."""
        return str(self.store)

    @property
    def directory(self) -> Path | None:
        """The directory of the log; None in a bucket."""
        return self.store.root if isinstance(self.store, DirectoryStore) else None

    def __str__(self) -> str:
        return f"log {self.root}"

    def path_of(self, name: str) -> str:
        """The full path of a chunk, for messages."""
        return self.store.path_of(key_of(name))

    @property
    def request_interval(self) -> float:
        """Seconds between two acts that can wait: 0 in a directory, 10 in a bucket (providers charge for requests)."""
        return 0.0 if isinstance(self.store, DirectoryStore) else 10.0

    # The log's id.

    def open_log(self, log_id: str | None = None) -> str:
        """Create the log if there is none; return its id.

        Args:
            log_id: The id of a new log; random, unless given.

        Raises:
            LogFormatError: ``log.json`` is damaged or of another format version, or it is missing and there are chunks.
            LogWriteError: The store cannot be created or written.
        """
        self.store.create(*_DIRECTORIES)
        with suppress(NoLogError):
            return self.log_id()
        content = json.dumps({"format": FORMAT_VERSION, "log": log_id or uuid.uuid4().hex}).encode()
        failpoints.reach("log.identity.before_put")
        with suppress(KeyTakenError):  # another process has created the log at this moment
            self.store.put_new(LOG_NAME, [content])
        failpoints.reach("log.identity.after_put")
        return self.log_id()

    def log_id(self) -> str:
        """The id in ``log.json``.

        Raises:
            NoLogError: There is no log here.
            LogFormatError: The log is damaged, or of a format that this release does not read.
        """
        content = read_object(self.store, LOG_NAME)
        if content is None:
            raise self._missing_error()
        path = self.store.path_of(LOG_NAME)
        with suppress(ValueError, RecursionError):
            match json.loads(content):
                case {"format": int(version), "log": str(log)} if version == FORMAT_VERSION:
                    return log
                case {"format": int(version)}:
                    raise LogFormatError(
                        f"reading {path}: format version {version}, this release reads {FORMAT_VERSION}. Let each "
                        "query of this log read to its end with the release that wrote it; then set another "
                        "walLocation or walStore, and a new checkpoint for each of these queries"
                    )
        raise LogFormatError(f"reading {path}: it is not the description of a log. {RESTORE}")

    def log_id_again(self) -> str:
        """Read the id of a log that was found before.

        Raises:
            DiskFaultError: The log is not there any more.
            LogFormatError: As ``log_id``.
        """
        try:
            return self.log_id()
        except NoLogError as e:
            raise DiskFaultError(f"{e}. It was there before. {MOUNT_AGAIN}") from e

    def _missing_error(self) -> LogFormatError:
        """The error if there is no ``log.json``. With chunks, a new log would give their ids to other messages."""
        there = self.chunks()
        # Looked for again, because another process may have created the log and written chunks meanwhile.
        if there and self.store.find(LOG_NAME) is None:
            return LogFormatError(
                f"opening the log in {self.root}: {LOG_NAME} is missing, and there are chunks "
                f"(the first one begins at id {there[0].first}). "
                f'Restore {LOG_NAME}: it holds {{"format": {FORMAT_VERSION}, "log": "<id>"}}, and each checkpoint '
                'of a query of this log has the id, as "log" in its offsets. Or set another walLocation or walStore, '
                "and for each of these queries a new checkpoint"
            )
        where = "bucket" if self.directory is None else "directory"
        return NoLogError(
            f"reading {self.store.path_of(LOG_NAME)}: there is no log in this {where}, or it is not reachable from "
            f"this machine ({socket.gethostname()}). Start what fills it (a query with connect or bind, "
            "zmq-datasource receive, a proxy), or correct walLocation, which all machines that read it must share, or "
            "walStore"
        )

    def sees(self, log_id: str, names: Iterable[str]) -> bool:
        """Whether this machine sees all these chunks of the log with this id.

        The location may lead to another log here, or to an older copy, which lacks chunks.

        Raises:
            DiskFaultError: This process has no free descriptor or memory now.
        """
        try:
            return self.log_id() == log_id and all(self.store.find(key_of(name)) for name in names)
        except LogError as e:
            if getattr(e.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            return False

    # Chunks.

    def chunks(self) -> list[Chunk]:
        """The chunks as they were sealed, in order: also those that lie in a merged chunk and will be deleted.

        A listing does not show where they end, so each has one id.
        """
        return self._list(CHUNKS_NAME, "")

    def merged(self) -> list[Chunk]:
        """The merged chunks, in the order of their ends. Two listings must be equal, so that none hides between them.

        A merged chunk may itself have been merged. Then it lies in another one until it is deleted.
        """
        before, found = None, self._list(MERGED_NAME, f"{MERGED_NAME}/")
        while found and found != before:
            before, found = found, self._list(MERGED_NAME, f"{MERGED_NAME}/")
        return found

    def _list(self, directory: str, prefix: str) -> list[Chunk]:
        found = (_chunk_of(f"{prefix}{entry.name}", entry) for entry in self.store.list(directory))
        return sorted(filter(None, found), key=lambda chunk: (chunk.end, chunk.first))

    def from_listing(self, act: Callable[[], T]) -> T:
        """Call ``act``, which lists chunks and opens some of them, again if those were deleted meanwhile.

        Raises:
            DiskFaultError: The log cannot be listed now, or its chunks are gone.
            LogFormatError: Listed chunks cannot be opened.
        """
        for _ in range(MOST_LISTINGS):
            with suppress(FileNotFoundError):
                return act()
        if not self.chunks():
            raise DiskFaultError(f"reading {self}: no chunk is there any more. {MOUNT_AGAIN}")
        raise LogFormatError(f"reading {self}: its listing shows chunks that cannot be opened")

    def open_sealed(self, name: str, modified: float | None = None) -> pa.NativeFile:
        """Open a chunk for reading; FileNotFoundError if it is gone.

        Args:
            modified: The modification time of its object. Another object in its place counts as gone: a writer that had
                lost the log has put it. None opens any.

        Raises:
            DiskFaultError: The store refuses for now, or the whole log is gone.
        """
        key = key_of(name)
        try:
            file = self.store.open(key)
        except FileNotFoundError:
            self.log_id_again()
            file = self.store.open(key)  # the log was perhaps away for a moment
        if modified is not None:
            found = self.store.find(key)  # now, so that it is the entry of the opened object, or of none
            if found is None or found.modified != modified:
                file.close()
                raise FileNotFoundError(errno.ENOENT, "another object is in its place", self.path_of(name))
        return file

    def put_chunk(self, first: int, content: Content) -> float | None:
        """Write a chunk; return the modification time of its object. The writer may repeat the call.

        Args:
            first: Its first id.

        Raises:
            LogLockedError: Another writer has put a chunk there, or has taken over: this chunk does not count.
            DiskFaultError: The store refuses for now, or has lost its content.
        """
        self.check_writer()
        name = chunk_name(first)
        failpoints.reach("log.chunk.before_put")
        try:
            self.store.put_new(key_of(name), content)
        except KeyTakenError as e:
            error = overtaken(
                self.store, f"another process has put {self.path_of(name)}, with other messages"
            )
            raise (error if self.fence is None else self.fence.close(error)) from e
        failpoints.reach("log.chunk.after_put")
        return None if self.fence is None else self.fence.advance(first)

    def put_merged(self, name: str, content: Content) -> Entry:
        """Write a merged chunk; return its entry. The writer may repeat the call. Raises what ``put_chunk`` does."""
        key = key_of(name)
        self.check_writer()
        with suppress(KeyTakenError):  # an earlier writer has put it late: it has the same rows
            self.store.put_new(key, content)
        found = self.store.find(key)
        if self.fence is not None:
            self.fence.check_head()
        if found is None:
            raise gone(f"writing to {self}", self.store.path_of(key))
        return found

    def delete_chunk(self, chunk: Chunk) -> None:
        """Delete a chunk, if it is there."""
        failpoints.reach("log.chunk.before_delete")
        self.store.delete(key_of(chunk.name))
        failpoints.reach("log.chunk.after_delete")

    def tidy_up(self) -> None:
        """Tidy up after killed processes. Only the writer calls this, before it reads anything."""
        if isinstance(self.store, DirectoryStore):
            for directory in ("", *_DIRECTORIES):
                self.store.tidy_up(directory)

    # The one writer.

    def lock(self, wait: float) -> Hold:
        """Become the writer of the log.

        Args:
            wait: Seconds to wait for a writer that is stopping.

        Raises:
            LogLockedError: Another writer has the log; the error names its process.
        """
        self.fence = None
        try:
            return self.store.hold(LOCK_NAME, wait)
        except LogLockedError as e:
            option = "walStore" if self.directory is None else "walLocation"
            raise LogLockedError(
                f"opening {self}: {e}; stop that query or proxy, or give this one a {option} of its own"
            ) from e

    def check_writer(self) -> None:
        """Check that no other process writes the log, and that the store is there. Raises what ``Fence.check`` does."""
        if self.fence is not None:
            self.fence.check()

    def writer(self) -> str | None:
        """The name of the process that writes the log now; None if there is none."""
        return self.store.holder(LOCK_NAME)


def _chunk_of(name: str, entry: Entry) -> Chunk | None:
    """The chunk of an object; None if it is another object."""
    if (ids := parse_name(name)) is None:
        return None
    first, end = ids
    if end is None:
        return Chunk(first, first + 1, entry.size, entry.modified, None, entry.modified)
    return Chunk(first, end, entry.size, entry.modified, name)
