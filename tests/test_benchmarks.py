"""The benchmarks' page: made from what was measured, with each target beside its figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measure import Measurement
from benchmarks.plots import drawn
from benchmarks.report import page, read_results, write_results
from benchmarks.run import SECTIONS
from benchmarks.section import Section, at_least, at_most, share, verdicts, within_cpu
from tests.support import REPOSITORY

_RESULTS = REPOSITORY / "benchmarks"
_RATE = Measurement("speed", "100 B", "ours", "messages/s", (7.0, 8.0, 9.0), {"sender": (0.5, 0.5, 0.5)})
_OTHER = replace(_RATE, method="other", values=(10.0,), cpu={"sender": (1.5,)})
_MACHINE = {"date": "2026-11-25", "CPU": "one"}


def test_the_page_is_made_from_the_results() -> None:
    text = (_RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    assert text == page(SECTIONS, *read_results(_RESULTS)), "write it with python -m benchmarks --page"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_each_target_has_a_figure(section: Section) -> None:
    _, measured = read_results(_RESULTS)
    found = list(verdicts(section, [m for m in measured if m.section == section.name]))
    assert [verdict.target for verdict in found] == list(section.targets)


def test_a_target_is_met_or_missed_by_its_figure() -> None:
    targets = [
        at_least("100 B", "ours", 8),
        at_most("100 B", "ours", 7.9),
        share("100 B", "ours", 0.8, "other"),
        within_cpu("100 B", "ours", 1, [("ours", "sender"), ("other", "sender")], "both", cores=2),
        share("1 kB", "ours", 1, "other"),
    ]
    found = list(verdicts(Section("speed", "", "", targets=targets), [_RATE, _OTHER]))
    assert [(v.limit, v.met) for v in found] == [(8, True), (7.9, False), (8, True), (1_000_000, False)]


def test_a_figure_that_is_not_measured_again_keeps_its_date(tmp_path: Path) -> None:
    section = Section("speed", "Speed", "How fast.", targets=[at_least("1 kB", "ours", 9)])
    write_results(tmp_path, [section], _MACHINE, [_RATE, replace(_RATE, case="1 kB")])
    later = {"date": "2026-11-26", "CPU": "two"}
    write_results(tmp_path, [section], later, [replace(_RATE, case="1 kB", values=(9.0,))], whole=False)
    _, measured = read_results(tmp_path)
    assert [(m.case, m.place) for m in measured] == [
        ("100 B", "2026-11-25, one"),
        ("1 kB", "2026-11-26, two"),
    ]
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "- Measured on 2026-11-25, one: scale 1, 3 rounds (100 B)." in text
    assert "- Measured on 2026-11-26, two: scale 1, 1 round (1 kB)." in text
    assert "| 1 kB, ours | at least 9 | 9.00 | 9.00 | met |" in text


def test_the_plots_of_the_page_are_drawn() -> None:
    marked = (REPOSITORY / "docs" / "performance.md").read_text(encoding="utf-8")
    for name, svg in drawn():
        assert f"<!-- plot: {name} -->" in marked
        assert svg.startswith("<?xml")
