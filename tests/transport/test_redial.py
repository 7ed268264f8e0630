"""Connections that end: nothing that has reached the socket is thrown away by dialling again."""

from __future__ import annotations

import logging
import time

import pytest
import zmq

from tests.support import Socket, bound, stream_options, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.source.receiver import Receiver

Context = zmq.Context[Socket]
REDIAL_SECONDS = 0.1


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zmq_datasource.transport.peers.Redialer.seconds", REDIAL_SECONDS)


class Reading(Receiver):
    """A receiver whose connections the test looks at."""

    def __init__(self, kind: str, endpoints: str, maxmsgsize: int = 1000) -> None:
        self.counters = SourceCounters()
        options = stream_options(connect=endpoints, socketType=kind, zmq_maxmsgsize=maxmsgsize)
        super().__init__(options, self.counters)

    def lost(self) -> bool:
        self.extend_timeouts()
        return self.counters.connections_lost > 0

    def pause(self, seconds: float) -> None:
        """As while the log is full, or its disk is slow."""
        until = time.monotonic() + seconds
        wait_for(lambda: self.extend_timeouts() or time.monotonic() > until, "the end of a pause")

    def read_all(self, count: int) -> int:
        """Until as many have come as there are, and then no more."""
        total = 0

        def enough() -> bool:
            nonlocal total
            total += self.receive(10)
            return total >= count

        wait_for(enough, f"{count} messages")
        return total + self.receive(10)


KINDS = pytest.mark.parametrize("kind", ["SUB", "PULL"])


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
    with Reading(kind, endpoint) as receiving:
        wait_until_heard(source)
        for _ in range(500):
            source.send(b"x")
        source.close()
        wait_for(receiving.lost, "the end of the connection")
        receiving.pause(3 * REDIAL_SECONDS)
        assert receiving.read_all(500) == 500
        assert receiving.counters.protocol_errors == 0


@KINDS
def test_messages_before_a_frame_over_the_limit_are_read_before_a_redial(
    context: Context, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, endpoint = sender(context, kind)
    with Reading(kind, endpoint, maxmsgsize=100) as receiving:
        wait_until_heard(source)
        for _ in range(500):
            source.send(b"x")
        source.send(b"." * 101)
        with caplog.at_level(logging.WARNING):
            wait_for(receiving.lost, "the end of the connection")
            receiving.pause(3 * REDIAL_SECONDS)
            assert receiving.read_all(500) == 500

            def connected_again() -> bool:
                receiving.receive(10)
                receiving.extend_timeouts()
                return receiving.counters.connections_made == 2

            wait_for(connected_again, "a new connection")
        counters = receiving.counters
        assert (counters.connections_lost, counters.protocol_errors) == (1, 1)
        assert [r.message for r in caplog.records if "zmq.maxmsgsize (100 bytes)" in r.message]
        wait_for(lambda: (source.send(b"after"), receiving.receive(10))[1], "messages of the new connection")
