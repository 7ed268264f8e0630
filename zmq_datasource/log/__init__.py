"""The message log: what stands between a socket that forgets and an engine that asks again.

Layout of a log directory (format version 2)::

    log.json                                  {"format": 2, "log": "<log id>"}
    readers/<name>.json                       what the log must keep for one query
    0/                                        log partition 0
      writer.lock                             held by the one writer; says who it is
      00000000000000000000-00000000000000001000.arrow
      00000000000000001000-00000000000000001723.arrow

The rules:

* A *chunk* is one Arrow IPC file with the schema ``messages.schemas.MESSAGE_SCHEMA``. Its name says which
  ids it holds, half-open: the first above holds the ids 0 to 999. Its rows have no ids; ``chunk.read_chunk``
  adds them, and refuses a chunk that was written for another place.
* A chunk is written under a hidden temporary name, flushed, fsynced and renamed, and never
  changes afterwards. So there is no torn tail: what is listed is whole, and listing the
  directory is the whole recovery. A temporary file is the trace of a crash; the next writer
  removes it. (Whoever does without fsync may find torn chunks after a crash of the machine; see
  ``recovery``.)
* What the disk refuses for now is tried again from memory, file by file, so that nothing of a
  failed attempt counts: see ``persistence``.
* Ids are contiguous: each chunk starts where the one before it ends. Chunks go from the
  front only, and the newest always stays, because it says which id comes next.
* Each record batch carries custom metadata: ``xxh3``, the checksum of its columns' contents and of the rows
  before it (``chunk.fingerprint``), checked whenever the batch is read.
* One writer per log partition, held by an advisory lock that the kernel releases when the
  process ends, however it ends.
* A proxy's newest chunk is durable before it is whole: see ``growing``.
* Where a query goes on is in its checkpoint. The record of a reader only says what must not be deleted yet: see
  ``readers``.

Layers: ``layout`` names things, ``storage`` touches the file system (``files``, ``staged_files`` and
``reader_files`` are its parts) for one partition, ``chunk`` is one file, ``index`` the list of them,
``contents`` what a process knows of a partition while that changes. The writer of a partition takes it over
by ``recovery``; its ``writer`` counts and cuts, its ``sealer`` writes in a thread of its own, for as long as
``persistence`` says, and ``retention`` deletes what none of the ``readers`` needs. A program that reads a log
uses ``reader``, or reads along with ``follower``, whose ``listing`` costs what is new. ``stored`` is the same
storage in a bucket (``claims``, ``tenure``, ``restoring``). Several partitions of a log have a storage
(``LogStorage.of``) and a writer each, and share ``log.json`` and the readers.
"""
