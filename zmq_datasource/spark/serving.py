"""Serves the log to executors that do not see its directory, if a query decides so when it plans its first batch."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from zmq_datasource.errors import EndpointError
from zmq_datasource.host.log_lines import LimitedLog
from zmq_datasource.log import LogStorage

if TYPE_CHECKING:
    from zmq_datasource.source.chunk_server import ChunkServer, LogAccess

_LOCAL = re.compile(r"(?:--master|spark\.master)[=\0](?:local|local\[[^\]\0]*\])(?:\0|$)")
# So many parents of this process are searched for the JVM. Spark's daemon of Python processes may be in between.
_GENERATIONS = 3


class Serving:
    """The server of one query's log, if there is one."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._server: ChunkServer | None = None
        self._warnings = LimitedLog(__name__, "attempts to serve the log")

    def access(self, storage: LogStorage, log_id: str) -> LogAccess | None:
        """How executors reach the server of this log; None if there is none. Starts the server on the first call.

        Raises:
            EndpointError: The server cannot listen at the endpoint of ``serveLog``.
        """
        if self._server is None and self._is_wanted:
            self._server = self._start(storage, log_id)
        return None if self._server is None else self._server.access

    @cached_property
    def _is_wanted(self) -> bool:
        return self._wanted != "never" and not (self._wanted == "auto" and in_local_mode())

    def _start(self, storage: LogStorage, log_id: str) -> ChunkServer | None:
        import zmq  # noqa: PLC0415 - only the source runner needs it

        from zmq_datasource.source.chunk_server import ChunkServer  # noqa: PLC0415

        endpoint = self._wanted if self._wanted.startswith("tcp://") else None
        try:
            return ChunkServer(storage, log_id, endpoint)
        except (zmq.ZMQError, OSError) as e:
            if endpoint is not None:
                raise EndpointError(
                    f"serving the log at serveLog={endpoint}: {e.strerror}; name an address of this machine and a "
                    "free port"
                ) from e
            self._warnings.warn(
                "the log cannot be served (%s): executors that do not see walLocation cannot read it",
                e.strerror,
            )
            return None

    def stop(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()


def in_local_mode() -> bool:
    """Whether the JVM above this process was started with a local master.

    The master is on the command line of the JVM. If it is not there, as with a master from ``spark-defaults.conf``, and
    on other systems than Linux, the answer is False.
    """
    process = os.getppid()
    with suppress(OSError, ValueError):
        for _ in range(_GENERATIONS):
            directory = Path("/proc", str(process))
            if _LOCAL.search((directory / "cmdline").read_text(errors="replace")):
                return True
            # After the name, which may contain any character, come the state and the parent.
            process = int((directory / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return False
