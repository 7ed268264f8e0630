"""proxy.fronts: what comes from publishers, in portions that a log can take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import zmq

from tests.support import Socket, bound, wait_for
from zmq_datasource.counters import SourceCounters
from zmq_datasource.options.types import Endpoints
from zmq_datasource.proxy import fronts
from zmq_datasource.proxy.fronts import Front
from zmq_datasource.proxy.rows import Messages
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


def test_what_a_batch_cannot_hold_at_once_comes_in_parts(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "MAX_MESSAGE_BYTES", 1000)
    push, endpoint = bound(context, zmq.PUSH)
    sent = [[b"%d" % i, b"." * 300, b"." * 100] for i in range(20)]  # the most in the middle
    counters = SourceCounters()
    with pulling(endpoint, counters) as front:
        push.send_multipart([b"", b"x" * 1001, b""])
        for message in sent:
            push.send_multipart(message)
        parts: list[Messages] = []
        wait_for(lambda: (parts.extend(front.receive()), sum(map(len, parts)) == len(sent))[1], "all of them")
    got = [part.frames(at) for part in parts for at in range(len(part))]
    assert got == sent
    for part in parts:
        assert sum(sum(map(len, part.frames(at))) for at in range(len(part))) <= 1000
    assert counters.oversize == 1
