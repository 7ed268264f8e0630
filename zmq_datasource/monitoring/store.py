"""Metrics at ``metricsLocation``: one small JSON file an account or report, on any file system pyarrow knows.

    <location>/sinks/<query id>/<sink>-<batch, 20 digits>.json     one a committed batch
    <location>/sinks/writes/<write>-<sink>-<0, 20 digits>.json     one a batch write of its own
    <location>/sources/<log id>-<partition>[-<reader>]/<ms since the epoch, 14 digits>.json   one a report

The rules:

* A file appears whole: it is written under a hidden name and renamed.
* A batch that is repeated writes the same file once more (by the rule of ``batches``), so whoever adds
  files up counts it once. Each has the total up to its batch too, taken from the file before it; so
  totals go on after a restart, and nobody need read all files.
* The newest file of a series has the highest name. Where the clock has stepped back, a report is named one
  millisecond after the one before it; its ``timestamp`` is what the clock says.
* A file that is none of ours, or not whole, is said and left out: the one before it counts.
* Files older than the retention are removed now and then by whoever writes beside them; the two
  newest of a series stay.
"""

from __future__ import annotations

import functools
import logging
import posixpath
import random
import threading
import uuid
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import msgspec
import xxhash

from zmq_datasource.errors import MetricsError
from zmq_datasource.host import failpoints
from zmq_datasource.host.locations import directory_of, without_secrets
from zmq_datasource.monitoring.batches import BatchWrite, SinkTotals
from zmq_datasource.monitoring.figures import sink_counters, sink_metrics
from zmq_datasource.options.types import Location

__all__ = ["FORMAT", "MetricsStore", "iso", "total_metrics"]

_log = logging.getLogger(__name__)

FORMAT = 1
_KINDS = ("sources", "sinks")
# At once, because an object store takes its time for each file.
_READING_THREADS = 16
# How many files are written between two looks for expired ones, about.
_EXPIRY_FILES = 50
# No writer takes so long for a file.
_LONGEST_WRITE_SECONDS = 3600.0


def iso(seconds: float) -> str:
    """A time as Spark's progress writes it: UTC, ISO 8601, milliseconds."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"


def total_metrics(totals: SinkTotals) -> dict[str, Any]:
    """The total of an account, under its metrics' names."""
    return {"batches": totals.batches, **sink_metrics(totals.total)}


