"""A source's metrics, computed when they are asked for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zmq_datasource.counters import SourceCounters, counted, declared, figures, state
from zmq_datasource.errors import DataLossError, LogError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import Deletions, read_slices, slices
from zmq_datasource.options import StreamReadOptions
from zmq_datasource.sequences import Totals
from zmq_datasource.transport import core

if TYPE_CHECKING:
    from zmq_datasource.log import LogStorage
    from zmq_datasource.source.feed_receiver import FeedReceiver
    from zmq_datasource.source.query_log import QueryLog

_RATE_SECONDS = 10.0
_RATE_SAMPLE_SECONDS = 0.5


@dataclass
class _Momentary:
    """The figures that no counter has: they are computed when they are asked for. None if unknown in this process."""

    source: str = state(
        "source",
        "",
        "The socket type and the endpoints of the source, or the log that it follows; and in parentheses the query's "
        "option `reader`.",
        type="text",
        series=None,
    )
    reader: str | None = state(
        "reader",
        "",
        "The name under which the query reads the log: its option `reader`, or a name of this run.",
        type="text",
        series=None,
        initial=None,
    )
    core: str | None = state(
        "core",
        "",
        "Which core takes messages from the socket: `compiled`, or `python` where the compiled core was not built.",
        type="text",
        label="core",
        keys=("compiled", "python"),
        initial=None,
    )
    messages_per_second: float = state(
        "messagesReceivedPerSecond",
        "messages/s",
        "The average rate over about the last ten seconds.",
        series=None,
    )
    backlog_messages: int = state(
        "backlogMessages",
        "messages",
        "The number of messages that were received and are not yet in a finished micro-batch. The micro-batch that is "
        "being read is part of the backlog.",
    )
    backlog_bytes: int = state(
        "backlogBytes",
        "bytes",
        "The size of the backlog in the log. A chunk that was read in part counts in proportion.",
    )
    backlog_age_seconds: float = state(
        "backlogAgeMs",
        "ms",
        "How long ago the oldest message of the backlog was received. It shows how old the data gets.",
    )
    log_bytes: int = state("logBytes", "bytes", "The total size of the chunks of the log.")
    log_chunks: int = state("logChunks", "chunks", "The number of chunks of the log.")
    metrics_failures: int = counted(
        "metricsFailures",
        "times",
        "How often the metrics could not be put together.",
        "process",
    )
    publishers: int | None = state(
        "publishers",
        "publishers",
        "The number of counters that are remembered. `sequenceBy` says what has a counter.",
        numbered=True,
        initial=None,
    )
    gaps: int | None = state(
        "gaps",
        "gaps",
        "The number of rows of the gap table (`view=gaps`).",
        numbered=True,
        initial=None,
    )


SOURCE = declared("zmq_source", _Momentary, SourceCounters, Totals)

_OF_RECEIVER = {metric.name for metric in SOURCE if metric.since == "log" or metric.numbered}


def own_figures(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave the figures of the log's receiver out of those of a source that follows the log.

    So a sum over all sources of a log counts each lost message once.
    """
    if metrics.get("core") is not None:  # only a source that receives has a core
        return metrics
    return {name: value for name, value in metrics.items() if name not in _OF_RECEIVER}


class SourceMonitor:
    """Computes the figures of a running source. It never ends the source."""

    def __init__(self, source: QueryLog | FeedReceiver, options: StreamReadOptions) -> None:
        self._source = source
        self._lock = threading.Lock()  # for ``metrics``, which an outlet's threads call, too
        self._name = _name(options, source.storage)
        self._read_to: int | None = None
        self._rate = _Rate()
        self._oldest: tuple[int, float | None] = (-1, None)
        self._failures = 0
        self._faults = LimitedLog(__name__, "metrics that could not be read")

    def mark_finished(self, end: int) -> None:
        """Take the messages below ``end`` out of the backlog: they are in finished batches."""
        self._read_to = end

    def metrics(self) -> dict[str, Any]:
        """All figures of ``SOURCE`` that are known now. Never raises, so that no query fails because of its metrics."""
        with self._lock:
            try:
                return self._figures()
            # For example, the log is of another release or its disk has a fault. Reading rows raises that error, too.
            except Exception as e:
                self._failures += 1
                self._faults.warn("putting the metrics of %s together: %r", self._name, e)
                return {"source": self._name, "metricsFailures": self._failures}

    def _figures(self) -> dict[str, Any]:
        facts, log = self._source.facts(), self._source.contents
        end = log.durable_end
        read_to = self._source.resumed_at if self._read_to is None else self._read_to
        start = min(max(read_to, log.earliest), end)
        oldest = self._received_at(start) if start < end else None
        now = _Momentary(
            source=self._name,
            reader=self._source.reader_name,
            core=core.NAME if facts.receives else None,
            messages_per_second=self._rate.of(facts.received, time.monotonic()),
            backlog_messages=end - start + max(0, log.unsealed),
            backlog_bytes=log.size_of(start, end) + log.unsealed_bytes,
            backlog_age_seconds=0.0 if oldest is None else max(0.0, time.time() - oldest),
            log_bytes=log.size,
            log_chunks=log.chunks,
            metrics_failures=self._failures,
            publishers=facts.publishers,
            gaps=facts.gaps,
        )
        found = {name: value for name, value in figures(now).items() if value is not None}
        if facts.receives:
            found |= figures(facts.counters, lambda metric: not metric.numbered)
        else:  # the receiver's figures as the log has them, and the figures that this process counts as a reader
            if facts.receiver is not None:
                found |= figures(facts.receiver, lambda metric: metric.since == "log" and not metric.numbered)
            found |= figures(facts.counters, lambda metric: metric.since == "reader")
        if facts.receiver is not None and facts.totals is not None:
            found |= figures(facts.receiver, lambda metric: metric.numbered) | figures(facts.totals)
        return found

    def _received_at(self, start: int) -> float | None:
        """When the message ``start`` was received, in seconds since the epoch; None if the log does not have it."""
        if self._oldest[0] != start:
            try:
                storage, log = self._source.storage, self._source.contents
                pieces = slices(log.covering(start, start + 1), start, start + 1)
                merged = Deletions(storage, log.log_id, fails=True)
                batch = next(read_slices(storage, pieces, merged), None)
            except DataLossError:  # the message's batch is finished, and its chunk was deleted meanwhile
                return None
            except LogError as e:  # reading the rows raises it, too
                self._faults.warn("%s", e)
                return None
            at = None if batch is None else batch.column("timestamp")[0].value
            self._oldest = start, None if at is None else at / 1e6
        return self._oldest[1]


def _name(options: StreamReadOptions, storage: LogStorage) -> str:
    kinds = ", ".join(kind for kind, _, _ in options.receiving_sockets)
    name = f"{kinds} {options.endpoints}" if options.endpoints else f"log {storage.root}"
    # Only the user's name for the reader: a name that each run makes would begin new series in Prometheus.
    return name if options.reader is None else f"{name} ({options.reader})"


class _Rate:
    """How fast a count has grown, over about the last ten seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def of(self, count: int, now: float) -> float:
        """The growth a second, with this count as of ``now`` in seconds."""
        samples = self._samples
        if not samples or now - samples[-1][0] >= _RATE_SAMPLE_SECONDS:
            samples.append((now, count))
        while len(samples) > 2 and now - samples[1][0] >= _RATE_SECONDS:
            samples.popleft()
        since, before = samples[0]
        return round((count - before) / (now - since), 1) if now > since else 0.0
