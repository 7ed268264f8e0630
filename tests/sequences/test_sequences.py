"""The tracker: its rules by example and against a slow model, its saved state, and the bounds of its memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sequence_model import Model
from zmq_datasource.options import Numbering
from zmq_datasource.sequences import Key, Keys, Run, SequenceFindings, SequenceTracker, runs_of, state

KEY = b"p"
PLAIN = Numbering(("publisher",))
NUMBERINGS = [
    Numbering(("publisher",), window=5),
    Numbering(("publisher",), restarts=False),
    Numbering(("publisher",), start=1, window=3),
    Numbering(("publisher",), restarts=False, whole=True),
]


def in_runs(keys: Sequence[Key], numbers: Sequence[int]) -> list[Run]:
    """The runs of messages that arrived in this order."""
    if not keys:
        return []
    names = list(dict.fromkeys(keys))
    codes = pa.array([names.index(key) for key in keys]) if len(names) > 1 else None
    return runs_of(Keys(names, codes), pa.array(numbers, pa.int64()))


def tracker(numbering: Numbering = PLAIN, counters: int = 1000, gaps: int = 1000) -> SequenceTracker:
    return SequenceTracker(numbering, counters, gaps)


def receive(tracked: SequenceTracker, *numbers: int, key: bytes = KEY, when: int = 7) -> SequenceFindings:
    return tracked.track(in_runs([key] * len(numbers), numbers), lambda row: when)


def missing(tracked: SequenceTracker, key: bytes = KEY) -> list[tuple[int, int]]:
    return [(gap.first, gap.last) for gap in tracked.gaps.missing(key)]


# Each rule once, by example.


def test_messages_before_the_first_received_number_are_not_lost() -> None:
    tracked = tracker()
    assert not receive(tracked, 5, 6, 7).lost
    assert tracked.totals.lost == 0


def test_a_higher_number_leaves_a_gap() -> None:
    tracked = tracker()
    findings = receive(tracked, 0, 1, 5)
    assert [(gap.first, gap.last, gap.noticed) for gap in findings.lost] == [(2, 4, 7)]
    assert tracked.totals.lost == 3


def test_a_late_message_is_no_longer_lost() -> None:
    tracked = tracker()
    findings = receive(tracked, 0, 5, 3)
    assert not findings.duplicates
    assert missing(tracked) == [(1, 2), (4, 4)]
    assert (tracked.totals.lost, tracked.totals.late, tracked.totals.healed) == (3, 1, 1)


def test_a_number_received_before_is_a_duplicate() -> None:
    tracked = tracker()
    assert receive(tracked, 3, 4, 4, 5, 3).duplicates == [2, 4]
    assert tracked.totals.duplicates == 2


def test_the_first_number_again_is_a_restart_and_no_negative_loss() -> None:
    tracked = tracker()
    findings = receive(tracked, 0, 1, 2, 0, 1, 2)
    assert findings.restarts == [KEY]
    assert not findings.duplicates
    assert tracked.totals.lost == 0
    assert tracked.counters[KEY].epoch == 1


def test_a_number_below_the_window_is_a_restart() -> None:
    tracked = tracker(Numbering(("publisher",), window=10))
    findings = receive(tracked, 100, 3, 4)
    assert findings.restarts == [KEY]
    assert [(gap.epoch, gap.first, gap.last) for gap in findings.lost] == [(1, 0, 2)]


def test_publishers_with_new_names_never_restart() -> None:
    tracked = tracker(Numbering(("publisher",), restarts=False, window=1))
    assert receive(tracked, *range(50), 0).duplicates == [50]


def test_an_announcement_shows_the_missing_tail() -> None:
    tracked = tracker()
    receive(tracked, 0, 1)
    (gap,) = tracked.announce(KEY, 4, when=9).lost
    assert (gap.first, gap.last, gap.noticed) == (2, 4, 9)
    assert not tracked.announce(KEY, 4, when=9).lost
    assert not tracked.announce(KEY, 1, when=9).lost
    assert tracked.totals.lost == 3


def test_tracking_of_a_new_publisher_begins_at_its_announcement() -> None:
    tracked = tracker()
    assert not tracked.announce(KEY, 10, when=0).lost
    (gap,) = receive(tracked, 12).lost
    assert (gap.first, gap.last) == (11, 11)


def test_the_first_and_last_messages_of_a_short_lived_publisher_can_be_missing() -> None:
    tracked = tracker(Numbering(("publisher",), restarts=False, whole=True))
    assert [(gap.first, gap.last) for gap in receive(tracked, 3).lost] == [(0, 2)]
    assert [(gap.first, gap.last) for gap in tracked.announce(KEY, 5, 0, end=True).lost] == [(4, 5)]
    assert [(gap.first, gap.last) for gap in tracked.announce(b"new", 9, 0, end=True).lost] == [(0, 9)]
    assert tracked.totals.lost == 15


def test_publishers_that_have_ended_do_not_count_as_forgotten() -> None:
    tracked = tracker(Numbering(("publisher",), restarts=False, whole=True), counters=2)
    for name in range(5):
        receive(tracked, 0, 1, key=b"%d" % name)
        tracked.announce(b"%d" % name, 1, 0, end=True)
    assert tracked.totals.forgotten == 0
    receive(tracked, 1, key=b"beginning missed")
    assert tracked.totals.lost == 1
    for name in range(2):
        receive(tracked, 0, key=b"not ended %d" % name)
    assert tracked.totals.forgotten == 1
    # This may be a forgotten publisher: its earlier messages are not lost a second time.
    receive(tracked, 7, key=b"beginning missed")
    assert tracked.totals.lost == 1


ENDPOINT = Numbering(("endpoint",))


def test_a_lower_number_on_a_new_connection_is_a_restart_however_near() -> None:
    tracked = tracker(ENDPOINT)
    tracked.connections[KEY] = 1
    assert receive(tracked, *range(300), 299).duplicates == [300]
    assert receive(tracked, 298).duplicates == [0]
    tracked.connections[KEY] = 2
    findings = receive(tracked, 3, 4, 5)
    assert findings.restarts == [KEY]
    assert not findings.duplicates
    assert missing(tracked) == [(0, 2)]
    assert receive(tracked, 4).duplicates == [0]


def test_a_restart_on_a_new_connection_heals_no_older_gap() -> None:
    tracked = tracker(ENDPOINT)
    tracked.connections[KEY] = 1
    receive(tracked, 0, 100)
    tracked.connections[KEY] = 2
    assert receive(tracked, 5).restarts == [KEY]
    assert tracked.totals.healed == 0


def test_a_new_connection_to_the_same_publisher_is_no_restart() -> None:
    tracked = tracker(ENDPOINT)
    tracked.connections[KEY] = 1
    receive(tracked, 0, 1, 2)
    tracked.connections[KEY] = 2
    assert missing(tracked) == []
    receive(tracked, 5, 6)
    assert missing(tracked) == [(3, 4)]
    assert receive(tracked, 6).duplicates == [0]
    assert tracked.totals.restarts == 0


# Any interleaving, against the model.


@st.composite
def traffic(draw: st.DrawFn) -> tuple[Numbering, list[int]]:
    """Messages of a publisher with loss, repetition, reordering and restarts; and random numbers."""
    numbering = draw(st.sampled_from(NUMBERINGS))
    at = draw(st.integers(0, 20))
    numbers: list[int] = []
    for what, amount in draw(
        st.lists(
            st.tuples(
                st.sampled_from(["send", "lose", "repeat", "swap", "restart", "noise"]), st.integers(1, 9)
            ),
            max_size=25,
        )
    ):
        if what == "send":
            numbers += range(at, at + amount)
            at += amount
        elif what == "lose":
            at += amount
        elif what == "repeat":
            numbers += numbers[-amount:]
        elif what == "swap" and len(numbers) > amount:
            numbers[-1], numbers[-1 - amount] = numbers[-1 - amount], numbers[-1]
        elif what == "restart":
            at = numbering.start
        elif what == "noise":
            numbers.append(draw(st.integers(0, 25)))
    return numbering, numbers


@given(traffic(), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_any_traffic_is_tracked_as_by_the_model(faulty: tuple[Numbering, list[int]], size: int) -> None:
    numbering, numbers = faulty
    tracked, model = tracker(numbering), Model(numbering)
    for begin in range(0, len(numbers), size):
        part = numbers[begin : begin + size]
        findings = receive(tracked, *part)
        expected = [model.see(number) for number in part]
        assert findings.duplicates == [row for row, what in enumerate(expected) if what == "duplicate"]
        assert len(findings.restarts) == expected.count("restart")
        assert_alike(tracked, model)


def assert_alike(tracked: SequenceTracker, model: Model) -> None:
    totals = tracked.totals
    assert (totals.lost, totals.late, totals.healed, totals.duplicates, totals.restarts) == (
        model.lost,
        model.late,
        model.healed,
        model.duplicates,
        model.restarts,
    )
    for number, epoch in enumerate(model.epochs):
        assert positions(tracked, number) == sorted(epoch.missing)
    for before, after in pairwise(sorted(tracked.gaps, key=lambda gap: (gap.epoch, gap.first))):
        assert before.epoch < after.epoch or before.last < after.first, "two rows hold the same number"


def positions(tracked: SequenceTracker, epoch: int) -> list[int]:
    return sorted(
        position for gap in tracked.gaps if gap.epoch == epoch for position in range(gap.first, gap.last + 1)
    )


# The saved state.


@given(
    st.lists(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 12))), max_size=12),
    st.integers(0, 12),
    st.sampled_from([(1000, 1000), (2, 1000), (1000, 3), (2, 2)]),
)
@settings(max_examples=60, deadline=None)
def test_a_restored_tracker_continues_like_the_saved_one(
    steps: list[list[tuple[bytes, int]]], crash_at: int, bounds: tuple[int, int]
) -> None:
    numbering = Numbering(("publisher",), window=4)
    tracked, twin = tracker(numbering, *bounds), tracker(numbering, *bounds)
    for turn, messages in enumerate(steps):
        keys, numbers = [key for key, _ in messages], [number for _, number in messages]
        for one in (tracked, twin):
            one.track(in_runs(keys, numbers), lambda row: 0)
        if turn >= crash_at:
            saved = saved_by(tracked)
            tracked = tracker(numbering, *bounds)
            state.restore(tracked, saved)
        assert memory(tracked) == memory(twin)


def saved_by(tracked: SequenceTracker) -> state.SavedTracker:
    """A tracker's state as another process reads it."""
    return msgspec.json.decode(msgspec.json.encode(state.save(tracked)), type=state.SavedTracker)


