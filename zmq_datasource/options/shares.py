"""How the receivers of one feed share it: the endpoints and topics of each receiver. Pure.

No message may come to two receivers:

* A PUSH distributes its messages among the PULL sockets. So each receiver connects to every endpoint. But each bound
  endpoint belongs to one receiver.
* A SUB gets all messages to which it subscribes. So each receiver has its own endpoints, or with ``receiversBy=topics``
  its own topics. A message whose topic begins with two subscribed topics matches both, so such topics stay together.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from zmq_datasource.errors import OptionError
from zmq_datasource.options.read import ReadOptions
from zmq_datasource.options.types import Endpoints, Topics

__all__ = ["share_of", "share_topics"]


def share_of(options: ReadOptions, receiver: int) -> ReadOptions:
    """The options of one receiver.

    Args:
        receiver: Its number, from 0 to ``options.receivers`` - 1.

    Raises:
        OptionError: There are not enough endpoints or topics for all receivers.
    """
    if options.receivers == 1:
        return options
    if options.receivers_by == "topics":
        return _with_topics(options, receiver)
    if options.socket_type == "PULL":
        return _of_pull(options, receiver)
    return _with_endpoints(options, receiver)


def _of_pull(options: ReadOptions, receiver: int) -> ReadOptions:
    count, bind = options.receivers, options.bind
    if options.numbering is not None:
        raise OptionError(
            f"receivers={count} with socketType=PULL and framing={options.framing}: each receiver gets some of a "
            "publisher's numbers, and the others would look lost; set sequenceBy=none, or one receiver"
        )
    if not options.connect and len(bind) < count:
        raise OptionError(
            f"receivers={count} with bind={bind}: each receiver binds endpoints of its own, and there are {len(bind)}; "
            "name more, as in tcp://*:[5557-5560], or set fewer receivers"
        )
    return msgspec.structs.replace(options, bind=Endpoints(bind[receiver::count]))


def _with_endpoints(options: ReadOptions, receiver: int) -> ReadOptions:
    count, connect = options.receivers, options.connect
    endpoints = len(connect) + len(options.bind)
    if endpoints < count:
        raise OptionError(
            f"receivers={count}: SUB sockets share the endpoints, and there are {endpoints}; set fewer receivers, or "
            "receiversBy=topics"
        )
    # The bound endpoints are given to the receivers after those that have the last of the others, so that each has one.
    bound = (receiver - len(connect)) % count
    return msgspec.structs.replace(
        options,
        connect=Endpoints(connect[receiver::count]),
        replay_endpoint=Endpoints(options.replay_endpoint[receiver::count]),
        bind=Endpoints(options.bind[bound::count]),
    )


def _with_topics(options: ReadOptions, receiver: int) -> ReadOptions:
    count = options.receivers
    if options.socket_type != "SUB":
        raise OptionError(
            f"receiversBy=topics with socketType={options.socket_type}: only a SUB has topics; remove it"
        )
    if options.bind:
        raise OptionError(
            f"receiversBy=topics with bind={options.bind}: every receiver needs every publisher, and one port cannot "
            "be bound twice; let the publishers bind, or set receiversBy=endpoints"
        )
    if options.replay_endpoint:
        raise OptionError(
            "receiversBy=topics with replayEndpoint: a replay has all topics; remove one of them"
        )
    shares = share_topics(options.topics, count)
    if not all(shares):
        raise OptionError(
            f"receivers={count} with receiversBy=topics: topics={options.topics} makes {sum(map(bool, shares))} "
            "shares, because a topic that begins with another one stays with it; set fewer receivers, or name more "
            "topics"
        )
    return msgspec.structs.replace(options, topics=Topics(shares[receiver]))


def share_topics(topics: Sequence[str], count: int) -> list[list[str]]:
    """Divide topics into ``count`` shares, of which some may be empty. No message matches topics of two shares."""
    groups: list[list[str]] = []
    for topic in sorted(topics):  # a topic that begins with another one comes after it
        if groups and topic.startswith(groups[-1][0]):
            groups[-1].append(topic)
        else:
            groups.append([topic])
    return [[topic for group in groups[share::count] for topic in group] for share in range(count)]
