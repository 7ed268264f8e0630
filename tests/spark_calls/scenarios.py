"""What the queries meet whose calls are recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.spark_calls.reader import Settings

__all__ = ["SCENARIOS", "Run", "Scenario"]


@dataclass(frozen=True)
class Run:
    """One start of a query, and what ends it.

    It ends when a call fails, or by itself, with the trigger that does; and else by ``query.stop()``, when all data is
    read and each source has been asked twice more.

    Attributes:
        last: Where the data of each source ends.
        fail: The text of the call that raises.
        first: The answer of ``initialOffset``.
        late: Whether the first answer of ``latestOffset`` is that there is nothing new.
        trigger: The arguments of ``DataStreamWriter.trigger``.
    """

    last: tuple[int, ...] = (4,)
    fail: str = ""
    first: int = 0
    late: bool = False
    trigger: dict[str, bool] = field(default_factory=dict)

    @property
    def ends_by_itself(self) -> bool:
        return "availableNow" in self.trigger

    def settings(self, trace: Path, checkpoint: Path) -> list[Settings]:
        """Of each source: ``a``, ``b``."""
        return [
            Settings(
                trace=str(trace),
                checkpoint=str(checkpoint),
                source=chr(ord("a") + number),
                first=self.first,
                last=last,
                late=int(self.late),
                fail=self.fail,
            )
            for number, last in enumerate(self.last)
        ]


@dataclass(frozen=True)
class Scenario:
    """Runs of one query on one checkpoint.

    Attributes:
        quick: Recorded on Spark by ``make test-slow``; the others take ``make test-long``.
    """

    name: str
    runs: tuple[Run, ...]
    quick: bool = False


# In the order of the steps of a batch. What Spark has written is in the traces: "offsets/0", "commits/0".
_STEPS = {
    "before-anything": "a.initialOffset()",
    "before-offsets-0": "a.latestOffset(0, ReadMaxRows)",
    "planning-0": "a.partitions(0, 2)",
    "reading-0": "a.read(0-2)",
    "before-commits-0": "sink.commit(0, [0, 1])",
    "before-offsets-1": "a.latestOffset(2, ReadMaxRows)",
    "committing-0": "a.commit(2)",
    "planning-1": "a.partitions(2, 4)",
    "reading-1": "a.read(2-4)",
    "before-commits-1": "sink.commit(1, [2, 3])",
    "after-commits-1": "a.latestOffset(4, ReadMaxRows)",
}
_QUICK = ("planning-0", "reading-0", "before-commits-1")
_ONCE_MORE = Run(last=(6,))
_NOW = {"availableNow": True}

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain", (Run(),)),
        Scenario("late-data", (Run(late=True), _ONCE_MORE), quick=True),
        Scenario("no-data", (Run(last=(0,)),)),
        Scenario("restart", (Run(), _ONCE_MORE, Run(last=(6,)))),
        Scenario("restart-without-a-batch", (Run(last=(0,)), Run())),
        Scenario(
            "available-now", (Run(trigger=_NOW), Run((6,), trigger=_NOW), Run((6,), trigger=_NOW)), quick=True
        ),
        Scenario("available-now-without-data", (Run((0,), trigger=_NOW), Run(trigger=_NOW))),
        Scenario("available-now-then-forever", (Run((2,), trigger=_NOW), Run())),
        Scenario("union-of-which-one-is-empty", (Run((4, 0)), Run((6, 2))), quick=True),
        Scenario("union-of-both", (Run((2, 4)), Run((2, 6)))),
        Scenario("union-available-now", (Run((4, 0), trigger=_NOW), Run((4, 2), trigger=_NOW))),
        Scenario("union-failed", (Run((2, 0), fail="a.partitions(0, 2)"), Run((4, 2)))),
        Scenario(
            "union-failed-in-the-second-batch",
            (Run((2, 4), fail="b.partitions(2, 4)"), Run((4, 4))),
        ),
        *(
            Scenario(f"failed-{step}", (Run(fail=call), _ONCE_MORE), quick=step in _QUICK)
            for step, call in _STEPS.items()
        ),
        Scenario(
            "failed-in-the-first-batch-without-data",
            (Run(late=True, fail="a.partitions(0, 0)"), Run(late=True)),
        ),
        Scenario(
            "failed-after-the-first-batch-without-data",
            (Run(late=True, fail="a.partitions(0, 2)"), _ONCE_MORE),
        ),
        Scenario(
            "failed-twice-in-the-first-batch",
            (
                Run(fail="a.partitions(0, 2)"),
                Run(fail="a.read(0-2)"),
                _ONCE_MORE,
            ),
        ),
        Scenario(
            "failed-in-the-first-batch-of-a-source-that-begins-elsewhere-now",
            (Run(fail="a.partitions(0, 2)"), Run(last=(6,), first=1)),
        ),
        Scenario(
            "failed-twice-in-the-second-batch",
            (
                Run(fail="a.partitions(2, 4)"),
                Run(fail="sink.commit(1, [2, 3])"),
                _ONCE_MORE,
            ),
        ),
        Scenario(
            "available-now-failed",
            (Run(fail="a.partitions(0, 2)", trigger=_NOW), Run((6,), trigger=_NOW)),
        ),
        Scenario(
            "available-now-failed-in-the-second-batch",
            (Run(fail="a.partitions(2, 4)", trigger=_NOW), Run((6,), trigger=_NOW)),
        ),
    )
}
