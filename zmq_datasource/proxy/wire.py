"""What was written to the connections of clients and has not left yet: memory that libzmq does not bound in bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zmq_datasource.host.limited_logging import LimitedLog
from zmq_datasource.transport.kernel import AckedBytes

__all__ = ["PATIENCE_SECONDS", "Wire", "Wires"]

# Bytes written between two looks.
_LOOK_BYTES = 128 << 10
# What ZMTP writes in front of a frame.
_SMALL_FRAME, _SMALL_HEADER, _LARGE_HEADER = 255, 2, 9
# A client that has asked for something, and takes none of it for so long, is hung up.
PATIENCE_SECONDS = 60.0


class Wire:
    """What libzmq and the system hold of what was written to one connection, whatever its client says.

    Without a word from the system (ipc) it is nothing, and only what the protocol itself bounds counts.
    """

    def __init__(self, taken: AckedBytes) -> None:
        self._taken = taken
        self._before = self._left = taken.bytes()
        self._written = self._looked_at = 0

    def write(self, frames: Sequence[bytes]) -> None:
        """These were given to libzmq. (What CURVE adds is not counted: then it looks like less.)"""
        headers = (_SMALL_HEADER if len(frame) <= _SMALL_FRAME else _LARGE_HEADER for frame in frames)
        self.add(sum(map(len, frames)) + sum(headers))

    def add(self, size: int) -> None:
        """So many bytes were given to libzmq."""
        self._written += size
        if self._written - self._looked_at >= _LOOK_BYTES:
            self.look()

    def look(self) -> None:
        """Ask the system how much of it has left."""
        self._left = self._taken.bytes()
        self._looked_at = self._written

    @property
    def queued(self) -> int:
        """Bytes that wait, as of the last look."""
        if self._before is None or self._left is None:
            return 0
        return max(0, self._written - (self._left - self._before))

    @property
    def left(self) -> int | None:
        """Grows with what the client's system has taken, as of the last look."""
        return self._left

    def hang_up(self) -> None:
        """End the connection, and with it what is queued there."""
        self._taken.hang_up()


class Wires:
    """The connections of a server's clients, each for as long as something waits there.

    A client that is served no more may have left a full queue behind: it counts until it is empty, or is hung up.
    """

    def __init__(self) -> None:
        self._wires: dict[int, Wire] = {}
        # Of each, what had left at a look, and the first look at which it was so much.
        self._stood: dict[int, tuple[int | None, float]] = {}
        self._hung_up = LimitedLog(__name__, "clients that take nothing")

    def of(self, descriptor: int) -> Wire:
        """That of the connection with this descriptor."""
        connection = AckedBytes(descriptor)
        if connection.inode is None:  # gone, or of a system that does not tell
            return Wire(connection)
        if connection.inode not in self._wires:
            self._wires[connection.inode] = Wire(connection)
        return self._wires[connection.inode]

    def left_over(self, used: Collection[Wire]) -> list[Wire]:
        """Those of clients that are not served any more, and for which something waits."""
        in_use = set(map(id, used))
        return [wire for wire in self._wires.values() if id(wire) not in in_use and wire.queued]

    def look(self, used: Collection[Wire], now: float) -> None:
        """Look at all of them; hang up on clients that are not served any more and take nothing."""
        self._hung_up.flush()
        in_use = set(map(id, used))
        for inode, wire in list(self._wires.items()):
            wire.look()
            left, since = self._stood.get(inode, (None, now))
            if left != wire.left or id(wire) in in_use:  # patience begins once nobody serves the client
                since = now
            self._stood[inode] = wire.left, since
            if id(wire) in in_use:
                continue
            late = wire.queued and now - since >= PATIENCE_SECONDS
            if late:
                self._hung_up.warn(
                    "a client has taken none of the %d bytes that wait for it for %.0f s; it is disconnected",
                    wire.queued,
                    now - since,
                )
                wire.hang_up()
            if late or not wire.queued:
                del self._wires[inode], self._stood[inode]
