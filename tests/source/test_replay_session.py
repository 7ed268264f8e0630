"""Replays in many orders of loss, delay and restarts, from a seed: a session, an intake and a publisher, no sockets.

The publisher keeps its newest messages, and a run of it counts from 0. ``World`` draws what happens next; when all
works again, ``judge`` compares the rows with what was sent.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.support import stream_options
from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.framing.replay import END, request
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.sequences import Gap
from zmq_datasource.source.intake import Arrival, Intake
from zmq_datasource.source.replay_session import ReplaySession

FEED = "tcp://feed:1"
KEY = FEED.encode()
TIMEOUT = 5.0


def reply(number: int, value: bytes) -> list[bytes]:
    return [b"", b"t", number.to_bytes(8, "big"), value]


class World:
    """A publisher, its connections, and the receiver of its messages.

    Args:
        seed: What happens.
        buffer: How many messages the publisher keeps.
        options: Options of the source.
    """

    def __init__(self, seed: int = 0, buffer: int = 1000, **options: str) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self._buffer = buffer
        self._options = stream_options(
            connect=FEED, framing="vllm", replayEndpoint="tcp://replays:1", onMalformed="keep", **options
        )
        self.rows: list[tuple[int, int]] = []  # run and number, as the value says
        self.numbers: list[int] = []  # as the column says
        self.given_up: list[Gap] = []
        self.unheard: set[int] = set()  # given up because no request was answered
        # The run whose first message had a higher number than the run before it: that looks like no restart.
        self.unnoticed = -1
        self.starts: list[int] = []
        self._unanswered = 0
        self.run = -1
        self.redials = 0
        self.connection: int | None = None
        self._connections = 0
        self.answers = True
        self.restart_publisher()
        self._saved = b""
        self.open()

    # The publisher.

    def restart_publisher(self) -> None:
        """The publisher ends, and another run starts. What its sockets held is gone."""
        self.run += 1
        self.sent = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=self._buffer)
        self.live: deque[tuple[int, bytes]] = deque()
        self.replies: deque[list[bytes]] = deque()
        self.connection = None
        if self.run:
            self.session.reconnected(self.now)

    def publish(self, count: int = 1, delivered: bool = True) -> None:
        for _ in range(count):
            message = self.sent, b"%d.%d" % (self.run, self.sent)
            self.kept.append(message)
            if delivered and self.connection is not None:
                self.live.append(message)
            self.sent += 1

    def answer(self) -> None:
        """The publisher answers what it was asked; its queue may overflow, but not at the first reply."""
        while self.session.outbox:
            start = int.from_bytes(self.session.outbox[0][1], "big")
            assert list(self.session.outbox.popleft()) == request(start)
            self.starts.append(start)
            if self.answers:
                have = [reply(n, value) for n, value in self.kept if n >= start]
                self.replies.extend([*have, [b"", b"", END, b""]])

    def lose_replies(self) -> None:
        """Lose, double and swap some replies behind the first, or all from one on."""
        first, rest = list(self.replies)[:1], list(self.replies)[1:]
        end = rest[-1:]
        rest = [each for each in rest[:-1] if self.draw.random() < 0.8]
        rest += self.draw.choices(rest, k=min(2, len(rest)))
        self.draw.shuffle(rest)
        if self.draw.random() < 0.3:
            rest, end = rest[: len(rest) // 2], []
        self.replies = deque([*first, *rest, *end])

    def connect(self) -> None:
        """The live flow has a new connection. It is assumed that what the former one has brought was received."""
        if self.session.holds_live and self.live:
            return
        self.hear(len(self.live))
        self._connections += 1
        self.connection = self._connections
        self.session.note_live(self.now)

    # The receiver, as ``Receiver`` does it.

    def open(self) -> None:
        """Start the query, from what its log has."""
        self.counters = SourceCounters()
        self.intake = Intake(self._options, self.counters)
        self.intake.restore(self._saved)
        tracker = self.intake.tracker
        assert tracker is not None
        self.tracker = tracker
        first = 0 if self._options.replay_from == "earliest" else None
        self.session = ReplaySession(FEED, "tcp://replays:1", TIMEOUT, self.counters, tracker, first)
        self.session.reachable = True
        self.live.clear()
        self.replies.clear()
        self._connections = 0
        self.connection = None
        self.session.start(self.now)

    def kill_query(self) -> None:
        """The query dies: the state is that of its last row."""
        self.open()

    def hear(self, count: int) -> None:
        """The live flow brings messages, unless it waits."""
        if self.session.holds_live or not self.live:
            return
        messages = [self.live.popleft() for _ in range(min(count, len(self.live)))]
        self._note_first(messages[0][0])
        self.session.note_live(self.now)
        raw = raw_of([[b"t", n.to_bytes(8, "big"), value] for n, value in messages])
        batch, _ = self.intake.read(raw, [Arrival(0, len(messages), FEED, self._connections)])
        self._keep(batch)

    def _note_first(self, number: int) -> None:
        if self.rows and self.rows[-1][0] < self.run and number >= (self.tracker.expected.get(KEY) or 0):
            self.unnoticed = self.run

    def reply(self, count: int) -> None:
        """Replies arrive."""
        for _ in range(min(count, len(self.replies))):
            self._unanswered = 0
            self.session.receive(self.replies.popleft(), self.now)

    def take(self) -> None:
        """Take the replies, and let the session act."""
        self.tracker.connections[KEY] = self._connections
        self.session.live = self.connection is not None
        replies = self.session.take(self.now)
        self._redial()
        if replies:
            self._note_first(replies[0].sequence)
            arrival = Arrival(0, len(replies), FEED, self._connections)
            self._keep(self.intake.read_replies(replies, arrival)[0])
        given_up = self.session.step(bool(self.live), self.now)
        self.given_up += given_up
        self._unanswered += self.session.redial  # the request has ended without its end marker
        if self._unanswered >= 3:
            self.unheard.update(n for gap in given_up for n in range(gap.first, gap.last + 1))
        self._redial()

    def _redial(self) -> None:
        if self.session.redial:
            self.session.redial = False
            self.redials += 1
            self.replies.clear()

    def _keep(self, batch: object) -> None:
        columns = batch.to_pydict()  # type: ignore[attr-defined]
        for value, number in zip(columns["value"], columns["sequence"], strict=True):
            run, _, sent = value.decode().partition(".")
            self.rows.append((int(run), int(sent)))
            self.numbers.append(number)
        if columns["value"]:
            self._saved = self.intake.state()

    def run_for(self, seconds: float, tick: float = 0.05) -> None:
        """Let time pass while everything works."""
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            self.hear(100)
            self.answer()
            self.reply(1000)
            self.take()

    # What happens, and what must be true.

    def step(self) -> None:
        """Something happens."""
        draw, happens = self.draw, self.draw.random()
        if happens < 0.25:
            self.publish(draw.randint(1, 4), delivered=draw.random() < 0.7)
        elif happens < 0.45:
            self.hear(draw.randint(1, 3))
        elif happens < 0.55:
            self.answer()
        elif happens < 0.7:
            self.reply(draw.randint(1, 5))
        elif happens < 0.85:
            self.now += draw.choice([0.01, 0.1, 1.0, TIMEOUT])
        else:
            self._disturb()
        self.take()

    def _disturb(self) -> None:
        match self.draw.randrange(9):
            case 0 | 1:
                self.lose_replies()
            case 2:
                self.connection = None
            case 3:
                self.connect()
            case 4:
                self.session.reachable = self.answers = not self.answers
            case 5:
                self.session.reconnected(self.now)
                self.replies.clear()
            case 6:
                self.kill_query()
            case 7:
                self.session.note_pause(self.now)
            case 8 if self.draw.random() < 0.5:
                self.restart_publisher()

    def judge(self) -> None:
        """When everything works again, each message is a row once, or known to be lost."""
        self.answers = self.session.reachable = True
        self.run_for(TIMEOUT + 1)
        if self.connection is None:
            self.connect()
        self.run_for(40)
        self.publish()
        self.run_for(3 * TIMEOUT + 5)
        assert self.numbers == [sent for _, sent in self.rows]
        assert len(set(self.rows)) == len(self.rows), "a message came twice"
        runs = [run for run, _ in self.rows]
        assert runs == sorted(runs), "a message of an earlier run came after a later run's"
        lost = {n for gap in self.tracker.gaps.missing(KEY) for n in range(gap.first, gap.last + 1)}
        have = {sent for run, sent in self.rows if run == self.run}
        floor = self.tracker.counters[KEY].floor  # older messages are not tracked
        assert not have & lost
        if self.unnoticed != self.run:
            assert have | lost >= set(range(max(min(have), floor), self.sent)), (
                "a message is missing, and does not count as lost"
            )
        assert self.sent - 1 in have
        assert all(gap.lost for gap in self.tracker.gaps), "a gap is still asked for"
        assert self.tracker.totals.lost == sum(gap.size for gap in self.tracker.gaps)
        assert lost & {n for n, _ in self.kept} <= self.unheard, "the publisher has it, and answers"


@pytest.mark.parametrize("replay_from", ["latest", "earliest"])
@pytest.mark.parametrize("buffer", [5, 1000])
def test_in_any_order_of_faults_each_message_is_a_row_once_or_counts_as_lost(
    buffer: int, replay_from: str
) -> None:
    for seed in range(50):
        world = World(seed, buffer, replayFrom=replay_from)
        try:
            for _ in range(world.draw.randint(10, 120)):
                world.step()
            world.judge()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# When it asks.


def heard(buffer: int = 1000, **options: str) -> World:
    """A world whose live flow has brought the numbers 0 to 4; the session has asked for nothing."""
    world = World(buffer=buffer, **options)
    world.connect()
    world.publish(5)
    world.hear(5)
    return world


def with_gap(buffer: int = 1000) -> World:
    """A world whose session has asked for the missing numbers 5, 6 and 8."""
    world = heard(buffer)
    for delivered in (False, False, True, False, True):
        world.publish(delivered=delivered)
    world.hear(2)
    world.take()
    return world


def asked(world: World, seconds: float) -> list[float]:
    """The times at which the session asks, while everything works."""
    times, end = [], world.now + seconds
    while world.now < end:
        before = len(world.starts)
        world.run_for(0.5, tick=0.5)
        times += [world.now] * (len(world.starts) - before)
    return times


def test_a_silent_feed_is_asked_after_a_second_and_then_every_ten() -> None:
    world = heard()
    assert asked(world, 34) == [1.5, 12, 22.5, 33]  # and half a second for each answer
    world.publish()
    assert asked(world, 2) == [36]


def test_a_pause_of_receiving_is_no_silence() -> None:
    world = heard()
    world.now = 10
    world.session.note_pause(world.now)
    assert not world.session.is_due(10.9)
    assert world.session.is_due(11)


def test_a_feed_whose_publisher_is_away_or_whose_messages_wait_is_not_asked() -> None:
    world = heard()
    world.session.reachable = False
    assert asked(world, 10) == []
    world.session.reachable = True
    world.publish()
    world.now += 2
    world.take()
    assert not world.session.outbox


def test_a_gap_is_healed_by_one_request_that_takes_nothing_beyond_it() -> None:
    world = with_gap()
    world.publish(5)
    world.answer()
    world.reply(100)
    world.take()
    assert world.starts == [5]
    assert world.numbers == [0, 1, 2, 3, 4, 7, 9, 5, 6, 8]
    world.run_for(0.5)
    assert world.starts == [5]


def test_requests_for_gaps_have_a_pause_between_them() -> None:
    world = with_gap()
    world.run_for(0.05)
    world.publish(delivered=False)
    world.publish()
    world.hear(1)
    world.take()
    assert not world.session.outbox
    world.now += 0.1
    world.take()
    assert world.session.outbox


def test_what_the_publisher_no_longer_has_is_given_up_with_the_first_answer() -> None:
    world = with_gap(buffer=2)
    world.run_for(0.05)
    assert [(gap.first, gap.last) for gap in world.given_up] == [(5, 6)]
    assert world.numbers[-1] == 8
    assert world.redials == 0


def test_gaps_are_given_up_after_three_unanswered_requests_on_new_connections() -> None:
    world = with_gap()
    world.answers = False
    world.run_for(3 * TIMEOUT - 0.5)
    assert (world.starts, world.redials, world.given_up) == ([5, 5, 5], 2, [])
    world.run_for(1)
    assert [(gap.first, gap.last) for gap in world.given_up] == [(5, 6), (8, 8)]
    world.answers = True
    world.run_for(10)
    assert 5 not in world.starts[3:], "what is given up is not asked for again"


def test_a_reply_that_is_lost_behind_the_first_is_asked_for_again() -> None:
    world = with_gap()
    world.answer()
    del world.replies[1]  # 6
    world.reply(100)
    world.take()
    world.run_for(1)
    assert (world.starts, world.given_up) == ([5, 6], [])
    assert sorted(world.numbers) == list(range(10))


def test_an_answer_begins_the_count_of_unanswered_requests_again() -> None:
    world = with_gap()
    world.answers = False
    world.run_for(2 * TIMEOUT + 1)
    world.answers = True
    world.answer()  # of the third request, only the first reply
    world.replies = type(world.replies)([reply(5, b"0.5")])
    world.reply(1)
    world.answers = False
    world.run_for(2 * TIMEOUT + 1)
    assert world.given_up == []


def test_the_live_flow_waits_for_history_until_a_request_is_unanswered_and_it_has_messages() -> None:
    world = World(replayFrom="earliest")
    world.answers = False
    world.run_for(2 * TIMEOUT + 1)
    assert (world.starts, world.redials) == ([0, 0, 0], 2)
    world.publish(3)
    world.connect()
    world.publish(2)
    world.hear(5)
    assert world.numbers == []
    world.run_for(TIMEOUT)
    assert world.numbers == [3, 4]


# Which publisher replies.


def test_a_restart_is_seen_in_the_live_flow_and_its_first_messages_are_fetched() -> None:
    world = heard()
    world.publish(10)
    world.hear(10)
    world.restart_publisher()
    world.publish(5)
    world.connect()
    world.run_for(5)
    assert len(world.numbers) == 15, "what replies may be another run"
    world.publish()
    world.run_for(1)
    assert world.numbers[15:] == [5, 0, 1, 2, 3, 4]
    assert (world.tracker.totals.restarts, world.tracker.totals.lost) == (1, 0)


def test_a_gap_is_not_asked_for_while_the_live_flow_is_not_connected() -> None:
    world = heard()
    world.publish(3, delivered=False)
    world.publish()
    world.hear(1)
    world.restart_publisher()
    world.publish(9)
    world.run_for(10)
    assert 5 not in world.numbers, "it would be another run's message"


def test_a_gap_waits_on_a_new_connection_for_a_live_message() -> None:
    world = heard()
    world.publish(3, delivered=False)
    world.publish()
    world.hear(1)
    world.connect()
    world.run_for(10)
    assert 5 not in world.numbers
    world.publish()
    world.run_for(1)
    assert sorted(world.numbers) == list(range(10))
    assert world.tracker.totals.restarts == 0


@pytest.mark.parametrize("what", ["connection", "restart"])
def test_a_request_is_void_after_a_change_of(what: str) -> None:
    world = with_gap()
    world.answer()
    if what == "connection":
        world.session.reconnected(world.now)
    else:
        world.live.append((0, b"1.0"))
        world.hear(1)
    rows = len(world.rows)
    world.reply(100)
    world.take()
    assert (len(world.rows), world.redials) == (rows, 1)
    assert not world.session.replies


def test_replies_without_a_request_and_replies_that_are_not_valid_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = heard()
    world.replies.extend([reply(5, b"0.5"), [b"", b"?"]])
    world.reply(2)
    assert not world.session.replies
    assert world.counters.malformed_replies == 1
    assert "is not valid" in caplog.text


def test_pending_replies_are_counted_until_they_are_taken() -> None:
    world = with_gap()
    world.answer()
    world.reply(100)
    assert len(world.session.replies) == 4  # 5 to 8
    assert world.session.reply_bytes > 4
    world.take()
    assert (world.session.replies, world.session.reply_bytes) == ([], 0)


def test_a_request_that_cannot_be_sent_is_not_sent_later() -> None:
    world = with_gap()
    world.session.blocked()
    assert not world.session.outbox
    world.now += TIMEOUT
    world.take()
    world.now += 0.2
    world.take()
    assert len(world.session.outbox) == 1
