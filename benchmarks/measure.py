"""What a measurement is, and how to wait for one: shared by all sections."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MEGA = 1_000_000
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Times:
    """How long to measure.

    Attributes:
        seconds: Length of the window that counts.
        warm_up: Seconds before the window, in which the same work runs already.
        rounds: Repetitions, after a first round that is not counted because the JVM compiles in it.
    """

    seconds: float
    warm_up: float
    rounds: int


@dataclass(frozen=True)
class Sample:
    """One value of a quantity, CPU seconds a message by process, and values of other cases from the same run."""

    value: float
    cpu: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured once a round.

    Attributes:
        section: Name of its section.
        case: What was varied, as in ``100 B`` or ``10 kB, read by one task``.
        method: What was measured.
        unit: Of the values.
        values: One a round.
        cpu: Microseconds of CPU a message, by process, one a round; empty where that says nothing.
        scale: Size of the runs.
        place: When, and on which processor.
    """

    section: str
    case: str
    method: str
    unit: str
    values: tuple[float, ...]
    cpu: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    scale: float = 1.0
    place: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def measured(
    section: str, case: str, unit: str, methods: Mapping[str, Callable[[], Sample]], times: Times
) -> Iterator[Measurement]:
    """Every method once a round, interleaved, so that a slow minute of the machine hits all of them."""
    samples: dict[str, list[Sample]] = {method: [] for method in methods}
    for counted in range(-1, times.rounds):
        for method, sample in methods.items():
            found = sample()
            if counted >= 0:
                samples[method].append(found)
    for method, of_rounds in samples.items():
        processes = dict.fromkeys(name for one in of_rounds for name in one.cpu)
        cpu = {name: tuple(one.cpu.get(name, 0.0) * MEGA for one in of_rounds) for name in processes}
        yield Measurement(section, case, method, unit, tuple(one.value for one in of_rounds), cpu)
        for other in of_rounds[0].others:
            yield Measurement(section, other, method, unit, tuple(one.others[other] for one in of_rounds))


def size_name(size: int) -> str:
    """16 B, 100 kB, 1 MB."""
    for unit, name in ((1_000_000, "MB"), (1_000, "kB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def wait_for(what: str, done: Callable[[], bool], seconds: float, poll: float = _POLL_SECONDS) -> None:
    """Poll until ``done()``.

    Raises:
        TimeoutError: It was not done after ``seconds``; says what was waited for.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waiting {seconds:.0f} s for {what}")
        time.sleep(poll)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory that is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="zmq-benchmark-", ignore_cleanup_errors=True) as name:
        yield Path(name)
