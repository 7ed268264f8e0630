"""CPU seconds by process: the peers, the JVM, and what Spark runs in Python."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

import psutil

JVM, RUNNER, WORKERS = "JVM", "source runner", "Python workers"
_SPARK = "org.apache.spark"
_RUNNER_MODULE = "python_streaming_source_runner"


def source_runners() -> list[psutil.Process]:
    """The Python processes in which Spark's driver runs the sources of our queries."""
    return [p for p in psutil.Process().children(recursive=True) if _is_runner(p)]


def cpu_seconds(peers: Mapping[str, int] = MappingProxyType({})) -> dict[str, float]:
    """CPU seconds used so far, by process.

    Args:
        peers: Name to process id of the other processes that take part. Their children count with them.

    Returns:
        For those, and for Spark if it runs: the JVM, the source runners, and all other Python processes, which
        are the workers and short-lived ones that plan and commit.
    """
    seconds: dict[str, float] = {}
    for name, pid in peers.items():
        with suppress(psutil.NoSuchProcess):
            peer = psutil.Process(pid)
            seconds[name] = sum(sum(_own_and_ended(p)) for p in (peer, *peer.children(recursive=True)))
    for jvm in psutil.Process().children():
        if not _command(jvm).startswith("java ") or _SPARK not in _command(jvm):
            continue
        seconds[JVM], seconds[WORKERS] = _own_and_ended(jvm)
        seconds.setdefault(RUNNER, 0.0)
        for process in jvm.children(recursive=True):
            seconds[RUNNER if _is_runner(process) else WORKERS] += sum(_own_and_ended(process))
    return seconds


def per_message(before: Mapping[str, float], after: Mapping[str, float], messages: int) -> dict[str, float]:
    """CPU seconds a message between two readings."""
    return {name: max(0.0, after[name] - before.get(name, 0.0)) / messages for name in after}


def _is_runner(process: psutil.Process) -> bool:
    return _RUNNER_MODULE in _command(process)


def _command(process: psutil.Process) -> str:
    """Its program's name without the directory, and its arguments; nothing if it has ended."""
    try:
        program, *arguments = process.cmdline() or [""]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""
    return " ".join([program.rsplit("/", 1)[-1], *arguments])


def _own_and_ended(process: psutil.Process) -> tuple[float, float]:
    """Of a process, and of its children that have ended."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0, 0.0
    return used.user + used.system, used.children_user + used.children_system
