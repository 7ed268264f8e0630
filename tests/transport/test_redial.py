"""Connections that end: nothing that has reached the socket is thrown away by dialling again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import pytest
import zmq

from tests.support import Socket, bound, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.options.socket import Endpoints
from zmq_datasource.source.channel import Channel
from zmq_datasource.source.receiver import Receiver
from zmq_datasource.transport.core import Inbox
from zmq_datasource.transport.spec import SocketSpec

Context = zmq.Context[Socket]
REDIAL_SECONDS = 0.1


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq_datasource.transport.peers.Redialer.lost_seconds", REDIAL_SECONDS)


class Reading(NamedTuple):
    """A receiver or a front, driven alike."""

    hold: Callable[[], object]
    read: Callable[[], int]
    counts: Callable[[], tuple[int, int, int]]
    """Connections made, lost, and ended by libzmq."""

    def lost(self) -> bool:
        self.hold()
        return bool(self.counts()[1])

    def hold_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        wait_for(lambda: self.hold() or time.monotonic() > until, "the end of a pause")

    def read_all(self, count: int) -> int:
        """Until as many have come as there are, and then no more."""
        total = 0

        def enough() -> bool:
            nonlocal total
            total += self.read()
            return total >= count

        wait_for(enough, f"{count} messages")
        return total + self.read()


@contextmanager
def reading(kind: str, endpoints: str, maxmsgsize: int = 1000) -> Iterator[Reading]:
    if kind == "XSUB":
        spec = SocketSpec(
            kind=kind,
            connect=Endpoints.read(endpoints),
            rcvhwm=1000,
            sndhwm=1000,
            linger=0,
            zmq=stream_options(connect=endpoints, zmq_maxmsgsize=maxmsgsize).zmq,
        )
        channel, inbox = Channel(spec, SourceCounters(), counts_connections=False), Inbox()
        channel.open()
        with closing(channel):
            channel.socket.send(b"\x01")
            watch = channel.opened.watch
            yield Reading(
                channel.keep_alive,
                lambda: channel.receive(inbox, 10, 1 << 20, wait=False).messages,
                lambda: (watch.connections, watch.lost, watch.protocol_errors),
            )
        return
    counters = SourceCounters()
    options = stream_options(connect=endpoints, socketType=kind, zmq_maxmsgsize=maxmsgsize)
    with Receiver(options, counters) as receiver:
        yield Reading(
            receiver.extend_timeouts,
            lambda: receiver.receive(10),
            lambda: (counters.connections_made, counters.connections_lost, counters.protocol_errors),
        )


KINDS = pytest.mark.parametrize("kind", ["SUB", "PULL", "XSUB"])


def sender(context: Context, kind: str) -> tuple[Socket, str]:
    return bound(context, zmq.PUSH if "PULL" in kind else zmq.XPUB, linger=5000)


def wait_until_heard(sock: Socket) -> None:
    if int(sock.type) == zmq.XPUB:
        assert sock.poll(5000)
        assert sock.recv() == b"\x01"


@KINDS
def test_a_publisher_that_ends_while_receiving_is_paused_costs_no_message(
    context: Context, kind: str
) -> None:
    source, endpoint = sender(context, kind)
    with reading(kind, endpoint) as receiving:
        wait_until_heard(source)
        for _ in range(500):
            source.send(b"x")
        source.close()
        wait_for(receiving.lost, "the end of the connection")
        receiving.hold_for(3 * REDIAL_SECONDS)  # the log is full, or its disk is slow
        assert receiving.read_all(500) == 500
        assert receiving.counts()[2] == 0


@KINDS
def test_messages_before_a_frame_over_the_limit_are_read_before_a_redial(
    context: Context, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, endpoint = sender(context, kind)
    with reading(kind, endpoint, maxmsgsize=100) as receiving:
        wait_until_heard(source)
        for _ in range(500):
            source.send(b"x")
        source.send(b"." * 101)
        with caplog.at_level(logging.WARNING):
            wait_for(receiving.lost, "the end of the connection")
            receiving.hold_for(3 * REDIAL_SECONDS)
            assert receiving.read_all(500) == 500

            def connected_again() -> bool:
                receiving.read()
                receiving.hold()
                return receiving.counts()[0] == 2

            wait_for(connected_again, "a new connection")
        assert receiving.counts() == (2, 1, 1)
        assert [r.message for r in caplog.records if "zmq.maxmsgsize (100 bytes)" in r.message]
        wait_for(lambda: (source.send(b"after"), receiving.read())[1], "messages of the new connection")


@KINDS
def test_a_connection_that_was_cut_is_dialled_again_though_others_never_pause(
    context: Context, kind: str
) -> None:
    cut, cut_endpoint = sender(context, kind)
    busy, busy_endpoint = sender(context, kind)
    with reading(kind, f"{cut_endpoint},{busy_endpoint}", maxmsgsize=100) as receiving:
        wait_until_heard(cut)
        wait_until_heard(busy)
        cut.send(b"." * 101)

        def dialled_again() -> bool:
            with suppress(zmq.Again):  # a PUSH with a full peer
                for _ in range(100):
                    busy.send(b"x", zmq.NOBLOCK)
            receiving.read()  # less than that
            receiving.hold()
            return receiving.counts()[0] == 3

        wait_for(dialled_again, "a new connection")
