"""Dead letters of a source: messages that do not fit, with the reason, as Parquet files.

``spark.read.parquet(location)`` reads the files, which are on any file system that pyarrow knows. A thread writes them,
with up to some thousand letters each. So a slow file system does not delay receiving. Letters that cannot be written
are counted and logged.

If no location is set, the files are beside the log, and their size has a bound: any peer can send messages that do not
fit.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from zmq_datasource.counters import SourceCounters
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options.types import Location
from zmq_datasource.source.intake import MalformedMessage

__all__ = ["DEAD_LETTER_SCHEMA", "LETTER_LIMITS", "MAX_BESIDE_LOG_BYTES", "DeadLetters", "LetterLimits"]

_log = logging.getLogger(__name__)

DEAD_LETTER_SCHEMA = pa.schema(
    [
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
        ("framing", pa.string()),
        ("endpoint", pa.string()),
        ("frames", FRAMES),
    ]
)

# A file has at least this many bytes in addition to its letters.
_FILE_BYTES = 4096
# The most bytes of dead letters beside a log.
MAX_BESIDE_LOG_BYTES = 64 << 20
_TRANSIENT = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)


@dataclass(frozen=True)
class LetterLimits:
    """How dead letters are gathered and written.

    Attributes:
        waiting_bytes: While this many bytes wait for the file system, new letters are lost, and counted.
        file_messages: A file is written when this many letters wait for it.
        file_seconds: A file is written, with fewer letters, this long after its first one.
        close_seconds: How long ``__exit__`` waits for a file system that does not answer.
        retry_seconds: How long a write is repeated if its fault may pass.
        retry_pause: Seconds before each repetition.
    """

    waiting_bytes: int = 64 << 20
    file_messages: int = 10_000
    file_seconds: float = 1.0
    close_seconds: float = 10.0
    retry_seconds: float = 60.0
    retry_pause: float = 0.5


LETTER_LIMITS = LetterLimits()


class DeadLetters:
    """Writes dead letters; use it in a ``with`` block.

    Args:
        location: A directory, as a path or URI.
        framing: The framing that the messages do not fit.
        counters: The counters to increase when letters are lost.
        max_bytes: The most bytes of files in the directory; None for no bound.
        limits: When files are written, and how long each step may take.
    """

    def __init__(
        self,
        location: Location,
        framing: str,
        counters: SourceCounters,
        max_bytes: int | None = None,
        limits: LetterLimits = LETTER_LIMITS,
    ) -> None:
        self._limits = limits
        self._location = location
        self._framing = framing
        self._counters = counters
        self._max_bytes = max_bytes
        self._kept_bytes: int | None = None  # in the directory; counted before the first write
        self._waiting: queue.SimpleQueue[Sequence[MalformedMessage] | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._waiting_messages = 0
        self._losses = LimitedLog(__name__, "times that dead letters could not be kept")
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zmq-dead-letters", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Write the waiting letters, but wait only ``close_seconds`` for a file system that does not answer."""
        if self._thread.ident is None:
            return
        self._waiting.put(None)
        self._closing.set()
        self._thread.join(self._limits.close_seconds)
        self._losses.flush()
        if self._thread.is_alive():
            with self._lock:
                left = self._waiting_messages
            self._counters.dead_letters_lost += left
            _log.error(
                "%s has not answered for %.0f s: %d dead letters are lost",
                self._location,
                self._limits.close_seconds,
                left,
            )

    def add(self, messages: Sequence[MalformedMessage]) -> None:
        """Give messages to the thread that writes them. Never waits. Only one thread may call it."""
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as e:  # the interpreter ends, or there are too many threads
                self._discard(messages, str(e))
                return
        size = _size(messages)
        with self._lock:
            full = self._waiting_bytes >= self._limits.waiting_bytes
            if not full:
                self._waiting_bytes += size
                self._waiting_messages += len(messages)
        if full:
            self._discard(messages, f"{self._limits.waiting_bytes >> 20} MiB wait to be written")
        else:
            self._waiting.put(messages)

    def _discard(self, messages: Sequence[MalformedMessage], why: str) -> None:
        self._counters.dead_letters_lost += len(messages)
        self._losses.warn("%d dead letters could not be kept in %s: %s", len(messages), self._location, why)

    # The methods below run in the writing thread.

    def _run(self) -> None:
        ended = False
        while not ended:
            messages: list[MalformedMessage] = []
            deadline = math.inf
            while len(messages) < self._limits.file_messages:
                left = deadline - time.monotonic()
                try:
                    more = self._waiting.get(timeout=None if left == math.inf else max(left, 0))
                except queue.Empty:
                    break
                if more is None:
                    ended = True
                    break
                messages += more
                deadline = min(deadline, time.monotonic() + self._limits.file_seconds)
            if messages:
                self._keep(messages)
                with self._lock:
                    self._waiting_bytes -= _size(messages)
                    self._waiting_messages -= len(messages)

    def _keep(self, messages: Sequence[MalformedMessage]) -> None:
        deadline = time.monotonic() + self._limits.retry_seconds
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex}.parquet"
        while True:
            last = self._closing.is_set() or time.monotonic() >= deadline
            try:
                fitting = self._fitting(messages)
                if fitting:
                    self._write(messages[:fitting], name)
                if fitting < len(messages):
                    self._discard(
                        messages[fitting:],
                        f"this directory may hold {self._max_bytes} bytes; move its files away and start again, or set "
                        "deadLetterLocation, which has no bound",
                    )
                return
            # A file system can raise any error, and the feed must go on.
            except Exception as e:
                why = without_secrets(e, self._location)
                if last or not (isinstance(e, OSError) and e.errno in _TRANSIENT):
                    self._discard(messages, why)
                    return
                self._losses.warn("trying again to keep dead letters in %s: %s", self._location, why)
            self._closing.wait(self._limits.retry_pause)

    def _write(self, messages: Sequence[MalformedMessage], name: str) -> None:
        rows = [
            {
                "timestamp": message.timestamp,
                "reason": message.reason,
                "framing": self._framing,
                "endpoint": message.endpoint,
                "frames": message.frames,
            }
            for message in messages
        ]
        failpoints.reach("source.dead_letters.before_write")
        system, directory = directory_of(self._location)
        if self._max_bytes is None or system.type_name != "local":
            make_directory(system, directory)
        else:  # a missing log must stay missing, so make only the directory in it
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
        # Spark ignores names that begin with a dot, so it reads no unfinished file.
        write_parquet(system, f"{directory}/.{name}", rows, DEAD_LETTER_SCHEMA)
        failpoints.reach("source.dead_letters.before_move")
        system.move(f"{directory}/.{name}", f"{directory}/{name}")
        failpoints.reach("source.dead_letters.after_move")
        if self._kept_bytes is not None:
            self._kept_bytes += system.get_file_info(f"{directory}/{name}").size

    def _fitting(self, messages: Sequence[MalformedMessage]) -> int:
        """How many of the messages, from the first on, fit below the bound."""
        if self._max_bytes is None:
            return len(messages)
        if self._kept_bytes is None:
            from pyarrow import fs  # noqa: PLC0415  as in directory_of

            system, directory = directory_of(self._location)
            kept = system.get_file_info(fs.FileSelector(directory, allow_not_found=True))
            self._kept_bytes = sum(file.size for file in kept if file.is_file)
        total = self._kept_bytes + _FILE_BYTES
        for fitting, message in enumerate(messages):
            total += _size([message])
            if total > self._max_bytes:
                return fitting
        return len(messages)


def _size(messages: Sequence[MalformedMessage]) -> int:
    # Python's objects take more bytes than the frames have.
    return sum(sum(map(len, message.frames)) + 64 * len(message.frames) + 200 for message in messages)
