"""Metrics at ``metricsLocation``: a small JSON file for each account or report, on any file system pyarrow knows.

    <location>/sinks/<query id>/<sink>-<batch, 20 digits>.json     the account of a committed batch
    <location>/sinks/writes/<write>-<sink>-<0, 20 digits>.json     the account of a batch write outside of a query
    <location>/sums/<query id>/<sink>-<batch, 20 digits>.json      the sum of all batches up to this one
    <location>/sources/<log id>-<partition>[-<reader>]/<ms since the epoch, 14 digits>.json   a report of a source

The rules:

* A file appears whole: it is written under a hidden name and renamed.
* The account of a batch needs no other file. A batch that is repeated writes the same file once more (by the rule of
  ``accounts``), so it counts once.
* A reader makes the total: it adds the accounts after the newest sum to that sum. With a sum, readers open fewer files,
  and old accounts can be removed. Now and then a writer makes a sum of all batches but the newest ``apart``: Spark may
  repeat the last batch, and shows events of the newest ones. The name of a sum says up to which batch it counts, so
  nothing counts twice.
* The newest file of a series has the highest number in its name. If the clock was set back, the number of a report is
  one more than that of the report before; its ``timestamp`` is still what the clock says.
* A file that this package has not written, or that is not whole, is logged and left out. A file of another format is an
  error.
* Now and then a writer removes files beside its own that are older than the retention: accounts that are in a sum, all
  sums but the newest, all reports but the two newest, and all accounts of batch writes but two.
"""

from __future__ import annotations

import logging
import posixpath
import random
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec
import xxhash

from zmq_datasource.counters import iso
from zmq_datasource.errors import MetricsError
from zmq_datasource.host.locations import directory_of, without_secrets
from zmq_datasource.monitoring import files
from zmq_datasource.monitoring.accounts import (
    FORMAT,
    Account,
    SinkHistory,
    SinkTotals,
)
from zmq_datasource.options.types import Location

__all__ = ["MetricsStore"]

_log = logging.getLogger(__name__)


