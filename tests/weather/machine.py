"""One run: a world of processes and middleboxes, the weather drawn for it, and what became of it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support import REPOSITORY, free_endpoint
from tests.support.middlebox import Middlebox
from tests.weather.damage import KINDS, KNOWN_HOLES, Damage, do, pick, read_log
from tests.weather.failpoints import POINTS, Count, Event, Page
from tests.weather.faults import DISK_FAULTS, STORE_FAULTS, Faults, lose_power
from zmq_datasource.errors import ZmqDataSourceError
from zmq_datasource.log.files import MOUNT_AGAIN

__all__ = [
    "ARMED",
    "BrokenPromiseError",
    "Process",
    "RefusedError",
    "World",
    "draw",
    "draw_damage",
]

# What one process of ours may hold, whatever the weather.
_MOST_BYTES = 700 << 20
# How long the load and the queries may take to be through once the weather is fair.
SETTLE_SECONDS = 90.0
_END_SECONDS = 60.0
# How long after an error that its topology explains a process is started again.
_EXPLAINED_SECONDS = 0.3
# How often a process may refuse a log whose damage is restored each time.
_MOST_REFUSALS = 3
# Lets a process that is started have failpoints.
ARMED = Path(__file__).parent / "armed"
# How Python names an error of the package at the end of its traceback; some are defined beside what raises them.
_ERROR = re.compile(r"zmq_datasource\.[\w.]+Error: ")
_OPENING_SECONDS = 0.2
# How often deleted files are restored that a process waits for.
_RESTORING_SECONDS = 2.0
# More than any retention, and than any timeout of a reader.
_DAYS_AHEAD_SECONDS = 8 * 86400.0


class BrokenPromiseError(AssertionError):
    """A promise that did not hold."""


class RefusedError(Exception):
    """A program goes on refusing a log: what only a damaged position held is deleted."""


class Process:
    """A role in a process of its own, which may die and is started again."""

    def __init__(self, world: World, name: str, role: str, disk: Path, settings: dict[str, Any]) -> None:
        self._world, self.name, self.role = world, name, role
        self._disk, self._settings = disk, settings
        self._page = world.directory / f"{name}.faults"
        self.faults = Faults(self._page)
        self._log = (world.directory / f"{name}.log").open("ab")
        self.page = Page(world.directory / f"{name}.failpoints")
        self._kills = 0  # those of the page that were noticed
        self._seen: list[psutil.Process] = []
        self.killed = False
        self.start()

    def start(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join((str(ARMED), str(REPOSITORY))),
            "PYTHONFAULTHANDLER": "1",
            "WEATHER_FAILPOINTS": str(self._page.with_suffix(".failpoints")),
        }
        self._seen = []
        self.popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.weather.child",
                self.role,
                str(self._page),
                str(self._disk),
                json.dumps(self._settings),
            ],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )
        self.killed = False

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    @property
    def struck_dead(self) -> bool:
        """Whether the process has ended at a failpoint, which ``kill`` was not called for yet."""
        return self.popen.poll() == -signal.SIGKILL and not self.killed and self.page.kills > self._kills

    @property
    def ended(self) -> bool:
        """Whether the process has ended by itself."""
        return not self.alive and not self.killed and not self.struck_dead

    def kill(self) -> None:
        """SIGKILL, to the process and, as when a machine stops, to those that it has started.

        All are stopped first: what sees another one die must not go on.
        """
        family = self._family()
        for process in family:
            with _gone_is_fine():
                process.suspend()
        for process in family:
            with _gone_is_fine():
                process.kill()
        self.popen.wait()
        self._let_go()
        self.killed, self._kills = True, self.page.kills

    def signal(self, number: int) -> None:
        for process in self._family():
            with _gone_is_fine():
                process.send_signal(number)

    def _family(self) -> list[psutil.Process]:
        """The process and those that it has started; once it is dead, those that it was last seen to have."""
        if self.alive:
            with _gone_is_fine():
                own = psutil.Process(self.popen.pid)
                self._seen = [own, *own.children(recursive=True)]
        return self._seen

    @property
    def bytes(self) -> int:
        """The resident memory of the largest of its processes."""
        sizes = [0]
        for process in self._family():
            with _gone_is_fine():
                sizes.append(process.memory_info().rss)
        return max(sizes)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        if self.alive:
            self.popen.terminate()
        try:
            return self.popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise BrokenPromiseError(
                f"{self.name} did not end within {_END_SECONDS:.0f} s of SIGTERM"
            ) from None

    def close(self) -> None:
        if self.alive:
            self.kill()
        self._let_go()
        self._log.close()

    def _let_go(self) -> None:
        if self.popen.stdin is not None:
            self.popen.stdin.close()

    def last_error(self) -> str:
        """The error of the package that it ended with; empty for any other end."""
        lines = (self._world.directory / f"{self.name}.log").read_text(errors="replace").splitlines()
        last = lines[-1] if lines else ""
        return last if _ERROR.match(last) else ""

    def last_lines(self, count: int = 8) -> str:
        lines = (self._world.directory / f"{self.name}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"    {self.name}: {line}" for line in lines[-count:])


class _gone_is_fine:  # noqa: N801 - reads as what it is
    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, psutil.NoSuchProcess)


class World:
    """What a topology is built in; use it in a ``with`` block.

    Attributes:
        random: Draws the topology's own parameters.
        events: The weather that was drawn; what is lossy is known from it.
        retention: How long logs keep what is committed. Only ``clock-days-ahead`` is ahead by more.
        extras: Draws options of the topology by which it reaches more failpoints.
        at_rest: What may be damaged at rest, and which of its kinds; see ``may_be_damaged``.
        damages: The damage that was done to files.
        refusals: The errors of processes that found a damage, or what their topology explains.
        explains: Whether a process may end with this error of the package, and is started again.
    """

    retention = "1d"

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(f"world {seed}")
        self.extras = random.Random(f"extras {seed}")
        self._struck: dict[str, Event] = {}  # what was armed last, by process
        self.processes: dict[str, Process] = {}
        self.boxes: dict[str, Middlebox] = {}
        self.events: list[Event] = []
        self.most_bytes = 0
        self._stack = ExitStack()
        self._stopped: set[str] = set()
        self.at_rest: list[tuple[str, str]] = []
        self.refusals: list[str] = []
        self.explains: Callable[[str], bool] = lambda _: False
        self._rests: dict[str, Path] = {}
        self.damages: list[Damage] = []
        self._refused: Counter[str] = Counter()
        self._again: list[tuple[float, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.close()
        self._stack.close()

    # Building.

    def endpoint(self) -> str:
        return free_endpoint()

    def middlebox(self, name: str, endpoint: str) -> str:
        """Put a box in front of an endpoint; the endpoint to connect to instead."""
        self.boxes[name] = box = self._stack.enter_context(Middlebox(endpoint, remembers=True))
        return box.endpoint

    def process(self, name: str, role: str, disk: Path | None = None, /, **settings: Any) -> Process:
        self.processes[name] = process = Process(
            self, name, role, disk or self.directory / "nowhere", settings
        )
        return process

    def keep(self, closing: Any) -> Any:
        """Enter something that is to be left at the end."""
        return self._stack.enter_context(closing)

    def may_be_damaged(self, name: str, root: Path, *victims: str) -> None:
        """Let files be damaged below a root, while a process is down (``name/victim``) and while it runs (``victim``).

        Args:
            victims: Keys of ``damage.VICTIMS``.
        """
        for victim in victims:
            for target in (f"{name}/{victim}", victim):
                self._rests[target] = root
                self.at_rest += [(kind, target) for kind in KINDS if f"{kind} {victim}" not in KNOWN_HOLES]

    def lossy(self, *kinds: str) -> bool:
        """Whether some weather of these kinds was drawn, as ``kind target``.

        A damage at rest kills the process that it names, and one that was refused has ended the process that found it.
        """
        killed = {e.target.partition("/")[0] for e in self.events if e.kind in KINDS} | set(self._refused)
        met = {f"{kind} {e.target}" for e in self.events for kind in self._costs(e)}
        return not (met | {f"kill {name}" for name in killed}).isdisjoint(kinds)

    def _costs(self, event: Event) -> Iterator[str]:
        """The kinds of weather that an event is like, for what may be lost in it."""
        if event.strike is None:
            yield event.kind
            return
        if POINTS[event.strike.name].opens:
            yield "kill"
        if self.processes[event.target].page.struck(event.strike.name):
            yield event.strike.like

    def discarded(self, value: str) -> bool:
        """Whether a middlebox has lost a message of this one short frame after its sender had left in good order.

        Neither end learns of it, and the promise of a task that has ended reaches no further than to the next machine.
        """
        frame = bytes([0, len(value)]) + value.encode()
        return any(frame in lost for box in self.boxes.values() for lost in box.discarded)

    # Weather.

    def weather(self, events: list[Event]) -> None:
        """Let it come and go; afterwards all is fair, and every process runs.

        What is armed and was not met yet goes on waiting until the process is stopped: a busy machine is late.
        """
        self.events += events
        began = time.monotonic()
        todo = sorted([(e.at, 0, e) for e in events] + [(e.at + e.seconds, 1, e) for e in events])
        for at, over, event in todo:
            while (left := began + at - time.monotonic()) > 0:
                self._look(min(left, 0.1))
            (self._end if over else self._begin)(event)
        for box in self.boxes.values():
            box.clear()
        for name in list(self._stopped):
            self._resume(name)
        for process in self.processes.values():
            process.faults.disk = "none"
        while self._again:
            self._look(0.05)

    def _begin(self, event: Event) -> None:
        match event.kind:
            case damage if damage in KINDS:
                self._damage(event)
            case "kill" | "power":
                self._kill(event.target, event.seconds, power=event.kind == "power")
            case "stop":
                self.processes[event.target].signal(signal.SIGSTOP)
                self._stopped.add(event.target)
            case fault if fault in DISK_FAULTS:
                self.processes[event.target].faults.disk = fault
            case "clock-back":
                self.processes[event.target].faults.clock = -3600.0
            case "clock-ahead":
                self.processes[event.target].faults.clock = 3600.0
            case "clock-days-ahead":
                self.processes[event.target].faults.clock = _DAYS_AHEAD_SECONDS
            case "delay":
                self.boxes[event.target].delay = 0.15
            case "throttle":
                self.boxes[event.target].bytes_per_second = 40_000
            case "reset":
                self.boxes[event.target].reset()
            case "reset-after":
                self.boxes[event.target].reset_after = self.random.randrange(1, 60_000)
            case "half-open":
                self.boxes[event.target].half_open()
            case "black-hole":
                self.boxes[event.target].black_hole = True
            case "failpoint":
                assert event.strike is not None
                if POINTS[event.strike.name].opens:
                    self._kill(event.target, _OPENING_SECONDS, power=False)
                self._arm(self.processes[event.target].page, event)
            case _:
                raise ValueError(event)

    def _end(self, event: Event) -> None:
        match event.kind:
            case "stop":
                self._resume(event.target)
            case fault if fault in DISK_FAULTS:
                self.processes[event.target].faults.disk = "none"
            case "delay":
                self.boxes[event.target].delay = 0.0
            case "throttle":
                self.boxes[event.target].bytes_per_second = 0
            case "half-open" | "black-hole":
                self.boxes[event.target].clear()

    def _kill(self, name: str, seconds: float, *, power: bool) -> None:
        """Kill a process, with what its disk had not been forced to keep; it comes again so much later."""
        self.processes[name].kill()
        if power:
            lose_power(self.directory / f"{name}.faults", self.random)
        self._stopped.discard(name)
        self._again = [pair for pair in self._again if pair[1] != name]
        self._again.append((time.monotonic() + seconds, name))

    def _arm(self, page: Page, event: Event) -> None:
        assert event.strike is not None
        self._struck[event.target] = event
        page.arm(event.strike, event.seconds)

    def counts(self) -> dict[str, Count]:
        """How often each failpoint was reached so far, was to be struck at, and was."""
        armed = [e.strike.name if e.strike else e.kind for e in self.events]
        counts = {name: Count(0, armed.count(name), 0) for name in POINTS}
        for page in [process.page for process in self.processes.values()]:
            for name, (reached, struck) in page.counts().items():
                before = counts[name]
                counts[name] = before._replace(
                    reached=before.reached + reached, struck=before.struck + struck
                )
        return counts

    def _damage(self, event: Event) -> None:
        """Damage a file, between two runs of a process or while all run."""
        name, _, victim = event.target.rpartition("/")
        if name:
            self._kill(name, event.seconds, power=False)
        path = pick(self._rests[event.target], event.kind, victim, self.random)
        if path is None:
            return
        try:
            damage = do(event.kind, victim, path, self.random)
        except FileNotFoundError:  # deleted by its process meanwhile
            return
        if damage is not None:
            self.damages.append(damage)

    def _find_refusal(self, name: str) -> bool:
        """Whether a process has ended because of a damage, and says so; the file is restored then, and it starts again.

        Raises:
            RefusedError: The process goes on refusing: what only a damaged position held is deleted by now.
        """
        error = self.processes[name].last_error()
        named = [damage for damage in self.damages if damage.is_named_in(error)]
        if not error or not named:
            return False
        self.refusals.append(f"{name}: {error}")
        self._refused[name] += 1
        if self._refused[name] > _MOST_REFUSALS and any(damage.victim == "position" for damage in named):
            raise RefusedError(self.refusals[-1])
        if self._refused[name] > _MOST_REFUSALS:
            raise BrokenPromiseError(f"{name} goes on refusing what was restored: {error}")
        for damage in named:
            # In the place of a log.json without chunks there is another one by now.
            if damage.is_there or damage.victim == "log.json":
                damage.heal()
        self._kill(name, 0.0, power=False)
        return True

    def audit(self, options: Mapping[str, str], known: Mapping[int, str]) -> None:
        """Read the whole log, with what is damaged and was not noticed, and restore it then.

        Args:
            options: Of a batch query.
            known: The values that queries have got, by id.

        Raises:
            BrokenPromiseError: The log gave a row that is not right, or left one out, without an error.
        """
        there = [damage for damage in self.damages if damage.is_there]
        if not there:
            return
        lowest = highest = -1
        try:
            for number, value in read_log(**options):
                if known.get(number, value.decode()) != value.decode():
                    raise BrokenPromiseError(f"id {number} has two values")
                if highest >= 0 and number != highest + 1:
                    raise BrokenPromiseError(f"id {number} follows {highest}")
                lowest, highest = number if lowest < 0 else lowest, number
        except ZmqDataSourceError as e:
            if not any(damage.is_named_in(str(e)) for damage in there):
                raise BrokenPromiseError(f"reading the log after {', '.join(map(str, there))}: {e}") from e
            self.refusals.append(f"a batch query: {e}")
        else:
            if 0 <= highest < max(known, default=0):
                raise BrokenPromiseError(f"the log ends before id {max(known)}")
        for damage in there:
            if damage.after is not None or damage.first is None or damage.first > lowest:
                damage.heal()

    def _resume(self, name: str) -> None:
        self.processes[name].signal(signal.SIGCONT)
        self._stopped.discard(name)

    def _look(self, seconds: float) -> None:
        """Let time pass; start again who is due, notice who has ended by itself and who has grown."""
        now = time.monotonic()
        for due, name in [pair for pair in self._again if pair[0] <= now]:
            self._again.remove((due, name))
            self.processes[name].start()
        self.check_alive()
        time.sleep(seconds)

    def check_alive(self) -> None:
        for name, process in self.processes.items():
            if process.struck_dead:
                event = self._struck[name]
                assert event.strike is not None
                self._kill(name, event.seconds, power=event.strike.act == "power")
            if not process.alive and not process.killed and process.popen.returncode != 0:
                if self.damages and self._find_refusal(name):
                    continue
                error = process.last_error()
                if self.explains(error):
                    self.refusals.append(f"{name}: {error}")
                    self._kill(name, _EXPLAINED_SECONDS, power=False)
                    continue
                raise BrokenPromiseError(
                    f"{name} has ended by itself with exit code {process.popen.returncode}"
                )
            size = process.bytes
            self.most_bytes = max(self.most_bytes, size)
            if size > _MOST_BYTES:
                raise BrokenPromiseError(f"{name} holds {size >> 20} MiB")

    # The end.

    def wait_for(self, done: Callable[[], bool], what: str, seconds: float = SETTLE_SECONDS) -> None:
        """Wait for something to come about in fair weather."""
        began = restored = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > began + seconds:
                raise BrokenPromiseError(f"the weather is fair for {seconds:.0f} s, and not yet: {what}")
            if now > restored + _RESTORING_SECONDS:
                self._restore_awaited()
                restored = now
            self._look(0.05)

    def _restore_awaited(self) -> None:
        """Restore the deleted files that a process waits for, as it says in its log: it waits for some minutes."""
        for damage in [damage for damage in self.damages if damage.after is None and damage.is_there]:
            for name, process in self.processes.items():
                lines = process.last_lines().splitlines()
                if any(damage.path.name in line and MOUNT_AGAIN in line for line in lines):
                    self.refusals.append(f"{name}, which waits for {damage.path.name}")
                    damage.heal()
                    break

    def stop(self, *names: str) -> None:
        """End processes in good order. Nothing strikes at a process any more."""
        for name in names:
            process = self.processes[name]
            process.page.disarm()
            code = process.stop()
            if process.struck_dead:  # just before that
                process.kill()
                process.start()
                code = process.stop()
            if code == 1 and self.damages and self._find_refusal(name):
                self._again.clear()
                continue
            # Ended by the signal itself is who was only starting.
            if code not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
                raise BrokenPromiseError(f"{name} ended with exit code {code}")

    def tell(self) -> str:
        return "\n".join(process.last_lines() for process in self.processes.values())


# In how many seeds there is damage at rest, and how long the programs run before.
_DAMAGE_CHANCE, _FIRST_DAMAGE = 0.25, 1.0
_LENGTHS = {
    "kill": (0.0, 1.5),
    "power": (0.0, 1.5),
    "stop": (0.2, 4.0),
    "enospc": (0.2, 3.0),
    "eio": (0.2, 3.0),
    "emfile": (0.2, 3.0),
    "slow": (0.5, 3.0),
    "delay": (0.5, 3.0),
    "throttle": (0.5, 3.0),
    "half-open": (0.5, 4.0),
    "black-hole": (0.3, 4.0),
    **dict.fromkeys(STORE_FAULTS, (0.5, 3.0)),
}


def draw(seed: int, possible: list[tuple[str, str]], seconds: float) -> Iterator[Event]:
    """The weather of a seed: one to five of the possible (kind, target), within so many seconds.

    One black hole in ten is a partition of 30 s.
    """
    chance = random.Random(f"weather {seed}")
    busy: dict[str, float] = {}  # one trouble at a time for each target: they would undo each other
    for _ in range(chance.randint(1, 5)):
        kind, target = chance.choice(possible)
        low, high = _LENGTHS.get(kind, (0.0, 0.0))
        length = chance.uniform(low, high)
        if kind == "black-hole" and chance.random() < 0.1:
            length = 30.0
        at = chance.uniform(0.1, seconds)
        if at < busy.get(target, 0.0):
            at = busy[target] + 0.1
        busy[target] = at + length
        yield Event(at, kind, target, length)


def draw_damage(
    seed: int, possible: Sequence[tuple[str, str]], seconds: float, always: bool = False
) -> Iterator[Event]:
    """The damage at rest of a seed, as (kind, target): in one seed of four one or two.

    Args:
        always: In every seed.
    """
    chance = random.Random(f"damage {seed}")
    if not possible or (chance.random() >= _DAMAGE_CHANCE and not always):
        return
    victims = sorted({target for _, target in possible})
    for _ in range(chance.randint(1, 2)):
        target = chance.choice(victims)
        kind = chance.choice([kind for kind, about in possible if about == target])
        yield Event(
            chance.uniform(_FIRST_DAMAGE, seconds),
            kind,
            target,
            chance.uniform(0.0, 1.0) if "/" in target else 0.0,
        )
