"""How many receivers a feed needs."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from zmq_datasource.cli import main
from zmq_datasource.workbench import cluster
from zmq_datasource.workbench.cluster import ReceiverCost, make_cluster_plan, measure_receiver

COST = ReceiverCost(rate=1_000_000, cpu_seconds=0.5e-6)


@pytest.mark.parametrize(("rate", "receivers"), [(1, 1), (600_000, 1), (600_001, 2), (100e6, 167)])
def test_a_receiver_is_used_to_its_share(rate: float, receivers: int) -> None:
    made = make_cluster_plan(rate, 100, COST)
    assert made.receivers == receivers
    assert made.receivers * made.rate_each == pytest.approx(rate)
    assert made.receiver_cores == pytest.approx(rate * 0.5e-6)


def test_bytes_are_carried_and_kept() -> None:
    made = make_cluster_plan(1_000_000, 1000, COST, retention=3600)
    assert made.log_bytes == 1_000_000 * 1028
    assert made.stored_bytes == made.log_bytes * 3600
    assert 8e9 < made.network_bits < 9e9
    assert made.spark_cores == pytest.approx(3.7)


def test_a_receiver_is_measured() -> None:
    cost = measure_receiver(1000, seconds=0.5)
    assert cost.rate > 1000
    assert 0 < cost.cpu_seconds < 1e-3


def test_the_command_shows_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "measure_receiver", lambda size: COST)
    arguments = ["plan", "--cluster", "--rate", "3000000", "--size", "100", "--retention", "1h"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "5, each for 600,000 messages a second" in result.output
    assert "1,382 GB" in result.output


def test_a_stall_is_needed_without_it() -> None:
    result = CliRunner().invoke(main, ["plan", "--rate", "1", "--size", "100"])
    assert result.exit_code == 2
    assert "--stall is needed" in result.output
