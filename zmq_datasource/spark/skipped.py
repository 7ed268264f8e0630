"""Counts the ids that tasks skipped because they were deleted from the log (``failOnDataLoss=false``).

A task records what it skips in the log (``ReaderRecords``). The source runner looks for these records after a batch,
adds them up, and deletes them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from zmq_datasource.errors import LogError
from zmq_datasource.log import ReaderRecords

if TYPE_CHECKING:
    from zmq_datasource.source.feed import Feed

_log = logging.getLogger(__name__)


class Skipped:
    """The skipped ids of one query; for one thread."""

    def __init__(self) -> None:
        self._planned: int | None = None  # the first id planned since the records were last checked
        self._next_check: float | None = None  # when to check the records again; monotonic seconds
        self._counted = 0  # the id after the last one that was counted

    def plan(self, feed: Feed, start: int, begin: int) -> None:
        """Note where a planned batch begins.

        The first call deletes the records of an earlier run of this batch, because planning has already counted the ids
        that are deleted.

        Args:
            start: The first id of the batch in Spark's offset.
            begin: The first id of the batch that the log still has.
        """
        if self._planned is None:
            self._forget(feed, [ids for ids in self._records(feed) if ids.stop > start])
            self._planned = begin

    def count(self, feed: Feed, begin: int) -> None:
        """Count the ids that the tasks of the batches below ``begin`` have skipped. These batches are done."""
        planned = self._planned
        if self._next_check is not None:
            if planned is None or planned == begin:  # no batch was planned since the last check
                return
            if feed.log.earliest <= planned and time.monotonic() < self._next_check:
                return
        self._next_check = time.monotonic() + feed.storage.request_interval
        if planned is not None:
            self._planned = begin
        records = [ids for ids in self._records(feed) if ids.start < begin]
        for ids in records:
            self._add(feed, ids)
        self._forget(feed, records)

    def _add(self, feed: Feed, ids: range) -> None:
        first = max(ids.start, self._counted)
        if first >= ids.stop:
            return
        self._counted = ids.stop
        feed.counters.data_losses += 1
        feed.counters.expired += ids.stop - first
        _log.warning(
            "data loss: the ids %d to %d were deleted from %s before a task had read them; continuing because "
            "failOnDataLoss=false",
            first,
            ids.stop - 1,
            feed.storage,
        )

    def _records(self, feed: Feed) -> list[range]:
        try:
            return ReaderRecords(feed.storage).skipped(feed.reader.name)
        except LogError as e:
            _log.warning("reading the ids that tasks have skipped: %s", e)
            return []

    def _forget(self, feed: Feed, records: list[range]) -> None:
        for ids in records:
            try:
                ReaderRecords(feed.storage).forget_skipped(feed.reader.name, ids)
            except LogError as e:
                _log.warning("%s", e)