class _Sum(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sum"):
    """What a sink has written in all batches up to and including ``batch``."""

    format: int = FORMAT
    batch: int
    figures: dict[str, int | dict[str, int]] = msgspec.field(name="sinkTotal")


class _Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel", tag_field="kind", tag="source"):
    """The fields of a source's report that are checked when it is read."""

    source: str
    timestamp: str
    source_metrics: dict[str, Any]

    def __post_init__(self) -> None:
        datetime.fromisoformat(self.timestamp)


class _Head(msgspec.Struct):
    format: int


_Record: TypeAlias = Account | _Sum | _Report


class _Series(NamedTuple):
    """The files of one sink of one query, oldest first."""

    accounts: list[str]
    sums: list[str]


class MetricsStore:
    """Reads and writes the files of one ``metricsLocation``.

    Args:
        location: A directory, as a path or URI.
        retention: Seconds after which a file may be removed; only for writers.
        tidying: The percentage of calls of ``tidy_batches`` and ``tidy_reports`` that do something. Chance decides,
            because a process may write only once.
        apart: How many of the newest batches no sum contains.
    """

    def __init__(
        self, location: Location, retention: float = 0.0, *, tidying: float = 2.0, apart: int = 100
    ) -> None:
        self._location = location
        self._retention = retention
        self._tidying = tidying
        self._apart = apart
        self._newest_report: dict[str, int] = {}  # the number in its name, by series

    # Writing.

    def write_batch(self, account: Account, given_up: threading.Event | None = None) -> None:
        """Keep the account of a batch.

        Args:
            given_up: If it is set meanwhile, no file appears.

        Raises:
            MetricsError: The file system refused.
        """
        directory, name = _place(account)
        with self._accessing(f"writing the account of batch {account.batch}") as (system, root):
            path = f"{root}/{directory}/{name}-{account.batch:020d}.json"
            before = _read(system, path)
            joined = account.joined(before if isinstance(before, Account) else None)
            files.write(system, path, msgspec.json.encode(joined), given_up)

    def write_report(self, series: str, record: Mapping[str, Any], now: float) -> None:
        """Write a source's report to a file.

        Args:
            series: The name of its directory: the log's id, the partition, and the reader if a query reports.

        Raises:
            MetricsError: The file system refused.
        """
        with self._accessing("writing a source's report") as (system, root):
            directory = f"{root}/sources/{series}"
            if series not in self._newest_report:  # another process may have written the last one
                numbers = map(_number, files.find(system, directory))
                self._newest_report[series] = max(numbers, default=-1)
            number = max(round(now * 1000), self._newest_report[series] + 1)
            head = {"format": FORMAT, "kind": "source", "timestamp": iso(now)}
            files.write(system, f"{directory}/{number:014d}.json", msgspec.json.encode({**head, **record}))
            self._newest_report[series] = number

    def tidy_batches(self, account: Account, now: float) -> None:
        """Now and then sum up the batches of a sink, and remove files older than the retention; never raises."""
        if not self._is_tidying_due():
            return
        directory, name = _place(account)
        with self._tidying_up() as (system, root):
            directory, expired = f"{root}/{directory}", now - self._retention
            accounts = files.find(system, directory, name if account.in_query else "")
            if account.in_query:
                sums = f"{root}/sums/{account.query}"
                series = _Series(accounts, files.find(system, sums, name))
                through = _number(series.sums[-1]) if series.sums else -1
                removable = [path for path in accounts if _number(path) <= through]
                self._sum_up(system, series, f"{sums}/{name}")
                files.remove_expired(system, sums, series.sums[:-1], expired, now)
            else:
                removable = accounts[:-2]
            files.remove_expired(system, directory, removable, expired, now)

    def _sum_up(self, system: Any, series: _Series, name: str) -> None:
        numbers = [_number(path) for path in series.accounts[: -self._apart]]
        if not numbers or (series.sums and numbers[-1] <= _number(series.sums[-1])):
            return
        history = _history(system, series, numbers[-1])
        totals = history.at(numbers[-1])
        if totals is not None:
            total = _Sum(batch=numbers[-1], figures=dict(totals.total))
            files.write(system, f"{name}-{total.batch:020d}.json", msgspec.json.encode(total))

    def tidy_reports(self, series: str, now: float) -> None:
        """Now and then remove reports older than the retention; never raises."""
        if not self._is_tidying_due():
            return
        with self._tidying_up() as (system, root):
            directory = f"{root}/sources/{series}"
            removable = files.find(system, directory)[:-2]
            files.remove_expired(system, directory, removable, now - self._retention, now)

    def _is_tidying_due(self) -> bool:
        return random.random() * 100 < self._tidying

    @contextmanager
    def _tidying_up(self) -> Iterator[tuple[Any, str]]:
        try:
            with self._accessing("summing up and removing old metrics") as found:
                yield found
        except MetricsError as e:
            _log.warning("%s", e)

    # Reading.

    def totals(self, query: str, batches: Sequence[int]) -> dict[int, dict[str, SinkTotals]]:
        """The totals of each sink of a query after each batch. A batch that is only in a sum has none.

        If a batch wrote nothing to a sink, the figures of this batch are 0.

        Raises:
            MetricsError: The file system refused, or a file is of another format.
        """
        found: dict[int, dict[str, SinkTotals]] = {batch: {} for batch in batches}
        with self._accessing(f"reading the accounts of query {query}") as (system, root):
            for series in _sinks_in(system, root, query).values():
                history = _history(system, series, max(batches))
                for batch in batches:
                    totals = history.at(batch)
                    if totals is not None and totals.total["batches"] and history.newest is not None:
                        found[batch][history.newest.sink] = totals
        return found

    def newest(self, *, required: bool = False) -> list[dict[str, Any]]:
        """The newest record of each series, sources first. The record of a sink also has its total, ``sinkTotal``.

        Args:
            required: Whether to raise if there is none.

        Raises:
            MetricsError: The file system refused, a file is of another format, or a required record is missing.
        """
        reports: dict[str, list[str]] = {}
        with self._accessing("reading metrics") as (system, root):
            for path in files.find(system, f"{root}/sources", recursive=True):
                reports.setdefault(posixpath.dirname(path), []).append(path)
            sinks = _sinks_in(system, root)
            newest = [_newest_report(system, paths) for paths in reports.values()]
            newest += [_newest_account(_history(system, series)) for series in sinks.values()]
        if required:
            self._require([*reports, *sinks])
        return [record for record in newest if record is not None]

    def paths(self) -> list[str]:
        """The paths of all reports and accounts, for ``read``; those of one series in their order.

        Raises:
            MetricsError: The file system refused, or there are none.
        """
        with self._accessing("listing metrics") as (system, root):
            kinds = f"{root}/sources", f"{root}/sinks"
            found = [path for kind in kinds for path in files.find(system, kind, recursive=True)]
        self._require(found)
        return found

    def read(self, paths: Sequence[str]) -> Iterator[str]:
        """Yield the content of each file, as JSON. Leave out files that are gone or hold no record.

        Raises:
            MetricsError: The file system refused, or a file is of another format.
        """
        with self._accessing("reading metrics") as (system, _):
            for path, content in files.load_all(system, paths):
                if content is not None and _record_in(path, content) is not None:
                    yield content.decode()

    def _require(self, found: Collection[object]) -> None:
        if not found:
            raise MetricsError(
                f"reading metrics in {self._location}: there are none; name the metricsLocation of a source or sink "
                "that has run"
            )

    @contextmanager
    def _accessing(self, act: str) -> Iterator[tuple[Any, str]]:
        try:
            system, root = directory_of(self._location)
            yield system, root.rstrip("/")
        except MetricsError:
            raise
        # Each file system raises its own errors, and their texts may hold a secret.
        except Exception as e:
            raise MetricsError(f"{act} in {self._location}: {without_secrets(e, self._location)}") from None


def _place(account: Account) -> tuple[str, str]:
    """The directory of an account, and how its name begins."""
    series = xxhash.xxh3_64_hexdigest(account.sink.encode())
    if account.in_query:
        return f"sinks/{account.query}", series
    return "sinks/writes", f"{quote(account.query, safe='')}-{series}"


def _number(path: str) -> int:
    """The number in a file's name: of an account and a sum the batch, of a report its time."""
    number = posixpath.basename(path).removesuffix(".json").rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _sinks_in(system: Any, root: str, query: str | None = None) -> dict[tuple[str, str], _Series]:
    """The series of sinks, of one query or of all, by query and sink."""
    found: dict[tuple[str, str], _Series] = {}
    # Accounts first: if an account is removed before its turn, it is in a sum that is listed afterwards.
    for kind, field in (("sinks", "accounts"), ("sums", "sums")):
        directory = f"{root}/{kind}" if query is None else f"{root}/{kind}/{query}"
        for path in files.find(system, directory, recursive=query is None):
            parent, name = posixpath.split(path)
            key = posixpath.basename(parent), name.rpartition("-")[0]
            getattr(found.setdefault(key, _Series([], [])), field).append(path)
    return found


def _history(system: Any, series: _Series, last: int = sys.maxsize) -> SinkHistory:
    """The batches of a sink up to ``last`` that no sum contains, with their totals.

    Raises:
        MetricsError: A file is gone that was listed.
    """
    history = SinkHistory(sys.maxsize)
    for path in reversed(series.sums):
        total = _read(system, path)
        if isinstance(total, _Sum):
            history = SinkHistory(sys.maxsize, SinkTotals.after(total.figures), total.batch)
            break
    later = [path for path in series.accounts if history.through < _number(path) <= last]
    for path, content in files.load_all(system, later):
        if content is None:
            raise MetricsError(f"reading {path}: it was removed meanwhile; try again")
        account = _record_in(path, content)
        if isinstance(account, Account):
            history.add(account)
    return history


def _newest_account(history: SinkHistory) -> dict[str, Any] | None:
    """The newest account of a sink, with its total."""
    if history.newest is None:
        return None
    totals = history.at(history.newest.batch)
    assert totals is not None, "the newest account is in no sum"
    shown: dict[str, Any] = msgspec.to_builtins(history.newest)
    return shown | {"sinkMetrics": totals.batch, "sinkTotal": totals.total}


def _newest_report(system: Any, paths: Sequence[str]) -> dict[str, Any] | None:
    for path in reversed(paths):
        content = files.load(system, path)
        if content is not None and isinstance(_record_in(path, content), _Report):
            report: dict[str, Any] = msgspec.json.decode(content)
            return report
    return None


def _read(system: Any, path: str) -> _Record | None:
    content = files.load(system, path)
    return None if content is None else _record_in(path, content)


def _record_in(path: str, content: bytes) -> _Record | None:
    """The record in a file. If there is none, log that and return None.

    Raises:
        MetricsError: The file is of another format.
    """
    try:
        found = msgspec.json.decode(content, type=_Head).format
        if found == FORMAT:
            record: _Record = msgspec.json.decode(content, type=_Record)
            return record
    # Bytes that are no UTF-8 are a ValueError, and text nested without end a RecursionError.
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        _log.warning("reading %s: %s; it is left out", path, e)
        return None
    raise MetricsError(
        f"reading {path}: it is of format {found} of metrics, and this version reads format {FORMAT}; move the files "
        "of that format away, or name another metricsLocation"
    )
