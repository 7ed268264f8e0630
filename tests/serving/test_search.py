"""A search over what networks, disks and callers do to a durable subscriber and its server, both as they are.

Each run is drawn from its seed. Messages are lost, doubled, delayed and overtaken; the server is restarted and forgets
what is not on its disk, which is slow and refuses; the log loses messages; the subscriber is killed, and comes back.
"""

from __future__ import annotations

import heapq
import math
from random import Random
from typing import Any

import pytest

from tests.serving.host import Host
from zmq_datasource.serving.protocol import Batch, Fetch, Open, Opened, decode
from zmq_datasource.serving.subscriber_session import SubscriberSession

TOPICS = (b"a", b"ab", b"b")
NAME = "me"
TO_SERVER, TO_CLIENT = "server", "client"


class Network:
    """The messages on the way between a server and the present connection of a client."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._on_way: list[tuple[float, int, str, int, list[bytes]]] = []
        self._count = 0
        self.connection = 0
        self.is_calm = False

    def send(self, to: str, connection: int, frames: list[bytes], now: float) -> None:
        copies = 1 if self.is_calm else self._random.choices((0, 1, 2), (20, 70, 10))[0]
        for _ in range(copies):
            slow = not self.is_calm and self._random.random() < 0.1
            delay = self._random.uniform(0, 9 if slow else 0.3)
            self._count += 1
            heapq.heappush(self._on_way, (now + delay, self._count, to, connection, frames))

    def arrived(self, now: float) -> list[tuple[str, int, list[bytes]]]:
        found = []
        while self._on_way and self._on_way[0][0] <= now:
            _, _, to, connection, frames = heapq.heappop(self._on_way)
            if to == TO_SERVER or connection == self.connection:
                found.append((to, connection, frames))
        return found

    def reconnect(self) -> None:
        """Messages from the server on the old connection are lost; those to it may still arrive."""
        self.connection += 1

    def lose_all(self) -> None:
        self._on_way.clear()


class Run:
    """One run, and its judge.

    Attributes:
        given: The ids that the caller has got of this session.
        settled: The ids that need not come: acknowledged, lost, superseded, or before where the name began.
        confirmed: The highest position that was ever confirmed.
    """

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.now = 0.0
        self.network = Network(random)
        self.host = Host(random)
        self.topics = random.choice([(), (b"a",), (b"b",), (b"ab", b"b")])
        self.start = random.choice(["earliest", "earliest", "last", "latest"])
        self.waits = random.random() < 0.5  # for the disk, in the end
        self.loses = random.random() < 0.5
        self.settled: set[int] = set()
        self.confirmed = 0
        self.clients = 0
        self.is_known = False  # no client knows of the name yet
        self.loss_told: set[int] = set()
        self.reached: dict[str, int] = dict.fromkeys(
            (
                "killed",
                "restarted",
                "lost",
                "redialled",
                "given",
                "given again",
                "confirmed",
                "refused",
                "away",
            ),
            0,
        )
        self.ever_given: set[int] = set()
        self.publish(random.randint(0, 30))
        self.begin()

    def publish(self, count: int) -> None:
        self.host.log += [self.random.choice(TOPICS) for _ in range(count)]

    def matches(self, number: int) -> bool:
        return not self.topics or self.host.log[number].startswith(self.topics)

    def begin(self) -> None:
        """A new client."""
        self.clients += 1
        request = Open(name=NAME, session=self.clients, start=self.start)
        self.session = SubscriberSession(request, self.topics, 100, math.inf, "tcp://server:1")
        self.given: list[int] = []
        self.acked = -1
        self.first: int | None = None
        self.session.reconnected(self.now)

    # Judging.

    def check(self) -> None:
        session = self.session
        if session.refusal is not None:
            assert "no space left" in str(session.refusal), str(session.refusal)
            self.reached["refused"] += 1
            self.kill()
        if not session.is_open:
            return
        if self.first is None:
            self._judge_opening()
        kept = self.host.lease(NAME).next
        assert session.confirmed <= kept, "more is confirmed than is on the disk"
        assert session.confirmed <= session.inbox.done, "more is confirmed than is done"
        self.reached["confirmed"] += session.confirmed > self.confirmed
        self.confirmed = max(self.confirmed, session.confirmed)

    def _judge_opening(self) -> None:
        self.first = first = self.session.inbox.done
        assert self.session.log == "log-1"
        if not self.is_known:
            assert self.session.new or self.clients > 1, "the first client has made the name"
            notes = self.host.lease(NAME).subscriber
            assert notes is not None
            if self.start == "earliest":
                assert first <= self.host.earliest
            newest = {self.host.log[n]: n for n in range(first, notes.snapshot)}
            self.settled = set(range(first)) | (set(range(first, notes.snapshot)) - set(newest.values()))
        self.is_known = True
        missing = [n for n in range(first) if self.matches(n) and n not in self.settled]
        assert not missing, f"the ids {missing} are skipped"
        assert first >= self.confirmed, "it goes back behind a confirmed position"

    def judge_taken(self, number: int, frames: tuple[bytes, ...]) -> None:
        assert self.first is not None
        assert number >= max(self.first, self.confirmed), f"{number} comes again"
        assert frames == (self.host.log[number], b"%d" % number)
        assert self.matches(number)
        last = self.given[-1] if self.given else self.first - 1
        assert number > last, f"{number} comes after {last}"
        skipped = [n for n in range(last + 1, number) if self.matches(n) and n not in self.settled]
        assert not skipped, f"{skipped} are skipped before {number}"
        self.given.append(number)
        self.reached["given"] += 1
        self.reached["given again"] += number in self.ever_given
        self.ever_given.add(number)

    def judge_said(self, message: Any) -> None:
        if isinstance(message, Fetch):
            assert self.session.is_open, "it asks for messages of a name that it does not have"
            early = [n for n in range(message.done) if self.matches(n) and n not in self.settled]
            assert not early, f"done {message.done} passes the ids {early}"

    # Events.

    def receive(self, frames: list[bytes]) -> None:
        session = self.session
        message, _ = decode(frames)
        lost, was_open = session.lost, session.is_open
        session.receive(frames, self.now)
        if isinstance(message, Batch) and session.lost > lost:
            assert self.loses, "something is lost that a lease needs"
            assert session.lost - lost == message.lost
            gone = range(message.next - message.lost, message.next)
            assert not self.loss_told & set(gone), "a loss is counted twice"
            assert not set(self.given) & set(gone), "a message that was handed over is counted as lost"
            assert all(n < self.host.earliest for n in gone)
            self.loss_told.update(gone)
            self.settled.update(gone)
            self.reached["lost"] += 1
        else:
            assert session.lost == lost
        if isinstance(message, Opened) and session.is_open and not was_open:
            self.loss_told.clear()
        self.check()

    def step(self, seconds: float | None = None) -> None:
        self.now += seconds or self.random.uniform(0.01, 0.4)
        for to, connection, frames in self.network.arrived(self.now):
            if to == TO_SERVER:
                self.host.now = self.now
                self.host.receive(b"%d" % connection, frames)
            elif connection == self.network.connection:
                self.receive(frames)
        self.host.step(self.now)
        for peer, frames in self.host.answers:
            self.network.send(TO_CLIENT, int(peer), frames, self.now)
        self.host.answers.clear()
        self.session.wake(self.now)
        self.flush()
        self.check()

    def flush(self) -> None:
        session = self.session
        if session.redial:
            session.redial = False
            self.network.reconnect()
            self.reached["redialled"] += 1
        if not self.network.is_calm and session.outbox and self.random.random() < 0.02:
            session.blocked()
        while session.outbox:
            frames = [bytes(frame) for frame in session.outbox.popleft()]
            self.judge_said(decode(frames)[0])
            self.network.send(TO_SERVER, self.network.connection, frames, self.now)

    def take(self, most: int) -> None:
        for _ in range(most):
            message = self.session.inbox.peek()
            if message is None:
                break
            if not self.network.is_calm and self.random.random() < 0.1:
                break  # an interrupt before the caller has it
            self.session.inbox.hand_over(message[0], message[0])
            self.judge_taken(*message)

    def ack(self) -> None:
        """Acknowledge all messages that were taken, or some."""
        open_ones = [n for n in self.given if n > self.acked]
        if open_ones:
            self.acked = self.random.choice(open_ones)
            self.settled.update(range(self.acked + 1))
            self.session.inbox.acked = self.acked + 1

    def do_one_thing(self) -> None:
        """Let one thing happen, or nothing."""
        random = self.random
        kind = random.choices(
            (
                "take",
                "ack",
                "publish",
                "delete",
                "tidy",
                "cut",
                "restart",
                "confirm",
                "kill",
                "stop",
                "nothing",
            ),
            (30, 20, 12, 4 if self.loses else 0, 4, 3, 2, 4, 1, 1, 40),
        )[0]
        match kind:
            case "take":
                self.take(random.randint(1, 6))
            case "ack":
                self.ack()
            case "publish":
                self.publish(random.randint(1, 4))
            case "delete":
                self.host.delete(random.randint(self.host.earliest, len(self.host.log)))
            case "tidy":
                self.host.tidy()
            case "cut":
                self.network.reconnect()
                self.session.reconnected(self.now)
            case "restart":
                self.restart()
            case "confirm":  # at the end of a block, which is waited for, or not
                self.session.confirm(self.now)
                for _ in range(random.randint(0, 4)):
                    self.flush()
                    self.step()
                self.kill()
            case "kill":
                self.kill()
            case "stop":  # for so long that the server counts it as away
                self.reached["away"] += 1
                for _ in range(30):
                    self.now += 0.3
                    self.host.step(self.now)
        self.flush()

    def restart(self) -> None:
        self.reached["restarted"] += 1
        self.network.lose_all()
        self.host.restart()
        if self.random.random() < 0.5:  # otherwise only silence shows it
            self.network.reconnect()
            self.session.reconnected(self.now)

    def kill(self) -> None:
        self.reached["killed"] += 1
        self.network.lose_all()
        self.network.reconnect()
        self.loss_told.clear()
        self.begin()

    def end(self) -> None:
        """End all faults, and check that every message comes and is confirmed."""
        self.network.is_calm = self.host.is_calm = True
        deadline = self.now + 60
        end = len(self.host.log)
        while self.session.confirmed < end:
            assert self.now < deadline, f"{self.session.confirmed} of {end} are confirmed after a minute"
            self.step()
            self.take(100)
            if self.waits and self.session.inbox.done == end:
                self.session.confirm(self.now)
            if self.given:
                self.acked = self.given[-1]
                self.settled.update(range(self.acked + 1))
                self.session.inbox.acked = self.acked + 1
        missing = [n for n in range(end) if self.matches(n) and n not in self.settled]
        assert not missing


def run(seed: int, steps: int = 400) -> Run:
    it = Run(seed)
    for _ in range(steps):
        it.step()
        it.do_one_thing()
    it.end()
    return it


@pytest.mark.parametrize("begin", range(0, 240, 60))
def test_messages_come_in_order_and_only_durable_positions_are_confirmed(begin: int) -> None:
    for seed in range(begin, begin + 60):
        try:
            run(seed)
        except BaseException as e:
            e.add_note(f"seed {seed}")
            raise


def test_the_search_reaches_every_kind_of_fault() -> None:
    reached = [run(seed).reached for seed in range(20)]
    for what in reached[0]:
        assert sum(one[what] for one in reached) >= 2, what
