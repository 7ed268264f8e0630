"""Directories on any file system that pyarrow knows: what ``Location`` names."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from zmq_datasource.errors import OptionError
from zmq_datasource.host.private_files import make_private
from zmq_datasource.options.types import Location

__all__ = ["check_location", "directory_of", "make_directory", "make_file", "without_secrets"]

# Of pyarrow.fs.FileSystem.from_uri.
_SCHEMES = {"file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}


def directory_of(location: Location) -> tuple[Any, str]:
    """The file system, and the path on it.

    Raises:
        OSError, ValueError: pyarrow cannot mean anything by it; its words may hold a secret.
    """
    # Imported here because it costs a tenth of a second, which only who uses a location should pay.
    from pyarrow import fs  # noqa: PLC0415

    if "://" in location.plain:
        system, directory = fs.FileSystem.from_uri(location.plain)
        return system, directory
    return fs.LocalFileSystem(), location.plain


def make_directory(system: Any, root: str, below: str = "") -> None:
    """Make a location's directory, and one below it.

    On this machine a location that does not exist yet is made for its user alone: whole messages may be kept there.

    Raises:
        OSError: The file system refused.
    """
    root = root.rstrip("/") or "/"
    if system.type_name == "local" and not os.path.isdir(root):
        os.makedirs(os.path.dirname(root), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
    system.create_dir(f"{root}/{below}" if below else root, recursive=True)


def make_file(system: Any, path: str) -> None:
    """On this machine, make an empty file for its user alone, which is written next; elsewhere the storage decides.

    Raises:
        OSError: The file system refused.
    """
    if system.type_name == "local":
        make_private(path)


def check_location(option: str, location: Location | None, *, reach: bool = True) -> None:
    """Refuse a location that pyarrow cannot mean anything by.

    Args:
        reach: Whether to ask the file system, too, which may take its time and be away for a while.

    Raises:
        OptionError: It is of an unknown scheme, or malformed.
    """
    if location is None:
        return
    scheme, separator, _ = location.plain.partition("://")
    try:
        if not location.plain or (not separator and location.plain.startswith("file:")):
            raise ValueError("a URI of the local file system begins with file://")
        if not separator and not location.plain.startswith("/"):
            # pyarrow would make a directory of that name wherever the process happens to run.
            if location.plain.startswith("dbfs:"):
                raise ValueError(f"on Databricks write the path /dbfs{location.plain.removeprefix('dbfs:')}")
            raise ValueError("it must be an absolute path, or a URI: each process has a directory of its own")
        if separator and scheme not in _SCHEMES:
            raise ValueError(f"no file system is called {scheme}")
        if reach or scheme == "file":
            directory_of(location)
    except (OSError, ValueError) as e:
        # The cause's own words may hold a secret.
        raise OptionError(
            f"option {option}={location!r}: {without_secrets(e, location)}; name a directory by its path, or by a URI "
            "of a file system that pyarrow knows (file, s3, gs, hdfs)"
        ) from None


def without_secrets(error: Exception, location: Location) -> str:
    """The words of a file system's error, fit for a log."""
    return str(error).replace(location.plain, str(location))
