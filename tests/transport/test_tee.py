"""The compiled core and the Python core: how a tee sends on what an inbox takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.support import Socket, wait_for
from tests.transport.cores import MIB, Context, Frames, handed_over, pair, read_all, send, use
from zmq_datasource.host.wake_pipe import WakePipe
from zmq_datasource.transport import core
from zmq_datasource.transport.core import Inbox, Tee

pytestmark = pytest.mark.usefixtures("core_name")

_MOST = 100_000


@pytest.fixture
def wakes() -> Iterator[WakePipe]:
    with closing(WakePipe()) as pipe:
        yield pipe


def published_to(context: Context, hwm: int = 0, topic: bytes = b"") -> tuple[Socket, Socket]:
    """An XPUB and its subscriber, whose queue together holds twice the high-water mark."""
    publisher, subscriber = pair(context, zmq.XPUB, zmq.SUB, hwm)
    publisher.setsockopt(zmq.XPUB_NODROP, 1)
    subscriber.subscribe(topic)
    assert publisher.recv() == b"\x01" + topic
    return publisher, subscriber


def numbered(first: int, end: int) -> Frames:
    return [[b"topic", b"%d" % i] for i in range(first, end)]


def test_each_message_is_kept_and_sent_on_as_it_came(context: Context) -> None:
    push, pull = pair(context)
    feed, xsub = pair(context, zmq.PUB, zmq.XSUB)
    publisher, subscriber = published_to(context)
    xsub.send(b"\x01")
    sent = [[b""], [b"t", b"", b"x" * 5_000_000], [b"one"], [b"%d" % i for i in range(3000)], [b"y" * 100]]
    inbox, tee = Inbox(), Tee(publisher, drops=False)
    send(push, sent)
    send(feed, sent)
    wait_for(
        lambda: (inbox.take([pull, xsub], _MOST, 1 << 30, tee=tee), inbox.messages)[1] >= 10, "all messages"
    )
    got = handed_over(inbox)
    assert read_all(subscriber) == got
    assert sorted(got) == sorted(sent + sent)
    assert (tee.published, tee.full, tee.waited_seconds, tee.pending) == (10, 0, 0.0, False)


def test_a_message_that_is_too_large_is_not_sent_on(context: Context) -> None:
    push, pull = pair(context)
    publisher, subscriber = published_to(context)
    inbox, tee = Inbox(), Tee(publisher, drops=False)
    send(push, [[b"a", b"b"], [b"x" * 60] * 40, [b"c"]])
    taken = inbox.take([pull], _MOST, MIB, largest=100, tee=tee)
    assert (taken.messages, taken.excess, taken.excess_source) == (1, 2400, 0)
    assert inbox.take([pull], _MOST, MIB, largest=100, tee=tee).messages == 1
    assert read_all(subscriber) == handed_over(inbox) == [[b"a", b"b"], [b"c"]]


def test_a_full_queue_holds_the_inputs_back_and_loses_nothing(context: Context) -> None:
    push, pull = pair(context)
    publisher, subscriber = published_to(context, hwm=5)
    inbox, tee = Inbox(), Tee(publisher, drops=False)
    sent = numbered(0, 100)
    send(push, sent)
    assert inbox.take([pull], _MOST, MIB, tee=tee).messages == 11  # the last one waits in the tee
    assert (tee.pending, tee.published, tee.full) == (True, 10, 1)
    assert tee.waited_seconds > 0
    assert inbox.take([pull], _MOST, MIB, tee=tee, wait=0.02).messages == 0
    assert tee.full == 1
    got: Frames = []
    while len(got) < 100:
        got += read_all(subscriber)
        inbox.take([pull], _MOST, MIB, tee=tee)
    assert got == sent == handed_over(inbox)
    assert (tee.pending, tee.published) == (False, 100)


def test_a_full_queue_is_waited_for_5_ms_and_then_messages_are_dropped(context: Context) -> None:
    push, pull = pair(context)
    publisher, stuck = published_to(context, hwm=5)
    inbox, tee = Inbox(), Tee(publisher, drops=True)
    send(push, numbered(0, 1000))
    assert inbox.take([pull], _MOST, MIB, tee=tee).messages == 1000
    assert (tee.pending, tee.published) == (False, 1000)
    assert 1 <= tee.full <= 1 + 10 * tee.waited_seconds / 0.005
    assert read_all(stuck) == numbered(0, 10)
    # It has read all, so it gets messages again. The others were never refused one for longer than a moment.

    def gets_more() -> bool:
        send(push, [[b"on"]])
        inbox.take([pull], 9, MIB, tee=tee)
        return bool(read_all(stuck))

    wait_for(gets_more, "a message")


def test_a_subscriber_that_reads_gets_what_another_one_drops(context: Context) -> None:
    push, pull = pair(context)
    publisher, stuck = published_to(context, hwm=5)
    reads = context.socket(zmq.SUB)
    reads.rcvhwm, reads.rcvtimeo = 0, 20_000
    reads.subscribe(b"")
    reads.connect(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
    inbox, tee = Inbox(), Tee(publisher, drops=True)
    got: Frames = []
    sent = numbered(0, 2000)
    for i in range(0, 2000, 5):
        send(push, sent[i : i + 5])
        assert inbox.take([pull], _MOST, MIB, tee=tee).messages == 5
        got += read_all(reads)
    assert got == sent
    assert len(read_all(stuck)) < 2000
    assert tee.full


def test_what_waits_leaves_at_the_end_or_is_dropped(context: Context) -> None:
    push, pull = pair(context)
    for drops in (False, True):
        publisher, subscriber = published_to(context, hwm=1)
        inbox, tee = Inbox(), Tee(publisher, drops=False)
        send(push, numbered(0, 3))
        inbox.take([pull], _MOST, MIB, tee=tee)
        assert tee.pending
        reader = threading.Timer(0.05, lambda sub=subscriber: sub.recv_multipart())
        if not drops:
            reader.start()
        tee.finish(0.05 if drops else 20)
        if not drops:
            reader.join()
        assert (tee.pending, tee.published) == (False, 3)
        assert len(read_all(subscriber)) == 2  # of three, of which one was read or dropped
        publisher.close(linger=0)


def test_a_wait_ends_with_a_subscription_or_when_it_is_woken(context: Context, wakes: WakePipe) -> None:
    _, pull = pair(context)
    publisher, subscriber = published_to(context)
    inbox, tee = Inbox(), Tee(publisher, drops=False)
    for wake in (wakes.wake, lambda: subscriber.subscribe(b"more")):
        began = time.monotonic()
        timer = threading.Timer(0.05, wake)
        timer.start()
        taken = inbox.take([pull], 9, MIB, wait=60, tee=tee, alarms=[wakes.descriptor, publisher])
        assert (taken.messages, taken.empty) == (0, [True])
        assert 0.04 < time.monotonic() - began < 30
        timer.join()
        wakes.clear()
    assert publisher.recv() == b"\x01more"


def test_a_full_queue_does_not_keep_alarms_and_the_end_of_a_wait_from_being_noticed(
    context: Context, wakes: WakePipe
) -> None:
    push, pull = pair(context)
    publisher, _ = published_to(context, hwm=1)
    inbox, tee = Inbox(), Tee(publisher, drops=False)
    send(push, numbered(0, 10))
    began = time.monotonic()
    inbox.take([pull], _MOST, MIB, wait=0.05, gather=0.05, tee=tee)
    assert 0.04 < time.monotonic() - began < 30
    wakes.wake()
    inbox.take([pull], _MOST, MIB, wait=60, gather=60, tee=tee, alarms=[wakes.descriptor])
    assert time.monotonic() - began < 30
    assert tee.pending


def test_a_call_gathers_messages_and_says_when_they_came(context: Context) -> None:
    push, pull = pair(context)
    other, also = pair(context)
    inbox = Inbox()
    timers = [
        threading.Timer(after, sender.send, [b"late"])
        for after, sender in ((0.05, push), (0.15, other), (0.25, push))
    ]
    for timer in timers:
        timer.start()
    taken = inbox.take([pull, also], 3, MIB, gather=20)
    for timer in timers:
        timer.join()
    assert [(run.messages, run.source) for run in taken.runs] == [(1, 0), (1, 1), (1, 0)]
    times = [run.at for run in taken.runs]
    assert times == sorted(times)
    assert times[0] >= 40_000
    assert times[2] - times[0] >= 100_000
    send(push, [[b"at once"]] * 5)
    assert inbox.take([pull, also], 9, MIB, wait=60).messages == 5  # without ``gather`` it goes on for none


def test_new_subscribers_are_noticed_while_messages_never_end(context: Context) -> None:
    push, pull = pair(context)
    publisher, _ = pair(context, zmq.XPUB, zmq.SUB)
    inbox, tee = Inbox(), Tee(publisher, drops=True)
    late = context.socket(zmq.SUB)
    late.rcvhwm = 0
    late.subscribe(b"")
    late.connect(publisher.getsockopt_string(zmq.LAST_ENDPOINT))

    def passed() -> bool:
        send(push, [[b"x"]] * 100)
        assert inbox.take([pull], 100, MIB, tee=tee).messages == 100
        return bool(late.poll(0))

    wait_for(passed, "a message for the late subscriber")


@given(
    messages=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=6), max_size=30),
    most=st.integers(1, 7),
    hwm=st.integers(0, 3),
    name=st.sampled_from(sorted({core.NAME, "python"})),
)
def test_subscribers_see_what_the_log_gets(messages: Frames, most: int, hwm: int, name: str) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    push, pull = pair(context)
    try:
        with pytest.MonkeyPatch.context() as patch:
            use(patch, name)
            publisher, subscriber = published_to(context, hwm)
            inbox, tee = Inbox(), Tee(publisher, drops=False)
            send(push, messages)
            kept: Frames = []
            got: Frames = []
            while len(got) < len(messages):
                inbox.take([pull], most, MIB, tee=tee)
                got += read_all(subscriber)
                kept += handed_over(inbox)
            assert kept == got == messages
    finally:
        context.destroy(linger=0)