def memory(tracked: SequenceTracker) -> object:
    gaps = [
        (gap.key, gap.epoch, gap.first, gap.last, gap.noticed, gap.lost, gap.past) for gap in tracked.gaps
    ]
    present = {key: missing(tracked, key) for key in tracked.expected}
    return (
        list(tracked.expected.items()),
        tracked.counters,
        gaps,
        present,
        tracked.totals,
    )


# Bounds of memory.


def test_publishers_beyond_the_limit_are_forgotten_the_longest_silent_first() -> None:
    tracked = tracker(counters=2)
    receive(tracked, 0, key=b"a")
    receive(tracked, 0, key=b"b")
    receive(tracked, 1, key=b"a")
    receive(tracked, 0, key=b"c")
    assert list(tracked.expected) == [b"a", b"c"]
    assert tracked.totals.forgotten == 1


def test_a_publisher_whose_gap_is_forgotten_has_still_been_silent_the_longest() -> None:
    tracked = tracker(counters=2, gaps=1)
    receive(tracked, 0, 2, key=b"a")
    receive(tracked, 0, 2, key=b"b")  # its gap replaces that of a
    receive(tracked, 0, key=b"c")
    assert list(tracked.expected) == [b"b", b"c"]


def test_forgotten_gaps_stay_counted_as_lost() -> None:
    tracked = tracker(Numbering(("publisher",), restarts=False), gaps=10)
    for number in range(0, 20_000, 2):
        receive(tracked, number)
    assert tracked.totals.lost == 9_999
    assert len(tracked.gaps) == 10
    # The tracker cannot know whether 1 was received before: the message is kept.
    assert not receive(tracked, 1).duplicates
    assert tracked.totals.lost == 9_999


