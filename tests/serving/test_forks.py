"""Programs that fork: a child cannot use its parent's clients, and keeps no proxy alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq

from tests.acknowledged.test_acknowledged import receiving, values
from tests.support import Socket, free_endpoint, wait_for
from tests.support.proxies import ProxyThreads, endpoints

pytestmark = pytest.mark.spark  # no Spark, but processes

# Ends with 0 if each act raises the error; a child that hangs is ended by its alarm.
CHILD = """
import os, signal, sys
from zmq_datasource import DurableSubscriber, OptionError, Producer, Proxy

def child_refuses(acts, end):
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the child has ended with {status}"
        return
    signal.alarm(20)
    try:
        for act in acts:
            try:
                act()
            except OptionError as e:
                assert "forked child" in str(e) and "spawn" in str(e), e
            else:
                raise AssertionError(f"{act} works in a forked child")
        end()
    except BaseException as e:
        print(repr(e), file=sys.stderr)
        os._exit(1)
    os._exit(0)
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_cannot_use_a_producer_of_its_parent(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    with receiving(tmp_path, endpoint):
        run(
            """
with Producer(sys.argv[1]) as producer:
    producer.send("a")
    producer.flush()
    producer.send("b")
    child_refuses(
        [
            producer.flush,
            lambda: producer.send("c"),
            lambda: producer.last_committed,
        ],
        lambda: (producer.__exit__(None, None, None), producer.close()),
    )
    with producer._lock:  # as another thread may have it at the moment of a fork
        child_refuses([producer.flush], producer.close)
""",
            endpoint,
        )
    assert values(tmp_path) == ["a", "b"]


def test_a_forked_child_cannot_use_a_durable_subscriber_of_its_parent(
    context: zmq.Context[Socket], tmp_path: Path
) -> None:
    sides = endpoints("pull", "durable")
    with ProxyThreads(tmp_path, sides):
        push = context.socket(zmq.PUSH)
        push.connect(sides["pull"])
        for value in "abc":
            push.send_string(value)
        run(
            """
with DurableSubscriber(sys.argv[1], "me") as me:
    first = me.receive(20)
    child_refuses(
        [me.receive, lambda: me.ack(first), lambda: next(iter(me))],
        lambda: me.__exit__(None, None, None),
    )
    assert me.receive(20).value == b"b"
with DurableSubscriber(sys.argv[1], "me") as me:
    assert me.receive(20).value == b"c"
""",
            sides["durable"],
        )


def test_a_proxy_ends_with_its_parent_though_a_forked_child_lives_on(tmp_path: Path) -> None:
    program = """
with Proxy(pull=sys.argv[1], durable=sys.argv[2], wal_location=sys.argv[3]) as proxy:
    pid = os.fork()
    if pid:
        print(proxy.pid, pid, flush=True)
        signal.pause()
    try:
        proxy.status()
    except OptionError:
        signal.alarm(60)
        signal.pause()
    os._exit(1)
"""
    arguments = [free_endpoint(), free_endpoint(), str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD + program, *arguments], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        proxy, child = map(int, parent.stdout.readline().split())
        try:
            parent.kill()
            wait_for(lambda: not _runs(proxy), "the proxy to end with its parent")
            assert _runs(child)
        finally:
            os.kill(child, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
