"""What a measurement is, and how to wait for one: shared by all sections."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MEGA", "Measurement", "interleaved", "temporary_directory", "wait_for"]

MEGA = 1_000_000
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured once a round.

    Attributes:
        section: ``source``, ``sequences``, ``sink``, ``transactions``, ``metrics``, ``proxy``, ``memory`` or
            ``planning``.
        case: What was varied, as in ``100 B`` or ``10000 chunks``.
        method: What was measured.
        unit: Of the values.
        values: One a round.
        scale: Size of the runs.
    """

    section: str
    case: str
    method: str
    unit: str
    values: tuple[float, ...]
    scale: float = 1.0

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def wait_for(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Poll until ``done()``.

    Raises:
        TimeoutError: It was not done after ``seconds``; says what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waiting {seconds:.0f} s for {what}")
        time.sleep(_POLL_SECONDS)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="zmq-benchmark-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def interleaved(methods: Sequence[str], rounds: int) -> Iterator[str]:
    """The methods, interleaved, so that a slow minute of the machine hits all of them."""
    for _ in range(rounds):
        yield from methods
