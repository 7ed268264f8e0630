"""Where the log of a feed is."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from zmq_datasource.errors import LogError
from zmq_datasource.log import LogStorage
from zmq_datasource.options import ReadOptions


def log_storage(options: ReadOptions) -> LogStorage:
    """The feed's log: in ``walStore``, in ``walLocation``, or in the default directory of the feed."""
    if options.wal_store is not None:
        return LogStorage(options.wal_store)
    return LogStorage(options.wal_location or default_location(options))


def default_location(options: ReadOptions) -> str:
    """The directory of a feed's log if no option names one: below the temporary directory of this machine.

    Feeds with another socket type, other endpoints or topics have another directory.

    Raises:
        LogError: Other users can enter the parent directory.
    """
    parent = Path(tempfile.gettempdir(), f"zmq_datasource-{os.getuid()}")
    with suppress(FileExistsError):
        parent.mkdir(mode=0o700)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LogError(
            f"using {parent} for message logs: it must be a directory that only you can enter; "
            "correct or remove it, or set walLocation"
        )
    sockets = sorted(map(str, options.connect)), sorted(map(str, options.bind))
    text = json.dumps([options.socket_type, *sockets, sorted(options.topics)])
    return str(parent / hashlib.sha256(text.encode()).hexdigest()[:16])
