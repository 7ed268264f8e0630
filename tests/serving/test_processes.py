"""Durable subscribers and receivers as processes: interrupts, stops, sockets of each kind, and memory."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import zmq

from tests.support import Socket, free_endpoint, wait_for
from tests.support.serving import Serving, take
from zmq_datasource import DurableSubscriber, Producer
from zmq_datasource.serving import subscriber_session

pytestmark = pytest.mark.spark
Context = zmq.Context[Socket]


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def test_an_interrupted_call_takes_no_message(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, drawn = 5000, random.Random(7)
    # Of a context that is interrupted. Pytest's own hook would be interrupted, too.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals["__name__"] == "logging":
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                return  # an exception there may leave its lock taken for ever
            frame = frame.f_back
        raise Interrupted

    with Serving(tmp_path) as it:
        it.feed(context, *([b"t", b"%d" % i] for i in range(count)))
        # On a busy machine an answer may be interrupted again and again, and is then asked for again.
        with DurableSubscriber(it.durable, "me", max_bytes=2000, timeout=None) as me:
            got: list[int] = []
            interrupts = 0

            def receive_all() -> None:
                while len(got) < count:
                    message = me.receive(30)
                    got.append(-1 if message is None else message.id)

            before = signal.signal(signal.SIGALRM, interrupt)
            try:
                while len(got) < count:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, drawn.uniform(0.002, 0.02))
                        receive_all()
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except Interrupted:
                        interrupts += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)  # or it would end this process
                signal.signal(signal.SIGALRM, before)
            assert got == list(range(count))
            assert interrupts > 10
        assert it.lease("me").next == count
    gc.collect()  # while the hook is away


@contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A Python program; the end of the block kills it."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def receiving(place: Path, **options: str) -> Iterator[subprocess.Popen[str]]:
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    with running("-m", "zmq_datasource", "receive", "--wal-location", place, *given) as process:
        yield process


IDLE = """
import sys
from zmq_datasource import DurableSubscriber

with DurableSubscriber(sys.argv[1], "me", timeout=4.0) as me:
    print("here", flush=True)
    print(me.receive().value.decode(), flush=True)
"""


def test_an_idle_subscriber_that_was_stopped_goes_on(context: Context, tmp_path: Path) -> None:
    with Serving(tmp_path) as it, running("-c", IDLE, it.durable) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "here\n"
        program.send_signal(signal.SIGSTOP)
        wait_for(lambda: it.account("me")["awaySeconds"], "longer than its timeout")
        program.send_signal(signal.SIGCONT)
        wait_for(lambda: not it.account("me")["awaySeconds"], "a request, or its end")
        it.feed(context, [b"t", b"late"])
        assert program.stdout.readline() == "late\n"


def test_a_server_that_was_stopped_goes_on(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber_session, "SILENCE_SECONDS", 0.3)
    pull, durable = free_endpoint(), free_endpoint()
    push = context.socket(zmq.PUSH)
    push.connect(pull)
    with receiving(tmp_path, socket_type="PULL", bind=pull, durable=durable) as receiver:
        push.send_multipart([b"t", b"0"])
        with DurableSubscriber(durable, "me") as me:
            assert take(me, 1) == [b"0"]
            receiver.send_signal(signal.SIGSTOP)
            assert me.receive(2.0) is None  # it asks again, and on new connections
            receiver.send_signal(signal.SIGCONT)
            push.send_multipart([b"t", b"1"])
            assert take(me, 1) == [b"1"]
        with DurableSubscriber(durable, "me") as again:
            assert again.receive(0.1) is None


def test_transactions_are_served(tmp_path: Path) -> None:
    senders, durable = free_endpoint(), free_endpoint()
    options = {"socket_type": "ROUTER", "bind": senders, "durable": durable}
    with receiving(tmp_path, **options), Producer(senders, "orders") as producer:
        for i in range(3):
            producer.send(b"%d" % i, b"t")
        producer.flush()
        with DurableSubscriber(durable, "me") as me:
            assert take(me, 3) == [b"0", b"1", b"2"]


def test_a_feed_is_served_also_after_its_receiver_was_killed(context: Context, tmp_path: Path) -> None:
    pub = context.socket(zmq.XPUB)
    feed, durable = free_endpoint(), free_endpoint()
    pub.bind(feed)
    options = {"socket_type": "SUB", "connect": feed, "durable": durable}
    sent = 0

    def send() -> None:
        nonlocal sent
        pub.send_multipart([b"t", b"%d" % sent])
        sent += 1

    with receiving(tmp_path, **options) as receiver:
        assert pub.recv() == b"\x01"
        for _ in range(5):
            send()
        with DurableSubscriber(durable, "me", auto_ack=False) as me:
            assert take(me, 5) == [b"%d" % i for i in range(5)]
            me.ack(2)
        with DurableSubscriber(durable, "there") as there:
            assert take(there, 5) == [b"%d" % i for i in range(5)]
            receiver.kill()
            receiver.wait()
            with receiving(tmp_path, **options):
                while pub.recv() != b"\x01":  # its unsubscription comes first
                    pass
                send()
                assert take(there, 1) == [b"5"]
                with DurableSubscriber(durable, "me") as again:
                    assert take(again, 3) == [b"3", b"4", b"5"]
                there.__exit__(None, None, None)
