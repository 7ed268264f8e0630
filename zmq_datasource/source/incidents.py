"""Handles messages that do not fit and messages that are lost: logs them at a limited rate, or ends receiving.

Messages that do not fit are kept as *dead letters*, with the reason, in Parquet files. ``spark.read.parquet(location)``
reads them, from any file system that pyarrow knows. A thread writes the files, each with about 10,000 letters at most.
So a slow file system does not delay receiving. Letters that cannot be written are counted and logged.

If no location is set, the files are beside the chunks of the log partition, and their size has a bound: any peer can
send messages that do not fit."""

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
from zmq_datasource.errors import MalformedMessageError, MessageLossError, SocketError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, make_directory, without_secrets, write_parquet
from zmq_datasource.host.log_lines import LimitedLog, printable
from zmq_datasource.messages.columns import FRAMES
from zmq_datasource.options import FramingOptions
from zmq_datasource.options.types import Location
from zmq_datasource.sequences import Gap, Key, SequenceTracker
from zmq_datasource.source.facts import describe_key
from zmq_datasource.source.intake import Findings, MalformedMessage

__all__ = [
    "DEAD_LETTER_SCHEMA",
    "LETTER_LIMITS",
    "MAX_BESIDE_LOG_BYTES",
    "DeadLetters",
    "Incidents",
    "LetterLimits",
]

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
        file_seconds: A file is written, with fewer letters, this long after its first letter.
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


# Warn, once in _DUPLICATES_SECONDS, if more than the share _MANY of _LEAST_MESSAGES or more messages are duplicates.
_LEAST_MESSAGES, _MANY, _DUPLICATES_SECONDS = 1000, 0.03, 600.0
_COUNTED_WRONG = (
    "If each topic has numbers of its own, set sequenceBy=%s, and not deduplicate, which would leave out messages that "
    "came once. "
)


class Incidents:
    """Acts on findings, as ``onMalformed``, ``deadLetterLocation`` and ``onLoss`` say.

    With dead letters, use it in a ``with`` block.

    Attributes:
        tracker: The tracker that has the gaps given to ``report_lost``.
        failure: Why receiving must end, as soon as the messages received before are in the log.
    """

    def __init__(
        self,
        options: FramingOptions,
        tracker: SequenceTracker | None,
        dead_letters: DeadLetters | None,
    ) -> None:
        self._options = options
        self.tracker = tracker
        self._dead_letters = dead_letters
        self._malformed = LimitedLog(__name__, "malformed messages")
        self._losses = LimitedLog(__name__, "losses")
        self._restarts = LimitedLog(__name__, "restarts of publishers")
        self._duplicates = LimitedLog(
            __name__, "times of many duplicates", lines=1, seconds=_DUPLICATES_SECONDS
        )
        self._messages = self._counted = 0
        self.failure: SocketError | None = None

    def __enter__(self) -> Self:
        if self._dead_letters is not None:
            self._dead_letters.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Write the dead letters that wait: see ``DeadLetters``."""
        if self._dead_letters is not None:
            self._dead_letters.__exit__(*error)

    def act_on(self, findings: Findings, messages: int) -> None:
        """Act on the findings of a round that received so many ``messages``."""
        if findings.malformed:
            self._report_malformed(findings.malformed)
        for key in findings.restarts:
            self._restarts.warn("a publisher has restarted: %s", self._name(key))
        if self.tracker is not None:
            self._warn_of_duplicates(self.tracker, messages)
        if not self._options.replay_endpoint:
            self.report_lost(findings.gaps)

    def _warn_of_duplicates(self, tracker: SequenceTracker, messages: int) -> None:
        self._messages += messages
        if self._messages < _LEAST_MESSAGES:
            return
        count, by = tracker.totals.duplicates - self._counted, tracker.numbering.by
        if count > _MANY * self._messages:
            self._duplicates.warn(
                "%d of the last %d messages have the number of an earlier message. %sIf the publisher sends messages "
                "again, deduplicate leaves them out",
                count,
                self._messages,
                "" if "topic" in by else _COUNTED_WRONG % ",".join((*by, "topic")),
            )
        self._messages, self._counted = 0, tracker.totals.duplicates

    def _report_malformed(self, messages: Sequence[MalformedMessage]) -> None:
        if self._dead_letters is not None:
            self._dead_letters.add(messages)
        framing = self._options.framing
        for message in messages:
            self._malformed.warn(
                "a message from %s does not fit framing=%s: %s", message.endpoint, framing, message.reason
            )
        if self._options.on_malformed == "fail":
            first = messages[0]
            self.failure = self.failure or MalformedMessageError(
                f"reading a message from {first.endpoint}: it does not fit framing={framing}: "
                f"{printable(first.reason, 300)}. Correct "
                "the framing, or set onMalformed=skip to go on without such messages"
            )

    def report_lost(self, gaps: Sequence[Gap]) -> None:
        """Log the gaps that no replay will fill, and set ``failure``, as ``onLoss`` says. The tracker counts them."""
        if self.tracker is None or self._options.on_loss == "count":
            return
        for gap in gaps:
            first, last = self.tracker.number(gap.first), self.tracker.number(gap.last)
            text = f"{gap.size} messages of {self._name(gap.key)} never came: sequences {first} to {last}"
            if self._options.on_loss == "fail":
                self.failure = self.failure or MessageLossError(
                    f"{text}. They are in the gap table. Start the query again: it continues after them. To continue "
                    "without a restart, set onLoss=warn; to fetch them, set replayEndpoint if the publisher has one"
                )
            self._losses.warn("%s", text)

    def flush(self) -> None:
        """Log how many lines were left out; call it now and then."""
        for log in (self._malformed, self._losses, self._restarts, self._duplicates):
            log.flush()

    def _name(self, key: Key) -> str:
        assert self.tracker is not None
        return describe_key(self.tracker.numbering.by, key)
