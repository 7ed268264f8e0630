"""Every kind of damage to every file of a log: the same rows, or an error that names the file and the ids.

In a directory. What is in a bucket is read by the same code, and ``test_weather`` damages it (``two-machines``).

A real log is made once: by a query that receives and one that follows, or by a proxy with a durable subscriber, in
processes of their own that are killed. Each cell copies it, damages one file, and lets the queries go on.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.ipc
import pytest

from tests.support import free_endpoint, keep_handlers
from tests.support.proxies import ProxyThreads
from tests.weather.damage import (
    KINDS,
    KNOWN_HOLES,
    Copies,
    Damage,
    do,
    find,
    flip,
    overwrite,
    state_of,
)
from tests.weather.engine import Source, read_output
from tests.weather.machine import World
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.errors import DataLossError, SocketError, ZmqDataSourceError

_ROWS = 20
# Transactions: before the second query is killed, before the damage, and in all.
_EARLY, _BEFORE, _ALL = 3, 5, 6
_SECONDS = 20.0
# A reader that is not given its rows for so long is given them never.
_QUIET_SECONDS = 3.0
_PROXY = {"walChunkBytes": "64k", "walFlushInterval": "10m"}


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)


def due(transactions: int) -> set[str]:
    """The values of so many transactions of both producers."""
    numbers = [(who, n, row) for who in "sa" for n in range(transactions) for row in range(_ROWS // 2)]
    return {f"{who}{number}:{row}" for who, number, row in numbers}


def send(endpoint: str, begin: int, end: int) -> None:
    """Commit transactions from two producers.

    ``a`` goes on after what was acknowledged, ``s`` after what the receiver says that it has. So rows that the log
    has lost are missing from ``a``, and transactions that it has forgotten come twice from ``s``.
    """
    for who in "sa":
        with Producer(endpoint, who, connectTimeout="5s", sendTimeout="5s") as producer:
            last = producer.last_committed if who == "s" else begin - 1
            for number in range(0 if last is None else last + 1, end):
                for row in range(_ROWS // 2):
                    producer.send(f"{who}{number}:{row}")
                producer.flush()


class Sample(NamedTuple):
    """A log with two queries: ``first`` receives, ``late`` follows under a name and has read a part.

    Attributes:
        root: Has the log and the checkpoints.
        copies: Older copies of the small files.
        older: An older copy of the whole directory.
    """

    root: Path
    endpoint: str
    copies: Copies
    older: Path

    @property
    def log(self) -> Path:
        """Where the damage is done."""
        return self.root / "wal"

    def at(self, root: Path) -> Sample:
        """A copy in another directory."""
        shutil.copytree(self.root, root, ignore=shutil.ignore_patterns("*.faults", "*.log", "*.disk"))
        return self._replace(root=root, copies=self.copies.moved(self.root, root))

    def options(self, query: str) -> dict[str, str]:
        options = {"walLocation": str(self.log), "failOnDataLoss": "true"}
        if query == "late":
            return options | {"reader": "late"}
        receives = {"socketType": "ROUTER", "bind": self.endpoint, "walRetention": "0s"}
        return options | receives | {"startingOffsets": "earliest"}

    def rows(self, query: str) -> list[list[Any]]:
        return read_output(self.root / query) if (self.root / query / "out").exists() else []

    def run(self, query: str, begin: int, end: int) -> None:
        """Let a query read all; ``first`` also receives transactions meanwhile. Raises what the query raises."""
        looks, deadline, ended = 0, time.monotonic() + _SECONDS, threading.Event()
        failures: list[str] = []
        last = due(end) - due(end - 1)

        def go_on() -> None:
            while not ended.wait(0.005):
                if looks < 2:  # it has not begun to receive
                    continue
                try:
                    send(self.endpoint, begin, end)
                except SocketError as e:
                    failures.append(f"{type(e).__name__}: {e}")
                return

        def done() -> bool:
            nonlocal looks
            looks += 1
            came = {row[3] for row in self.rows(query)}
            return bool(failures) or time.monotonic() > deadline or last <= came

        thread = threading.Thread(target=go_on)
        if query == "first":
            thread.start()
        try:
            Source(self.root / query, self.options(query)).run(done)
        finally:
            ended.set()
            if query == "first":
                thread.join()
        assert not failures

    def run_all(self) -> None:
        """Let both queries read all, and judge their rows; raises what the queries raise."""
        seen: dict[int, str] = {}
        for query in ("first", "late"):
            self.run(query, _BEFORE, _ALL)
            rows = self.rows(query)
            check([(row[0], row[3]) for row in rows])
            for row in rows:
                assert seen.setdefault(row[0], row[3]) == row[3], f"id {row[0]} has two values"


def check(rows: list[tuple[int, str]]) -> None:
    """Judge what one reader got: each row once, ids without holes."""
    came = Counter(value for _, value in rows)
    assert not (doubled := [value for value, count in came.items() if count > 1]), f"{doubled[:3]} came twice"
    assert not (missing := sorted(due(_ALL) - came.keys())), f"{len(missing)} rows are missing, {missing[:3]}"
    assert [number for number, _ in rows] == list(range(len(rows))), "the ids have holes, or no order"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    root = tmp_path_factory.mktemp("sample")
    made = Sample(root, free_endpoint(), Copies(), tmp_path_factory.mktemp("older") / "log")
    with World(root, 0) as world:
        world.process("first", "source", directory=str(root / "first"), options=made.options("first"))
        world.wait_for(lambda: bool(find(made.log, "log.json")), "there is a log")
        world.process("late", "source", directory=str(root / "late"), options=made.options("late"))
        world.wait_for(lambda: any(made.log.glob("readers/late.json")), "the second query has a position")
        send(made.endpoint, 0, _EARLY)
        world.wait_for(lambda: len(made.rows("late")) == _EARLY * _ROWS, "it has read the first transactions")
        world.processes["late"].kill()
        world.wait_for(lambda: len(made.rows("first")) == _EARLY * _ROWS, "so has the first query")
        made.copies.take(made.log)
        shutil.copytree(made.log, made.older)
        send(made.endpoint, _EARLY, _BEFORE)
        world.wait_for(lambda: len(made.rows("first")) == _BEFORE * _ROWS, "the first query has read all")
        world.stop("first")
    return made


def test_without_damage_the_queries_go_on(sample: Sample, tmp_path: Path) -> None:
    sample.at(tmp_path / "cell").run_all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["earliest chunk", "newest chunk", "position", "log.json"])
def test_a_damaged_file_changes_no_row_or_is_named(
    sample: Sample, victim: str, kind: str, tmp_path: Path
) -> None:
    which, _, victim = victim.rpartition(" ")
    paths = find(sample.log, victim)
    if victim == "position":  # that of the other query is known to its process
        paths = [path for path in paths if path.stem == "late"]
    cell = sample.at(tmp_path / "cell")
    target = cell.root / paths[-1 if which == "newest" else 0].relative_to(sample.root)
    damage = do(kind, victim, target, random.Random(3), cell.copies.of(target))
    if damage is not None:
        judge(cell, damage)


def judge(cell: Sample | Proxied, damage: Damage) -> None:
    """Run the queries after a damage, and again with the file restored if they refuse it."""
    try:
        cell.run_all()
    except ZmqDataSourceError as e:
        message = f"{type(e).__name__}: {e}"
        assert damage.is_named_in(message), f"{damage}: {message}"
    else:
        return
    damage.heal()
    try:
        cell.run_all()
    except DataLossError as e:
        # Without its position a reader holds nothing: its messages may be deleted by now.
        assert damage.victim == "position", f"{damage}: {message}; with the file restored: {e}"


def mark_hole(request: pytest.FixtureRequest, kind: str, victim: str) -> None:
    reason = KNOWN_HOLES.get(f"{kind} {victim}")
    if reason is not None:
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))


def bits_that_hide_the_state(content: bytes) -> list[tuple[int, int]]:
    """The bits of a chunk without which Arrow reads the rows, and no state."""
    found = []
    for byte in state_of(content):
        for bit in range(8):
            _, changed = flip(content, byte, bit)
            try:
                reader = pa.ipc.open_file(pa.BufferReader(changed))
                batch, names = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
                batch.validate(full=True)
            except (OSError, ValueError, pa.ArrowException):
                continue
            if b"state" not in (names or {}):
                found.append((byte, bit))
    return found


@pytest.mark.slow
def test_a_bit_that_hides_the_state_is_named(sample: Sample, tmp_path: Path) -> None:
    newest = find(sample.log, "chunk")[-1]
    content = newest.read_bytes()
    places = bits_that_hide_the_state(content)
    assert places
    for number, (byte, bit) in enumerate(places):
        cell = sample.at(tmp_path / str(number))
        target = cell.root / newest.relative_to(sample.root)
        place, changed = flip(content, byte, bit)
        overwrite(target, changed)
        judge(cell, Damage("flip", "state", target, content, changed, place))


def test_a_flipped_digit_of_a_position_is_named(sample: Sample, tmp_path: Path) -> None:
    """A position that is too high lets the writer delete what its reader needs."""
    cell = sample.at(tmp_path / "cell")
    (target,) = (path for path in find(cell.log, "position") if path.stem == "late")
    content = target.read_bytes()
    position = json.loads(content)["next"]["0"]
    at = content.index(b"%d" % position)
    changed = max(
        flip(content, at, bit)[1] for bit in range(4) if flip(content, at, bit)[1][at : at + 1].isdigit()
    )
    assert json.loads(changed)["next"]["0"] > position
    overwrite(target, changed)
    with pytest.raises(ZmqDataSourceError) as caught:
        cell.run_all()
    assert target.name in str(caught.value)


def test_a_receiver_does_not_begin_a_log_over_old_chunks(sample: Sample, tmp_path: Path) -> None:
    cell = sample.at(tmp_path / "cell")
    for path in find(cell.log, "log.json"):
        path.unlink()
    shutil.rmtree(cell.root / "first")  # a receiver without a checkpoint
    with pytest.raises(ZmqDataSourceError) as caught:
        cell.run("first", _BEFORE, _ALL)
    assert "log" in str(caught.value)


def test_an_older_copy_of_a_log_is_refused_by_its_queries(sample: Sample, tmp_path: Path) -> None:
    cell = sample.at(tmp_path / "cell")
    newer = cell.log.rename(cell.root / "newer")
    shutil.copytree(sample.older, cell.log)
    with pytest.raises(DataLossError, match="newest chunks are gone"):
        cell.run_all()
    shutil.rmtree(cell.log)
    newer.rename(cell.log)
    cell.run_all()


def test_an_older_copy_that_was_received_into_is_refused(sample: Sample, tmp_path: Path) -> None:
    """An id has one value in ``first`` and another one in a query that began with the copy."""
    cell = sample.at(tmp_path / "cell")
    shutil.rmtree(cell.log)
    shutil.copytree(sample.older, cell.log)
    checkpoint = (cell.root / "first").rename(cell.root / "kept")
    send_all = _BEFORE + 2
    cell.run("first", _EARLY, send_all)
    shutil.rmtree(cell.root / "first")
    checkpoint.rename(cell.root / "first")
    with pytest.raises(DataLossError):
        cell.run("first", send_all, send_all + 1)


class Proxied(NamedTuple):
    """The log of a proxy whose durable subscriber has acknowledged the ids below 40."""

    root: Path
    sides: dict[str, str]
    copies: Copies
    got: list[tuple[int, str]]

    def at(self, root: Path) -> Proxied:
        shutil.copytree(self.root / "wal", root / "wal")
        return self._replace(root=root, copies=self.copies.moved(self.root, root), got=[*self.got])

    def run_all(self) -> None:
        """Let the proxy and its subscriber go on until the subscriber has everything; raises what the proxy raises."""
        with (
            ProxyThreads(self.root / "wal", self.sides, walSync=True, **_PROXY) as proxy,
            DurableSubscriber(self.sides["durable"], "sweep", auto_ack=False, timeout=5) as subscriber,
        ):
            send(self.sides["router"], _BEFORE, _ALL)
            quiet_since = time.monotonic()
            while len(self.got) < len(due(_ALL)) and time.monotonic() - quiet_since < _QUIET_SECONDS:
                if proxy.failure is not None:
                    raise proxy.failure
                if (message := subscriber.receive(0.05)) is not None:
                    self.got.append((message.id, message.value.decode()))
                    quiet_since = time.monotonic()
        check(self.got)


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Proxied:
    root = tmp_path_factory.mktemp("proxied")
    made = Proxied(root, {"router": free_endpoint(), "durable": free_endpoint()}, Copies(), [])
    with World(root, 0) as world:
        options = {"walLocation": str(root / "wal"), **made.sides, **_PROXY}
        world.process("proxy", "proxy", options=options)
        with DurableSubscriber(made.sides["durable"], "sweep", auto_ack=False, timeout=30) as subscriber:
            send(made.sides["router"], 0, _EARLY)
            for enough in (30, 40):
                while len(made.got) < enough:
                    if (message := subscriber.receive(0.1)) is not None:
                        made.got.append((message.id, message.value.decode()))
                subscriber.ack(made.got[-1][0], wait=True)
                made.copies.take(root / "wal")
        send(made.sides["router"], _EARLY, _BEFORE)
        world.processes["proxy"].kill()
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["open-chunk", "subscriber", "log.json"])
def test_a_damaged_file_of_a_proxy_changes_no_message_or_is_named(
    proxied: Proxied, victim: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if (victim, kind) == ("open-chunk", "cut") or victim == "subscriber":
        mark_hole(request, kind, victim)
    cell = proxied.at(tmp_path / "cell")
    (target,) = find(cell.root / "wal", victim)
    damage = do(kind, victim, target, random.Random(3), cell.copies.of(target))
    if damage is not None:
        judge(cell, damage)


@pytest.mark.parametrize("kind", ["flip", "cut"])
@pytest.mark.xfail(strict=True, raises=AssertionError, reason=KNOWN_HOLES["cut open-chunk"])
def test_the_last_group_of_an_open_chunk_is_missed(proxied: Proxied, kind: str, tmp_path: Path) -> None:
    cell = proxied.at(tmp_path / "cell")
    (target,) = find(cell.root / "wal", "open-chunk")
    content = target.read_bytes()
    after = content[:-1] if kind == "cut" else flip(content, content.rindex(b"a4:9"), 0)[1]
    overwrite(target, after)
    judge(cell, Damage(kind, "open-chunk", target, content, after))


def test_a_flipped_digit_of_a_position_of_a_subscriber_is_named(proxied: Proxied, tmp_path: Path) -> None:
    """A subscriber whose place is too high is never sent what it has not acknowledged."""
    cell = proxied.at(tmp_path / "cell")
    (target,) = find(cell.root / "wal", "subscriber")
    content = target.read_bytes()
    place, after = flip(content, content.index(b'"next":{"0":40}') + len(b'"next":{"0":'), 0)  # 40 becomes 50
    overwrite(target, after)
    judge(cell, Damage("flip", "subscriber", target, content, after, place))


def test_a_chunk_that_is_lost_below_an_open_one_is_named(tmp_path: Path) -> None:
    sides = {"router": free_endpoint(), "durable": free_endpoint()}
    log = tmp_path / "wal"
    with World(tmp_path, 0) as world:
        options = {"walLocation": str(log), **sides, **_PROXY, "walFlushInterval": "2s"}
        world.process("proxy", "proxy", options=options)
        send(sides["router"], 0, _EARLY)
        world.wait_for(lambda: bool(find(log, "chunk")), "a chunk is sealed")
        send(sides["router"], _EARLY, _BEFORE)
        world.processes["proxy"].kill()
    assert find(log, "open-chunk")
    find(log, "chunk")[-1].unlink()
    with (
        pytest.raises(ZmqDataSourceError, match=r"\.open-.* are missing\. Restore them"),
        ProxyThreads(log, sides, walSync=True),
    ):
        pass
