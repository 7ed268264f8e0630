"""Directories on any file system that pyarrow knows: what ``Location`` names."""

from __future__ import annotations

from typing import Any

from zmq_datasource.errors import OptionError
from zmq_datasource.option_types import Location

__all__ = ["check_location", "directory_of", "without_secrets"]


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


def check_location(option: str, location: Location | None) -> None:
    """Refuse a location that pyarrow cannot mean anything by.

    Raises:
        OptionError: It is of an unknown scheme, or malformed.
    """
    if location is None:
        return
    try:
        directory_of(location)
    except (OSError, ValueError) as e:
        reason = without_secrets(e, location)
        raise OptionError(
            f"option {option}={location!r}: {reason}; name a directory by its path, or by a URI of a file system that "
            "pyarrow knows (file, s3, gs, hdfs)"
        ) from e


def without_secrets(error: Exception, location: Location) -> str:
    """The words of a file system's error, fit for a log."""
    return str(error).replace(location.plain, str(location))
