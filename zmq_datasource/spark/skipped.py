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
    from zmq_datasource.source.query_log import QueryLog

_log = logging.getLogger(__name__)


class Skipped:
    """The skipped ids of one query; for one thread."""

    def __init__(self) -> None:
        self._planned: int | None = None  # the first id planned since the records were last checked
        self._next_check: float | None = None  # when to check the records again; monotonic seconds
        self._counted = 0  # the id after the last one that was counted

    def plan(self, log: QueryLog, start: int, begin: int) -> None:
        """Note where a planned batch begins.

        The first call deletes the records of an earlier run of this batch, because planning has already counted the ids
        that are deleted.

        Args:
            start: The first id of the batch in Spark's offset.
            begin: The first id of the batch that the log still has.
        """
        if self._planned is None:
            self._forget(log, [ids for ids in self._records(log) if ids.stop > start])
            self._planned = begin

    def count(self, log: QueryLog, begin: int) -> None:
        """Count the ids that the tasks of the batches below ``begin`` have skipped. These batches are done."""
        planned = self._planned
        if self._next_check is not None:
            if planned is None or planned == begin:  # no batch was planned since the last check
                return
            if log.contents.earliest <= planned and time.monotonic() < self._next_check:
                return
        self._next_check = time.monotonic() + log.storage.request_interval
        if planned is not None:
            self._planned = begin
        records = [ids for ids in self._records(log) if ids.start < begin]
        for ids in records:
            self._add(log, ids)
        self._forget(log, records)

    def _add(self, log: QueryLog, ids: range) -> None:
        first = max(ids.start, self._counted)
        if first >= ids.stop:
            return
        self._counted = ids.stop
        log.counters.data_losses += 1
        log.counters.expired += ids.stop - first
        _log.warning(
            "data loss: the ids %d to %d were deleted from %s before a task had read them; continuing because "
            "failOnDataLoss=false",
            first,
            ids.stop - 1,
            log.storage,
        )

    def _records(self, log: QueryLog) -> list[range]:
        try:
            return ReaderRecords(log.storage).skipped(log.reader.name)
        except LogError as e:
            _log.warning("reading the ids that tasks have skipped: %s", e)
            return []

    def _forget(self, log: QueryLog, records: list[range]) -> None:
        for ids in records:
            try:
                ReaderRecords(log.storage).forget_skipped(log.reader.name, ids)
            except LogError as e:
                _log.warning("%s", e)
