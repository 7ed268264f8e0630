"""An object as a file for Arrow, where each read is a request: of a bucket, or of the driver."""

from __future__ import annotations

from collections.abc import Callable

# Arrow reads some hundred bytes before each record batch. So a read fetches at least ``_FIRST_BYTES``, and one that
# goes on after the last one fetches twice as much as that, up to ``_MOST_BYTES``.
_FIRST_BYTES = 64 << 10
_MOST_BYTES = 16 << 20


class RangeFile:
    """A file for ``pyarrow.PythonFile``. It holds the object's end, and the range that was fetched last.

    Args:
        fetch: Returns the bytes from one place to another; fewer if the object has become shorter.
        size: The object's bytes.
        end: The object's last bytes.
    """

    closed = False

    def __init__(self, fetch: Callable[[int, int], bytes | memoryview], size: int, end: memoryview) -> None:
        self._fetch = fetch
        self._size = size
        self._end = (size - len(end), end)
        self._last = (0, memoryview(b""))
        self._place = 0

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._place + size, self._size)
        parts = []
        while self._place < end:
            wanted = end - self._place
            part = self._held(wanted) or self._fetched(wanted)
            if not part:
                break
            parts.append(part)
            self._place += len(part)
        return b"".join(parts)  # a copy, because Arrow needs buffers that begin at a multiple of 8 bytes

    def _held(self, most: int) -> memoryview | None:
        """What is in memory from the present place on."""
        for begin, content in (self._end, self._last):
            if begin <= self._place < begin + len(content):
                return content[self._place - begin :][:most]
        return None

    def _fetched(self, most: int) -> memoryview:
        begin, content = self._last
        ahead = min(2 * len(content), _MOST_BYTES) if self._place == begin + len(content) else 0
        length = max(most, ahead, _FIRST_BYTES)
        content = memoryview(self._fetch(self._place, min(self._place + length, self._end[0])))
        self._last = self._place, content
        return content[:most]

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def close(self) -> None:
        self.closed = True
