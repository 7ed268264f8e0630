"""The reduced engine of the weather machine calls a source as Spark does, over starts, failures, kills and restarts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark_calls.on_engine import record_on_engine
from tests.spark_calls.scenarios import SCENARIOS
from tests.spark_calls.traces import MINOR, golden, golden_versions
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK = sorted(scenario.name for scenario in SCENARIOS.values() if scenario.quick)


@pytest.mark.parametrize("version", golden_versions())
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_reduced_engine_makes_the_calls_of_spark(name: str, version: str, tmp_path: Path) -> None:
    assert record_on_engine(name, tmp_path) == golden(version)[name]


def test_each_minor_version_of_pyspark_that_is_supported_has_golden_traces() -> None:
    oldest = re.search(r'"pyspark>=(\d+)\.(\d+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert oldest is not None
    assert f"{oldest[1]}.{oldest[2]}" == golden_versions()[0]
    assert MINOR in golden_versions(), "record them: python -m tests.spark_calls --write"


@pytest.mark.slow
@pytest.mark.spark
def test_spark_makes_the_calls_of_its_golden_traces(spark: SparkSession, tmp_path: Path) -> None:
    from tests.spark_calls.on_spark import record  # noqa: PLC0415 - the other tests do without a session

    assert record(QUICK, tmp_path, spark) == {name: golden(MINOR)[name] for name in QUICK}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_spark_makes_the_calls_of_all_its_golden_traces(spark: SparkSession, tmp_path: Path) -> None:
    from tests.spark_calls.on_spark import record  # noqa: PLC0415

    assert record(sorted(SCENARIOS), tmp_path, spark) == golden(MINOR)
