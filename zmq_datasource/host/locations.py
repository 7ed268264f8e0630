"""Directories on any file system that pyarrow supports, named by an option of type ``Location``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from zmq_datasource.errors import OptionError
from zmq_datasource.host.machine import make_private
from zmq_datasource.options.types import Location

# Of pyarrow.fs.FileSystem.from_uri.
_SCHEMES = {"file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss"}


def directory_of(location: Location) -> tuple[Any, str]:
    """The file system of a location, and the path on it.

    Raises:
        OSError, ValueError: pyarrow does not understand the location; the error's text may contain a secret.
    """
    # Imported here because it takes 0.1 s, which a program without a location need not spend.
    from pyarrow import fs  # noqa: PLC0415

    if "://" in location.with_credentials:
        system, directory = fs.FileSystem.from_uri(location.with_credentials)
        return system, directory
    return fs.LocalFileSystem(), location.with_credentials


def make_directory(system: Any, root: str, below: str = "") -> None:
    """Create a location's directory, and the directory ``below`` it.

    On a local file system a new directory is readable by its owner only, because it may receive whole messages.

    Raises:
        OSError: The file system refused.
    """
    root = root.rstrip("/") or "/"
    if system.type_name == "local" and not os.path.isdir(root):
        os.makedirs(os.path.dirname(root), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(root, 0o700)
    system.create_dir(f"{root}/{below}" if below else root, recursive=True)


def write_parquet(system: Any, path: str, rows: Sequence[Mapping[str, object]], schema: Any) -> None:
    """Write rows to a Parquet file. On a local file system, only its owner may read it.

    Raises:
        OSError: The file system refused. A part of the file may be there.
    """
    # The imports take a tenth of a second, so only a process that writes such a file pays for them.
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    if system.type_name == "local":
        make_private(path)
    parquet.write_table(pa.Table.from_pylist(rows, schema), path, filesystem=system)


def check_location(option: str, location: Location | None, *, reach: bool = True) -> None:
    """Refuse a location that pyarrow does not understand. Called when a DataFrame or a receiver is created.

    Args:
        option: The option's name, for the error.
        reach: Whether to connect to the file system too, which may be slow or not available at present.

    Raises:
        OptionError: The location has an unknown scheme, or is malformed.
    """
    if location is None:
        return
    scheme, separator, _ = location.with_credentials.partition("://")
    try:
        if not location.with_credentials or (not separator and location.with_credentials.startswith("file:")):
            raise ValueError("a URI of the local file system begins with file://")
        if not separator and not location.with_credentials.startswith("/"):
            # pyarrow would create a directory of this name in the process's working directory.
            if location.with_credentials.startswith("dbfs:"):
                raise ValueError(
                    f"on Databricks write the path /dbfs{location.with_credentials.removeprefix('dbfs:')}"
                )
            raise ValueError("it must be an absolute path, or a URI: each process has a directory of its own")
        if separator and scheme not in _SCHEMES:
            raise ValueError(f"there is no file system of the scheme {scheme}")
        if reach or scheme == "file":
            directory_of(location)
    except (OSError, ValueError) as e:
        # From None, because the cause's text may contain a secret.
        raise OptionError(
            f"option {option}={location!r}: {without_secrets(e, location)}; name a directory by its path, or by a URI "
            "of a file system that pyarrow knows (file, s3, gs, hdfs)"
        ) from None


def without_secrets(error: Exception, location: Location) -> str:
    """The text of a file system's error without the secrets of its location, for a log."""
    return str(error).replace(location.with_credentials, str(location))