class MetricsStore:
    """Reads and writes the files of one ``metricsLocation``.

    Args:
        location: A directory, as a path or URI.
        retention: Seconds after which a file may be removed; only for writers.
    """

    def __init__(self, location: Location, retention: float = 0.0) -> None:
        self._location = location
        self._retention = retention
        self._newest_report: dict[str, int] = {}  # the number in its name, by series

    # Writing.

    def write_batch(self, entry: BatchWrite, now: float, given_up: threading.Event | None = None) -> None:
        """Keep a sink's account of a batch.

        Args:
            given_up: If it is set meanwhile, nothing appears.

        Raises:
            MetricsError: The file system refused.
        """
        directory, name = _place(entry)
        with self._storing(f"writing the account of batch {entry.batch}") as (system, root):
            system.create_dir(f"{root}/{directory}", recursive=True)
            path = f"{root}/{directory}/{name}-{entry.batch:020d}.json"
            own, before = entry.counters, self._before(system, f"{root}/{directory}", name, entry.batch)
            written = _read(system, path)
            if written is not None and written["execution"] == entry.execution:
                own = sink_counters(written["sinkMetrics"]) + own
            totals = before.then(own)
            record = {
                "format": FORMAT,
                "kind": "sink",
                "timestamp": iso(now),
                "query": entry.query,
                "name": entry.name,
                "execution": entry.execution,
                "batch": entry.batch,
                "sink": entry.sink,
                "sinkMetrics": sink_metrics(own),
                "sinkTotal": total_metrics(totals),
            }
            _write(system, path, record, given_up)

    def _before(self, system: Any, directory: str, name: str, batch: int) -> SinkTotals:
        """The account of the newest batch before this one."""
        previous = f"{directory}/{name}-{batch - 1:020d}.json"
        record = _read(system, previous) if batch else None
        if record is None and batch:
            own = f"{name}-{batch:020d}.json"
            for path in reversed([p for p in _files(system, directory, name) if posixpath.basename(p) < own]):
                record = _read(system, path)
                if record is not None:
                    break
        return _totals_of(record) if record is not None else SinkTotals.none()

    def write_report(self, series: str, record: Mapping[str, Any], now: float) -> None:
        """Write a source's report to a file.

        Args:
            series: Its name: a log, its partition, and who reports of it.

        Raises:
            MetricsError: The file system refused.
        """
        with self._storing("writing a source's report") as (system, root):
            directory = f"{root}/sources/{series}"
            system.create_dir(directory, recursive=True)
            head = {"format": FORMAT, "kind": "source", "timestamp": iso(now)}
            number = max(round(now * 1000), self._last_report(system, directory) + 1)
            _write(system, f"{directory}/{number:014d}.json", {**head, **record})
            self._newest_report[directory] = number

    def _last_report(self, system: Any, directory: str) -> int:
        """The number of the newest report of a series; another process may have written it."""
        if directory not in self._newest_report:
            numbers = [_parts(path)[1] for path in _files(system, directory)]
            self._newest_report[directory] = max(numbers, default=-1)
        return self._newest_report[directory]

    def expire_batches(self, entry: BatchWrite, now: float) -> None:
        """Now and then remove what is older than the retention beside an account; never raises."""
        directory, name = _place(entry)
        self._expire(directory, name if entry.in_query else "", now)

    def expire_reports(self, series: str, now: float) -> None:
        """Now and then remove what is older than the retention beside a report; never raises."""
        self._expire(f"sources/{series}", "", now)

    def _expire(self, directory: str, prefix: str, now: float) -> None:
        # By chance, because whoever writes may be a process that writes once.
        if random.randrange(_EXPIRY_FILES):
            return
        expired = now - self._retention
        try:
            with self._storing("removing old metrics") as (system, root):
                infos = _infos(system, f"{root}/{directory}", prefix)
                # A repeated batch needs the one before it for its total.
                for info in infos[:-2]:
                    if info.mtime is not None and info.mtime.timestamp() < expired:
                        _remove(system, info.path)
                # A writer that was killed has left it.
                unfinished = min(expired, now - _LONGEST_WRITE_SECONDS)
                for info in _infos(system, f"{root}/{directory}", ".", hidden=True):
                    if info.mtime is not None and info.mtime.timestamp() < unfinished:
                        _remove(system, info.path)
        except MetricsError as e:
            _log.warning("%s", e)

    # Reading.

    def totals(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, SinkTotals]]:
        """Each sink of a query, as of each batch; zeros where a batch wrote nothing.

        Raises:
            MetricsError: The file system refused.
        """
        found: dict[int, dict[str, SinkTotals]] = {batch: {} for batch in batches}
        with self._storing(f"reading the accounts of query {query}") as (system, root):
            series: dict[str, list[int]] = {}
            for path in _files(system, f"{root}/sinks/{query}"):
                name, number = _parts(path)
                series.setdefault(name, []).append(number)
            for name, numbers in series.items():
                for batch in batches:
                    for number in reversed(numbers[: bisect_right(numbers, batch)]):
                        record = _read(system, f"{root}/sinks/{query}/{name}-{number:020d}.json")
                        if record is not None:
                            totals = _totals_of(record)
                            found[batch][record["sink"]] = totals if number == batch else totals.idle()
                            break
        return found

    def files(self) -> list[str]:
        """All files, for ``read``, those of a series in their order.

        Raises:
            MetricsError: The file system refused, or there are none.
        """
        with self._storing("listing metrics") as (system, root):
            found = [path for kind in _KINDS for path in _files(system, f"{root}/{kind}", recursive=True)]
        self._require(found)
        return found

    def read(self, paths: Sequence[str]) -> Iterator[str]:
        """What is in those files, as JSON. Leaves out what is gone by now, and what is no record.

        Raises:
            MetricsError: The file system refused.
        """
        with self._storing("reading metrics") as (system, _), ThreadPoolExecutor(_READING_THREADS) as pool:
            # A share for each thread: on a local file system a file costs less than to hand it to a thread.
            shares = [paths[at::_READING_THREADS] for at in range(_READING_THREADS)]
            for records in pool.map(functools.partial(_texts, system), shares):
                yield from records

    def _require(self, files: Collection[object]) -> None:
        if not files:
            raise MetricsError(
                f"reading metrics in {self._location}: there are none; name the metricsLocation of a source or sink "
                "that has run"
            )

    def newest(self, *, required: bool = False) -> list[dict[str, Any]]:
        """The newest record of each series, sources first.

        Args:
            required: Whether to raise if there is none.

        Raises:
            MetricsError: The file system refused, or there is nothing although it is required.
        """
        series: dict[tuple[str, str], list[str]] = {}
        with self._storing("reading metrics") as (system, root):
            for kind in _KINDS:
                for path in _files(system, f"{root}/{kind}", recursive=True):
                    name = "" if kind == "sources" else _parts(path)[0]
                    series.setdefault((posixpath.dirname(path), name), []).append(path)
            found = (map(functools.partial(_read, system), reversed(paths)) for paths in series.values())
            records = [next(filter(None, tried), None) for tried in found]
        if required:
            self._require(series)
        return [record for record in records if record is not None]

    @contextmanager
    def _storing(self, act: str) -> Iterator[tuple[Any, str]]:
        try:
            system, root = directory_of(self._location)
            yield system, root.rstrip("/")
        except MetricsError:
            raise
        # Each file system raises what it likes, and its own words may hold a secret.
        except Exception as e:
            raise MetricsError(f"{act} in {self._location}: {without_secrets(e, self._location)}") from None


