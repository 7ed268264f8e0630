"""A store in a bucket of S3, Google Cloud Storage or Azure, accessed by ``obstore``."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa

from zmq_datasource.errors import (
    DiskFaultError,
    KeyTakenError,
    LogError,
    LogLockedError,
    LogWriteError,
    OptionError,
)
from zmq_datasource.host import failpoints
from zmq_datasource.host.machine import is_gone, process_mark
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.buckets import Bucket, import_obstore
from zmq_datasource.log.files import read_file, this_process, writing
from zmq_datasource.log.range_file import RangeFile
from zmq_datasource.log.store import Content, Entry, Holding, Part
from zmq_datasource.options.types import Location

_log = logging.getLogger(__name__)

# An object up to ``_WHOLE_BYTES`` is read by one request. Of a larger one, the last ``_END_BYTES`` are read first.
_WHOLE_BYTES, _END_BYTES = 64 << 20, 1 << 20
# Time limits: ``_ANSWER`` for the server's first answer, ``_ALL`` for a whole request. A put of more than
# ``_LARGE_BYTES`` has only the second, because the server answers it only at its end.
_ANSWER, _ALL, _LARGE_BYTES = "10s", "60s", 4 << 20
# A request that fails quickly is sent a second time. All other retries are the callers'.
_RETRIES = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}

# Shorter than ``LOCK_WAIT_SECONDS``, so that a process that waits so long gets the key of a killed holder.
SILENT_SECONDS = 12.0
# This process measures a holder's silence from check to check. If two checks are further apart than this, it begins the
# measurement again.
_MOST_CHECK_GAP_SECONDS = 4.0
# How long the end of a hold waits for the thread that refreshes it.
_JOIN_SECONDS = 5.0
# ``_LASTING``: texts of errors that stay, for which obstore has no class of its own. ``_PASSING``: texts of errors that
# pass, although their class, or another text in them, means an error that stays.
_LASTING = re.compile(
    "NoSuchBucket|ContainerNotFound|The specified bucket does not exist|incorrectly configured region"
    "|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|InvalidToken|MethodNotAllowed|NotImplemented"
)
_PASSING = re.compile("RequestTimeTooSkewed|ExpiredToken|TokenExpired")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|The specified bucket does not exist")

# The id of the process that has started obstore's threads. In a forked child, a request would never end.
_threads_of: dict[str, int] = {}


class HoldTimes(NamedTuple):
    """How often a holder of a key and those that wait for it act.

    Attributes:
        beat_seconds: How often a holder refreshes its key.
        silent_seconds: The time without a refresh after which another process may take the key.
        check_seconds: How often a process that waits for a key checks it.
        settling_seconds: How long a process that has taken over a key waits before it reads the record again: if two
            processes take over a key at the same time, the last one to write the record has it.
    """

    beat_seconds: float = 3.0
    silent_seconds: float = SILENT_SECONDS
    check_seconds: float = 1.0
    settling_seconds: float = 1.0


class BucketStore:
    """A bucket as a ``Store``.

    A new object is put with the condition that its key is free. The bucket checks the condition in the same step.

    Args:
        location: The bucket's URI; see the module ``buckets``.
        times: When holders act; by default ``BucketStore.times``.

    Raises:
        OptionError: The URI is not that of a bucket, or ``obstore`` is not installed.
    """

    times = HoldTimes()

    def __init__(self, location: Location, times: HoldTimes | None = None) -> None:
        self.location = location
        self.times = times or self.times
        self._bucket = Bucket.read(location)
        self._obstore = import_obstore()
        self._connections: dict[bool, Any] = {}
        self._seen: dict[str, _Seen] = {}
        self._checking = threading.Lock()

    def __reduce__(self) -> tuple[type[Self], tuple[Location, HoldTimes]]:
        return type(self), (self.location, self.times)

    def __repr__(self) -> str:
        return f"BucketStore({str(self)!r})"

    def __str__(self) -> str:
        return str(self.location).partition("?")[0].rstrip("/")

    def path_of(self, key: str) -> str:
        return f"{self}/{key}"

    def exists(self) -> bool:
        return True  # a bucket has no directories

    def create(self, *directories: str) -> None:
        self.list()  # reports a missing bucket now

    def list(self, prefix: str = "", after: str = "") -> Sequence[Entry]:
        if after:
            return self._list_after(prefix, after)
        with self._using(f"listing {self.path_of(prefix)}") as bucket:
            found = self._obstore.list_with_delimiter(bucket, prefix or None)
        entries = [Entry(_name(path), 0, 0.0, True) for path in found["common_prefixes"]]
        entries += [
            Entry(_name(about["path"]), about["size"], about["last_modified"].timestamp(), False)
            for about in found["objects"]
        ]
        return [entry for entry in entries if entry.name and not entry.name.startswith(".")]

    def _list_after(self, prefix: str, after: str) -> Sequence[Entry]:
        with self._using(f"listing {self.path_of(prefix)}") as bucket:
            pages = self._obstore.list(bucket, prefix, offset=f"{prefix}/{after}")
            found = [about for page in pages for about in page]
        below = len(prefix) + 1
        return [
            Entry(about["path"][below:], about["size"], about["last_modified"].timestamp(), False)
            for about in found
            if "/" not in about["path"][below:]
        ]

    def find(self, key: str) -> Entry | None:
        try:
            with self._using(f"looking for {self.path_of(key)}") as bucket:
                found = self._obstore.head(bucket, key)
        except FileNotFoundError:
            return None
        return Entry(_name(key), found["size"], found["last_modified"].timestamp(), False)

    def open(self, key: str, whole: bool = True) -> pa.NativeFile:
        with self._using(f"reading {self.path_of(key)}") as bucket:
            found = self._obstore.get(bucket, key)
            size = found.meta["size"]
            if size <= (_WHOLE_BYTES if whole else _END_BYTES):
                return pa.BufferReader(pa.py_buffer(found.bytes()))
        del found  # ends the request
        begin = size - _END_BYTES
        fetch = partial(self.read_range, key)
        return pa.PythonFile(RangeFile(fetch, size, fetch(begin, size)), mode="r")

    def read_range(self, key: str, begin: int, end: int) -> memoryview:
        with self._using(f"reading {self.path_of(key)}") as bucket:
            return memoryview(self._obstore.get_range(bucket, key, start=begin, end=end))

    def put_new(self, key: str, content: Content) -> None:
        if isinstance(content, Path):
            with writing(f"writing {self.path_of(key)}"):
                content = [read_file(content)]
        self._put_new(key, content)

    def _put_new(self, key: str, parts: Sequence[Part]) -> None:
        content = memoryview(parts[0] if len(parts) == 1 else b"".join(parts)).cast("B")
        while not self._put(key, content, "create"):
            with suppress(FileNotFoundError):  # it was deleted, so the key is free again
                if not self._has_content(key, content):
                    raise KeyTakenError(
                        f"writing {self.path_of(key)}: there is such an object with other content"
                    )
                return

    def _has_content(self, key: str, content: memoryview) -> bool:
        with self._using(f"reading {self.path_of(key)}") as bucket:
            found = self._obstore.get(bucket, key)
            return found.meta["size"] == content.nbytes and memoryview(found.bytes()) == content

    def put(self, key: str, content: bytes) -> None:
        self._put(key, memoryview(content), "overwrite")

    def _put(self, key: str, content: memoryview, mode: str) -> bool:
        """Put an object; return False if the mode is ``create`` and the key is taken."""
        with self._using(f"writing {self.path_of(key)}", content.nbytes > _LARGE_BYTES) as bucket:
            failpoints.reach("log.store.before_put")
            try:
                self._obstore.put(bucket, key, content, mode=mode, use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:
                return False
            except FileNotFoundError as e:  # the bucket
                raise LogWriteError(f"writing {self.path_of(key)}: {self._text_of(e)}") from None
            failpoints.reach("log.store.after_put")
        return True

    def delete(self, key: str) -> None:
        with self._using(f"deleting {self.path_of(key)}") as bucket, suppress(FileNotFoundError):
            failpoints.reach("log.store.before_delete")
            self._obstore.delete(bucket, key)
            failpoints.reach("log.store.after_delete")

    @contextmanager
    def _using(self, act: str, is_large: bool = False) -> Iterator[Any]:
        """Yield the connection, and turn obstore's errors into this package's errors, without secrets."""
        exceptions, connection = self._obstore.exceptions, self._connected(is_large)
        try:
            yield connection
        except FileNotFoundError as e:
            if _NO_BUCKET.search(str(e)):
                raise LogWriteError(f"{act}: {self._text_of(e)}") from None
            raise FileNotFoundError(2, "no such object", act.partition(" ")[2]) from None
        except (exceptions.BaseError, OSError, ValueError) as e:
            refused = isinstance(
                e,
                exceptions.PermissionDeniedError
                | exceptions.UnauthenticatedError
                | exceptions.NotSupportedError
                | exceptions.InvalidPathError,
            )
            stays = (refused or _LASTING.search(str(e))) and not _PASSING.search(str(e))
            raise (LogWriteError if stays else DiskFaultError)(f"{act}: {self._text_of(e)}") from None

    def _text_of(self, error: Exception) -> str:
        # The first paragraph only: the others have the values of the client's variables.
        return self._bucket.without_secrets(str(error).partition("\n\n")[0])

    def _connected(self, is_large: bool) -> Any:
        if _threads_of.setdefault("obstore", os.getpid()) != os.getpid():
            raise OptionError(
                f"using object storage in process {os.getpid()}, which was forked after its parent had used it: a fork "
                "does not take over the threads of obstore. Start the process with spawn"
            )
        if is_large not in self._connections:
            times = {"timeout": _ALL} if is_large else {"timeout": _ALL, "read_timeout": _ANSWER}
            try:
                self._connections[is_large] = self._bucket.connect(
                    client_options={"connect_timeout": "3s", **times}, retry_config=_RETRIES
                )
            except (self._obstore.exceptions.BaseError, ValueError) as e:
                raise OptionError(f"option walStore={self.location!r}: {self._text_of(e)}") from None
        return self._connections[is_large]

    # A key that is held.

    def hold(self, key: str, wait: float, note: str = "") -> BucketHold:
        deadline = time.monotonic() + wait
        mine = _Record(this_process(), note, process_mark(), uuid.uuid4().hex, 0)
        _held.add(mine.nonce)
        try:
            self._wait_and_claim(key, mine, deadline)
        except BaseException:
            _held.discard(mine.nonce)
            raise
        return BucketHold(self, key, mine)

    def _wait_and_claim(self, key: str, mine: _Record, deadline: float) -> None:
        while True:
            found, is_held = self._observe(key)
            if not is_held and self._claim(key, found, mine):
                return
            if is_held and found is not None and time.monotonic() >= deadline:
                raise LogLockedError(
                    f"{self.path_of(key)} is held by {found.name}. That process counts as gone when it has given no "
                    f"sign of life for {self.times.silent_seconds:.0f} s"
                )
            check_signals()
            time.sleep(min(self.times.check_seconds, max(0.01, deadline - time.monotonic())))

    def _claim(self, key: str, found: _Record | None, mine: _Record) -> bool:
        self._put(key, memoryview(mine.content), "create" if found is None else "overwrite")
        if found is not None:
            # Another process may overwrite the record at this moment. The last one to do so has the key.
            time.sleep(self.times.settling_seconds)
        now = self.record(key)
        return now is not None and now.nonce == mine.nonce

    def _observe(self, key: str) -> tuple[_Record | None, bool]:
        """Read the record of a key, and remember since when it has not changed.

        Returns:
            The record, and whether its process holds the key: it has not been silent for ``silent_seconds``.
        """
        with self._checking:
            found, now = self.record(key), time.monotonic()
            if found is None or found.is_free:
                self._seen.pop(key, None)
                return found, False
            seen = self._seen.get(key)
            is_same = seen is not None and seen.record == found and now - seen.last < _MOST_CHECK_GAP_SECONDS
            since = seen.since if seen is not None and is_same else now
            self._seen[key] = _Seen(found, since, now)
            return found, now - since < self.times.silent_seconds

    def holder(self, key: str) -> Holding | None:
        found, is_held = self._observe(key)
        return Holding(found.name, found.note) if found is not None and is_held else None

    def note(self, key: str) -> str:
        found = self.record(key)
        return "" if found is None else found.note

    def record(self, key: str) -> _Record | None:
        """The record of the last holder of a key."""
        try:
            with self.open(key) as file:
                return _Record.read(file.read())
        except FileNotFoundError:
            return None


def bucket_at(location: Location) -> BucketStore:
    """Return this process's only ``BucketStore`` for a location, which compares all checks of a holder."""
    key = os.getpid(), location
    if key not in _buckets:
        _buckets[key] = BucketStore(location)
    return _buckets[key]


