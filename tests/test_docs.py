"""The pages in docs/: their code is Python, their options exist, their links lead somewhere."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import zmq_datasource
from tests.support import REPOSITORY
from zmq_datasource import errors
from zmq_datasource.options import ReadOptions, WriteOptions
from zmq_datasource.options.parser import describe

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "benchmarks" / "RESULTS.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
_OPTIONS = {option.name for kind in (ReadOptions, WriteOptions) for option in describe(kind)}
_SPARKS_OWN = {"checkpointLocation", "path", "rowsPerBatch"}
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_is_python_that_names_what_exists(page: Path) -> None:
    for code in _BLOCK.findall(page.read_text(encoding="utf-8")):
        tree = ast.parse(f"(reader{code})" if code.startswith(".") else code)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "zmq_datasource":
                assert {name.name for name in node.names} <= set(zmq_datasource.__all__)
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "option"
            ):
                name = ast.literal_eval(node.args[0])
                assert name in _OPTIONS | _SPARKS_OWN or name.startswith("zmq."), name


def _anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


_ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
# A section "The way of ..." is a list, each item of which may begin with the function that does it.
_WAYS = re.findall(r"^### (The way of .*?)$(.*?)(?=^##)", _ARCHITECTURE, re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"^\d+\. `(\w+(?:\.\w+)+)`", re.MULTILINE)


@pytest.mark.parametrize("way", [way for way in _WAYS if _STEP.search(way[1])], ids=lambda way: way[0])
def test_the_functions_of_each_way_exist(way: tuple[str, str]) -> None:
    for name in _STEP.findall(way[1]):
        module, _, rest = name.partition(".")
        found = import_module(f"zmq_datasource.{module}")
        for part in rest.split("."):
            if not hasattr(found, part):
                import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        assert callable(found), name


def test_every_error_is_explained() -> None:
    page = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^### `(\w+)`\n\n\S.*\n\n\*\*What to do:\*\* \S", page, re.MULTILINE))
    assert explained | {"ZmqDataSourceError", "SocketError", "LogError"} == set(errors.__all__)


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert [page.name for page in PAGES[1:] if page.resolve() not in linked] == []
