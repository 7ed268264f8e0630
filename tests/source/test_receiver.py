"""The receiver: any traffic there is, in bounded rounds."""

from __future__ import annotations

import time

import pytest
import zmq

import zmq_datasource.source.receiver as receiver_module
from tests.support import Socket, bind_when_free, bound, free_endpoint, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.errors import EndpointError
from zmq_datasource.source.receiver import Receiver
from zmq_datasource.transport import connections, core

Context = zmq.Context[Socket]


def receive(receiver: Receiver, count: int) -> None:
    wait_for(lambda: (receiver.receive(), receiver.pending)[1] >= count, f"{count} messages")


def test_messages_arrive_as_they_were_sent(context: Context) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    sent = [
        [b""],
        [b"v"],
        [b"t", b"v"],
        [b"", b""],
        [b"t", b"a", b"b", b"v"],
        [bytes(range(256))],
        [b"x" * (3 * receiver_module.BATCH_BYTES)],  # more than a round takes, or a batch
    ]
    counters = SourceCounters()
    clock_began = time.monotonic()
    options = stream_options(connect=endpoint, socketType="PULL")
    with Receiver(options, counters, clock=lambda: 1.5 + time.monotonic() - clock_began) as receiver:
        for message in sent:
            push.send_multipart(message)
        receive(receiver, len(sent))
        batch = receiver.take()
    assert batch.column("value").to_pylist() == [message[-1] for message in sent]
    assert batch.column("topic").to_pylist() == [None, None, "t", "", "t", None, None]
    times = batch.column("timestamp").cast("int64").to_pylist()
    assert times == sorted(times)
    assert times[0] >= 1_500_000
    assert times[-1] <= 1_500_001 + 1_000_000 * (time.monotonic() - clock_began)
    assert counters.received == len(sent)
    assert counters.bytes == sum(len(message[-1]) for message in sent)


def test_topics_are_prefixes(context: Context) -> None:
    publisher, endpoint = bound(context, zmq.XPUB)
    with Receiver(stream_options(connect=endpoint, topics="a,bc"), SourceCounters()) as receiver:
        assert {publisher.recv(), publisher.recv()} == {b"\x01a", b"\x01bc"}
        for topic in (b"a1", b"b1", b"bc2", b"c"):
            publisher.send_multipart([topic, b"v"])
        receive(receiver, 2)
        assert receiver.receive() == 0
        assert receiver.take().column("topic").to_pylist() == ["a1", "bc2"]


def test_a_topic_before_a_delimiter_is_a_topic(context: Context) -> None:
    """As bluesky, monerod and others send it, in one frame. The SUB still compares the beginning of that frame."""
    publisher, endpoint = bound(context, zmq.XPUB)
    options = stream_options(connect=endpoint, topics="json-", topicDelimiter=":", includeFrames="true")
    with Receiver(options, SourceCounters()) as receiver:
        assert publisher.recv() == b"\x01json-"
        for message in (b'json-full-txpool_add:[{"id":"a:b"}]', b"other:1", b"json-without"):
            publisher.send(message)
        publisher.send_multipart([b"json-two", b"in:frames"])
        receive(receiver, 3)
        rows = receiver.take()
    assert rows.column("topic").to_pylist() == ["json-full-txpool_add", None, "json-two"]
    assert rows.column("value").to_pylist() == [b'[{"id":"a:b"}]', b"json-without", b"in:frames"]


def test_a_sub_subscribes_to_all_its_topics(context: Context) -> None:
    """libzmq silently drops subscriptions beyond the SUB's own SNDHWM."""
    count = 3000
    publisher, endpoint = bound(context, zmq.XPUB, sndhwm=0, rcvhwm=0)
    topics = ",".join(f"t{i:04}" for i in range(count))
    options = stream_options(connect=endpoint, topics=topics, rcvhwm=count)
    with Receiver(options, SourceCounters()) as receiver:
        asked = 0
        while asked < count and publisher.poll(1000):
            asked += len(publisher.recv()) > 0
        assert asked == count
        for i in range(count):
            publisher.send(b"t%04d" % i)
        receive(receiver, count)


def test_a_round_over_many_sockets_is_bounded_and_takes_them_in_turn(context: Context) -> None:
    """An Arrow array holds 2 GiB, so a round must not grow with the number of endpoints."""
    size, each = 1 << 20, 8
    publishers = [bound(context, zmq.XPUB, sndhwm=0) for _ in range(6)]
    options = stream_options(connect=",".join(endpoint for _, endpoint in publishers), framing="vllm")
    with Receiver(options, SourceCounters()) as receiver:
        for i, (publisher, _) in enumerate(publishers):
            assert publisher.recv() == b"\x01"
            for sequence in range(each):
                publisher.send_multipart([b"t", sequence.to_bytes(8, "big"), b"%d" % i + b" " * size])
        wait_for(lambda: all(c.socket.poll(0) for c in receiver.channels), "messages on every socket")
        order = []
        while len(order) < each * len(publishers):
            before = receiver.pending_bytes
            receiver.receive()
            assert receiver.pending_bytes - before <= receiver_module.ROUND_BYTES + size + 100
            order += [int(value[:1]) for value in receiver.take().column("value").to_pylist()]
        assert set(order[: each * 5]) == set(range(6))  # in turn: no socket waits until all others are empty


def test_a_message_too_large_for_a_row_is_counted_and_skipped(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "MAX_MESSAGE_BYTES", 1000)
    push, endpoint = bound(context, zmq.PUSH)
    counters = SourceCounters()
    with Receiver(stream_options(connect=endpoint, socketType="PULL"), counters, batch_bytes=1) as receiver:
        push.send(b"x" * 1000)
        push.send(b"x" * 1001)
        push.send_multipart([b"x" * 500, b"x" * 501])
        push.send(b"last")
        receive(receiver, 2)
        assert receiver.pending_bytes == 1004
        assert receiver.take().column("value").to_pylist() == [b"x" * 1000, b"last"]
        assert receiver.pending_bytes == 0
    assert counters.oversize == 2


def test_a_sub_receives_again_after_a_publisher_restarts(context: Context) -> None:
    publisher, endpoint = bound(context, zmq.XPUB)
    with Receiver(stream_options(connect=endpoint), SourceCounters()) as receiver:
        assert publisher.recv() == b"\x01"
        publisher.close()
        again = context.socket(zmq.XPUB)
        bind_when_free(again, endpoint)
        wait_for(lambda: (receiver.keep_alive(), again.poll(10))[1], "the subscription")
        again.send(b"v")
        receive(receiver, 1)


def test_a_replay_socket_that_cannot_be_opened_leaves_no_socket_open() -> None:
    options = stream_options(connect=free_endpoint(), replayEndpoint="tcp://*:5559", framing="vllm")
    before = connections.threads()
    with (
        pytest.raises(EndpointError, match=r"connecting to tcp://\*:5559"),
        Receiver(options, SourceCounters()),
    ):
        pass
    wait_for(lambda: connections.threads() <= before, "the end of libzmq's threads")
