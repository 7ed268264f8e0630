"""The head of a log: the record of its writer, of which the highest serial counts."""

from __future__ import annotations

import msgspec
import pytest

from tests.log.machines import Machines, Watched
from zmq_datasource.errors import DiskFaultError, LogFormatError, LogLockedError
from zmq_datasource.log.head import Head, HeadWriter, read_head
from zmq_datasource.log.records import read_object
from zmq_datasource.log.storage import LogStorage


@pytest.fixture
def storage(anywhere: Machines) -> LogStorage:
    made = anywhere.storage()
    made.open_log()
    return made


def test_every_process_reads_what_was_written_last_and_the_next_writer_continues_with_it(
    storage: LogStorage, anywhere: Machines
) -> None:
    head = HeadWriter(storage.store)
    head.take_over()
    for deleted in (10, 20, 30):
        written = head.write(Head(40, deleted, {"connect": "tcp://há:1"}, {"a": 1.5}))
    assert read_head(anywhere.connect()) == written == head.head
    assert (written.announced, written.deleted, written.silent) == (40, 30, {"a": 1.5})
    assert len(anywhere.names("head")) == 2, "older heads than the one before are deleted"
    taken = HeadWriter(anywhere.connect()).take_over()
    assert msgspec.structs.replace(taken, writer=written.writer) == written, (
        "the next writer continues with it"
    )


def test_a_writer_that_was_replaced_changes_nothing(storage: LogStorage, anywhere: Machines) -> None:
    first, second = HeadWriter(storage.store), HeadWriter(anywhere.connect())
    first.take_over()
    second.take_over()
    with pytest.raises(LogLockedError, match=r"another process has put .*head/0+2\.json"):
        first.write(Head(5))
    assert read_head(storage.store) == second.head


def test_a_late_put_under_a_free_serial_does_not_count(storage: LogStorage, anywhere: Machines) -> None:
    first, second = HeadWriter(storage.store), HeadWriter(anywhere.connect())
    first.take_over()
    second.take_over()
    for announced in (
        8,
        9,
    ):  # the second one deletes the head with which it took over: its serial is free again
        second.write(Head(announced))
    with pytest.raises(LogLockedError, match="another process has put"):
        first.write(Head(5))
    assert read_head(storage.store).announced == 9
    second.write(Head(10))
    assert len(anywhere.names("head")) == 2, "the late one is deleted too"


def test_a_put_whose_answer_was_lost_is_no_other_writer(storage: LogStorage) -> None:
    store = storage.store
    assert isinstance(store, Watched)
    head = HeadWriter(storage.store)
    head.take_over()

    def lose_listings(verb: str, key: str) -> None:
        if (verb, key) == ("list", "head"):
            raise DiskFaultError("no answer")

    store.before = lose_listings
    with pytest.raises(DiskFaultError):
        head.write(Head(5))
    store.before = None
    head.write(Head(6))
    assert read_head(storage.store).announced == 6


def test_a_damaged_head_is_named(storage: LogStorage, anywhere: Machines) -> None:
    HeadWriter(storage.store).take_over()
    key = f"head/{anywhere.names('head')[-1]}"
    content = read_object(storage.store, key)
    assert content is not None
    for damaged in (content.replace(b'"deleted":0', b'"deleted":9'), content[:-9], b"", b"[]"):
        storage.store.put(key, damaged)
        with pytest.raises(LogFormatError, match=r"reading .*head/[0-9]+\.json: it is not the head of a log"):
            read_head(storage.store)
