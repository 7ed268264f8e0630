"""Many duplicates are told: most often the numbers are counted in another way than the options say."""

from __future__ import annotations

import logging

import pytest
import zmq

from tests.support import Socket, bound, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.source.receiver import Receiver


def told(
    context: zmq.Context[Socket], caplog: pytest.LogCaptureFixture, numbers: list[int], **options: str
) -> list[str]:
    """Receive messages with these numbers. Returns the logged warnings."""
    push, endpoint = bound(context, zmq.PUSH)
    asked = stream_options(
        connect=endpoint,
        socketType="PULL",
        framing="custom",
        sequenceAt="1:0:u64be",
        valueFrame="2",
        topicFrame="0",
        **options,
    )
    with Receiver(asked, SourceCounters()) as receiver, caplog.at_level(logging.WARNING):
        for number in numbers:
            push.send_multipart(
                [b"ab"[number % 2 : number % 2 + 1], (number // 2).to_bytes(8, "big"), b"value"]
            )
        wait_for(lambda: (receiver.receive(), receiver.pending)[1] >= len(numbers), "all messages")
        receiver.take()
    return [
        record.getMessage()
        for record in caplog.records
        if "number of an earlier message" in record.getMessage()
    ]


def test_many_duplicates_suggest_a_counter_for_each_topic(
    context: zmq.Context[Socket], caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = told(context, caplog, list(range(2, 1002)), sequenceBy="endpoint")
    assert line == (
        "500 of the last 1000 messages have the number of an earlier message. If each topic has numbers of its own, "
        "set sequenceBy=endpoint,topic, and not deduplicate, which would leave out messages that came once. If the "
        "publisher sends messages again, deduplicate leaves them out"
    )


def test_many_duplicates_with_topics_counted_suggest_deduplicate(
    context: zmq.Context[Socket], caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = told(context, caplog, [*range(2, 952), *range(2, 52)], sequenceBy="endpoint,topic")
    assert line.startswith(
        "50 of the last 1000 messages have the number of an earlier message. If the publisher sends"
    )


@pytest.mark.parametrize(
    "numbers", [[*range(2, 972), *range(2, 32)], [*range(2, 502), *range(2, 501)]], ids=["few", "too early"]
)
def test_few_duplicates_cause_no_warning(
    numbers: list[int], context: zmq.Context[Socket], caplog: pytest.LogCaptureFixture
) -> None:
    assert told(context, caplog, numbers, sequenceBy="endpoint,topic") == []
