"""The compiled core and the Python core: which one is in use, and how they receive."""

from __future__ import annotations

import ctypes
import shutil
import signal
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pyarrow as pa
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from tests.support import wait_for
from tests.transport.cores import (
    LARGEST,
    MIB,
    Context,
    Frames,
    Got,
    give_all,
    handed_over,
    lists,
    pair,
    read_all,
    send,
    take,
    take_all,
    use,
)
from zmq_datasource.transport import core
from zmq_datasource.transport.columns import FramesColumn, NumberColumn, SameColumn
from zmq_datasource.transport.core import Inbox, Outbox

pytestmark = pytest.mark.usefixtures("core_name")


@contextmanager
def on_alarm(handler: Any, after: float, every: float = 0.0) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class HandlerError(Exception):
    """Raised by a signal's handler."""


# Which core is in use.


def test_where_there_is_a_compiler_the_compiled_core_is_in_use() -> None:
    if environ.get("ZMQ_DATASOURCE_CORE") == "python":
        pytest.skip("the core in Python was asked for")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("there is nothing to compile it with")
    assert core.NAME == "compiled", "pip install -e . builds it"


# Taking.


@pytest.mark.parametrize(
    "message",
    [
        [b""],
        [b"", b"", b""],
        [b"x" * 5_000_000],
        [b"", b"y" * 70_000, b"", b"z"],
        [b"%d" % i for i in range(10_000)],
    ],
    ids=["no byte", "no byte in three frames", "larger than the buffer", "mixed", "10,000 frames"],
)
def test_messages_of_any_shape_arrive_whole(context: Context, message: list[bytes]) -> None:
    push, pull = pair(context)
    send(push, [[b"before"], message, message, [b"behind"]])
    assert take_all(pull) == [[b"before"], message, message, [b"behind"]]


def test_an_inbox_keeps_its_limits(context: Context) -> None:
    push, pull = pair(context)
    send(push, [[b"0123456789"]] * 10)
    inbox = Inbox()
    for bounds in ({"most": 0, "room": MIB}, {"most": 9, "room": 0}, {"most": -1, "room": -1}):
        assert take(inbox, pull, **bounds) == Got(0, 0, False)
    assert take(inbox, pull, most=3, room=MIB) == Got(3, 0, False)
    assert take(inbox, pull, most=9, room=20) == Got(2, 0, False)
    assert take(inbox, pull, most=9, room=21) == Got(3, 0, False)
    assert take(inbox, pull, most=2, room=MIB) == Got(2, 0, False)
    assert take(inbox, pull, most=1, room=MIB) == Got(0, 0, True)
    assert inbox.messages == 10


def test_memory_of_large_frames_is_filled_again(context: Context, core_name: str) -> None:
    """Fresh pages of the system cost the receiving thread more than all else."""
    if core_name == "python":
        pytest.skip("the core in Python keeps no memory")
    push, pull = pair(context)
    inbox, places = Inbox(), []
    for _ in range(3):
        send(push, [[b"topic", bytes(1_000_000)]] * 3)
        wait_for(lambda: take(inbox, pull, most=9, room=9 * MIB) and inbox.messages == 3, "three messages")
        places.append(inbox.hand_over().last.buffers()[2].address)
    assert places[1] == places[2]


@pytest.mark.parametrize("before", range(18))
def test_a_message_that_is_too_large_leaves_nothing_among_others(context: Context, before: int) -> None:
    push, pull = pair(context)
    shapes = [[b"a"], [b"topic", b"value"], [b"t", b"x", b"yy", b"v"], [b"", b"", b""]]
    messages = [[*shapes[n % 4][:-1], b"%d" % n] for n in range(before + 10)]
    messages[-1] = [b"a", b"x" * 99]  # as large as may be
    huge = ([b"x" * 101], [b"t", b"x" * 20, b"", b"y" * 90, b"z"], [b""] + [b"x" * 10] * 11)[before % 3]
    send(push, [*messages[:before], huge, *messages[before:]])
    inbox = Inbox()
    assert take(inbox, pull, 99, MIB, largest=100) == Got(before, sum(map(len, huge)), False)
    assert (inbox.messages, inbox.size) == (
        before,
        sum(len(frame) for it in messages[:before] for frame in it),
    )
    assert take(inbox, pull, 99, MIB, largest=100) == Got(10, 0, True)
    assert handed_over(inbox) == messages


