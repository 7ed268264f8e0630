"""How the receivers of one feed share it: to what each of them connects, and what it subscribes to.

No message may come to two of them:

* The sockets of a PULL share what a publisher sends by themselves, so each of them connects to every endpoint. A port
  is bound by one of them.
* Each SUB gets everything that it subscribes to. So each has endpoints of its own; or, with ``receiversBy=topics``, all
  endpoints and topics of its own. Messages of a topic that begins with another one match both: such topics stay
  together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from zmq_datasource.errors import OptionError
from zmq_datasource.options.types import Endpoints, Topics

if TYPE_CHECKING:
    from zmq_datasource.options.read import ReadOptions

__all__ = ["share_of", "share_topics"]


def share_of(options: ReadOptions, receiver: int) -> ReadOptions:
    """The options of one receiver, of ``options.receivers`` that are counted from 0.

    Raises:
        OptionError: There is not enough for each of them.
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
    # Those that are bound go on where those to connect to end, so that each receiver has one.
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
            "shares, because a topic stays with the one that it begins with; set fewer receivers, or name more topics"
        )
    return msgspec.structs.replace(options, topics=Topics(shares[receiver]))


def share_topics(topics: Sequence[str], count: int) -> list[list[str]]:
    """Topics in so many shares, of which some may be empty; no message matches topics of two of them."""
    groups: list[list[str]] = []
    for topic in sorted(topics):  # one that begins with another one follows it
        if groups and topic.startswith(groups[-1][0]):
            groups[-1].append(topic)
        else:
            groups.append([topic])
    return [[topic for group in groups[share::count] for topic in group] for share in range(count)]