def test_a_gap_that_is_filled_piece_by_piece_stays_within_the_limit() -> None:
    tracked = tracker(gaps=50)
    receive(tracked, 0, 1001)
    for number in range(2, 1000, 2):
        receive(tracked, number)
        assert len(tracked.gaps) <= 50


@pytest.mark.parametrize("publishers", [20_000])
def test_memory_is_a_few_hundred_bytes_a_publisher(publishers: int) -> None:
    tracked = tracker(counters=publishers // 2, gaps=1000)
    tracemalloc.start()
    try:
        for batch in range(0, publishers, 1000):
            names = [b"publisher-%d" % n for n in range(batch, batch + 1000)]
            for numbers in ([0] * 1000, [2] * 1000):
                tracked.track(in_runs(names, numbers), lambda row: 0)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / (publishers // 2) < 800


# Replays.

REPLAYED = Numbering(("endpoint",), replayed=True)


def replay(tracked: SequenceTracker, numbers: Sequence[int]) -> list[int]:
    return [n for n in numbers if tracked.track_replayed(KEY, n, 0, SequenceFindings())]


def test_a_replay_fills_gaps_and_goes_on_where_the_live_flow_is() -> None:
    tracked = tracker(REPLAYED)
    receive(tracked, 0, 5)
    assert replay(tracked, range(8)) == [1, 2, 3, 4, 6, 7]
    assert replay(tracked, range(8)) == []
    assert (tracked.totals.lost, tracked.totals.healed, tracked.totals.late) == (0, 4, 0)


def test_each_number_is_taken_once_whether_a_replay_brings_it_or_the_live_flow() -> None:
    """A replay that begins with the first number, and that is further ahead than the window for restarts."""
    tracked = tracker(REPLAYED)
    assert replay(tracked, range(3000)) == list(range(3000))
    findings = receive(tracked, *range(3001))
    assert (findings.duplicates, findings.restarts) == (list(range(3000)), [])
    assert tracked.expected[KEY] == 3001


def test_what_a_replay_has_left_out_is_late_in_the_live_flow() -> None:
    """The publisher no longer has it for a replay, and the live flow has waited with it."""
    tracked = tracker(REPLAYED._replace(whole=True))
    assert replay(tracked, range(3, 6)) == [3, 4, 5]
    assert missing(tracked) == [(0, 2)]
    findings = receive(tracked, 0, 1, 3)
    assert (findings.restarts, findings.duplicates, missing(tracked)) == ([], [2], [(2, 2)])
    older = tracker(REPLAYED)
    replay(older, range(5, 9))
    assert not receive(older, 3, 4).duplicates
    assert older.totals.late == 2


def test_a_restart_that_the_live_flow_shows_is_found_beside_replays() -> None:
    on_a_new_connection = tracker(REPLAYED)
    replay(on_a_new_connection, range(1000))
    on_a_new_connection.connections[KEY] = 1
    assert receive(on_a_new_connection, *range(500)).restarts == [KEY]
    behind_a_proxy = tracker(REPLAYED)
    receive(behind_a_proxy, *range(10))
    replay(behind_a_proxy, range(10, 20))
    findings = receive(behind_a_proxy, *range(15))
    assert (findings.restarts, findings.duplicates) == ([KEY], [])


def test_a_gap_that_is_asked_for_is_lost_when_no_replay_can_fill_it_any_more() -> None:
    tracked = tracker(REPLAYED, counters=1, gaps=2)
    assert not receive(tracked, 0, 10).lost
    tracked.give_up(tracked.gaps.missing(KEY))
    receive(tracked, 5, 12)  # splits it
    told = [(gap.first, gap.last, gap.lost) for gap in tracked.gaps]
    assert told == [(6, 9, True), (11, 11, False)]
    findings = receive(tracked, 14, 16)  # the table is full
    assert [(gap.first, gap.last) for gap in findings.lost] == [(11, 11)]
    findings = receive(tracked, 0, key=b"other")  # the counter is forgotten
    assert [(gap.first, gap.last) for gap in findings.lost] == [(13, 13), (15, 15)]


def test_only_combinations_of_names_that_occur_become_counters() -> None:
    """1,000 publishers and 1,000 topics could make a million counters."""
    names = [b"%d" % at for at in range(1000)]
    many, one = Keys.of(pa.array(names, pa.binary())), Keys([b"e"])
    joined = Keys.joined([many, one, many])
    assert joined.codes is not None
    assert [joined.names[code] for code in joined.codes.to_pylist()] == [(name, b"e", name) for name in names]
    assert len(joined.names) == 1000
    assert Keys.joined([one, one]) == Keys([(b"e", b"e")])
    mixed = Keys.joined([Keys([b"a", b"b"], pa.array([0, 1, 0])), Keys([b"x", b"y"], pa.array([1, 1, 0]))])
    assert mixed.codes is not None
    assert [mixed.names[code] for code in mixed.codes.to_pylist()] == [
        (b"a", b"y"),
        (b"b", b"y"),
        (b"a", b"x"),
    ]


# Cases that a change of one operator or argument would break.


def noticed(tracked: SequenceTracker) -> list[tuple[int, int, int]]:
    return [(gap.first, gap.last, gap.noticed) for gap in tracked.gaps]


def test_each_gap_says_when_it_was_noticed() -> None:
    whole = tracker(Numbering(("publisher",), restarts=False, whole=True))
    receive(whole, 2, when=5)
    assert noticed(whole) == [(0, 1, 5)]
    tracked = tracker(Numbering(("publisher",), window=10))
    receive(tracked, 100)
    receive(tracked, 3, when=6)  # a restart, by the window
    assert noticed(tracked) == [(0, 2, 6)]
    on_a_new_connection = tracker(ENDPOINT)
    receive(on_a_new_connection, 9)
    on_a_new_connection.connections[KEY] = 1
    receive(on_a_new_connection, 2, when=8)
    assert noticed(on_a_new_connection) == [(0, 1, 8)]
    announced = tracker()
    announced.announce(KEY, 3, 5)
    assert [(gap.first, gap.last) for gap in announced.announce(KEY, 5, 9).lost] == [(4, 5)]
    assert noticed(announced) == [(4, 5, 9)]
    beyond = tracker(Numbering(("publisher",), restarts=False, whole=True))
    beyond.announce(KEY, 2, 4)
    assert noticed(beyond) == [(0, 2, 4)]
    replayed = tracker(REPLAYED)
    receive(replayed, 0)
    replayed.track_replayed(KEY, 5, 11, SequenceFindings())
    assert noticed(replayed) == [(1, 4, 11)]


def test_each_of_several_restarts_in_one_call_loses_its_gaps() -> None:
    tracked = tracker()
    findings = receive(tracked, 0, 2, 0, 2, 0)
    assert [(gap.epoch, gap.first, gap.last) for gap in findings.lost] == [(0, 1, 1), (1, 1, 1)]
    assert len(tracked.gaps) == 2  # and a restart with the first number has no gap


def test_announcements_are_tracked_like_messages() -> None:
    tracked = tracker()
    receive(tracked, 0)
    tracked.announce(KEY, 1, 0)
    assert missing(tracked) == [(1, 1)]
    assert not tracked.counters[KEY].ended
    findings = receive(tracked, 2)
    assert (findings.lost, findings.duplicates) == ([], [])
    tracked.announce(KEY, 2, 0, end=True)
    assert missing(tracked) == [(1, 1)]
    assert tracked.counters[KEY].ended


def test_a_new_connection_may_be_to_another_publisher() -> None:
    tracked = tracker(ENDPOINT)
    assert tracked.is_same_publisher(KEY)  # not known yet
    receive(tracked, 1)
    assert tracked.is_same_publisher(KEY)
    tracked.connections[KEY] = 1
    assert not tracked.is_same_publisher(KEY)
    receive(tracked, 0)
    assert tracked.is_same_publisher(KEY)


def test_connections_count_for_counters_that_include_the_endpoint() -> None:
    tracked = tracker(Numbering(("publisher", "endpoint")))
    key = (b"p", b"e")
    tracked.track(in_runs([key] * 2, [8, 9]), lambda _: 0)
    tracked.connections[b"e"] = 1
    assert tracked.track(in_runs([key], [5]), lambda _: 0).restarts == [key]


def test_topics_are_kept() -> None:
    tracked = tracker()
    receive(tracked, 1)
    receive(tracked, 1, key=b"\xff")
    tracked.counters[KEY].topic = b"kv"
    tracked.counters[b"\xff"].topic = b"\xfe"
    again = tracker()
    state.restore(again, saved_by(tracked))
    assert memory(again) == memory(tracked)


def test_messages_below_a_forgotten_gap_are_late_and_above_it_duplicates() -> None:
    tracked = tracker(gaps=1)
    receive(tracked, 0, 2, 4)
    assert missing(tracked) == [(3, 3)]
    assert (receive(tracked, 1).duplicates, tracked.totals.late) == ([], 1)
    assert receive(tracked, 2).duplicates == [0]


def test_each_forgotten_counter_is_counted_and_begins_again() -> None:
    tracked = tracker(counters=1)
    receive(tracked, 3, 5)
    receive(tracked, 1, key=b"other")
    receive(tracked, 5)
    assert tracked.totals.forgotten == 2
    assert receive(tracked, 6, 6).duplicates == [1]
    assert (
        receive(tracked, 4).duplicates == []
    )  # its gap is past, and what preceded the first number is not known


def test_interleaved_counters_keep_their_places_and_numbers() -> None:
    tracked = tracker()
    assert tracked.track(in_runs([b"a", b"b", b"a", b"b"], [5, 5, 5, 6]), lambda _: 0).duplicates == [2]
    tracked.track(in_runs([b"c", b"c", b"d", b"d"], [5, 6, 7, 8]), lambda _: 0)
    assert (tracked.expected[b"c"], tracked.expected[b"d"]) == (7, 9)
