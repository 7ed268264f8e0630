"""Merges small chunks into larger ones, in a thread of its own, so that a log has few files however often it seals.

The rules:

* Only chunks that lie one after the other are merged, and never the newest one, whose key says which id is next.
* Each batch is verified. A damaged chunk stays as it is, and its neighbours are merged without it. The state of the
  last chunk is copied with its checksum.
* The merged chunk is put by ``put_new``, and then its parts are deleted. After a crash in between, the parts lie in the
  merged chunk. They count for nobody (``index.counting``), and the next writer deletes them.
* A chunk of tier k has 8 times the bytes of one of tier k - 1. Chunks up to a tier are merged if they give one of a
  higher tier. So each row is copied once for each tier, and a log has some chunks of each tier, and many full ones.
* A writer that has lost the log may put a merged chunk late. It has the rows of chunks that never change, so it lies in
  the log, with the same rows, or below ``Head.deleted``.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from zmq_datasource.errors import DamagedChunkError, DataLossError, LogLockedError
from zmq_datasource.host import failpoints
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log.chunk import CHECKSUM, damage_of, facts_of, fingerprint, read_messages, read_metadata
from zmq_datasource.log.directory_store import TEMPORARY
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.files import sync_file, writing
from zmq_datasource.log.index import ChunkIndex, Contents
from zmq_datasource.log.layout import Chunk, first_id_in, merged_name
from zmq_datasource.log.state import state_of
from zmq_datasource.log.storage import LogStorage

_log = logging.getLogger(__name__)

_END_SECONDS = 5.0
# Chunks below this size have tier 0; so many of them are merged.
_FIRST_TIER_BYTES, _FAN_IN = 64 << 10, 8
# Small batches are joined up to this size.
_BATCH_BYTES = 4 << 20


def choose_run(
    chunks: Sequence[Chunk], apart: Collection[int], most: int, fan_in: int = _FAN_IN
) -> Sequence[Chunk]:
    """The oldest neighbours that should be merged now; none if there are none.

    Args:
        chunks: Successive chunks; the last one is the newest of the log.
        apart: The first ids of chunks that cannot be merged.
        most: The bytes of the largest merged chunk.
        fan_in: How many of the smallest chunks are merged, and how much larger the chunks of the next tier are.
    """
    tier_bytes = _FIRST_TIER_BYTES
    while True:
        limit = min(tier_bytes, most // 4)
        for neighbours in _neighbours(chunks[:-1], apart, limit):
            run: list[Chunk] = []
            size = 0
            for chunk in neighbours:
                if size + chunk.size > most and len(run) > 1:
                    return run
                run.append(chunk)
                size += chunk.size
            enough = size >= tier_bytes or (tier_bytes == _FIRST_TIER_BYTES and len(run) >= fan_in)
            if len(run) > 1 and enough:
                return run
        if limit < tier_bytes:
            return ()
        tier_bytes *= fan_in


def _neighbours(chunks: Sequence[Chunk], apart: Collection[int], limit: int) -> Iterator[list[Chunk]]:
    """The longest runs of chunks that are smaller than a limit, and can be merged."""
    run: list[Chunk] = []
    for chunk in chunks:
        # A part of a merged chunk, which begins later than its file, stays as it is.
        if chunk.size < limit and chunk.first not in apart and first_id_in(chunk.name) == chunk.first:
            run.append(chunk)
            continue
        yield run
        run = []
    yield run


class _Part(NamedTuple):
    """A verified chunk."""

    chunk: Chunk
    facts: ChunkFacts
    state: dict[bytes, bytes]
    batches: list[pa.RecordBatch]


class Merger:
    """Owns the merging thread of a log.

    Args:
        storage: The log, of which this process is the writer.
        contents: Its chunks.
        most: The bytes of the largest merged chunk.
        fan_in: See ``choose_run``.
    """

    def __init__(self, storage: LogStorage, contents: Contents, most: int, fan_in: int = _FAN_IN) -> None:
        self._storage = storage
        self._contents = contents
        self._most, self._fan_in = most, fan_in
        self._seconds = 0.0
        self._apart: set[int] = set()
        self._ending = threading.Event()
        self._faults = LimitedLog(__name__, "faults while chunks were merged")
        self._thread = threading.Thread(target=self._run, name="zmq-log-merger", daemon=True)

    def start(self, seconds: float) -> None:
        """Start the thread, which looks for chunks to merge every so many seconds; in a bucket more rarely."""
        self._seconds = max(seconds, self._storage.request_interval)
        self._thread.start()

    def end(self) -> None:
        """End the thread, and give up what it has not put. What a slow store puts later is harmless."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        is_clean = False
        while not self._ending.wait(self._seconds):
            try:
                if not is_clean:
                    self.remove_leftovers()
                    is_clean = True
                while not self._ending.is_set() and self.merge_once():
                    pass
            except LogLockedError as e:
                _log.info("merging ends: %s", e)
                return
            except Exception as e:  # it can wait, and the log goes on without
                is_clean = False  # a merged chunk may be there with its parts
                self._faults.fault("merging chunks of %s", self._storage, error=e)

    def remove_leftovers(self) -> None:
        """Delete the chunks that count for nobody: parts of merged chunks, and what lies below the first id."""
        storage, contents = self._storage, self._contents
        end = contents.durable_end
        listed = [Chunk(it.first, it.first + 1, it.size, it.sealed_at) for it in storage.chunks()]
        listed += storage.merged()
        counting = contents.choose(lambda index: index.covering(index.earliest, index.end))
        names, intact = {chunk.name for chunk in counting}, set[str]()
        for chunk in listed:
            if chunk.first >= end or chunk.name in names:
                continue
            holder = next(iter(contents.covering(chunk.first, chunk.first + 1)), None)
            # One that reaches further may be of a later writer, which has deleted its parts.
            if chunk.end > (contents.earliest if holder is None else holder.end):
                continue
            if holder is not None and holder.name not in intact:
                if (damage := damage_of(storage, holder)) is not None:
                    self._faults.warn("keeping %s: %s", storage.path_of(chunk.name), damage)
                    continue
                intact.add(holder.name)
            storage.check_writer()
            storage.delete_chunk(chunk)
            _log.info("deleted %s, which lies in another chunk or below the log", storage.path_of(chunk.name))

    def merge_once(self) -> bool:
        """Merge the oldest small neighbours; False if there are none.

        Raises:
            LogLockedError: Another writer has the log.
            LogError: The store refuses.
        """
        run = self._contents.choose(self._choose)
        if run:
            self._merge(run)
        return bool(run)

    def _choose(self, index: ChunkIndex) -> Sequence[Chunk]:
        return choose_run(index.covering(index.earliest, index.end), self._apart, self._most, self._fan_in)

    def _merge(self, run: Sequence[Chunk]) -> None:
        storage = self._storage
        with _temporary_file(storage.directory) as path:
            facts = self._write(run, path)
            if facts is None:
                return
            name = merged_name(facts.first, facts.end)
            failpoints.reach("log.merge.before_put")
            entry = storage.put_merged(name, path)
            failpoints.reach("log.merge.after_put")
        run = [chunk for chunk in run if chunk.end <= facts.end]
        merged = Chunk(facts.first, facts.end, entry.size, run[-1].sealed_at, name, entry.modified)
        if not self._contents.merge(merged):  # retention has deleted all of them meanwhile
            run = [merged]
        storage.check_writer()
        for chunk in run:
            failpoints.reach("log.merge.before_delete")
            storage.delete_chunk(chunk)
            failpoints.reach("log.merge.after_delete")

    def _write(self, run: Sequence[Chunk], path: Path) -> ChunkFacts | None:
        """Write the content of the merged chunk; None if fewer than two chunks can be merged.

        Returns:
            Its facts. It may end before ``run``.
        """
        first = self._read(run[0])
        if first is None:
            return None
        schema, times, last, rows = first.batches[0].schema, first.facts.times, first, 0
        pending: list[pa.RecordBatch] = []
        with writing(f"writing {path}"), pa.OSFile(str(path), "wb") as sink:
            with pa.ipc.new_file(sink, schema) as writer:

                def write(beside: dict[bytes, bytes]) -> None:
                    nonlocal rows
                    batch = pa.concat_batches(pending)
                    writer.write_batch(batch, custom_metadata={CHECKSUM: fingerprint(batch, rows), **beside})
                    rows += batch.num_rows
                    pending.clear()

                for chunk in run:
                    part = first if chunk is run[0] else self._read(chunk)
                    if part is None or self._ending.is_set():
                        break
                    if not part.batches[0].schema.equals(schema, check_metadata=True):
                        self._apart.add(chunk.first)  # it has another framing
                        break
                    last, times = part, times.union(part.facts.times)
                    for batch in part.batches:
                        if sum(it.nbytes for it in pending) + batch.nbytes > _BATCH_BYTES and pending:
                            write({})
                        pending.append(batch)
                facts = ChunkFacts(run[0].first, last.chunk.end, times, last.facts.past)
                write({**facts.to_metadata(), **last.state})
            sink.flush()
        sync_file(path)
        return None if last is first else facts

    def _read(self, chunk: Chunk) -> _Part | None:
        """Read and verify a chunk; None if it is damaged, or gone."""
        storage, name = self._storage, chunk.name
        try:
            metadata = read_metadata(storage, name)
            facts = facts_of(storage, name, metadata)
            found = read_messages(storage, name, chunk.first, chunk.end, modified=chunk.modified)
            return _Part(chunk, facts, state_of(metadata), [batch for _, batch in found])
        except DamagedChunkError as e:
            self._apart.add(chunk.first)
            _log.warning("a chunk stays as it is, because it is damaged: %s", e)
        except (DataLossError, FileNotFoundError):  # deleted meanwhile, or a chunk is missing
            self._apart.add(chunk.first)
        return None


@contextmanager
def _temporary_file(directory: Path | None) -> Iterator[Path]:
    """A hidden file, beside the chunks of a directory. The next writer deletes that of a killed process."""
    with writing("making a temporary file"):
        descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY}merge-", suffix=".arrow", dir=directory)
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
