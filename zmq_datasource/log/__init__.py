"""The message log between sockets, which forget messages, and Spark, which asks for them again.

A log is a set of whole objects in a store, which is a directory or a bucket. Both have the same keys (``layout``)::

    log.json                        {"format": 3, "log": "<log id>"}
    readers/<name>.json             a lease: what the log keeps for one reader
    writer.lock                     held by the one writer; names its process
    chunks/
      00000000000000000000.arrow    a chunk; its key is its first id
      00000000000000001000.arrow    the next chunk, so the first one has the ids 0 to 999
    merged/<end>-<first>.arrow      a chunk that was merged from others
    head/<serial>.json              the writer's record; the highest serial counts

The rules:

* The main verbs of a store are ``list``, ``open``, ``put_new``, ``put``, ``delete``, ``hold``. Of these, ``put_new``
  makes an object only if its key is free.
* The writer that puts a chunk's key first has given out its ids. The other writer finds the key taken, and stops. No
  lock and no clock protects the log: ``hold`` only says when a standby may begin.
* Before each put, the writer checks that its last chunk is still there (``fence``). A store without it was unmounted or
  emptied, and nothing is written there. After each put, it checks that no other writer has put a head (``head``).
* A chunk is one Arrow IPC file. It is whole when it is listed, and never changes. So listing recovers all chunks.
* Ids are contiguous. Chunks are deleted from the front, and the newest one always stays.
* Small chunks that lie one after the other are merged (``merging``). The same range has the same rows before and after.
* Rows have no ids in the file. The last batch of a chunk carries its place and its times (``facts``), and the whole
  state of its writer (``state``). Each has a checksum, and so has each batch.
* A store does not wait until a refusal passes. ``LogWriter``, ``LogFollower`` and ``Reader`` repeat a refused act for
  ``STORE_RETRY_SECONDS`` (``retrier``), so that their users need not. ``retry_reading`` repeats the reading of rows,
  for the ``retry_seconds`` of the storage.
* A query continues from its checkpoint. Its lease only says what must not be deleted (``leases``).

Layers, from below:

* ``store`` is the contract, ``directory_store`` and ``bucket_store`` (with ``buckets``) are the two stores.
* ``storage`` is a log in a store, with the rules of writing. ``chunk`` is one chunk, ``index`` lists all chunks
  in order, also while several threads use and change them.
* The writer: ``recovery`` takes a log over, ``writer`` counts messages and cuts chunks, ``sealer`` writes them in
  a thread of its own, ``retention`` deletes, ``merging`` merges. ``filler`` is the interface of the code that fills a
  log, ``state`` is its state in each chunk.
* The reader: ``reader`` reads a range of ids, finds a time, and decides what happens if a chunk is gone.
  ``follower`` finds new chunks.
* ``leases`` say what each reader needs, and ``head`` what the writer has announced and deleted. Both are ``records``.

Other packages import only the names listed here.
``docs/log-format.md`` specifies each byte.
"""

from zmq_datasource.log.bucket_store import BucketStore, bucket_at
from zmq_datasource.log.chunk import OpensChunks, read_facts
from zmq_datasource.log.directory_store import DirectoryStore
from zmq_datasource.log.facts import Times
from zmq_datasource.log.files import add_directory, is_transient, open_file, sync_file, writing
from zmq_datasource.log.filler import Filler, FillerFacts
from zmq_datasource.log.follower import REFRESH_SECONDS, LogFollower
from zmq_datasource.log.head import Head, read_head
from zmq_datasource.log.index import ChunkIndex, read_index
from zmq_datasource.log.layout import (
    LOCK_WAIT_SECONDS,
    Chunk,
    is_chunk_name,
)
from zmq_datasource.log.leases import Lease, LeaseFiles, Reader, SubscriberNotes, subscriber_key
from zmq_datasource.log.range_file import RangeFile
from zmq_datasource.log.reader import (
    Deletions,
    Found,
    Slice,
    deleted_error,
    find_id,
    first_since,
    lost_ids,
    read_slices,
    slices,
    split_range,
)
from zmq_datasource.log.retrier import STORE_RETRY_SECONDS, Retrier, retry_reading
from zmq_datasource.log.sealer import StoredRows
from zmq_datasource.log.state import Carried, CarriedState, read_saved_state, sections_of
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Hold, Store
from zmq_datasource.log.verification import verify_log
from zmq_datasource.log.writer import LogWriter

__all__ = [
    "LOCK_WAIT_SECONDS",
    "REFRESH_SECONDS",
    "STORE_RETRY_SECONDS",
    "BucketStore",
    "Carried",
    "CarriedState",
    "Chunk",
    "ChunkIndex",
    "Deletions",
    "DirectoryStore",
    "Filler",
    "FillerFacts",
    "Found",
    "Head",
    "Hold",
    "Lease",
    "LeaseFiles",
    "LogFollower",
    "LogStorage",
    "LogWriter",
    "OpensChunks",
    "RangeFile",
    "Reader",
    "Retrier",
    "Slice",
    "Store",
    "StoredRows",
    "SubscriberNotes",
    "Times",
    "add_directory",
    "bucket_at",
    "deleted_error",
    "find_id",
    "first_since",
    "is_chunk_name",
    "is_transient",
    "lost_ids",
    "open_file",
    "read_facts",
    "read_head",
    "read_index",
    "read_saved_state",
    "read_slices",
    "retry_reading",
    "sections_of",
    "slices",
    "split_range",
    "subscriber_key",
    "sync_file",
    "verify_log",
    "writing",
]
