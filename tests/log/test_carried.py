"""One envelope, whoever fills the log: its bytes outlive a process, and what is about something else is told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import stream_options
from zmq_datasource.acknowledged.transactions import CommittedTransactions, Transaction
from zmq_datasource.counters import SourceCounters
from zmq_datasource.log.carried import CarriedState, Envelope
from zmq_datasource.messages.raw import raw_of
from zmq_datasource.source.intake import Arrival, Intake

COUNTERS = (
    b'{"counters":{"received":%d,"bytes":%d,"malformed":0,"control":0,'
    b'"replayed":0,"malformed_replies":0,"oversize":0},'
)


def transactions(**counted: int) -> CommittedTransactions:
    return CommittedTransactions(SourceCounters(**counted), 10)


def intake(**options: Any) -> Intake:
    return Intake(stream_options(connect="tcp://feed:1", **options), SourceCounters())


def test_the_bytes_of_a_ledger_never_change() -> None:
    it = transactions(received=3, bytes=5)
    it.commit("q", Transaction(7, "attempt", 2, "0005"))
    it.commit("r", Transaction(1, "b", 1))
    assert it.full() == (
        COUNTERS % (3, 5)
        + b'"sequences":null,"transactions":{"q":[7,"attempt",2,"0005"],"r":[1,"b",1,null]}}'
    )
    it.commit("q", Transaction(8, "c", 3))
    assert it.changed
    assert it.delta() == (COUNTERS % (3, 5) + b'"sequences":null,"transactions":{"q":[8,"c",3,null]}}')
    assert not it.changed


@pytest.mark.parametrize(
    ("framing", "sequences"),
    [
        ("plain", b"null"),
        (
            "sequenced",
            b'{"numbering":[["publisher"],0,null,false,1000,true],"totals":{"lost":0,"late":0,"healed":0,'
            b'"duplicates":0,"overlapping":0,"restarts":0,"forgotten":0},"nextGap":0,'
            b'"counters":[["p",1,0,0,0,0,false,null]],"samples":[],"gaps":[],"removed":[],"removedGaps":[]}',
        ),
    ],
)
def test_the_bytes_of_an_intake_never_change(framing: str, sequences: bytes) -> None:
    it = intake(framing=framing)
    it.read(raw_of([[b"t", b"p", bytes(8), b"v"]]), [Arrival(5, 1, "tcp://feed:1")])
    assert it.full() == it.delta().replace(b'"counters":[]', b'"counters":[["p",1,0,0,0,0,false,null]]')
    assert it.full() == COUNTERS % (1, 1) + b'"sequences":' + sequences + b"}"


@pytest.mark.parametrize(
    ("written", "read", "known"),
    [
        (intake(framing="sequenced"), transactions(), False),
        (intake(), transactions(), False),
        (
            transactions(),
            intake(framing="sequenced"),
            True,
        ),  # nothing that could be taken for another numbering
        (transactions(), intake(), True),
        (intake(framing="sequenced"), intake(framing="vllm"), False),
    ],
)
def test_what_another_filler_has_left_is_counted_on_and_replaced_as_a_whole(
    written: CarriedState, read: CarriedState, known: bool
) -> None:
    written.counters.received = 9
    assert read.restore(written.full(), None) is known
    assert read.counters.received == 9
    # A delta says nothing of a base that is about something else.
    assert read.large is (not isinstance(read, Intake) or read.tracker is not None)
    read.full()
    assert not read.large


def test_a_log_without_any_state_begins_with_nothing() -> None:
    it = transactions()
    assert it.restore(None, None)
    assert (it.changed, it.large) == (False, False)
    assert Envelope.of(None, None).latest is None


def test_values_that_are_said_in_full_are_those_of_the_newest_delta() -> None:
    envelope = Envelope.of(json.dumps({"counters": 1}).encode(), json.dumps({"counters": 2}).encode())
    assert envelope.latest == {"counters": 2}
