"""Counts the ids that tasks skipped because they were deleted from the log (``failOnDataLoss=false``).

A task records what it skips in the log (``ReaderRecords``). The source runner looks for these records after a batch,
adds them up, and deletes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from zmq_datasource.errors import LogError
from zmq_datasource.log import ReaderRecords

if TYPE_CHECKING:
    from zmq_datasource.source.feed import Feed
    from zmq_datasource.source.feeds import Feeds

_log = logging.getLogger(__name__)


class Skipped:
    """The skipped ids of one query; for one thread."""

    def __init__(self) -> None:
        # By partition:
        self._planned: dict[int, int] = {}  # the first id planned since the records were last checked
        self._next_check: dict[int, float] = {}  # when to check the records again; monotonic seconds
        self._counted: dict[int, int] = {}  # the id after the last one that was counted

    def plan(self, feeds: Feeds, start: Mapping[int, int], begins: Mapping[int, int]) -> None:
        """Note where a planned batch begins.

        For each partition, the first call deletes the records of an earlier run of this batch, because planning has
        already counted the ids that are deleted.

        Args:
            start: The first ids of the batch in Spark's offset.
            begins: The first ids of the batch that the log still has.
        """
        for partition, begin in begins.items():
            if partition not in self._planned:
                feed, first = feeds.parts[partition], start.get(partition, 0)
                records = [ids for ids in self._records(feeds, feed) if ids.stop > first]
                self._forget(feeds, feed, records)
            self._planned.setdefault(partition, begin)

    def count(self, feeds: Feeds, begins: Mapping[int, int]) -> None:
        """Count the ids that the tasks of the batches below ``begins`` have skipped. These batches are done."""
        for partition, begin in begins.items():
            feed = feeds.parts[partition]
            planned = self._planned.get(partition)
            if partition in self._next_check:
                if planned is None or planned == begin:  # no batch was planned since the last check
                    continue
                if feed.log.earliest <= planned and time.monotonic() < self._next_check[partition]:
                    continue
            self._next_check[partition] = time.monotonic() + feed.storage.request_interval
            if planned is not None:
                self._planned[partition] = begin
            records = [ids for ids in self._records(feeds, feed) if ids.start < begin]
            for ids in records:
                self._add(feed, ids)
            self._forget(feeds, feed, records)

    def _add(self, feed: Feed, ids: range) -> None:
        partition = feed.storage.partition
        first = max(ids.start, self._counted.get(partition, 0))
        if first >= ids.stop:
            return
        self._counted[partition] = ids.stop
        feed.counters.data_losses += 1
        feed.counters.expired += ids.stop - first
        _log.warning(
            "data loss: the ids %d to %d were deleted from %s before a task had read them; continuing because "
            "failOnDataLoss=false",
            first,
            ids.stop - 1,
            feed.storage,
        )

    def _records(self, feeds: Feeds, feed: Feed) -> list[range]:
        try:
            return ReaderRecords(feed.storage).skipped(feeds.reader.name)
        except LogError as e:
            _log.warning("reading the ids that tasks have skipped: %s", e)
            return []

    def _forget(self, feeds: Feeds, feed: Feed, records: list[range]) -> None:
        for ids in records:
            try:
                ReaderRecords(feed.storage).forget_skipped(feeds.reader.name, ids)
            except LogError as e:
                _log.warning("%s", e)
