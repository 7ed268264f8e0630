"""The text of a trace: one line for each call, without what depends on timing.

A line is ``a.latestOffset(0, ReadMaxRows) -> 2``: source, call, arguments and answer. Before the first call that finds
it, a line ``offsets/0`` or ``commits/0`` says what is in the checkpoint now.

Spark asks an idle source over and over: of calls that repeat, the text has one round.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tests.spark_calls.reader import numbers_written

__all__ = ["Trace"]

# A union of two sources has rounds of this many calls.
_LONGEST_ROUND = 8


class Trace:
    """The file of one run."""

    def __init__(self, path: Path, checkpoint: Path) -> None:
        self.path, self._checkpoint = path, checkpoint
        self._before = numbers_written(checkpoint)

    def entries(self) -> list[dict[str, Any]]:
        # Without the last line, which is being written.
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def idle(self, last: tuple[int, ...]) -> bool:
        """Whether each source has been asked twice for what follows its data, since the newest batch."""
        entries = self.entries()
        newest = entries[-1]["commits"] if entries else -1
        calls = [e["call"] for e in entries if "call" in e and e["commits"] == newest]
        return all(
            sum(call.startswith(f"{name}.latestOffset({end},") for call in calls) >= 2
            for name, end in zip("abcd", last, strict=False)
        )

    def lines(self, end: str) -> list[str]:
        """The calls of a run that ended as ``end`` says, and what was written between them."""
        entries = self.entries()
        answers = {e["answered"]: e["text"] for e in entries if "answered" in e}
        lines: list[str] = []
        written = dict(self._before)
        runners: dict[str, int] = {}
        for entry in entries:
            lines += _written_since(written, entry)
            if "call" not in entry:
                continue
            call = entry["call"]
            in_task = ".read(" in call or "sink." in call
            if not in_task:
                # One process makes all calls to a source, for as long as the query runs.
                assert runners.setdefault(entry["source"], entry["pid"]) == entry["pid"], entry
            lines.append(f"{call} {answers[entry['key']]}".rstrip())
        lines += _written_since(written, numbers_written(self._checkpoint))
        if end == "stopped":
            # Of two sources one may be stopped while the other still answers.
            lines.sort(key=lambda line: ".stop(" in line)
        lines = _without_rounds(_in_one_order(lines))
        return [*(_without_cut_round(lines) if end == "stopped" else lines), end]


def _written_since(before: dict[str, int], now: dict[str, Any]) -> list[str]:
    lines = []
    for kind in ("offsets", "commits"):
        lines += [f"{kind}/{number}" for number in range(before[kind] + 1, now[kind] + 1)]
        before[kind] = now[kind]
    return lines


def _in_one_order(lines: list[str]) -> list[str]:
    """Sort what has no order: for several sources Spark calls these from a hash map, or side by side."""
    for kind in (".initialOffset(", ".commit(", ".read(", ".stop("):
        groups = itertools.groupby(lines, key=lambda line, kind=kind: kind in line and "sink" not in line)
        lines = [line for same, group in groups for line in (sorted(group) if same else group)]
    return lines


def _without_rounds(lines: list[str]) -> list[str]:
    """Leave out the repetitions of rounds of calls."""
    result: list[str] = []
    for line in lines:
        result.append(line)
        for size in range(1, _LONGEST_ROUND + 1):
            if len(result) >= 2 * size and result[-size:] == result[-2 * size : -size]:
                del result[-size:]
                break
    return result


def _without_cut_round(lines: list[str]) -> list[str]:
    """Leave out the last round of an idle query, which ``stop()`` has cut off."""
    polls = [line for line in lines if ".stop(" not in line]
    stops = lines[len(polls) :]
    for size in range(2, _LONGEST_ROUND + 1):
        for cut in range(size - 1, 0, -1):
            round_ = polls[-size - cut : -cut]
            if (
                len(round_) == size
                and all("atestOffset(" in line for line in round_)
                and polls[-cut:] == round_[:cut]
            ):
                return polls[:-cut] + stops
    return lines
