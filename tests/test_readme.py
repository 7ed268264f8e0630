"""README as its reader meets it: each snippet runs as printed, one after the other, but for ports and directories."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.support import REPOSITORY, wait_for
from tests.support.ports import free_port

_BLOCK = re.compile(r"(?:<!-- test: (\w+) -->\n)?```(python|sh)\n(.*?)```", re.DOTALL)
_PORT = re.compile(r"(tcp://(?:localhost|\*):)(\d+)")


def has_progress(query: StreamingQuery) -> object:
    return query.lastProgress


def has_rows(query: StreamingQuery) -> object:
    return sum(progress["numInputRows"] for progress in query.recentProgress)


class Snippet(NamedTuple):
    """A block of code, and in which line it begins."""

    kind: str
    code: str
    line: int


def snippets(path: Path, directory: Path) -> Iterator[Snippet]:
    """The blocks of a page, with free ports and a directory in place of those that it names."""
    text, ports = path.read_text(encoding="utf-8"), {}
    for port in {match[2] for match in _PORT.finditer(text)}:
        ports[port] = str(free_port())
    for match in _BLOCK.finditer(text):
        code = _PORT.sub(lambda found: found[1] + ports[found[2]], match[3])
        line = text.count("\n", 0, match.start(3)) + 1
        yield Snippet(match[1] or match[2], code.replace("/tmp/", f"{directory}/"), line)


@contextmanager
def _running(*arguments: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, *arguments], cwd=REPOSITORY)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def run(page: Iterator[Snippet], stack: ExitStack, *read_next: str) -> dict[str, Any]:
    """Run a page's snippets in one namespace; programs and commands go on until the stack ends.

    Args:
        read_next: Queries whose rows are waited for, because the next snippet reads them from their log.
    """
    names: dict[str, Any] = {}
    for snippet in page:
        if snippet.kind == "program":
            stack.enter_context(_running("-c", snippet.code))
        elif snippet.kind == "sh":
            for line in snippet.code.splitlines():
                program, *arguments = line.replace('"', "").split()
                if program == "zmq-datasource":
                    stack.enter_context(_running("-m", "zmq_datasource", *arguments))
        else:
            before = set(names)
            exec(compile("\n" * (snippet.line - 1) + snippet.code, "README.md", "exec"), names)
            for name in set(names) - before:
                if isinstance(found := names[name], StreamingQuery):
                    stack.callback(found.stop)
                    done = has_rows if name in read_next else has_progress
                    wait_for(
                        lambda query=found, done=done: done(query) or query.exception(), f"rows of {name}", 90
                    )
                    assert found.exception() is None
    return names


@pytest.mark.spark
def test_each_snippet_of_the_readme_runs_as_printed(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        names = run(snippets(REPOSITORY / "README.md", tmp_path), stack, "keeping")
        assert names["spark"] is spark
        wait_for(lambda: has_rows(names["query"]), "rows of the first query")
        assert names["ordered"].awaitTermination(60)
        assert sum(progress["numInputRows"] for progress in names["ordered"].recentProgress) == 2
        assert (names["order"].topic, names["order"].value) == (b"orders.eu", b"42")
    assert "weather.oslo" in capsys.readouterr().out  # the sample was shown


@pytest.mark.spark
@pytest.mark.long
def test_each_snippet_about_the_rest_of_spark_runs_as_printed(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = run(snippets(REPOSITORY / "docs" / "spark.md", tmp_path), stack)
        for name in ("averaging", "locating", "keeping"):
            wait_for(lambda query=names[name]: has_rows(query), f"rows of {name}", 90)
    assert spark.read.parquet(f"{tmp_path}/spark/readings").first()["city"] == "Oslo"
    for view in ("weather_now", "feed"):
        spark.catalog.dropTempView(view)
