"""The pages as their reader meets them: each snippet runs as printed, in order, but for ports and directories."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support import REPOSITORY, wait_for
from tests.support.pages import has_rows, run, snippets

_DOCS = REPOSITORY / "docs"
_SET_UPS = {
    "pub-into-table": ["query"],
    "queue-of-work": [],
    "exactly-once": [],
    "durable-subscribers": [],
}
"""Each page with the names of its queries whose rows the next snippet shows."""


@pytest.mark.spark
def test_each_snippet_of_the_readme_runs_as_printed(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = run(snippets(REPOSITORY / "README.md", tmp_path), stack, tmp_path)
        assert names["spark"] is spark
        wait_for(lambda: has_rows(names["query"]), "rows of the first query")


@pytest.mark.spark
@pytest.mark.parametrize("page", _SET_UPS)
def test_each_snippet_of_a_set_up_prints_what_the_page_shows(
    page: str, spark: SparkSession, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        assert (
            run(snippets(_DOCS / f"{page}.md", tmp_path), stack, tmp_path, *_SET_UPS[page])["spark"] is spark
        )


@pytest.mark.spark
@pytest.mark.long
def test_each_snippet_about_the_rest_of_spark_runs_as_printed(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = run(snippets(_DOCS / "spark.md", tmp_path), stack, tmp_path)
        for name in ("averaging", "locating", "keeping"):
            wait_for(lambda query=names[name]: has_rows(query), f"rows of {name}", 90)
    assert spark.read.parquet(f"{tmp_path}/spark/readings").first()["city"] == "Oslo"
    for view in ("weather_now", "feed"):
        spark.catalog.dropTempView(view)


@pytest.mark.spark
@pytest.mark.long
def test_the_recipe_for_numbers_in_json_prints_what_it_shows(spark: SparkSession, tmp_path: Path) -> None:
    page = _DOCS / "recipes.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = lines.index("## Numbers in JSON")
    end = lines.index(
        "In a table that has the messages already, `messages` here, window functions find the gaps:"
    )
    recipe = (snippet for snippet in snippets(page, tmp_path) if begin < snippet.line <= end)
    with ExitStack() as stack:
        assert run(recipe, stack, tmp_path)["spark"] is spark
