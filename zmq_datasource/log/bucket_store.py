"""A store in a bucket of S3, Google Cloud Storage or Azure, accessed by ``obstore``."""

from __future__ import annotations

import atexit
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, Self, TypeAlias

import msgspec
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
from zmq_datasource.host.signals import check_signals
from zmq_datasource.log.buckets import Bucket, import_obstore
from zmq_datasource.log.files import this_process
from zmq_datasource.log.range_file import RangeFile
from zmq_datasource.log.store import Content, Entry
from zmq_datasource.options.types import Location

_log = logging.getLogger(__name__)

# An object up to this size is read by one request. Of a larger one, so much of its end is read first.
_END_BYTES = 1 << 20
# Time limits: ``_ANSWER`` for the server's first answer, ``_ALL`` for a whole request. A put of more than
# ``_LARGE_BYTES`` has only the second, because the server answers it only at its end.
_ANSWER, _ALL, _LARGE_BYTES = "10s", "60s", 4 << 20
# A request that fails quickly is sent a second time. All other retries are the callers'.
_RETRIES = {"max_retries": 1, "retry_timeout": timedelta(seconds=5)}

# How often within ``silent_seconds`` a holder refreshes its key, and a process that waits for the key checks it.
_BEATS, _CHECKS = 4, 12
# This process measures a holder's silence from check to check. If two checks are further apart than this, it begins the
# measurement again.
_MOST_CHECK_GAP_SECONDS = 4.0
# How long the end of a hold waits for the thread that refreshes it.
_JOIN_SECONDS = 5.0
_CHANGED_PAUSE = 0.01  # seconds; how soon to look again at a key that another process has just changed
# Texts of errors that stay, for which obstore has no class of its own.
_LASTING = re.compile(
    "NoSuchBucket|ContainerNotFound|The specified bucket does not exist|incorrectly configured region"
    "|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|InvalidToken|MethodNotAllowed|NotImplemented"
)
# Texts of errors that pass, although their class, or another text in them, means an error that stays.
_PASSING = re.compile("RequestTimeTooSkewed|ExpiredToken|TokenExpired")

# What a bucket calls one version of an object: its ``e_tag``, its ``version``, or both.
_Version: TypeAlias = Mapping[str, str]


