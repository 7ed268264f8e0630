"""When a session asks for messages, and which replies it believes: without a socket, with a clock."""

from __future__ import annotations

import pytest

from zmq_datasource.counters import SourceCounters
from zmq_datasource.messages.columns import integers_of
from zmq_datasource.messages.framing.replay import END, request
from zmq_datasource.options import Numbering
from zmq_datasource.sequences import Gap, Keys, Sample, SequenceTracker, runs_of
from zmq_datasource.sequences.tracker import SequenceFindings
from zmq_datasource.source.replay_session import ReplaySession

FEED = "tcp://feed:1"
KEY = FEED.encode()
TIMEOUT = 10.0


class Asking:
    """A session, and the tracker of a live flow that has brought the numbers 0 to 4; at the time 0."""

    def __init__(self, heard: int = 5, sample: bool = False) -> None:
        self.now = 0.0
        self.counters = SourceCounters()
        self.tracker = SequenceTracker(Numbering(("endpoint",)), 10, 10)
        self.it = ReplaySession(FEED, "tcp://replays:1", TIMEOUT, self.counters, self.tracker)
        self.it.reachable = True
        self.it.silence.restart(self.now)
        self.live(1)
        if heard:
            self.hear(*range(heard))
        if sample:
            self.tracker.counters[KEY].sample = Sample.of(4, b"4")

    def live(self, connection: int | None) -> None:
        """Set the connection of the live flow."""
        self.it.live = connection
        self.tracker.connections[KEY] = connection or 0

    def hear(self, *numbers: int) -> None:
        """Receive these numbers by the live flow."""
        self.tracker.track(runs_of(Keys([KEY]), integers_of(numbers)), lambda row: 0)
        self.it.silence.restart(self.now)

    def step(self, live_waits: bool = False) -> list[Gap]:
        return self.it.step(live_waits, self.tracker.next_number(KEY) or 0, self.now)

    def asked(self) -> list[int]:
        """Take the requests: the sequences from which on they ask."""
        starts = [int.from_bytes(frames[1], "big") for frames in self.it.outbox]
        assert list(self.it.outbox) == [request(start) for start in starts]
        self.it.outbox.clear()
        return starts

    def reply(self, *numbers: int | None, value: str = "") -> None:
        """Receive these replies; None is the last reply of a replay."""
        for number in numbers:
            frames = (
                [END, b""] if number is None else [number.to_bytes(8, "big"), f"{value}{number}".encode()]
            )
            self.it.receive([b"", *frames], self.now)

    def take(self) -> tuple[list[int | None], bool]:
        """Take replies, track them, and return them and whether the publisher has restarted."""
        onwards = self.it.onwards
        replies, restarted = self.it.take(self.now)
        if restarted:
            self.tracker.restart(KEY, 0, SequenceFindings())
        for reply in replies:
            assert reply.sequence is not None
            self.tracker.track_replayed(KEY, reply.sequence, 0, onwards, SequenceFindings())
        return [reply.sequence for reply in replies], restarted

    def redials(self) -> bool:
        """Whether the session asks for a new connection; reset it, as the link does."""
        redial, self.it.redial = self.it.redial, False
        return redial

    def times(self, seconds: float) -> list[float]:
        """The times at which the session asks in the next ``seconds``, if each replay is empty."""
        asked, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            if not self.it.is_due(self.now):
                continue
            self.step()
            asked += [self.now] * len(self.asked())
            self.reply(None)
            assert self.take() == ([], False)
            self.step()
        return asked

    def lost(self) -> int:
        return self.tracker.totals.lost


# What follows.


def test_a_silent_feed_is_asked_after_a_second_and_then_more_and_more_rarely() -> None:
    asking = Asking()
    assert asking.times(200) == [1, 3, 7, 15, 31, 63, 123, 183]
    asking.it.silence.restart(asking.now)
    assert asking.times(5) == [201, 203]
    asking.it.extend_deadlines(asking.now)  # nothing was received in the meantime: that was no silence
    assert asking.times(5) == [209]
    assert asking.it.hurry() is False
    asking.it.silence.restart(asking.now)
    assert asking.it.hurry() is True
    assert asking.times(1) == [210.5]
    assert asking.it.hurry() is False


