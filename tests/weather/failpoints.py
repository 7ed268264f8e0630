"""The failpoints of the package: their table, the faults that strike there, and how often each was reached.

The package calls ``host.failpoints.reach(name)`` before and after each durable step. In a process of a weather run this
module's ``Page`` takes the place of that function. The page is memory that the machine and the processes of one role
share, so a count survives SIGKILL. The page counts every name, and holds one armed strike at a time.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.weather.faults import lose_power
from zmq_datasource.host import failpoints

__all__ = [
    "POINTS",
    "Count",
    "Event",
    "Page",
    "Point",
    "Strike",
    "add_up",
    "draw_strikes",
    "table",
]


class Point(NamedTuple):
    """A failpoint.

    Attributes:
        fails: Whether the step there may meet an error of the disk, so that EIO may be raised.
        opens: Whether a process is there only while it opens a log. A strike ends the process first, and waits for it.
        weight: How often it is drawn, compared with others. More where a strike leads to places that are rarely met,
            and 0 where a process is only while it makes a log.
    """

    fails: bool = False
    opens: bool = False
    weight: int = 1


_STEP = Point()
_IO = Point(fails=True)

POINTS: Mapping[str, Point] = {
    "acknowledged.commit.after_append": _STEP,
    "acknowledged.commit.after_committed": _STEP,
    "acknowledged.commit.before_append": _STEP,
    "acknowledged.commit.before_send": _STEP,
    "acknowledged.committed.after_answer": _STEP,
    "acknowledged.committed.before_answer": _STEP,
    "acknowledged.data.after_append": _STEP,
    "acknowledged.data.before_send": _STEP,
    "acknowledged.end.after_staged": _STEP,
    "acknowledged.file.after_rename": _IO,
    "acknowledged.file.after_sync": _IO,
    "acknowledged.file.after_write": _IO,
    "acknowledged.file.before_remove": _STEP,
    "acknowledged.file.before_sync": _IO,
    "acknowledged.file.before_write": _IO,
    "acknowledged.staged.before_answer": _STEP,
    "log.chunk.after_delete": _STEP,
    "log.chunk.after_put": Point(weight=2),
    "log.chunk.before_delete": _STEP,
    "log.chunk.before_put": Point(weight=4),
    "log.head.after_put": _STEP,
    "log.head.before_put": _STEP,
    "log.identity.after_put": Point(weight=0),
    "log.identity.before_put": Point(weight=0),
    "log.merge.after_delete": _STEP,
    "log.merge.after_put": _STEP,
    "log.merge.before_delete": _STEP,
    "log.merge.before_put": _STEP,
    "log.position.after_write": _STEP,
    "log.position.before_write": _STEP,
    "log.recovery.after_lock": Point(fails=True, opens=True),
    "log.store.after_delete": _IO,
    "log.store.after_link": _IO,
    "log.store.after_put": _IO,
    "log.store.after_rename": _IO,
    "log.store.after_sync": _IO,
    "log.store.after_unlink": _IO,
    "log.store.after_write": _IO,
    "log.store.before_beat": _IO,
    "log.store.before_delete": _IO,
    "log.store.before_link": _IO,
    "log.store.before_put": _IO,
    "log.store.before_release": _STEP,
    "log.store.before_rename": _IO,
    "log.store.before_write": _IO,
    "monitoring.metrics.after_move": _IO,
    "monitoring.metrics.before_move": _IO,
    "monitoring.metrics.before_write": _IO,
    "serving.ack.after_confirmed": _STEP,
    "serving.ack.before_send": _STEP,
    "serving.batch.before_send": _STEP,
    "sink.dead_letters.after_commit": _IO,
    "sink.dead_letters.after_write": _IO,
    "sink.dead_letters.before_commit": _IO,
    "sink.dead_letters.before_move": _IO,
    "sink.dead_letters.before_write": _IO,
    "source.chunk.after_answer": _STEP,
    "source.chunk.before_read": _IO,
    "source.takeover.after_open": _STEP,
    "source.takeover.before_open": _STEP,
    "spark.commit.after_commit": _STEP,
    "spark.commit.before_commit": _STEP,
    "spark.task.before_report": _STEP,
    "weather.commits.before_write": _STEP,
    "weather.offsets.after_write": _STEP,
    "weather.output.before_write": _STEP,
}

_KILL_ACTS, _ACTS = ("kill", "power"), ("kill", "power", "stall", "eio")
_NAMES = tuple(POINTS)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
# Armed: place from 1 on (0 is none), act, in how many times more, seconds. Then the strikes so far that killed.
_ARMED, _KILLS = struct.Struct("<HBHd"), struct.Struct("<I")
_COUNT = struct.Struct("<II")
_KILLS_AT = _ARMED.size
_COUNTS_AT = _KILLS_AT + _KILLS.size
_STALL_SECONDS, _AWAY_SECONDS = (0.1, 3.0), (0.0, 1.5)
_STRIKES = (0, 1, 2, 3, 4)


class Strike(NamedTuple):
    """A fault that a process meets at a failpoint.

    Attributes:
        name: The failpoint.
        nth: At which time of reaching it, from now on.
        act: ``kill``, ``power`` (a kill after which the disk loses what was not forced to it), ``stall``, ``eio``.
    """

    name: str
    nth: int
    act: str

    def __str__(self) -> str:
        return f"{self.act} at {self.name}" + (f" number {self.nth}" if self.nth > 1 else "")

    @property
    def like(self) -> str:
        """The kind of weather from outside that may cost a process as much."""
        return "stop" if self.act == "stall" else self.act


class Count(NamedTuple):
    """How often a failpoint was reached, was to be struck at, and was."""

    reached: int = 0
    armed: int = 0
    struck: int = 0


class Page:
    """The counts of one role's processes, and what strikes next; the same for each process that opens the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        size = _COUNTS_AT + _COUNT.size * len(_NAMES)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), size)
        self._lock = threading.Lock()

    # The machine's side.

    def arm(self, strike: Strike, seconds: float) -> None:
        """Arm a strike, in place of one that the process has not met yet."""
        place = 1 + _PLACES[strike.name]
        _ARMED.pack_into(self._page, 0, place, _ACTS.index(strike.act), strike.nth, seconds)

    def disarm(self) -> None:
        _ARMED.pack_into(self._page, 0, 0, 0, 0, 0.0)

    @property
    def kills(self) -> int:
        """How many processes have ended at a failpoint."""
        return int(_KILLS.unpack_from(self._page, _KILLS_AT)[0])

    def counts(self) -> dict[str, tuple[int, int]]:
        """How often each failpoint was reached, and struck at."""
        return {name: self._count(place) for name, place in _PLACES.items()}

    def struck(self, name: str) -> int:
        """How often something has struck at a failpoint."""
        return self._count(_PLACES[name])[1]

    def _count(self, place: int) -> tuple[int, int]:
        reached, struck = _COUNT.unpack_from(self._page, _COUNTS_AT + place * _COUNT.size)
        return reached, struck

    # The process' side.

    def install(self) -> None:
        """Count in this process from now on, and strike."""
        failpoints.reach = self.reach

    def reach(self, name: str) -> None:
        """Count, and carry out the strike if it is armed here.

        Raises:
            OSError: The strike is ``eio``.
            KeyError: The table does not have the name.
        """
        place = _PLACES[name]
        with self._lock:
            reached, struck = self._count(place)
            armed, act, left, seconds = _ARMED.unpack_from(self._page, 0)
            strikes = armed == 1 + place and left <= 1
            if strikes:
                self.disarm()
            elif armed == 1 + place:
                _ARMED.pack_into(self._page, 0, armed, act, left - 1, seconds)
            _COUNT.pack_into(self._page, _COUNTS_AT + place * _COUNT.size, reached + 1, struck + int(strikes))
            if strikes and _ACTS[act] in _KILL_ACTS:
                if _ACTS[act] == "power":  # at once, so that no other process has seen what is lost
                    lose_power(self._path.with_suffix(".faults"), random.Random(reached))
                _KILLS.pack_into(self._page, _KILLS_AT, self.kills + 1)
                os.kill(os.getpid(), signal.SIGKILL)
        if strikes and _ACTS[act] == "stall":
            time.sleep(seconds)
        elif strikes:
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (failpoint {name})")


