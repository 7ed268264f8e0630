"""Runs what may hang: reads and writes on a file system that this package does not control."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from zmq_datasource.errors import MetricsError

__all__ = ["within"]

T = TypeVar("T")


def within(seconds: float, what: str, act: Callable[[threading.Event], T]) -> T:
    """Run a function in a thread, and give it up after some seconds.

    Args:
        act: Is given an event that is set once it is given up: from then on it should change nothing.

    Raises:
        MetricsError: It did not end in time, or raised this itself.
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
