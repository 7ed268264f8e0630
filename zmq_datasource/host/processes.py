"""Marks by which a process on the same machine is known, also after another one has got its number."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["is_gone", "process_mark"]

_PROC = Path("/proc")
_DEAD = ("Z", "X")


def process_mark() -> str:
    """The mark of this process; empty where the system does not tell (only Linux does)."""
    machine, state = _machine(), _state(os.getpid())
    return f"{machine} {os.getpid()} {state[1]}" if machine and state else ""


def is_gone(mark: str) -> bool:
    """Whether a marked process was on this machine and has ended. False if that cannot be known here."""
    machine, _, process = mark.rpartition(" ")[0].rpartition(" ")
    if not machine or machine != _machine() or not process.isdecimal():
        return False
    state = _state(int(process))
    return state is None or state[0] in _DEAD or state[1] != mark.rpartition(" ")[2]


def _machine() -> str:
    """The machine since it was started, and the namespace in which its processes have their numbers."""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    return ""


def _state(process: int) -> tuple[str, str] | None:
    """The state of a process, and when it has started; None if there is no such process."""
    with suppress(OSError):
        # The name before it may have spaces and brackets in it.
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    return None