class Event(NamedTuple):
    """Some weather: when it begins, in seconds, what it is, whom it meets, and how long it lasts."""

    at: float
    kind: str
    target: str
    seconds: float
    strike: Strike | None = None

    def __str__(self) -> str:
        lasts = f" {self.seconds:.1f} s" if self.seconds else ""
        if self.strike is not None:
            return f"{self.strike} of {self.target}{lasts}, armed at {self.at:.1f}"
        return f"{self.kind} {self.target}{lasts} at {self.at:.1f}"


def draw_strikes(
    seed: int,
    reachable: Sequence[tuple[str, str]],
    lose_power: Sequence[str],
    seconds: float,
    least: int = 0,
) -> Iterator[Event]:
    """The strikes of a seed, none to four: at each reachable (process, failpoint) as likely, by their weights.

    Args:
        lose_power: Processes whose disk may lose what was not forced to it.
        least: How many there are at least.
    """
    chance = random.Random(f"failpoints {seed}")
    weights = [float(POINTS[name].weight) for _, name in reachable]
    for _ in range(max(chance.choice(_STRIKES), least) if reachable else 0):
        at = chance.uniform(0.1, seconds)
        target, name = chance.choices(reachable, weights)[0]
        strike = _strike(chance, name, target in lose_power)
        low, high = _STALL_SECONDS if strike.act == "stall" else _AWAY_SECONDS
        yield Event(at, "failpoint", target, chance.uniform(low, high), strike)


def _strike(chance: random.Random, name: str, may_lose_power: bool) -> Strike:
    point = POINTS[name]
    acts = ["kill", "kill", "stall"]
    if may_lose_power:
        acts += ["power", "power"]
    if point.fails:
        acts += ["eio"]
    return Strike(name, 1 if point.opens else chance.choice((1, 1, 1, 1, 2, 4)), chance.choice(acts))


def add_up(runs: Sequence[Mapping[str, Count]]) -> dict[str, Count]:
    """The counts of several runs."""
    return {
        name: Count(*map(sum, zip(*(run.get(name, Count()) for run in runs), strict=True))) for name in _NAMES
    }


def table(counts: Mapping[str, Count]) -> str:
    """The counts as lines of text."""
    width = max(map(len, counts))
    lines = [f"{'failpoint':{width}} {'reached':>9} {'armed':>6} {'struck':>6}"]
    lines += [f"{name:{width}} {c.reached:9} {c.armed:6} {c.struck:6}" for name, c in counts.items()]
    return "\n".join(lines)
