"""A log in a store: the names of its objects, and the rules for writing them.

A chunk's key is its first id, and the writer that puts a key first has given out those ids: see ``fence``. A lock only
says when a standby may begin.
"""

from __future__ import annotations

import errno
import json
import socket
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.fence import ChecksWriter, Fence
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.layout import (
    CHUNKS_NAME,
    FORMAT_VERSION,
    HEAD_NAME,
    LOCK_NAME,
    LOG_NAME,
    MERGED_NAME,
    READERS_NAME,
    Chunk,
    chunk_name,
    parse_chunk_name,
    parse_merged_name,
)
from zmq_datasource.log.store import Content, Entry, Hold, Store

# How often a listing is repeated. A chunk that was listed may be deleted before it is opened.
MOST_LISTINGS = 10
_LEISURE_SECONDS = 10.0


class ChunkEntry(NamedTuple):
    """A sealed chunk in a listing: its first id, its bytes, and its time of modification (seconds since the epoch)."""

    first: int
    size: int
    sealed_at: float

    @property
    def name(self) -> str:
        return chunk_name(self.first)


class LogStorage:
    """A log in a store.

    Args:
        store: The store of the log, or the absolute path or ``file:`` URI of a directory.
        retry_seconds: Seconds for which reading a chunk is repeated while the store refuses.

    Raises:
        OptionError: The location is neither.
    """

    def __init__(self, store: Store | str, retry_seconds: float = 0.0) -> None:
        self.store: Store = DirectoryStore(store) if isinstance(store, str) else store
        self.retry_seconds = retry_seconds
        self._writer: Hold | None = None  # if this object writes
        self._fence: Fence | None = None

    @property
    def root(self) -> str:
        """The location of the log, as text."""
        return str(self.store)

    @property
    def directory(self) -> Path | None:
        """The directory of the chunks; None in a bucket."""
        return self.store.root / CHUNKS_NAME if isinstance(self.store, DirectoryStore) else None

    def __repr__(self) -> str:
        return f"LogStorage({self.root!r})"

    def __str__(self) -> str:
        return f"log {self.root}"

    def key(self, name: str) -> str:
        """The key of a chunk."""
        return name if name.startswith(f"{MERGED_NAME}/") else f"{CHUNKS_NAME}/{name}"

    def path_of(self, name: str) -> str:
        """The full path of a chunk, for messages."""
        return self.store.path_of(self.key(name))

    @property
    def request_interval(self) -> float:
        """Seconds between two acts that can wait: 0 in a directory, 10 in a bucket (providers charge for requests)."""
        return 0.0 if isinstance(self.store, DirectoryStore) else _LEISURE_SECONDS

    # The log's id.

    def open_log(self, log_id: str | None = None) -> str:
        """Create the log if there is none; return its id.

        Args:
            log_id: The id of a new log; random, unless given.

        Raises:
            LogFormatError: ``log.json`` is damaged or of another format version, or it is missing and there are chunks.
            LogWriteError: The store cannot be created or written.
        """
        self.store.create(CHUNKS_NAME, HEAD_NAME, MERGED_NAME, READERS_NAME)
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
        return self._id_in(self.read_json(LOG_NAME) if self.store.exists() else None)

    def _id_in(self, description: object) -> str:
        path = self.store.path_of(LOG_NAME)
        match description:
            case {"format": int(version), "log": str(log)} if version == FORMAT_VERSION:
                return log
            case {"format": int(version)}:
                raise _other_format(path, version)
            case None:
                self._refuse_nameless_chunks()
                where = "bucket" if self.directory is None else "directory"
                raise NoLogError(
                    f"reading {path}: there is no log in this {where}, or it is not reachable from this machine "
                    f"({socket.gethostname()}). Start what fills it (a query with connect or bind, zmq-datasource "
                    "receive, a proxy), or correct walLocation, which all machines that read it must share, or walStore"
                )
        raise LogFormatError(f"reading {path}: it is not the description of a log. {RESTORE}")

    def log_id_again(self) -> str:
        """Read the id of a log that was found before.

        Raises:
            DiskFaultError: The log is not there any more.
            LogFormatError: As ``log_id``.
        """
        try:
            return self._id_in(self.read_json(LOG_NAME))
        except NoLogError as e:
            raise DiskFaultError(f"{e}. It was there before. {MOUNT_AGAIN}") from e

    def _refuse_nameless_chunks(self) -> None:
        """Refuse to create a log beside chunks: it would give their ids to other messages.

        Raises:
            LogFormatError: There are chunks.
        """
        firsts = self._firsts() if self.store.exists() else []
        # Checked again, because another process may have created the log and written chunks meanwhile.
        if firsts and self.store.find(LOG_NAME) is None:
            raise LogFormatError(
                f"opening the log in {self.root}: {LOG_NAME} is missing, and there are chunks "
                f"(the first one begins at id {firsts[0]}). "
                f'Restore {LOG_NAME}: it holds {{"format": {FORMAT_VERSION}, "log": "<id>"}}, and each checkpoint '
                'of a query of this log has the id, as "log" in its offsets. Or set another walLocation or walStore, '
                "and for each of these queries a new checkpoint"
            )

    def _firsts(self) -> list[int]:
        return [entry.first for entry in self.chunks()]

    def sees(self, log_id: str, names: Iterable[str]) -> bool:
        """Whether this machine sees all these chunks of the log with this id.

        The location may lead to another log here, or to an older copy, which lacks chunks.

        Raises:
            DiskFaultError: This process has no free descriptor or memory now.
        """
        try:
            return self.log_id() == log_id and all(self.store.find(self.key(name)) for name in names)
        except LogError as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in (
                errno.EMFILE,
                errno.ENFILE,
                errno.ENOMEM,
            ):
                raise
            return False

    # Chunks.

    def chunks(self, after: int | None = None) -> list[ChunkEntry]:
        """The chunks as they were sealed, in order: also those that lie in a merged chunk and will be deleted.

        Args:
            after: Only those that begin after this id.

        Raises:
            DiskFaultError: They cannot be listed now.
        """
        behind = "" if after is None else chunk_name(after)
        found = [
            ChunkEntry(first, entry.size, entry.modified)
            for entry in self.store.list(CHUNKS_NAME, behind)
            if (first := parse_chunk_name(entry.name)) is not None
        ]
        return sorted(found)

    def merged(self, after: int | None = None) -> list[Chunk]:
        """The merged chunks, in the order of their ends. Two listings must be equal, so that none hides between them.

        A merged chunk may itself have been merged. Then it lies in another one until it is deleted.

        Args:
            after: Only those that hold ids after this one.

        Raises:
            DiskFaultError: They cannot be listed now.
        """
        before, found = None, self._list_merged(after)
        while found and found != before:
            before, found = found, self._list_merged(after)
        return found

    def _list_merged(self, after: int | None) -> list[Chunk]:
        # An end is one more than the last id. The separator in a name comes after an end alone.
        behind = "" if after is None else f"{after + 2:020d}"
        found = []
        for entry in self.store.list(MERGED_NAME, behind):
            name = f"{MERGED_NAME}/{entry.name}"
            if (ids := parse_merged_name(name)) is not None:
                found.append(Chunk(*ids, entry.size, entry.modified, name))
        return sorted(found, key=lambda chunk: (chunk.end, chunk.first))

    def find_chunk(self, first: int) -> ChunkEntry | None:
        """The sealed chunk with this first id; None if there is none. It may be merged all the same."""
        found = self.store.find(self.key(chunk_name(first)))
        return None if found is None else ChunkEntry(first, found.size, found.modified)

    def newest_chunk(self) -> ChunkEntry | None:
        """The sealed chunk with the highest ids; None if there is no chunk."""
        return max(self.chunks(), default=None)

    def open_sealed(self, name: str, whole: bool = True, modified: float | None = None) -> pa.NativeFile:
        """Open a chunk for reading; FileNotFoundError if it is gone.

        Args:
            whole: Whether most of it will be read, and not only its end.
            modified: The modification time of its object. Another object in its place counts as gone: a writer that had
                lost the log has put it. None opens any.

        Raises:
            DiskFaultError: The store refuses for now, or the whole log is gone.
        """
        key = self.key(name)
        try:
            file = self.store.open(key, whole)
        except FileNotFoundError:
            self.log_id_again()
            file = self.store.open(key, whole)  # the log was perhaps away for a moment
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
            content: See ``store.Content``.

        Raises:
            LogLockedError: Another writer has put a chunk there.
            LogLockedError: Another writer has put later chunks, and this chunk does not count.
            DiskFaultError: The store refuses for now, or has lost its content.
        """
        if self._fence is not None:
            self._fence.check()
        name = chunk_name(first)
        failpoints.reach("log.chunk.before_put")
        try:
            self.store.put_new(self.key(name), content)
        except KeyTakenError as e:
            error = LogLockedError(
                f"writing to {self}: another process has put {self.path_of(name)}, with other messages under the ids "
                f"from {first} on. What this process has received and not sealed is lost; start it again, and it "
                "follows or takes over"
            )
            raise (error if self._fence is None else self._fence.close(error)) from e
        failpoints.reach("log.chunk.after_put")
        return None if self._fence is None else self._fence.advance(first)

    def put_merged(self, name: str, content: Content) -> Entry:
        """Write a merged chunk; return its entry. The writer may repeat the call.

        Raises:
            LogLockedError: Another writer has the log.
            DiskFaultError: The store refuses for now, or has lost its content.
        """
        key = self.key(name)
        if self._fence is not None:
            self._fence.check()
        with suppress(KeyTakenError):  # an earlier writer has put it late: it has the same rows
            self.store.put_new(key, content)
        found = self.store.find(key)
        if self._fence is not None:
            self._fence.check_head()
        if found is None:
            raise DiskFaultError(
                f"writing {self.store.path_of(key)}: it is not there any more. {MOUNT_AGAIN}"
            )
        return found

    def start_fence(self, log_id: str, newest: int | None, head: ChecksWriter) -> None:
        """Begin to check, in ``put_chunk`` and ``check_writer``, that no other writer has the log.

        Args:
            newest: The first id of the newest chunk; None for a log without chunks.
            head: The head of this writer.

        Raises:
            LogLockedError, DiskFaultError: See ``Fence``.
        """
        self._fence = Fence(self, log_id, newest, head)

    def delete_chunk(self, chunk: Chunk) -> None:
        """Delete a chunk, if it is there."""
        failpoints.reach("log.chunk.before_delete")
        self.store.delete(self.key(chunk.name))
        failpoints.reach("log.chunk.after_delete")

    def uncache_chunk(self, chunk: Chunk) -> None:
        """Let the system drop a chunk from its memory. The chunk stays in the log."""
        if isinstance(self.store, DirectoryStore):
            self.store.uncache(self.key(chunk.name))

    def remove_temporaries(self) -> None:
        """Delete temporary files of killed processes. Only the writer calls this."""
        if isinstance(self.store, DirectoryStore):
            for directory in ("", CHUNKS_NAME, HEAD_NAME, MERGED_NAME, READERS_NAME):
                self.store.clean(directory)

    # The one writer.

    def lock(self, wait: float) -> Hold:
        """Become the writer of the log.

        Args:
            wait: Seconds to wait for a writer that is stopping.

        Raises:
            LogLockedError: Another writer has the log; the error names its process.
        """
        self._fence = None
        try:
            self._writer = self.store.hold(LOCK_NAME, wait)
        except LogLockedError as e:
            option = "walStore" if self.directory is None else "walLocation"
            raise LogLockedError(
                f"opening {self}: {e}; stop that query or proxy, or give this one a {option} of its own"
            ) from e
        return self._writer

    def check_writer(self) -> None:
        """Check early that this process still holds the log, and that the store is there.

        This check is not needed for safety: ``put_chunk`` alone keeps two writers apart.

        Raises:
            LogLockedError: Another process holds the log.
            DiskFaultError: The store has lost its content.
        """
        if self._writer is not None and (lost := self._writer.lost):
            raise LogLockedError(
                f"writing to {self}: this process has lost the lock, which is held by {lost}. What it has received and "
                "not sealed is lost; start it again, and it follows or takes over"
            )
        if self._fence is not None:
            self._fence.check()

    def writer(self) -> str | None:
        """The name of the process that writes the log now; None if there is none."""
        return self.store.holder(LOCK_NAME)

    def is_written(self) -> bool:
        """Whether a process writes the log now."""
        return self.writer() is not None

    # Small objects beside the chunks.

    def read_json(self, key: str) -> object:
        """Read a small JSON object of the log; None if there is none.

        Raises:
            DiskFaultError, LogFormatError: It cannot be read, or is not JSON.
        """
        content = self.read(key)
        if content is None:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as e:
            raise LogFormatError(f"reading {self.store.path_of(key)}: {e}. {RESTORE}") from e

    def read(self, key: str) -> bytes | None:
        """Read a small object of the log; None if there is none."""
        with suppress(FileNotFoundError), self.store.open(key) as file:
            return bytes(file.read())
        return None


def _other_format(path: str, version: int) -> LogFormatError:
    return LogFormatError(
        f"reading {path}: format version {version}, this release reads {FORMAT_VERSION}. Let each query of this log "
        "read to its end with the release that wrote it; then set another walLocation or walStore, and a new "
        "checkpoint for each of these queries"
    )
