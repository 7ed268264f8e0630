"""Small JSON files on any file system that pyarrow knows. They appear whole, and old ones are removed.

This package does not control the file system, and a call to it may hang. ``within`` stops waiting for such a call.
"""

from __future__ import annotations

import functools
import posixpath
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from zmq_datasource.errors import MetricsError
from zmq_datasource.host import failpoints

__all__ = ["find", "load", "load_all", "remove", "remove_expired", "within", "write"]

T = TypeVar("T")

# How many files are read at the same time: an object store takes long for each.
_READING_THREADS = 16
# The writer of an unfinished file that is older than this has died.
_LONGEST_WRITE_SECONDS = 3600.0


def find(system: Any, directory: str, prefix: str = "", *, recursive: bool = False) -> list[str]:
    """The paths of a directory's whole files whose names begin with ``prefix``, sorted; none without the directory."""
    infos = _infos(system, directory, recursive=recursive)
    return sorted(info.path for info in infos if _is_whole(info) and info.base_name.startswith(prefix))


def load(system: Any, path: str) -> bytes | None:
    """The content of a file; None if the file is gone."""
    try:
        with system.open_input_stream(path) as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None


def load_all(system: Any, paths: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Yield each path with the content of its file, in the given order; None for a file that is gone."""
    act = functools.partial(load, system)
    # A thread gets many files at a time: reading a local file costs less than handing it to a thread.
    share = max(_READING_THREADS, -(-len(paths) // _READING_THREADS))
    with ThreadPoolExecutor(_READING_THREADS) as pool:
        shares = [paths[at : at + share] for at in range(0, len(paths), share)]
        for names, contents in zip(
            shares, pool.map(lambda names: list(map(act, names)), shares), strict=True
        ):
            yield from zip(names, contents, strict=True)


def write(system: Any, path: str, content: bytes, given_up: threading.Event | None = None) -> None:
    """Write a file that appears whole, or replaces an older one whole.

    If ``given_up`` is set before the whole content is written, the file does not appear.
    """
    directory, name = posixpath.split(path)
    system.create_dir(directory, recursive=True)
    hidden = f"{directory}/.{uuid.uuid4().hex}-{name}"
    try:
        failpoints.reach("monitoring.metrics.before_write")
        with system.open_output_stream(hidden) as file:
            file.write(content)
        if given_up is not None and given_up.is_set():
            remove(system, hidden)
        else:
            failpoints.reach("monitoring.metrics.before_move")
            system.move(hidden, path)
            failpoints.reach("monitoring.metrics.after_move")
    except BaseException:
        remove(system, hidden)
        raise


def remove_expired(system: Any, directory: str, paths: Sequence[str], expired: float, now: float) -> None:
    """Remove those of ``paths`` that were written before ``expired``, and the unfinished files of killed writers.

    Args:
        expired, now: Seconds since the epoch.
    """
    removable = set(paths)
    for info in _infos(system, directory):
        is_unfinished = not _is_whole(info)
        limit = min(expired, now - _LONGEST_WRITE_SECONDS) if is_unfinished else expired
        if (is_unfinished or info.path in removable) and info.mtime and info.mtime.timestamp() < limit:
            remove(system, info.path)


def remove(system: Any, path: str) -> None:
    """Remove a file; do nothing if it is not there, or if the file system refuses."""
    with suppress(OSError):
        system.delete_file(path)


def within(seconds: float, what: str, act: Callable[[threading.Event], T]) -> T:
    """Run ``act`` in a thread, and return its result; do not wait for it longer than ``seconds``.

    Args:
        what: What ``act`` does, for errors.
        act: Gets an event. When the event is set, the result is not wanted any more, and ``act`` should change nothing.

    Raises:
        MetricsError: ``act`` has not ended in time, or has failed.
    """
    given_up = threading.Event()
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act(given_up))
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run, name="zmq-metrics", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        given_up.set()
        raise MetricsError(f"{what}: the file system has not answered for {seconds:g} s")
    if failures:
        error = failures[0]
        raise error if isinstance(error, MetricsError) else MetricsError(f"{what}: {error!r}") from error
    return results[0]


def _infos(system: Any, directory: str, *, recursive: bool = False) -> list[Any]:
    from pyarrow import fs  # noqa: PLC0415 - see locations

    selector = fs.FileSelector(directory, allow_not_found=True, recursive=recursive)
    infos = system.get_file_info(selector)
    return [info for info in infos if info.type == fs.FileType.File and info.base_name.endswith(".json")]


def _is_whole(info: Any) -> bool:
    return not info.base_name.startswith(".")
