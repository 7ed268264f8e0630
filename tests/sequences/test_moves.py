"""Counters that move between the partitions of a log, compared with one tracker that receives all messages."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tests.sequences.test_sequences import in_runs, missing, receive, saved_by
from zmq_datasource.options import Numbering
from zmq_datasource.sequences import SequenceTracker, state

NUMBERING = Numbering(("publisher",), window=1000)


def opened(
    states: Mapping[int, bytes], partition: int, division: str, counters: int = 1000
) -> SequenceTracker:
    """The tracker of a partition that a writer has opened, with the saved states of all partitions."""
    mine = restored(states.get(partition), counters)
    mine.division = division
    for number, kept in states.items():
        if number != partition:
            mine.learn_newer_counters(restored(kept))
    return mine


def restored(kept: bytes | None, counters: int = 1000) -> SequenceTracker:
    tracked = SequenceTracker(NUMBERING, counters, 1000)
    if kept is not None:
        state.restore(tracked, msgspec.json.decode(kept, type=state.SavedTracker))
    return tracked


def kept_by(tracked: SequenceTracker) -> bytes:
    """The state that the log stores."""
    return msgspec.json.encode(state.save(tracked))


@pytest.mark.parametrize("seed", range(30))
def test_sums_are_exact_however_counters_move(seed: int) -> None:
    draw = random.Random(seed)
    names = [b"a", b"b", b"c"]
    one = SequenceTracker(NUMBERING, 1000, 1000)
    states: dict[int, bytes] = {}
    totals: dict[int, Any] = {}
    sent = dict.fromkeys(names, 0)
    for run in range(12):
        receivers = draw.randint(1, 3)
        division = f"{receivers} in run {run if draw.random() < 0.5 else 0}"
        for partition in range(receivers):
            share = names[partition::receivers]
            tracked = opened(states, partition, division)
            for _ in range(draw.randint(0, 3)):
                name = draw.choice(share)
                numbers = list(range(sent[name], sent[name] + draw.randint(1, 6)))
                sent[name] = numbers[-1] + 1
                kept = [n for n in numbers if draw.random() < 0.7]
                kept += draw.choices(range(max(0, sent[name] - 12), sent[name]), k=draw.randint(0, 2))
                if kept:
                    ours = tracked.track(in_runs([name] * len(kept), kept), lambda row: 0)
                    theirs = one.track(in_runs([name] * len(kept), kept), lambda row: 0)
                    assert ours.duplicates == theirs.duplicates
            states[partition], totals[partition] = kept_by(tracked), tracked.totals
        for figure in ("lost", "late", "healed", "duplicates", "restarts"):
            assert sum(getattr(t, figure) for t in totals.values()) == getattr(one.totals, figure)


def test_counters_of_another_numbering_do_not_move() -> None:
    other = SequenceTracker(Numbering(("publisher",), start=1), 1000, 1000)
    receive(other, *range(1, 1001))
    mine = opened({}, 0, "two")
    receive(mine, 5, 8)
    mine.learn_newer_counters(other)
    assert missing(mine) == [(6, 7)]


def test_a_tracker_that_has_forgotten_counters_takes_no_older_state_of_them() -> None:
    """Otherwise messages that this partition has received and forgotten would count as lost."""
    first = opened({}, 0, "one")
    receive(first, 0, key=b"a")
    states = {0: kept_by(first)}
    second = opened(states, 1, "two", counters=1)
    receive(second, *range(1, 100), key=b"a")
    receive(second, 0, key=b"b")
    states[1] = kept_by(second)
    again = opened(states, 1, "three", counters=1)
    receive(again, 100, key=b"a")
    assert again.totals.lost == 0


def test_the_number_of_counters_known_from_other_partitions_is_bounded() -> None:
    first = opened({}, 0, "one")
    for number in range(100):
        receive(first, 0, key=b"%d" % number)
    second = opened({0: kept_by(first)}, 1, "two", counters=10)
    for number in range(100):
        second.move_here(b"%d" % number)
    assert list(second.expected) == [b"%d" % number for number in range(90, 100)]


BY_TOPIC, BY_ENDPOINT = Numbering(("endpoint", "topic")), Numbering(("endpoint",))


@pytest.mark.parametrize(("before", "then"), [(BY_TOPIC, BY_ENDPOINT), (BY_ENDPOINT, BY_TOPIC)])
def test_counters_continue_when_a_replay_is_added_or_removed(before: Numbering, then: Numbering) -> None:
    """vLLM's messages are counted by endpoint with a replay, and without one also by topic."""
    keys = {BY_TOPIC: (b"e", b"t"), BY_ENDPOINT: b"e"}
    one = SequenceTracker(before, 10, 10)
    one.track(in_runs([keys[before]] * 2, [0, 5]), lambda row: 7)
    one.counters[keys[before]].topic = b"t"
    again = SequenceTracker(then, 10, 10)
    assert state.restore_renamed(again, saved_by(one))
    for number in (6, 3):
        again.track(in_runs([keys[then]], [number]), lambda row: 8)
    assert [(gap.first, gap.last) for gap in again.missing(keys[then])] == [(1, 2), (4, 4)]
    assert (again.totals.lost, again.totals.healed) == (3, 1)
    assert again.counters[keys[then]].topic == b"t"


def test_two_topics_of_one_endpoint_do_not_become_one_counter() -> None:
    one = SequenceTracker(BY_TOPIC, 10, 10)
    one.track(in_runs([(b"e", b"t"), (b"e", b"u")], [0, 0]), lambda row: 7)
    assert not state.restore_renamed(SequenceTracker(BY_ENDPOINT, 10, 10), saved_by(one))


def test_an_endpoint_without_a_known_topic_begins_again() -> None:
    one = SequenceTracker(BY_ENDPOINT, 10, 10)
    one.track(in_runs([b"e"], [0]), lambda row: 7)
    assert not state.restore_renamed(SequenceTracker(BY_TOPIC, 10, 10), saved_by(one))
