"""The state of each filler has one format, which outlives a process; sections of another filler are recognised."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import stream_options
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction
from zmq_datasource.counters import SourceCounters, declared
from zmq_datasource.log.state import CarriedState
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.source.facts import read_gaps
from zmq_datasource.source.intake import Arrival, Intake

COUNTERS = (
    b'{"counters":{"received":%d,"bytes":%d,"malformed":0,"control":0,'
    b'"replayed":0,"malformed_replies":0,"oversize":0},'
)


GOLDEN_SEQUENCES = (
    b'"sequences":{"numbering":[["endpoint","topic"],0,true,1000,false,false],'
    b'"totals":{"lost":3,"late":1,"healed":1,"duplicates":0,"restarts":0,"forgotten":0},'
    b'"names":[["dGNwOi8vZmVlZDox","/w=="]],"expected":[6],"counters":[[0,0,false,null]],'
    b'"gaps":[[["dGNwOi8vZmVlZDox","/w=="],0,1,2,5,true,false],[["dGNwOi8vZmVlZDox","/w=="],0,4,4,5,true,false]]}}'
)


def transactions(**counted: int) -> CommittedTransactions:
    return CommittedTransactions(SourceCounters(**counted), 10)


def intake(**options: Any) -> Intake:
    return Intake(stream_options(connect="tcp://feed:1", **options), SourceCounters())


def test_the_bytes_of_a_ledger_never_change() -> None:
    it = transactions(received=3, bytes=5)
    it.commit("q", Transaction(7, "attempt", 2, "0005"))
    it.commit("r", Transaction(1, "b", 1, "0007"))
    assert it.state() == COUNTERS % (3, 5) + (
        b'"transactions":[0.0,{"q":[7,"attempt",2,"0005",0.0],"r":[1,"b",1,"0007",0.0]}]}'
    )


def test_the_bytes_of_an_intake_never_change() -> None:
    plain = intake()
    plain.read(raw_of([[b"t", b"v"]]), [Arrival(5, 1, "tcp://feed:1")])
    assert plain.state() == (COUNTERS % (1, 1)).rstrip(b",") + b"}"
    it = intake(framing="vllm")
    sent = [[b"\xff", number.to_bytes(8, "big"), b"value %d" % number] for number in (0, 5, 3)]
    it.read(raw_of(sent), [Arrival(5, 3, "tcp://feed:1")])
    assert it.state() == COUNTERS % (3, 21) + GOLDEN_SEQUENCES
    again = intake(framing="vllm")
    again.restore(it.state())
    assert again.tracker is not None
    assert again.tracker.expected[b"tcp://feed:1", b"\xff"] == 6
    assert [(gap["first"], gap["last"], gap["messages"]) for gap in read_gaps(it.state())] == [
        (1, 2, 2),
        (4, 4, 1),
    ]


def test_losses_beyond_64_bits_are_kept() -> None:
    it = intake(framing="custom", sequenceAt="0:0:i64be")
    for number in (-(2**63), 2**63 - 1, -(2**63) + 1, 2**63 - 2):
        message = [number.to_bytes(8, "big", signed=True), b"v"]
        it.read(raw_of([message]), [Arrival(5, 1, "tcp://feed:1")])
    assert it.tracker is not None
    again = intake(framing="custom", sequenceAt="0:0:i64be")
    again.restore(it.state())
    assert again.tracker is not None
    assert again.tracker.totals == it.tracker.totals


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (intake(framing="sequenced"), transactions()),
        (transactions(), intake(framing="sequenced")),
        (intake(framing="sequenced"), intake(framing="vllm")),
        (intake(framing="sequenced"), intake()),
    ],
)
def test_another_filler_continues_the_counters_and_replaces_the_sections(
    written: CarriedState, read: CarriedState
) -> None:
    written.counters.received = 9
    read.restore(written.state())
    assert read.counters.received == 9


def test_each_figure_that_counts_since_the_log_began_is_kept_by_the_log() -> None:
    counted = [metric for metric in declared("zmq_source", SourceCounters) if metric.since == "log"]
    counters = SourceCounters(**dict.fromkeys(SourceCounters.kept(), 7))
    assert {metric.attribute for metric in counted} == set(SourceCounters.kept())
    again = SourceCounters()
    again.restore(counters.to_json())
    assert again == counters
    # The names on disk: a new one may come, and none may change.
    assert {"received", "bytes", "malformed", "control", "replayed", "malformed_replies", "oversize"} <= set(
        SourceCounters.kept()
    )
