"""The benchmarks' page: made from what was measured, with each target beside its figure."""

from __future__ import annotations

import pytest

from benchmarks.report import Section, page, read_results
from benchmarks.run import SECTIONS
from tests.support import REPOSITORY

_RESULTS = REPOSITORY / "benchmarks"


def test_the_page_is_made_from_the_results() -> None:
    text = (_RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    assert text == page(SECTIONS, *read_results(_RESULTS)), "write it with python -m benchmarks --page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_each_target_has_a_figure(section: Section) -> None:
    _, measured = read_results(_RESULTS)
    found = {(m.case, m.method): m for m in measured if m.section == section.name}
    for target in section.targets:
        target.shown(found)
