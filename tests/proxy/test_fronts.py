"""proxy.fronts: what comes from publishers, in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from tests.support import Socket, bound, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.options.types import Endpoints
from zmq_datasource.proxy.fronts import Front
from zmq_datasource.transport import core
from zmq_datasource.transport.spec import SocketSpec

Context = zmq.Context[Socket]


@contextmanager
def pulling(endpoint: str, counters: SourceCounters) -> Iterator[Front]:
    spec = SocketSpec(
        kind="PULL",
        connect=Endpoints.read(endpoint),
        rcvhwm=1000,
        sndhwm=1000,
        linger=0,
    )
    with closing(Front(spec, 1 << 20, counters)) as front:
        yield front


def test_a_message_that_no_row_can_hold_is_discarded_and_counted(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "MAX_MESSAGE_BYTES", 1000)
    push, endpoint = bound(context, zmq.PUSH)
    sent = [[b"%d" % i, b"." * 300, b"." * 100] for i in range(20)]  # the most in the middle
    counters = SourceCounters()
    with pulling(endpoint, counters) as front:
        for message in (sent[0], [b"", b"x" * 1001, b""], *sent[1:]):
            push.send_multipart(message)
        got: list[list[bytes]] = []
        wait_for(
            lambda: (got.extend(front.receive().lists().to_pylist()), len(got) == len(sent))[1], "all of them"
        )
    assert got == sent
    assert counters.oversize == 1
    assert "discarded a message of 1001 bytes" in caplog.text


def test_a_round_ends_with_the_message_that_fills_it(context: Context) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with pulling(endpoint, SourceCounters()) as front:
        for _ in range(10):
            push.send(bytes(400 << 10))
        wait_for(lambda: front.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN, "the first")
        rounds: list[int] = []
        wait_for(lambda: (rounds.append(len(front.receive())), sum(rounds) == 10)[1], "all of them")
    assert max(rounds) <= 3
