"""Merges small chunks into larger ones, so that a log has few files however often it seals.

The rules:

* Only chunks that lie one after the other are merged, and never the newest one, whose key says which id is next.
* Each batch is verified. A damaged chunk stays as it is, and its neighbours are merged without it. The state of the
  last chunk is copied.
* The merged chunk is put by ``put_new``, and then its parts are deleted. After a crash in between, the parts lie in the
  merged chunk. They count for nobody (``index.counting``), and the next writer deletes them.
* A chunk of tier k has 8 times the bytes of one of tier k - 1. Chunks up to a tier are merged if they give one of a
  higher tier. So each row is copied once for each tier, and a log has some chunks of each tier, and many full ones.
* A writer that has lost the log may put a merged chunk late. It has the rows of chunks that never change, so it lies in
  the log, with the same rows, or below ``Head.deleted``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
from msgspec.structs import replace

from zmq_datasource.errors import DamagedChunkError, DataLossError
from zmq_datasource.host import failpoints
from zmq_datasource.log.chunk import damage_of, encode_chunk, read_chunk, read_facts
from zmq_datasource.log.facts import ChunkFacts
from zmq_datasource.log.index import ChunkIndex
from zmq_datasource.log.layout import Chunk, first_id_in, merged_name
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.messages.rows import messages_of

_log = logging.getLogger(__name__)

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


class Merger:
    """Merges the chunks of a log of which this process is the writer. For one thread.

    Args:
        storage: The log.
        index: Its chunks.
        most: The bytes of the largest merged chunk.
        fan_in: See ``choose_run``.

    Attributes:
        is_ending: Set to give up what is not put yet. What a slow store puts later is harmless.
    """

    def __init__(self, storage: LogStorage, index: ChunkIndex, most: int, fan_in: int = _FAN_IN) -> None:
        self._storage = storage
        self._index = index
        self._most, self._fan_in = most, fan_in
        self._apart: set[int] = set()
        self._is_clean = False
        self.is_ending = False

    def step(self) -> bool:
        """Merge once, as ``merge_once``. The first call, and one after an error, deletes leftovers before."""
        if self.is_ending:
            return False
        if not self._is_clean:
            self.remove_leftovers()
        self._is_clean = False  # after an error, a merged chunk may be there with its parts
        merged = self.merge_once()
        self._is_clean = True
        return merged

    def remove_leftovers(self) -> None:
        """Delete the chunks that count for nobody: parts of merged chunks, and what lies below the first id."""
        storage, index = self._storage, self._index
        end = index.durable_end
        listed = [*storage.chunks(), *storage.merged()]
        names, intact = {chunk.name for chunk in index.all}, set[str]()
        for chunk in listed:
            if chunk.first >= end or chunk.name in names:
                continue
            holder = next(iter(index.covering(chunk.first, chunk.first + 1)), None)
            # One that reaches further may be of a later writer, which has deleted its parts.
            if chunk.end > (index.earliest if holder is None else holder.end):
                continue
            if holder is not None and holder.name not in intact:
                if (damage := damage_of(storage, holder)) is not None:
                    _log.warning("keeping %s: %s", storage.path_of(chunk.name), damage)
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
        run = choose_run(self._index.all, self._apart, self._most, self._fan_in)
        if run:
            self._merge(run)
        return bool(run)

    def _merge(self, run: Sequence[Chunk]) -> None:
        storage, (parts, batches) = self._storage, self._read(run)
        if len(parts) < 2:
            return
        run = run[: len(parts)]
        facts = replace(parts[-1], first=run[0].first, latest=max(part.latest for part in parts))
        content = encode_chunk(_joined(batches), facts)
        name = merged_name(facts.first, facts.end)
        failpoints.reach("log.merge.before_put")
        entry = storage.put_merged(name, content)
        failpoints.reach("log.merge.after_put")
        self._index.merge(Chunk(facts.first, facts.end, entry.size, run[-1].sealed_at, name, entry.modified))
        storage.check_writer()
        for chunk in run:
            failpoints.reach("log.merge.before_delete")
            storage.delete_chunk(chunk)
            failpoints.reach("log.merge.after_delete")

    def _read(self, run: Sequence[Chunk]) -> tuple[list[ChunkFacts], list[pa.RecordBatch]]:
        """Read and verify chunks, up to the first one that cannot be merged with those before it.

        A merged chunk is no larger than a chunk that is sealed, so its rows fit in memory as well.
        """
        storage, parts, batches = self._storage, list[ChunkFacts](), list[pa.RecordBatch]()
        for chunk in run:
            if self.is_ending:
                return [], []
            try:
                facts = read_facts(storage, chunk.name)
                rows = read_chunk(storage, chunk.name, chunk.first, chunk.end, modified=chunk.modified)
                found = [messages_of(batch) for batch in rows]
            except DamagedChunkError as e:
                _log.warning("a chunk stays as it is, because it is damaged: %s", e)
                found = []
            except (DataLossError, FileNotFoundError):  # deleted meanwhile, or a chunk is missing
                found = []
            # Chunks of another framing have other metadata.
            if not found or (batches and not found[0].schema.equals(batches[0].schema, check_metadata=True)):
                self._apart.add(chunk.first)
                break
            parts.append(facts)
            batches += found
        return parts, batches


def _joined(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, the small ones joined."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if pending and size + batch.nbytes > _BATCH_BYTES:
            yield pa.concat_batches(pending)
            pending, size = [], 0
        pending.append(batch)
        size += batch.nbytes
    yield pa.concat_batches(pending)
