"""The reduced engine of the weather machine calls a source as Spark does, over starts, failures and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark_calls.on_engine import record_on_engine
from tests.spark_calls.scenarios import SCENARIOS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.spark
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(scenario.name, marks=pytest.mark.slow if scenario.quick else pytest.mark.long)
        for scenario in SCENARIOS.values()
    ],
)
def test_the_reduced_engine_makes_the_calls_of_spark(name: str, spark: SparkSession, tmp_path: Path) -> None:
    from tests.spark_calls.on_spark import record_on_spark  # noqa: PLC0415 - it imports Spark

    on_engine = record_on_engine(name, tmp_path / "engine")
    assert record_on_spark(name, tmp_path / "spark", spark) == on_engine
