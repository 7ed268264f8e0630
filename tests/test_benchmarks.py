"""The benchmarks' page: made from what was measured, with each target beside its figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure import Measurement
from benchmarks.report import Section, Target, page, read_results
from benchmarks.run import SECTIONS
from tests.support import REPOSITORY

_RESULTS = REPOSITORY / "benchmarks"
_RATE = Measurement("speed", "100 B", "ours", "messages/s", (7.0, 8.0, 9.0), {"sender": (0.5, 0.5, 0.5)})
_OTHER = replace(_RATE, method="other", values=(10.0,), cpu={})


def test_the_page_is_made_from_the_results() -> None:
    text = (_RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    assert text == page(SECTIONS, *read_results(_RESULTS)), "write it with python -m benchmarks --page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_each_target_has_a_figure(section: Section) -> None:
    _, measured = read_results(_RESULTS)
    found = {(m.case, m.method): m for m in measured if m.section == section.name}
    for target in section.targets:
        target.shown(found)


def test_a_target_is_met_or_missed_by_its_figure() -> None:
    found = {("100 B", "ours"): _RATE, ("100 B", "other"): _OTHER}
    assert Target("100 B", "ours", 8).shown(found) == ("at least 8", True)
    assert Target("100 B", "ours", 7.9, upper=True).shown(found) == ("at most 7.9", False)
    assert Target("100 B", "ours", 0.8, times="other").shown(found) == (
        "at least 0.8 times *other*: 8.00",
        True,
    )
    at_most = Target("100 B", "other", 1, above="ours", upper=True)
    assert at_most.shown(found) == ("at most 1 more than *ours*: 9.00", False)
