"""How many files, and so connections, this process may have open."""

from __future__ import annotations

import resource
from contextlib import suppress

__all__ = ["allow_many_files"]


def allow_many_files() -> None:
    """As many as this user may have: libzmq takes a file for each connection, and leaves none for the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems name a limit that they do not allow
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