class BucketStore:
    """A bucket as a ``Store``.

    A new object is put with the condition that its key is free, and the record of a held key with the condition that it
    is still the version that was read. The bucket checks the condition in the same step.

    Args:
        location: The bucket's URI; see the module ``buckets``.
        silent_seconds: The time without a refresh after which another process may take a key.

    Raises:
        OptionError: The URI is not that of a bucket, or ``obstore`` is not installed.
    """

    # Shorter than ``LOCK_WAIT_SECONDS``, so that a process that waits so long gets the key of a killed holder.
    silent_seconds = 12.0

    def __init__(self, location: Location, silent_seconds: float | None = None) -> None:
        self.location = location
        self.silent_seconds = silent_seconds or self.silent_seconds
        self._bucket = Bucket.read(location)
        self._obstore = import_obstore()
        self._connections: dict[bool, Any] = {}
        # Since when the record of a key has not changed, and when it was last read; monotonic seconds.
        self._seen: dict[str, tuple[_Record, float, float]] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[Location, float]]:
        return type(self), (self.location, self.silent_seconds)

    def __str__(self) -> str:
        return str(self.location).partition("?")[0].rstrip("/")

    def path_of(self, key: str) -> str:
        return f"{self}/{key}"

    def create(self, *directories: str) -> None:
        self.list()  # reports a missing bucket now

    def list(self, prefix: str = "") -> Sequence[Entry]:
        with self._using(f"listing {self.path_of(prefix)}") as bucket:
            found = self._obstore.list_with_delimiter(bucket, prefix or None)["objects"]
        return [_entry(about["path"].rpartition("/")[2], about) for about in found]

    def find(self, key: str) -> Entry | None:
        try:
            with self._using(f"looking for {self.path_of(key)}") as bucket:
                return _entry(key.rpartition("/")[2], self._obstore.head(bucket, key))
        except FileNotFoundError:
            return None

    def open(self, key: str) -> pa.NativeFile:
        with self._using(f"reading {self.path_of(key)}") as bucket:
            found = self._obstore.get(bucket, key)
            size = found.meta["size"]
            if size <= _END_BYTES:
                return pa.BufferReader(pa.py_buffer(found.bytes()))
        del found  # ends the request
        begin = size - _END_BYTES
        fetch = partial(self.read_range, key)
        return pa.PythonFile(RangeFile(fetch, size, fetch(begin, size)), mode="r")

    def read_range(self, key: str, begin: int, end: int) -> memoryview:
        with self._using(f"reading {self.path_of(key)}") as bucket:
            return memoryview(self._obstore.get_range(bucket, key, start=begin, end=end))

    def put_new(self, key: str, content: Content) -> None:
        joined = bytearray()
        for part in content:  # one by one, so that they are not all in memory beside the whole
            joined += part
        whole = memoryview(joined)
        while not self.put_if(key, whole, "create"):
            with (
                suppress(FileNotFoundError),
                self.open(key) as file,
            ):  # after a deletion the key is free again
                if file.read() != whole:
                    raise KeyTakenError(
                        f"writing {self.path_of(key)}: there is such an object with other content"
                    )
                return

    def put(self, key: str, content: bytes) -> None:
        self.put_if(key, content, "overwrite")

    def put_if(self, key: str, content: bytes | memoryview, mode: str | _Version) -> bool:
        """Put an object.

        Args:
            mode: ``overwrite``; ``create``, if the key is free; or the version that the object has.

        Returns:
            False if the bucket has refused the condition.
        """
        exceptions = self._obstore.exceptions
        with self._using(f"writing {self.path_of(key)}", len(content) > _LARGE_BYTES) as bucket:
            failpoints.reach("log.store.before_put")
            try:
                self._obstore.put(bucket, key, content, mode=mode, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
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
        except (exceptions.BaseError, OSError, ValueError) as e:
            refused = isinstance(
                e,
                exceptions.PermissionDeniedError
                | exceptions.UnauthenticatedError
                | exceptions.NotSupportedError
                | exceptions.InvalidPathError,
            )
            stays = (refused or _LASTING.search(str(e))) and not _PASSING.search(str(e))
            if isinstance(e, FileNotFoundError) and not stays:
                raise FileNotFoundError(2, "no such object", act.partition(" ")[2]) from None
            raise (LogWriteError if stays else DiskFaultError)(f"{act}: {self._text_of(e)}") from None

    def _text_of(self, error: Exception) -> str:
        # The first paragraph only: the others have the values of the client's variables.
        return self._bucket.without_secrets(str(error).partition("\n\n")[0])

    def _connected(self, is_large: bool) -> Any:
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

    def hold(self, key: str, wait: float) -> BucketHold:
        deadline = time.monotonic() + wait
        mine = _Record(this_process(), uuid.uuid4().hex, 0)
        while True:
            found, version, is_held = self._observe(key)
            # If obstore repeats a put whose answer was lost, the bucket refuses it, and this process has the key.
            if found.nonce == mine.nonce or (
                not is_held and self.put_if(key, msgspec.json.encode(mine), version or "create")
            ):
                return BucketHold(self, key, mine)
            left = deadline - time.monotonic()
            if is_held and left <= 0:
                raise LogLockedError(
                    f"{self.path_of(key)} is held by {found.name}. That process counts as gone when it has given no "
                    f"sign of life for {self.silent_seconds:.0f} s"
                )
            check_signals()
            time.sleep(min(self.silent_seconds / _CHECKS, max(_CHANGED_PAUSE, left)))

    def _observe(self, key: str) -> tuple[_Record, _Version, bool]:
        """Read the record of a key, and remember since when it has not changed.

        Returns:
            The record, its version, and whether its process holds the key: it has not released it, and has not been
            silent for ``silent_seconds``.
        """
        found, version = self.record(key)
        now = time.monotonic()
        seen, since, last = self._seen.get(key, (found, now, now))
        if seen != found or now - last >= _MOST_CHECK_GAP_SECONDS:
            since = now
        self._seen[key] = found, since, now
        return found, version, bool(found.nonce) and now - since < self.silent_seconds

    def record(self, key: str) -> tuple[_Record, _Version]:
        """The record of the last holder of a key, and its version; no version if there is no record."""
        try:
            with self._using(f"reading {self.path_of(key)}") as bucket:
                found = self._obstore.get(bucket, key)
                version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
                return _Record.read(bytes(found.bytes())), version
        except FileNotFoundError:
            return _NO_RECORD, {}

    def holder(self, key: str) -> str | None:
        found, _, is_held = self._observe(key)
        return found.name if is_held else None


@cache
def bucket_at(location: Location) -> BucketStore:
    """Return this process's only ``BucketStore`` for a location, which compares all checks of a holder."""
    return BucketStore(location)


class _Record(msgspec.Struct, frozen=True):
    """The content of a key that is held.

    Attributes:
        name: The name of the process, for messages.
        nonce: A random text for this hold; empty after its release.
        beat: The number of refreshes.
    """

    name: str
    nonce: str
    beat: int

    @classmethod
    def read(cls, content: bytes) -> Self:
        try:
            return msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError:
            return cls("an unknown process", str(content), 0)


_NO_RECORD = _Record("", "", 0)


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
            self._write(msgspec.structs.replace(self._record, nonce=""))
        except LogError as e:
            _log.warning("%s; another process can take the key after %.0f s", e, self._store.silent_seconds)

    def _end(self) -> None:
        self._ending.set()
        self._thread.join(_JOIN_SECONDS)

    def _refresh(self) -> None:
        while self._lost is None and not self._ending.wait(self._store.silent_seconds / _BEATS):
            try:
                failpoints.reach("log.store.before_beat")
                self._write(msgspec.structs.replace(self._record, beat=self._record.beat + 1))
            except Exception as e:  # the next beat tries again, and a put reports the same fault
                _log.debug("refreshing %s: %s", self._store.path_of(self._key), e)

    def _write(self, record: _Record) -> None:
        """Replace this process's record. Do nothing if it is gone, or another process has taken the key.

        The record may change between the reading and the put, which the bucket then refuses: the next call sees why.
        """
        found, version = self._store.record(self._key)
        if version and found.nonce != self._record.nonce:
            self._lost = found.name
        elif version:  # otherwise the bucket has lost its content, and nothing is put there
            self._store.put_if(self._key, msgspec.json.encode(record), version)
            self._record = record


def _entry(name: str, about: Mapping[str, Any]) -> Entry:
    return Entry(name, about["size"], about["last_modified"].timestamp())
