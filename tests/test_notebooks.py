"""Every notebook runs from top to bottom, shows a plot and leaves no process behind."""

from __future__ import annotations

import base64
from pathlib import Path

import psutil
import pytest

from scripts.notebooks import stale
from tests.support import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
# It measures what a queue drops in a pause.
_RUNS = [
    pytest.param(path, marks=[pytest.mark.alone] if path.stem == "03_high_water_mark" else [])
    for path in NOTEBOOKS
]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("path", _RUNS, ids=lambda path: path.stem)
def test_notebook_runs_shows_a_plot_and_ends_what_it_started(path: Path, tmp_path: Path) -> None:
    import nbformat  # noqa: PLC0415 - it takes two seconds, and the fast tests do without
    from nbclient import NotebookClient  # noqa: PLC0415

    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    here = psutil.Process()
    before = set(here.children(recursive=True))

    # Raises CellExecutionError with the cell and its traceback if one fails.
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()

    pictures = [
        base64.b64decode(output["data"]["image/png"])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert pictures
    assert all(picture.startswith(PNG) for picture in pictures)
    # Spark's JVM needs a moment to end after its kernel has.
    _, alive = psutil.wait_procs(set(here.children(recursive=True)) - before, timeout=30)
    assert not alive


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_the_outputs_of_its_code(path: Path) -> None:
    assert not stale(path), "run make notebooks"
    assert path.stat().st_size < 400_000