def _place(entry: BatchWrite) -> tuple[str, str]:
    """The directory of an account, and how its name begins."""
    series = xxhash.xxh3_64_hexdigest(entry.sink.encode())
    if entry.in_query:
        return f"sinks/{entry.query}", series
    return "sinks/writes", f"{quote(entry.query, safe='')}-{series}"


def _parts(path: str) -> tuple[str, int]:
    """The series and number of a file: of an account the batch, of a report its time."""
    name, _, number = posixpath.basename(path).removesuffix(".json").rpartition("-")
    return name, int(number) if number.isdecimal() else -1


def _totals_of(record: Mapping[str, Any]) -> SinkTotals:
    total = record["sinkTotal"]
    return SinkTotals(sink_counters(record["sinkMetrics"]), sink_counters(total), int(total["batches"]))


def _infos(
    system: Any, directory: str, prefix: str = "", recursive: bool = False, hidden: bool = False
) -> list[Any]:
    """The files of a directory, oldest first, or those that are hidden; none if it does not exist."""
    from pyarrow import fs  # noqa: PLC0415 - see locations

    selector = fs.FileSelector(directory, allow_not_found=True, recursive=recursive)
    found = [
        info
        for info in system.get_file_info(selector)
        if info.type == fs.FileType.File
        and info.base_name.endswith(".json")
        and info.base_name.startswith(prefix)
        and info.base_name.startswith(".") == hidden
    ]
    return sorted(found, key=lambda info: info.path)


def _files(system: Any, directory: str, prefix: str = "", recursive: bool = False) -> list[str]:
    return [info.path for info in _infos(system, directory, prefix, recursive)]


def _read(system: Any, path: str) -> dict[str, Any] | None:
    """A record; None if there is none, or none of ours, which is said."""
    return _record_in(path, _load(system, path))


def _texts(system: Any, paths: Sequence[str]) -> list[str]:
    """What is in the files that hold a record."""
    found = ((path, _load(system, path)) for path in paths)
    return [content.decode() for path, content in found if content is not None and _record_in(path, content)]


def _load(system: Any, path: str) -> bytes | None:
    """What is in a file; None if it is gone."""
    try:
        with system.open_input_stream(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None


def _record_in(path: str, content: bytes | None) -> dict[str, Any] | None:
    """The record in a file; None if it is none of ours, which is said."""
    if content is None:
        return None
    try:
        record = msgspec.json.decode(content)
    # Bytes that are no UTF-8 are a ValueError, and text nested without end a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        _log.warning("reading %s: %s; it is left out", path, e)
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        _log.warning("reading %s: it is not of format %d; it is left out", path, FORMAT)
        return None
    try:
        _check(record)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        _log.warning("reading %s: it is not whole (%r); it is left out", path, e)
        return None
    return record


def _check(record: Mapping[str, Any]) -> None:
    """Raise if what a reader relies on is missing."""
    datetime.fromisoformat(record["timestamp"])
    if record["kind"] == "sink":
        _totals_of(record)
    elif not isinstance(record["sourceMetrics"], dict):
        raise TypeError("sourceMetrics")
    for name in ("source",) if record["kind"] == "source" else ("query", "execution", "batch", "sink"):
        record[name]


def _write(
    system: Any, path: str, record: Mapping[str, Any], given_up: threading.Event | None = None
) -> None:
    directory, name = posixpath.split(path)
    hidden = f"{directory}/.{uuid.uuid4().hex}-{name}"
    try:
        failpoints.reach("monitoring.metrics.before_write")
        with system.open_output_stream(hidden) as file:
            file.write(msgspec.json.encode(record))
        if given_up is not None and given_up.is_set():
            _remove(system, hidden)
        else:
            failpoints.reach("monitoring.metrics.before_move")
            system.move(hidden, path)
            failpoints.reach("monitoring.metrics.after_move")
    except BaseException:
        _remove(system, hidden)
        raise


def _remove(system: Any, path: str) -> None:
    try:
        system.delete_file(path)
    except OSError:  # it was never made, or the file system is what failed
        _log.debug("removing %s was not possible", path)
