"""The weather machine's failpoints: each is counted, and each act does what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.support import REPOSITORY
from tests.weather import topologies
from tests.weather.failpoints import POINTS, Page, Strike, draw_strikes
from tests.weather.machine import ARMED, World
from tests.weather.topologies import TOPOLOGIES

_NAME, _OTHER = "log.store.after_sync", "log.store.after_write"


def _run(page: Path, *names: str) -> int:
    """Reach these failpoints in a process that the weather machine would start; its exit code."""
    code = "from zmq_datasource.host import failpoints\n" + "".join(
        f"failpoints.reach({name!r})\n" for name in names
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ARMED), str(REPOSITORY))),
        "WEATHER_FAILPOINTS": str(page),
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode


def test_the_table_has_the_failpoints_of_the_source_and_no_others() -> None:
    called = {
        name
        for directory in ("zmq_datasource", "tests/weather")
        for path in (REPOSITORY / directory).rglob("*.py")
        for name in re.findall(r"\bfailpoints\.reach\(\s*\"([^\"]*)\"", path.read_text())
        if path.name != "failpoints.py"
    }
    assert called == POINTS.keys()
    assert list(POINTS) == sorted(POINTS)
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+\.(before|after)_[a-z]+", name) for name in POINTS)


def test_a_kill_strikes_at_the_nth_time_and_the_count_survives_it(tmp_path: Path) -> None:
    page = Page(tmp_path / "page")
    page.arm(Strike(_NAME, 2, "kill"), 0.0)
    assert _run(tmp_path / "page", _NAME, _OTHER, _NAME, _OTHER) == -signal.SIGKILL
    assert (page.counts()[_NAME], page.counts()[_OTHER], page.kills) == ((2, 1), (1, 0), 1)
    assert _run(tmp_path / "page", _NAME, _NAME, _NAME) == 0  # once is enough


def test_a_seed_draws_the_same_strikes_again() -> None:
    places = [name for name, point in POINTS.items() if point.weight]
    reachable = [(process, name) for process in ("source", "second") for name in places]

    def drawn() -> list[list[object]]:
        return [list(draw_strikes(seed, reachable, ["source"], 3.0)) for seed in range(1000)]

    first = drawn()
    assert first == drawn()
    events = [event for seed in first for event in seed]
    names = {event.strike.name for event in events if event.strike is not None}
    assert names == set(places)
    acts = {(event.strike.act, POINTS[event.strike.name].fails) for event in events if event.strike}
    assert ("eio", True) in acts
    assert ("eio", False) not in acts
    assert not any(e.strike and e.strike.act == "power" and e.target == "second" for e in events)


class _Sketch(World):
    """A world in which nothing runs: a topology says in it what it would reach."""

    def process(self, *_: object, **__: object) -> Any:
        return None

    def middlebox(self, name: str, endpoint: str) -> str:
        return endpoint

    def wait_for(self, *_: object) -> None:
        return None


def test_each_failpoint_is_one_that_some_topology_reaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topologies, "Publisher", MagicMock())
    drawn = {
        name
        for kind in TOPOLOGIES.values()
        for seed in range(20)
        for _, name in kind(_Sketch(tmp_path, seed), 3.0).reachable
    }
    assert drawn == {name for name, point in POINTS.items() if point.weight}
