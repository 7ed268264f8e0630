"""A handful of the weather machine's seeds; ``make chaos SEEDS=200`` runs as many as are wanted."""

from __future__ import annotations

import pytest

from tests.weather.__main__ import run
from tests.weather.machine import draw
from tests.weather.topologies import TOPOLOGIES

# One of a sink, a source and their transactions, one of durable subscribers.
_QUICK = {"dealer-router", "router-durable"}
_TOPOLOGIES = [
    pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in sorted(TOPOLOGIES)
]


@pytest.mark.spark  # processes of their own, by the dozen
@pytest.mark.parametrize("topology", _TOPOLOGIES)
def test_every_promise_holds_in_the_weather_of_a_seed(topology: str) -> None:
    outcome = run(7, topology)
    assert not outcome.failure, f"{outcome}\n{outcome.details}"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["dealer-router", "two-queries", "router-durable"])
@pytest.mark.parametrize("seed", [3, 8])
def test_damage_at_rest_changes_no_row_or_is_named(topology: str, seed: int) -> None:
    outcome = run(seed, topology, damage=True)
    assert not outcome.failure, f"{outcome}\n{outcome.details}"


def test_a_seed_draws_the_same_weather_again() -> None:
    possible = [(kind, target) for kind in ("kill", "stop", "black-hole") for target in ("source", "sink")]
    drawn = [list(draw(seed, possible, 3.0)) for seed in range(50)]
    assert drawn == [list(draw(seed, possible, 3.0)) for seed in range(50)]
    assert len(set(map(tuple, drawn))) == 50