def test_a_publisher_that_is_not_connected_is_not_asked() -> None:
    asking = Asking()
    asking.it.reachable = False
    assert asking.times(100) == []
    assert asking.it.hurry() is False


def test_a_feed_whose_messages_wait_is_not_silent() -> None:
    asking = Asking()
    asking.now = 1.0
    asking.step(live_waits=True)
    assert asking.asked() == []
    assert not asking.it.is_due(1.5)


def test_a_request_for_losses_at_the_end_of_a_burst_begins_with_the_sample() -> None:
    asking = Asking(sample=True)
    asking.now = 1.0
    asking.step()
    assert asking.asked() == [4]
    asking.reply(4, 5, 6, None)
    assert asking.take() == ([4, 5, 6], False)
    assert asking.step() == []
    assert asking.tracker.next_number(KEY) == 7
    assert not asking.it.is_due(1.5)
    assert asking.it.is_due(2.0), "it has brought something, so there may be more"


# Gaps.


def with_gaps() -> Asking:
    """A session that has asked for the missing numbers 5, 6 and 8."""
    asking = Asking()
    asking.hear(7, 9)
    assert asking.step() == []
    assert asking.asked() == [5]
    return asking


def test_a_gap_is_filled_by_one_request() -> None:
    asking = with_gaps()
    asking.reply(5, 6, 7, 8, 9, None)
    assert asking.take() == ([5, 6, 7, 8, 9], False)
    assert asking.step() == []
    assert (asking.lost(), asking.tracker.totals.duplicates) == (0, 0)
    asking.now = 0.9
    asking.step()
    assert asking.asked() == []


def test_gaps_are_asked_for_again_as_long_as_each_replay_fills_some() -> None:
    asking = with_gaps()
    for sequence, start in ((6, 5), (5, 8)):
        asking.reply(sequence, None)
        asking.take()
        assert asking.step() == []
        asking.now += 0.2
        assert asking.step() == []
        assert asking.asked() == [start]
    asking.reply(None)
    asking.take()
    assert [(gap.first, gap.last) for gap in asking.step()] == [(8, 8)], "a whole replay had nothing of it"
    assert not asking.redials()


def test_requests_have_a_pause_between_them() -> None:
    asking = with_gaps()
    asking.reply(5, None)
    asking.take()
    asking.step()
    assert asking.asked() == []
    asking.now = 0.1
    asking.step()
    assert asking.asked() == [6]


def test_after_silence_a_request_is_repeated_three_times_on_new_connections() -> None:
    asking = with_gaps()
    given_up: list[Gap] = []
    asked = []
    while not given_up and asking.now < 100:
        asking.now += 0.5
        given_up = asking.step()
        asked += [(asking.now, start, asking.redials()) for start in asking.asked()]
    assert asked == [(10.0, 5, True), (20.0, 5, True)]
    assert asking.now == 30.0
    assert [(gap.first, gap.last) for gap in given_up] == [(5, 6), (8, 8)]


def test_a_reply_and_a_pause_extend_the_deadline_of_a_request() -> None:
    asking = with_gaps()
    asking.now = 9.0
    asking.reply(5)
    asking.now = 18.0
    assert not asking.it.is_due(asking.now)
    asking.it.extend_deadlines(asking.now)
    asking.now = 27.0
    assert not asking.it.is_due(asking.now)
    asking.now = 28.0
    assert asking.it.is_due(asking.now)


def test_a_request_that_cannot_be_sent_ends_by_silence() -> None:
    asking = Asking()
    asking.hear(7)
    asking.step()
    asking.it.blocked()
    assert not asking.it.outbox
    asking.now = TIMEOUT
    asking.step()
    assert asking.asked() == [5]


# Which publisher sent the replies.


def test_replies_without_a_request_are_dropped() -> None:
    asking = Asking()
    asking.reply(5, 6, None)
    assert asking.it.pending == 0
    assert asking.take() == ([], False)


