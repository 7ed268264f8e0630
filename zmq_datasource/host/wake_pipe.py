"""Wakes a thread that waits in a poller, from another thread."""

from __future__ import annotations

import os
from contextlib import suppress


class WakePipe:
    """A pipe that is readable from ``wake`` on until ``clear``.

    Attributes:
        descriptor: The end to register in the poller.

    Raises:
        OSError: There are too many open files.
    """

    def __init__(self) -> None:
        self.descriptor, self._writes = os.pipe()
        for descriptor in (self.descriptor, self._writes):
            os.set_blocking(descriptor, False)

    def wake(self) -> None:
        """End the wait of the poller. Never waits. Any thread may call this; does nothing after ``close``."""
        with suppress(OSError):  # the pipe is full, so it is readable already; or it is closed
            os.write(self._writes, b"1")

    def clear(self) -> None:
        """Make the pipe unreadable again. Called by the waiting thread before it looks for work."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 65536)

    def close(self) -> None:
        """Close the pipe. Call it once, when no thread waits for it."""
        # First, so that a late ``wake`` writes nothing into another file that gets this descriptor.
        writes, self._writes = self._writes, -1
        os.close(writes)
        os.close(self.descriptor)