_buckets: dict[tuple[int, Location], BucketStore] = {}


class _Record(NamedTuple):
    """The content of a key that is held.

    Attributes:
        name: The name of the process, for messages.
        note: The note of the process.
        process: The mark of the process, by which others on the same machine see whether it has ended.
        nonce: A random text for this hold; empty after its release.
        beat: The number of refreshes.
    """

    name: str
    note: str
    process: str
    nonce: str
    beat: int

    @classmethod
    def read(cls, content: bytes) -> Self:
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return cls("an unknown process", "", "", str(content), 0)

    @property
    def content(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @property
    def is_free(self) -> bool:
        """Whether the key is free: it was released, its process has ended, or this process no longer has this hold.

        A put without an answer may leave a record of a hold that this process never got.
        """
        without_hold = self.process and self.process == process_mark() and self.nonce not in _held
        return not self.nonce or bool(without_hold) or is_gone(self.process)


class _Seen(NamedTuple):
    """A record, the time since which it has not changed, and the time of the last check; monotonic seconds."""

    record: _Record
    since: float
    last: float


# The nonces of the holds of this process.
_held: set[str] = set()


class BucketHold:
    """A key that this process holds. The key's object in the bucket names this process, and a thread refreshes it."""

    def __init__(self, store: BucketStore, key: str, record: _Record) -> None:
        self._store, self._key, self._record = store, key, record
        self._lost: str | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="zmq-log-hold", daemon=True)
        # The interpreter must not end during a request.
        atexit.register(self._end)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        return self._lost

    def release(self) -> None:
        self._end()
        atexit.unregister(self._end)
        failpoints.reach("log.store.before_release")
        try:
            if self._is_mine():
                self._store.put(self._key, self._record._replace(nonce="").content)
        except LogError as e:
            _log.warning(
                "%s; another process can take the key after %.0f s", e, self._store.times.silent_seconds
            )
        _held.discard(self._record.nonce)

    def _end(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)

    def _is_mine(self) -> bool:
        found = self._store.record(self._key)
        if found is not None and found.nonce != self._record.nonce:
            self._lost = found.name
        # Without a record the bucket has lost its content, and nothing is put there.
        return found is not None and self._lost is None

    def _refresh(self) -> None:
        while self._lost is None and not self._ending.wait(self._store.times.beat_seconds):
            try:
                failpoints.reach("log.store.before_beat")
                if self._is_mine():
                    self._record = self._record._replace(beat=self._record.beat + 1)
                    self._store.put(self._key, self._record.content)
            except Exception as e:  # the next beat tries again, and a put reports the same fault
                _log.debug("refreshing %s: %s", self._store.path_of(self._key), e)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
