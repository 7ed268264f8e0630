"""What belongs to one process: a forked child has the parent's objects, but neither its threads nor its connections."""

from __future__ import annotations

import os

from zmq_datasource.errors import OptionError

__all__ = ["ThisProcess"]


class ThisProcess:
    """The process that makes something which works only there.

    Args:
        what: The thing, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_left(self) -> bool:
        """Whether this is a forked child of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """To be called before a lock is taken, which another thread of the parent may have held at the fork.

        Raises:
            OptionError: This is a forked child.
        """
        if self.is_left:
            raise OptionError(
                f"using {self._what} of process {self._pid} in its forked child {os.getpid()}: a fork does not take "
                "over the connection. Make a new one in the child, or start the child with spawn"
            )
