"""What the server decides, without a socket, a clock, a file or a thread."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.host import Host
from zmq_datasource.errors import DamagedChunkError
from zmq_datasource.serving.protocol import Batch, Fetch, Open, Opened, Refused
from zmq_datasource.serving.server import MOST_NAMES

PEER, OTHER = b"peer", b"other"


def host(messages: int = 3, **arguments: Any) -> Host:
    it = Host(**arguments)
    it.log += [b"a"] * messages
    it.step(0.0)
    return it


def open_name(it: Host, name: str = "me", session: int = 1, peer: bytes = PEER, **fields: Any) -> Opened:
    topics = fields.pop("topics", ())
    it.send(peer, Open(name=name, session=session, **fields), topics)
    (answer,) = it.heard(peer)
    assert isinstance(answer, Opened), answer
    return answer


def fetch(it: Host, first: int, name: str = "me", session: int = 1, peer: bytes = PEER, **fields: Any) -> Any:
    """The answer to a FETCH; None if it waits."""
    it.send(peer, Fetch(name=name, session=session, first=first, **{"done": first, **fields}))
    answers = it.heard(peer)
    return answers[0] if answers else None


def refusal(it: Host, message: Any, peer: bytes = PEER, **arguments: Any) -> str:
    """The code of the REFUSED that a request gets."""
    it.send(peer, message, **arguments)
    (answer,) = it.heard(peer)
    assert isinstance(answer, Refused), answer
    return answer.code


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, 0),
        ({"start": "latest"}, 3),
        ({"start": 2}, 2),
    ],
)
def test_a_new_name_begins_where_its_client_says(fields: dict[str, Any], begins: int) -> None:
    it = host()
    opened = open_name(it, **fields)
    assert (opened.next, opened.new, opened.log) == (begins, True, "log-1")
    assert it.lease("me").next == begins


def test_last_sends_the_newest_message_of_each_topic_also_after_a_restart() -> None:
    it = host(0)
    it.log += [b"a", b"b", b"a", b"b"]
    open_name(it, start="last")
    it.restart()
    it.log.append(b"a")
    batch = fetch(it, 0)
    assert (batch.rows, batch.next) == (3, 5)


def test_a_search_holds_up_no_other_subscriber() -> None:
    it = host()
    open_name(it, "slow", start="last", peer=OTHER)
    it.is_calm = False  # the search has no time to end
    it._random.choices = lambda *_: (9.0,)  # type: ignore[method-assign,assignment]
    assert fetch(it, 0, "slow", peer=OTHER) is None
    it.is_calm = True
    open_name(it)
    assert fetch(it, 3, confirm=True, max_bytes=0).done == 3


@pytest.mark.parametrize(
    "message",
    [
        Open(name="me", session=1, log="log-2"),
        Open(name="me", session=1, start=4),
        Fetch(name="me", session=1, first=4, done=0),
    ],
    ids=["saved ids of another log", "a start beyond the end", "a request beyond the end"],
)
def test_ids_of_another_log_are_refused(message: Any) -> None:
    it = host()
    if isinstance(message, Fetch):
        open_name(it)
    assert refusal(it, message) == "another-log"


def test_an_id_beyond_an_empty_log_is_refused_in_plain_words() -> None:
    it = host(0)
    it.send(PEER, Open(name="me", session=1, start=9))
    (answer,) = it.heard(PEER)
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("start=9 is beyond its end, 0, and this is log log-1. Continue")


def test_the_newest_client_has_the_name() -> None:
    it = host()
    first, second = 11, 12
    open_name(it, session=first)
    assert fetch(it, 3, session=first) is None
    open_name(it, session=second, peer=OTHER)
    (answer,) = it.heard(PEER)
    assert isinstance(answer, Refused)
    assert answer.code == "taken"
    assert refusal(it, Fetch(name="me", session=first, first=3, done=0)) == "taken"
    assert fetch(it, 0, session=second, peer=OTHER).rows == 3


def test_the_newest_of_two_clients_that_open_a_name_at_once_gets_it() -> None:
    it = host()
    it.is_calm = False  # the disk has no time for the first lease
    it._random.choices = lambda *_: (0.5,)  # type: ignore[method-assign,assignment]
    it.send(PEER, Open(name="me", session=1))
    it.send(OTHER, Open(name="me", session=2))
    (answer,) = it.heard(PEER)
    assert isinstance(answer, Refused)
    assert answer.code == "taken"
    it.is_calm = True
    it.step(1.0)
    (answer,) = it.heard(OTHER)
    assert isinstance(answer, Opened)
    assert answer.session == 2


def test_requests_that_cannot_be_fulfilled_are_refused() -> None:
    it = host()
    open_name(it)
    for at in range(MOST_NAMES - 1):
        open_name(it, f"other {at}")
    assert refusal(it, Open(name="one more", session=1)) == "full"
    assert refusal(it, Open(name="me", session=1), may_use=False) == "forbidden"
    assert refusal(it, Fetch(name="one more", session=1, first=0, done=0)) == "gone"
    assert refusal(it, Opened(session=1, log="x", next=0, new=True)) == "protocol"
    it.receive(PEER, [b"rubbish"])
    (answer,) = it.heard(PEER)
    assert isinstance(answer, Refused)


def test_a_name_is_new_for_the_client_that_has_made_it() -> None:
    it = host()
    it.send(PEER, Open(name="me", session=1))
    it.restart()  # before OPENED has left
    assert open_name(it).new
    assert not open_name(it, session=2).new


def test_a_subscriber_waits_at_the_end_and_the_receiver_is_asked_to_seal() -> None:
    it = host()
    open_name(it)
    assert fetch(it, 3) is None
    assert it.awaited == [3]
    it.log.append(b"a")
    it.step(0.1)
    (batch,) = it.heard(PEER)
    assert isinstance(batch, Batch)
    assert (batch.first, batch.next, batch.rows) == (3, 4, 1)
    assert fetch(it, 4) is None
    it.step(1.2)
    (batch,) = it.heard(PEER)
    assert isinstance(batch, Batch)
    assert (batch.next, batch.rows) == (4, 0), "the deadline has passed"


def test_the_receiver_is_asked_more_rarely_to_seal_for_topics_that_do_not_come() -> None:
    it = host()
    it.step(9.0)
    open_name(it, topics=[b"a"])
    assert fetch(it, 3) is None
    it.log.append(b"other")
    it.step(9.1)
    it.step(9.3)
    assert it.awaited == [3], "the last chunk had nothing for it"
    it.step(9.4)
    assert it.awaited == [3, 4]
    it.log.append(b"a")
    it.step(9.5)
    assert len(it.heard(PEER)) == 1
    assert fetch(it, 5) is None
    assert it.awaited == [3, 4, 5], "the last chunk had something for it"


def test_a_search_for_a_rare_topic_goes_on_where_it_was() -> None:
    it = host(0)
    it.log += [b"other"] * 150
    open_name(it, topics=[b"rare"])
    assert fetch(it, 0) is None
    it.step(1.0)
    (batch,) = it.heard(PEER)
    assert isinstance(batch, Batch)
    assert (batch.next, batch.rows) == (150, 0), "when the time to wait is over"


def test_while_the_disk_refuses_nothing_is_confirmed_and_messages_come_all_the_same() -> None:
    it = host()
    open_name(it)
    it.refuses = True
    assert fetch(it, 3, confirm=True, max_bytes=0) is None
    it.step(1.0)
    assert it.heard(PEER) == []
    batch = fetch(it, 0, done=0)
    assert (batch.rows, batch.done) == (3, 0)
    assert fetch(it, 3, confirm=True, max_bytes=0) is None
    it.refuses = False
    it.step(2.0)
    (batch,) = it.heard(PEER)
    assert isinstance(batch, Batch)
    assert batch.done == it.lease("me").next == 3
    it.refuses = True
    assert refusal(it, Open(name="other", session=1)) == "log"


def test_a_position_is_written_once_a_second_and_as_a_sign_of_life() -> None:
    it = host()
    open_name(it)
    fetch(it, 1)
    it.step(0.5)
    assert it.lease("me").next == 0
    it.step(1.5)
    assert it.lease("me").next == 1
    before = it.lease("me")
    for second in range(2, 14):
        it.now = float(second)
        fetch(it, 1)
        it.step(it.now)
    assert it.lease("me") is not before


def test_a_client_that_was_away_goes_on() -> None:
    it = host()
    open_name(it)
    fetch(it, 2)
    it.step(6.0)
    (account,) = it.server.accounts(7.0)
    assert (account["awaySeconds"], account["nextId"]) == (7.0, 2)
    assert it.lease("me").next == 2
    before = it.lease("me")
    it.step(20.0)
    assert it.lease("me") is before, "there is no sign of life"
    assert fetch(it, 2).rows == 1


def test_a_lease_that_was_dropped_while_its_client_was_away_is_gone() -> None:
    it = host()
    open_name(it)
    fetch(it, 2)
    it.step(6.0)
    it.leases.clear()
    it.step(6.1)
    assert refusal(it, Fetch(name="me", session=1, first=2, done=2)) == "gone"
    assert list(it.server.accounts(7.0)) == []
    assert open_name(it).new


def test_what_was_deleted_is_told_once_and_counted() -> None:
    it = host(5)
    open_name(it)
    it.delete(2)
    it.step(0.1)
    lost = [fetch(it, 0) for _ in range(2)]  # the second one is asked for again
    assert [(one.first, one.next, one.lost, one.rows) for one in lost] == [(0, 2, 2, 0)] * 2
    (account,) = it.server.accounts(1.0)
    assert (account["lost"], account["backlog"]) == (2, 3)


def test_a_damaged_chunk_refuses_the_client_that_reads_it() -> None:
    it = host()
    open_name(it)

    def fail(read: Any) -> None:
        it.server.read(read, DamagedChunkError("a bad checksum"), read.waiting.at, it.now)

    it._read = fail  # type: ignore[method-assign]
    refused = fetch(it, 0)
    assert (refused.code, refused.reason) == ("log", "a bad checksum")