def test_a_message_stays_in_the_socket_until_the_largest_has_room(context: Context) -> None:
    push, pull = pair(context)
    inbox = Inbox()
    send(push, [[b"a"], [b"b"]])
    assert take(inbox, pull, 9, MIB, largest=LARGEST) == Got(1, 0, False)
    assert take(inbox, pull, 9, MIB, largest=LARGEST) == Got(0, 0, False)
    assert take(inbox, pull, 9, MIB, largest=LARGEST - 1).messages == 1
    assert handed_over(inbox) == [[b"a"], [b"b"]]
    for largest in (-1, LARGEST + 1):
        with pytest.raises(ValueError, match="32 bits"):
            take(inbox, pull, 9, MIB, largest=largest)


# Buffers.


def test_columns_that_were_handed_over_never_change(context: Context) -> None:
    push, pull = pair(context)
    inbox, other = Inbox(), Inbox()
    held: list[tuple[pa.Array, Frames]] = []
    for turn in range(40):
        messages = [[b"%d" % turn, bytes([turn]) * size] for size in (10, 70_000, turn * 20_000)]
        send(push, messages)
        into = (inbox, other)[turn % 3 == 0]
        take(into, pull, 3, 1 << 30)
        held.append((into.hand_over().lists(), messages))
        if turn % 2:
            del held[turn // 4]  # its memory may be used again, and that of no other
        if turn == 30:
            inbox = Inbox()
    del inbox, other, into
    for array, messages in held:
        array.validate(full=True)
        assert array.to_pylist() == messages


def test_memory_is_given_back(context: Context) -> None:
    push, pull = pair(context)
    inbox, frame = Inbox(), b"x" * (MIB // 4)
    process = psutil.Process()

    def rounds(count: int) -> None:
        for _ in range(count):
            send(push, [[frame]] * 30)
            take(inbox, pull, 30, 1 << 30)
            inbox.hand_over()

    def resident() -> int:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
        trim(0)  # what glibc keeps for itself is not meant
        return int(process.memory_info().rss)

    rounds(3)
    before = resident()
    rounds(30)
    assert resident() - before < 10 * 30 * len(frame)


# Signals, other threads, and sockets that go.


def test_a_signal_during_a_wait_runs_its_handler(context: Context) -> None:
    push, pull = pair(context)
    inbox = Inbox()
    with on_alarm(lambda *_: push.send(b"from the handler"), 0.05):
        wait_for(lambda: take(inbox, pull, 9, MIB, wait=20).messages, "the handler's message")
    push, pull = pair(context, hwm=1)
    rows = Outbox([SameColumn(b"row")], 100)
    start = rows.give(push, 0, 100)
    with on_alarm(lambda *_: read_all(pull), 0.05, 0.05):
        assert rows.give(push, start, start + 3, wait=60) == start + 3


def test_a_handler_that_raises_at_any_moment_loses_no_message(context: Context, core_name: str) -> None:
    if core_name == "python":
        pytest.skip("in Python a handler runs between any two steps, so that one message may be gone with it")
    count = 30_000
    push, pull = pair(context)
    give_all(push, [NumberColumn(0)], count)
    inbox = Inbox()
    interruptions = 0

    def interrupt_taking(_: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code is Inbox.take.__code__:
            raise HandlerError

    with on_alarm(interrupt_taking, 0.0001, 0.0001):
        while inbox.messages < count:
            try:
                take(inbox, pull, 1000, MIB)
            except HandlerError:
                interruptions += 1
    assert interruptions
    assert handed_over(inbox) == [[i.to_bytes(8, "big")] for i in range(count)]


# Both.


@given(
    messages=st.lists(st.lists(st.binary(max_size=60), min_size=1, max_size=6), max_size=30),
    skip=st.integers(0, 3),
    most=st.integers(1, 7),
    room=st.integers(1, 200),
    cores=st.tuples(*[st.sampled_from(sorted({core.NAME, "python"}))] * 2),
)
def test_one_core_receives_what_the_other_sends(
    messages: Frames, skip: int, most: int, room: int, cores: tuple[str, str]
) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    push, pull = pair(context)
    try:
        with pytest.MonkeyPatch.context() as patch:
            use(patch, cores[0])
            part = lists(messages)[skip:]
            give_all(push, [FramesColumn(part)], len(part))
            use(patch, cores[1])
            inbox = Inbox()
            taken = []
            while not (done := take(inbox, pull, most, room)).empty:
                assert done.messages <= most
                taken += handed_over(inbox)
            assert taken + handed_over(inbox) == messages[skip:]
    finally:
        context.destroy(linger=0)