def test_replies_are_counted_until_they_are_taken() -> None:
    asking = with_gaps()
    asking.reply(5, 6)
    assert asking.it.pending == 2
    assert asking.it.pending_bytes > 2
    asking.take()
    assert (asking.it.pending, asking.it.pending_bytes) == (0, 0)


@pytest.mark.parametrize("what", ["our connection", "the live connection", "a restart"])
def test_a_request_is_void_after_a_change_of(what: str) -> None:
    asking = with_gaps()
    asking.reply(5, 6)
    if what == "our connection":
        asking.it.reconnected(asking.now)
    elif what == "the live connection":
        asking.live(2)
    else:
        asking.hear(0)
    assert asking.take() == ([], False)
    assert asking.redials(), "late replies are not taken for new ones"
    assert asking.it.pending == 0


def test_a_replay_with_another_message_on_the_same_connection_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asking = Asking(sample=True)
    asking.now = 1.0
    asking.step()
    asking.asked()
    asking.reply(4, 5, None, value="another ")
    assert asking.take() == ([], False)
    assert asking.redials()
    assert "repeats sequence 4 with another value" in caplog.text
    asking.step()
    assert asking.asked() == []


def reconnected() -> Asking:
    """A session whose live flow has a new connection, and that has asked onwards."""
    asking = Asking(sample=True)
    asking.live(2)
    asking.now = 1.0
    asking.step()
    assert asking.asked() == [4]
    return asking


def test_the_same_message_on_a_new_connection_confirms_the_publisher() -> None:
    asking = reconnected()
    asking.reply(4, 5, None)
    assert asking.take() == ([4, 5], False)
    assert asking.tracker.is_same_publisher(KEY)
    assert asking.tracker.totals.restarts == 0


def test_another_message_on_a_new_connection_shows_a_restart() -> None:
    asking = reconnected()
    asking.reply(4, 5, None, value="another ")
    assert asking.take() == ([], False)
    assert asking.redials()
    assert asking.asked() == [0]
    asking.reply(0, 1, 2, None)
    assert asking.take() == ([0, 1, 2], True)
    assert (asking.tracker.totals.restarts, asking.tracker.next_number(KEY)) == (1, 3)


def test_a_publisher_without_the_sample_is_asked_for_all_messages() -> None:
    asking = reconnected()
    asking.reply(None)
    assert asking.take() == ([], False)
    assert asking.step() == []
    assert asking.asked() == [0]
    assert not asking.redials()


def test_older_gaps_are_asked_for_only_once_the_publisher_is_confirmed() -> None:
    asking = Asking(sample=True)
    asking.hear(7)
    asking.live(2)
    asking.step()
    assert asking.asked() == [4], "what follows the last known message, not the gap"
    asking.reply(4, 8, None)
    asking.take()
    assert asking.tracker.is_same_publisher(KEY)
    asking.step()
    asking.now = 0.2
    asking.step()
    assert asking.asked() == [5]


def test_replies_that_are_not_valid_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    asking = with_gaps()
    asking.it.receive([b"", b"?"], 0)
    assert asking.counters.malformed_replies == 1
    assert "is not valid" in caplog.text
    assert asking.it.pending == 0


# History.


def test_the_live_flow_waits_for_history_until_it_has_come() -> None:
    asking = Asking(heard=0)
    asking.it.fetch_history(0, 0)
    assert asking.asked() == [0]
    assert asking.it.awaits_history
    asking.reply(0, 1, None)
    assert asking.take() == ([0, 1], False)
    assert asking.step() == []
    assert not asking.it.awaits_history


def test_a_request_for_history_is_repeated_while_the_live_flow_is_silent() -> None:
    asking = Asking(heard=0)
    asking.it.fetch_history(0, 0)
    asking.asked()
    asking.now = TIMEOUT
    asking.step(live_waits=False)
    assert (asking.asked(), asking.redials(), asking.it.awaits_history) == ([0], True, True)
    asking.now = 2 * TIMEOUT
    asking.step(live_waits=True)
    assert (asking.asked(), asking.it.awaits_history) == ([], False)
