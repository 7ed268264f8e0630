"""Files that only their user may read, also in a directory that others may enter: whole messages are in them."""

from __future__ import annotations

import os

__all__ = ["PRIVATE", "make_private"]

# The mode of a file.
PRIVATE = 0o600


def make_private(path: str | os.PathLike[str]) -> None:
    """Make an empty file for its user alone, for something to write that would make it as the umask says.

    A file that is there already is emptied.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE))
