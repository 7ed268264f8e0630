"""Each message of a feed comes to one receiver."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import stream_options
from zmq_datasource.errors import OptionError
from zmq_datasource.options import share_of
from zmq_datasource.options.receiving import share_topics
from zmq_datasource.options.types import Topics


def shares(count: int, **options: Any) -> list[tuple[str, str, str]]:
    parsed = stream_options(receivers=count, **options)
    found = [share_of(parsed, number) for number in range(count)]
    return [(str(share.connect), str(share.bind), str(share.topics)) for share in found]


def test_every_pull_connects_everywhere_and_a_port_is_bound_once() -> None:
    options = {"socketType": "PULL", "connect": "tcp://a:1,tcp://b:1", "bind": "tcp://*:2"}
    assert shares(2, **options) == [("tcp://a:1,tcp://b:1", "tcp://*:2", ""), ("tcp://a:1,tcp://b:1", "", "")]


def test_subs_share_the_endpoints_in_turn() -> None:
    assert shares(2, connect="tcp://a-[0-4]:1") == [
        ("tcp://a-0:1,tcp://a-2:1,tcp://a-4:1", "", ""),
        ("tcp://a-1:1,tcp://a-3:1", "", ""),
    ]
    assert shares(3, connect="tcp://a:1", bind="tcp://*:[2-4]") == [
        ("tcp://a:1", "tcp://*:4", ""),
        ("", "tcp://*:2", ""),
        ("", "tcp://*:3", ""),
    ]


def test_a_replay_endpoint_stays_with_its_publisher() -> None:
    parsed = stream_options(
        receivers=2, framing="vllm", connect="tcp://a-[0-2]:1", replayEndpoint="tcp://a-[0-2]:2"
    )
    found = [share_of(parsed, number) for number in range(2)]
    assert [str(share.replay_endpoint) for share in found] == ["tcp://a-0:2,tcp://a-2:2", "tcp://a-1:2"]


def test_subs_share_the_topics_with_receivers_by_topics() -> None:
    options = {"connect": "tcp://a:1", "topics": "a,b,ab,c", "receiversBy": "topics"}
    assert shares(2, **options) == [("tcp://a:1", "", "a,ab,c"), ("tcp://a:1", "", "b")]


@given(
    st.lists(st.text("ab", max_size=4), min_size=1, unique=True), st.integers(1, 4), st.text("ab", max_size=6)
)
def test_no_message_matches_topics_of_two_receivers(topics: list[str], count: int, message: str) -> None:
    found = share_topics(Topics(topics), count)
    assert Counter(topic for share in found for topic in share) == Counter(topics)
    assert sum(any(message.startswith(topic) for topic in share) for share in found) <= 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"connect": "tcp://a:1"}, "SUB sockets share the endpoints, and there are 1; set fewer receivers"),
        ({"bind": "tcp://*:1", "socketType": "PULL"}, "binds endpoints of its own, and there are 1"),
        ({"connect": "tcp://a:1", "receiversBy": "topics"}, "makes 1 shares"),
        ({"connect": "tcp://a:1", "receiversBy": "topics", "topics": "a,ab"}, "makes 1 shares"),
        ({"bind": "tcp://*:1", "receiversBy": "topics", "topics": "a,b"}, "one port cannot be bound twice"),
        ({"connect": "tcp://a:1", "receiversBy": "topics", "socketType": "PULL"}, "only a SUB has topics"),
        (
            {"connect": "tcp://a:1", "socketType": "PULL", "framing": "sequenced"},
            "each receiver gets some of a publisher's numbers",
        ),
        (
            {"connect": "tcp://a:1", "topics": "a,b", "receiversBy": "topics", "framing": "sequenced"},
            "over all its topics",
        ),
        ({"bind": "tcp://*:[1-2]", "socketType": "ROUTER"}, "receivers is not for socketType=ROUTER"),
        ({"receivers": 1, "connect": "tcp://a:1", "receiversBy": "topics"}, "receiversBy needs receivers"),
    ],
)
def test_a_feed_that_cannot_be_shared_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        stream_options(**{"receivers": 2, **options})
