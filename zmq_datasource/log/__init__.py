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

* Of two writers, the one that puts a chunk's key first has given out its ids: ``Store.put_new`` makes an object only if
  its key is free. No lock and no clock protects the log (``fence``).
* A chunk is one Arrow IPC file. It is whole when it is listed, and never changes. So listing recovers all chunks. Its
  last batch carries its place, its time, and the whole state of its writer (``facts``).
* Ids are contiguous. Chunks are deleted from the front, and the newest one always stays. Small ones are merged.
* A store does not wait until a refusal passes. ``LogWriter``, ``LogFollower`` and ``Reader`` repeat a refused act for
  ``STORE_RETRY_SECONDS``, and the reading of rows is repeated for the ``retry_seconds`` of the storage (``retrier``).

From below: ``store`` is the contract, ``directory_store`` and ``bucket_store`` are the two stores, ``storage`` is a log
in a store, ``chunk`` is one chunk, and ``index`` has all of them in order. A writer is ``recovery`` (which takes a log
over), ``writer``, ``retention`` with ``silence``, and ``merging``, and its record is the ``head``. A reader is
``leases``, ``follower`` and ``reader``.

Other packages import only the names listed here. ``docs/log-format.md`` specifies each byte.
"""

from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.files import add_directory, is_transient, open_file, sync_file, writing
from zmq_datasource.log.follower import REFRESH_SECONDS, LogFollower
from zmq_datasource.log.head import read_head
from zmq_datasource.log.index import ChunkIndex, read_index
from zmq_datasource.log.layout import (
    LOCK_WAIT_SECONDS,
    Chunk,
    parse_name,
)
from zmq_datasource.log.leases import Lease, LeaseFiles, Reader, SubscriberNotes, subscriber_key
from zmq_datasource.log.range_file import RangeFile
from zmq_datasource.log.reader import (
    Deletions,
    Found,
    deleted_error,
    find_id,
    first_since,
    lost_ids,
    read_slices,
    slices,
    split_range,
)
from zmq_datasource.log.retrier import STORE_RETRY_SECONDS, retry_reading
from zmq_datasource.log.state import CarriedState, FillerFacts, read_saved_state, sections_of
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.store import Store
from zmq_datasource.log.verification import verify_log
from zmq_datasource.log.writer import LogWriter, StoredRows

__all__ = [
    "LOCK_WAIT_SECONDS",
    "REFRESH_SECONDS",
    "STORE_RETRY_SECONDS",
    "BucketStore",
    "CarriedState",
    "Chunk",
    "ChunkIndex",
    "Deletions",
    "FillerFacts",
    "Found",
    "Lease",
    "LeaseFiles",
    "LogFollower",
    "LogStorage",
    "LogWriter",
    "RangeFile",
    "Reader",
    "Store",
    "StoredRows",
    "SubscriberNotes",
    "add_directory",
    "deleted_error",
    "find_id",
    "first_since",
    "is_transient",
    "lost_ids",
    "open_file",
    "parse_name",
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
