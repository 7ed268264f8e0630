"""A chunk as it is read from object storage: patiently, and no more of it than is needed."""

from __future__ import annotations

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError
from zmq_datasource.host.object_store import ObjectStore
from zmq_datasource.log.files import patiently

__all__ = ["open_stored"]


def open_stored(store: ObjectStore, key: str, whole: int, patience: float) -> pa.NativeFile:
    """Open an object for reading at any place.

    Args:
        whole: Up to so many bytes are read at once, because each request takes tens of milliseconds.
        patience: For so many seconds each request for more of it is tried again; once at least.

    Raises:
        FileNotFoundError: There is none.
        DiskFaultError: The storage does not answer, now or when more is read.
    """
    file = store.open(key, whole)
    if isinstance(file, pa.BufferReader):
        return file
    return pa.PythonFile(_Patient(store, key, file, patience), mode="r")


class _Patient:
    """A file of which each part that is read is a request of its own."""

    closed = False

    def __init__(self, store: ObjectStore, key: str, file: pa.NativeFile, patience: float) -> None:
        self._store, self._key, self._file, self._patience = store, key, file, patience

    def read(self, size: int = -1) -> bytes:
        begin = self._file.tell()

        def ask() -> bytes:
            try:
                with self._store.reading(self._key):
                    self._file.seek(begin)
                    return bytes(self._file.read(size))
            except DiskFaultError:
                # Of an object that was deleted meanwhile pyarrow says no more than that.
                if self._store.find(self._key) is None:
                    raise FileNotFoundError(2, "no such object", f"{self._store}/{self._key}") from None
                raise

        return patiently(ask, self._patience)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        self._file.close()
        self.closed = True
