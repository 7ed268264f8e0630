"""Every order of the steps of several processes that use one store, without a clock.

A process is real code over a store, of which each verb is a step. What it does next depends on nothing but the answers
that it has got. So it is not stopped: it is run again from its beginning with these answers, up to its next step. The
orders are gone through depth first, and two that lead to the same state (what the store holds, and which answers each
process has got) are one from there on. A process that dies is one that takes no step any more: what must hold is
checked in each state.

The store does what a ``Store`` promises, and no more: ``hold`` is given to each process that asks, as if every lock
were lost; where a test says so, a listing is not of one moment, and a number of requests have no answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from zmq_datasource.errors import DiskFaultError, KeyTakenError
from zmq_datasource.log.layout import CHUNKS_NAME, LOG_NAME
from zmq_datasource.log.store import Content, Entry

__all__ = [
    "Check",
    "Held",
    "Note",
    "Now",
    "Process",
    "Request",
    "Steps",
    "Tried",
    "World",
    "answers",
    "bytes_of",
    "every_order",
]


class Held(NamedTuple):
    """An object: its content, and how many of its key there were before."""

    content: bytes
    number: int


class World(NamedTuple):
    """What the store holds, and has held.

    Attributes:
        objects: By key, in order.
        made: By key, how many objects of it there were.
        faults: How often it may yet fail to answer.
        account: What ``Check.step`` has made of all that has happened.
    """

    objects: tuple[tuple[str, Held], ...] = ()
    made: tuple[tuple[str, int], ...] = ()
    faults: int = 0
    account: Any = None

    def get(self, key: str) -> Held | None:
        return dict(self.objects).get(key)

    def with_object(self, key: str, content: bytes) -> World:
        objects, made = dict(self.objects), dict(self.made)
        made[key] = made.get(key, 0) + 1
        objects[key] = Held(content, made[key])
        return self._replace(objects=tuple(sorted(objects.items())), made=tuple(sorted(made.items())))

    def without(self, key: str) -> World:
        return self._replace(objects=tuple(it for it in self.objects if it[0] != key))

    def names(self, prefix: str) -> tuple[Entry, ...]:
        """A listing as of now."""
        keys = ((*key.rpartition("/"), held) for key, held in self.objects)
        return tuple(_entry(name, held) for directory, _, name, held in keys if directory == prefix)


def _entry(name: str, held: Held) -> Entry:
    return Entry(name, len(held.content), float(held.number))


class _Missing(NamedTuple):
    """The answer of ``open`` if there is no object."""


class _Taken(NamedTuple):
    """The answer of ``put_new`` if there is another object."""


class _Fault(NamedTuple):
    """The answer of a store that does not answer."""


def bytes_of(content: Content) -> bytes:
    """The content of an object, in one piece."""
    return b"".join(bytes(memoryview(part).cast("B")) for part in content)


class Request(NamedTuple):
    """One step."""

    verb: str
    arguments: tuple[Any, ...]

    @property
    def key(self) -> str:
        return str(self.arguments[0])

    def __str__(self) -> str:
        return f"{self.verb} {self.key}"


class Note(NamedTuple):
    """What a process has done, in its own words."""

    what: str
    about: Any


class Check:
    """What must hold. Its methods raise AssertionError."""

    def step(self, name: str, request: Request, before: World, after: World) -> Any:
        """A process has taken a step; the account as of now."""
        return before.account

    def note(self, name: str, note: Note, world: World) -> None:
        """A process has done something."""

    def end(self, name: str, error: Exception | None, world: World) -> None:
        """A process has ended."""

    def state(self, world: World) -> None:
        """It has come to this."""


class _NextStep(BaseException):  # nothing in the package catches it
    """A process has come to a step for which there is no answer yet."""


class _Hold:
    lost = None

    def release(self) -> None:
        pass


class Steps:
    """The store of a process that is run with the answers that it has got so far.

    Attributes:
        notes: What it has done, in order.
        next: Its next step, if it has come to one.
        may_delete: Whether it may.
    """

    def __init__(self, answers: Sequence[tuple[Request, Any]], torn: bool = False) -> None:
        self._answers = iter(answers)
        self._torn = torn
        self.notes: list[Note] = []
        self.next: Request | None = None
        self.may_delete = True

    def tell(self, what: str, about: Any = None) -> None:
        """For ``Check.note``."""
        if self.next is None:
            self.notes.append(Note(what, about))

    def _ask(self, verb: str, *arguments: Any) -> Any:
        request = Request(verb, arguments)
        if self.next is None:
            for asked, answer in self._answers:
                assert asked == request, (
                    f"it has asked for {asked}, and now for {request}: it is not deterministic"
                )
                if isinstance(answer, _Fault):
                    raise DiskFaultError(f"{request}: no answer")
                return answer
            self.next = request
        raise _NextStep

    def __str__(self) -> str:
        return "the store"

    def path_of(self, key: str) -> str:
        return key

    def create(self, *directories: str) -> None:
        pass

    def list(self, prefix: str = "") -> Sequence[Entry]:
        found: Sequence[Entry] = self._ask("list", prefix)
        if self._torn and prefix == CHUNKS_NAME:
            found = self._ask("list on", prefix, found)
        return found

    def find(self, key: str) -> Entry | None:
        found: Entry | None = self._ask("find", key)
        return found

    def open(self, key: str) -> pa.NativeFile:
        content = self._ask("open", key)
        if isinstance(content, _Missing):
            raise FileNotFoundError(2, "no such object", key)
        return pa.BufferReader(content)

    def put_new(self, key: str, content: Content) -> None:
        answer = self._ask("put_new", key, bytes_of(content))
        if isinstance(answer, _Taken):
            raise KeyTakenError(f"{key} is taken")

    def put(self, key: str, content: bytes) -> None:
        self._ask("put", key, content)

    def delete(self, key: str) -> None:
        assert self.may_delete, f"{key} is deleted by a process that may not"
        self._ask("delete", key)

    def empty(self) -> None:
        """What no process does: delete all there is."""
        self._ask("empty", "")

    def hold(self, key: str, wait: float) -> _Hold:
        return _Hold()

    def holder(self, key: str) -> str | None:
        return None


Process = Callable[[Steps], None]


class Now(Steps):
    """The store of a process that runs alone.

    Attributes:
        world: What it holds.
    """

    def __init__(self, world: World, check: Check | None = None) -> None:
        super().__init__(())
        self.world = world
        self._check = check or Check()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        request = Request(verb, arguments)
        answer, after = next(_answers(self.world, request))
        self.world = after._replace(account=self._check.step("", request, self.world, after))
        return answer


def _answers(world: World, request: Request) -> Iterator[tuple[Any, World]]:
    """What the store may answer, and what it holds then; first of all what it answers if nothing is in the way."""
    for answer, after in answers(world, request):
        yield answer, after
        if world.faults and request.verb != "empty":
            yield _Fault(), after._replace(faults=world.faults - 1)
            if after.objects != world.objects:
                yield _Fault(), world._replace(faults=world.faults - 1)


def answers(world: World, request: Request) -> Iterator[tuple[Any, World]]:
    """What a store may answer that has no fault, and what it holds then."""
    key, *rest = request.arguments
    held = world.get(key)
    match request.verb:
        case "find":
            yield (None if held is None else _entry(key.rpartition("/")[2], held)), world
        case "open":
            yield (_Missing() if held is None else held.content), world
        case "list":
            yield world.names(key), world
        case "list on":
            for found in _listings(*rest, world.names(key)):
                yield found, world
        case "put_new" if held is None:
            yield None, world.with_object(key, rest[0])
        case "put_new":
            yield (None if held.content == rest[0] else _Taken()), world
        case "put":
            yield None, world.with_object(key, rest[0])
        case "delete":
            yield None, world.without(key)
        case "empty":
            yield None, world._replace(objects=())
        case _:
            raise AssertionError(request)


def _listings(begun: tuple[Entry, ...], ended: tuple[Entry, ...]) -> Iterator[tuple[Entry, ...]]:
    """What a listing may show that has taken a while.

    Of what was deleted meanwhile it may show anything, but not nothing where there always was something. Of what was
    put meanwhile, too; but if it shows a chunk, then also those that were put before.
    """
    stayed = [entry for entry in ended if entry in begun]
    deleted = [entry for entry in begun if entry not in ended]
    new = sorted(entry for entry in ended if entry not in begun)
    newest = max((entry.name for entry in begun), default="")
    behind = [entry for entry in new if entry.name > newest]
    between = [entry for entry in new if entry.name <= newest]
    for some, few in itertools.product(_subsets(deleted), _subsets(between)):
        for count in range(len(behind) + 1):
            if begun and not (stayed or some):
                continue
            shown = {entry.name: entry for entry in (*stayed, *some, *few, *behind[:count])}
            yield tuple(sorted(shown.values()))


def _subsets(entries: Sequence[Entry]) -> Iterator[tuple[Entry, ...]]:
    for count in range(len(entries) + 1):
        yield from itertools.combinations(entries, count)


class Tried(NamedTuple):
    """How many orders there are, of how many states, and how often a process was run."""

    orders: int
    states: int
    runs: int


class _Ran(NamedTuple):
    """A process that was run up to its next step, or to its end."""

    next: Request | None
    notes: tuple[Note, ...]
    error: Exception | None


# A place in the run of a process: which one, the place before, and the answer since; the beginning has none.
_Place = tuple[int, "int | None", Any]


class _Orders:
    def __init__(self, processes: dict[str, Process], check: Check, still: Sequence[str], torn: bool) -> None:
        self._names, self._processes = list(processes), list(processes.values())
        self._check, self._still, self._torn = check, tuple(still), torn
        self._places: dict[_Place, int] = {}
        self._listed: list[_Place] = []
        self._ran: dict[int, _Ran] = {}
        self._orders: dict[Any, int] = {}
        self._path: list[str] = []

    def go(self, world: World, begun: dict[str, str]) -> Tried:
        state: Any = world, tuple(self._place((i, None, None)) for i in range(len(self._processes)))
        for i, name in enumerate(self._names):
            state = self._settled(*state, i)
            while (
                name in begun
                and (request := self._run(state[1][i]).next)
                and not str(request).startswith(begun[name])
            ):
                answer, after = next(_answers(state[0], request))
                state = self._settled(*self._step(*state, i, request, answer, after), i)
        orders = self._from(*state)
        return Tried(orders, len(self._orders), len(self._ran))

    def _place(self, place: _Place) -> int:
        if place not in self._places:
            self._places[place] = len(self._listed)
            self._listed.append(place)
        return self._places[place]

    def _run(self, at: int) -> _Ran:
        if at not in self._ran:
            process, before, answer = self._listed[at]
            answers: list[tuple[Request, Any]] = []
            while before is not None:
                asked = self._ran[before].next
                assert asked is not None
                answers.append((asked, answer))
                _, before, answer = self._listed[before]
            steps, error = Steps(answers[::-1], self._torn), None
            try:
                self._processes[process](steps)
            except _NextStep:
                pass
            except Exception as e:
                error = e if steps.next is None else None
            self._ran[at] = _Ran(steps.next, tuple(steps.notes), error)
        return self._ran[at]

    def _from(self, world: World, places: tuple[int, ...]) -> int:
        """How many orders go on from here."""
        state = world, places
        if state in self._orders:
            return self._orders[state]
        orders = 0
        for i, at in enumerate(places):
            request = self._run(at).next
            if request is None:
                continue
            for answer, after in _answers(world, request):
                self._path.append(f"{self._names[i]}: {request} -> {_shown(answer)}")
                try:
                    stepped = self._step(world, places, i, request, answer, after)
                    orders += self._from(*self._settled(*stepped, i))
                except Exception as e:
                    if not hasattr(e, "__notes__"):
                        e.add_note("in this order:\n" + "\n".join(self._path))
                    raise
                self._path.pop()
        self._orders[state] = orders = orders or 1
        return orders

    def _step(
        self, world: World, places: tuple[int, ...], i: int, request: Request, answer: Any, after: World
    ) -> tuple[World, tuple[int, ...]]:
        """The state after a step."""
        after = after._replace(account=self._check.step(self._names[i], request, world, after))
        there = self._place((i, places[i], answer))
        now = self._run(there)
        for note in now.notes[len(self._run(places[i]).notes) :]:
            self._check.note(self._names[i], note, after)
        if now.next is None:
            self._check.end(self._names[i], now.error, after)
        self._check.state(after)
        return after, (*places[:i], there, *places[i + 1 :])

    def _settled(self, world: World, places: tuple[int, ...], i: int) -> tuple[World, tuple[int, ...]]:
        """The same after the steps of a process that nothing else has to do with."""
        while (request := self._run(places[i]).next) is not None and request.key in self._still:
            answer, after = next(_answers(world, request))
            world, places = self._step(world, places, i, request, answer, after)
        return world, places


def _shown(answer: Any) -> str:
    if isinstance(answer, bytes):
        return f"{len(answer)} bytes"
    if isinstance(answer, tuple) and all(isinstance(it, Entry) for it in answer):
        return ", ".join(it.name.lstrip("0") or "0" for it in answer) or "nothing"
    return str(answer)


def every_order(
    world: World,
    processes: dict[str, Process],
    check: Check,
    *,
    begun: dict[str, str] | None = None,
    still: Sequence[str] = (LOG_NAME, "readers"),
    torn: bool = False,
) -> Tried:
    """Go through every order of the steps of processes.

    Args:
        world: What there is before.
        begun: Processes that have come, one after the other, to their first step that begins with this text; before
            there is a choice.
        still: Keys and directories that never change, so that steps which read them have no order.
        torn: Whether a listing of the sealed chunks is not of one moment.
    """
    return _Orders(processes, check, still, torn).go(world, begun or {})
