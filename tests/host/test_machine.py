"""A process mark identifies one process, also after another process has got its number."""

from __future__ import annotations

import subprocess
import sys

from tests.support import wait_for
from zmq_datasource.host.machine import is_gone, process_mark

MARK = "from zmq_datasource.host.machine import process_mark; print(process_mark(), flush=True); input()"


def test_a_process_is_gone_when_it_has_ended_and_not_before() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MARK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        mark = process.stdout.readline().strip()
        assert mark != process_mark()
        assert not is_gone(mark)
        process.kill()
        wait_for(lambda: is_gone(mark), "its end, which its parent has not asked for")
        process.wait()
        assert is_gone(mark)


def test_this_process_is_not_gone() -> None:
    assert not is_gone(process_mark())


def test_a_mark_with_another_start_time_is_gone() -> None:
    mark = process_mark()
    assert is_gone(mark.rpartition(" ")[0] + " 1")


def test_a_process_of_another_machine_is_not_reported_as_gone() -> None:
    machine, rest = process_mark().split(" ", 1)
    for mark in ("", "no mark", f"{machine[:-1]}? {rest}", "a b c d"):
        assert not is_gone(mark)
