"""The chunks of a partition that another process writes: listed again only if something has changed, for what is new.

A trigger without news costs one ``stat`` of the directory, one with news the names in it and a ``stat`` of each new
chunk, however many chunks there are.

* A directory's time of modification is as coarse as the file system's clock, and some do not keep it at all. So what
  has changed is listed twice, and everything once in a while.
* What does not follow from the last listing (a hole, or a log that was put in another's place) is for ``read_index``
  to judge, which lists everything anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice, pairwise

from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.contents import Contents
from zmq_datasource.log.files import MOUNT_AGAIN
from zmq_datasource.log.layout import Chunk, parse_chunk_name
from zmq_datasource.log.reader import read_index
from zmq_datasource.log.storage import LogStorage

__all__ = ["ChunkListing"]

_RELISTING_SECONDS = 1.0


class ChunkListing:
    """Keeps ``Contents`` up to date with a directory. For one thread at a time.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(
        self, storage: LogStorage, contents: Contents, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._storage = storage
        self._contents = contents
        self._clock = clock
        self._names: deque[str] = deque()  # of the chunks in the contents, in their order
        self._known: set[str] = set()
        self._stamp: tuple[int, ...] = ()  # of the directory, before the last listing
        self._settled = False  # whether the listing before that had the same
        self._listed_at = -_RELISTING_SECONDS

    def refresh(self, anew: bool = False) -> None:
        """Take over what has come and gone.

        Args:
            anew: Whether to list it though nothing seems to have changed.

        Raises:
            LogFormatError: A chunk in the middle is missing.
            DiskFaultError: All of them are.
        """
        now = self._clock()
        stamp = self._storage.stamp()
        same = stamp == self._stamp
        if same and not anew and self._settled and now - self._listed_at < _RELISTING_SECONDS:
            return
        if not self._take_over(self._storage.names()):
            self._begin_anew()
        self._stamp, self._settled, self._listed_at = stamp, same, now

    def _take_over(self, names: set[str]) -> bool:
        """Take over what has changed; False if it does not follow from what was known."""
        gone = self._known - names
        new = sorted(filter(parse_chunk_name, names - self._known))
        if len(gone) == len(self._names) or not gone.issuperset(islice(self._names, len(gone))):
            return False
        chunks = [self._storage.find_chunk(*ids) for ids in filter(None, map(parse_chunk_name, new))]
        found = [chunk for chunk in chunks if chunk is not None]
        if len(found) < len(new) or not _contiguous(self._contents.end, found):
            return False
        self._contents.follow(len(gone), found)
        for _ in gone:
            self._known.discard(self._names.popleft())
        self._note(new)
        return True

    def _begin_anew(self) -> None:
        index = read_index(self._storage)
        if not len(index) and index.end < self._contents.end:  # the newest chunk always stays
            raise DiskFaultError(f"reading {self._storage}: no chunk is there any more. {MOUNT_AGAIN}")
        self._contents.replace(index)
        self._names.clear()
        self._known.clear()
        self._note(chunk.name for chunk in index.covering(index.earliest, index.end))

    def _note(self, names: Iterable[str]) -> None:
        for name in names:
            self._names.append(name)
            self._known.add(name)


def _contiguous(end: int, chunks: list[Chunk]) -> bool:
    """Whether the first chunk follows the id ``end``, and each other one the chunk before it."""
    borders = [(end, chunk.first) for chunk in chunks[:1]]
    borders += [(before.end, chunk.first) for before, chunk in pairwise(chunks)]
    return all(before == first for before, first in borders)
