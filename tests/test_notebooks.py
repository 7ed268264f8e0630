"""Every notebook runs from top to bottom, shows a plot and leaves no process behind."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
# Worth reading where nothing can be run: kept with its outputs. Run it from top to bottom before you save it.
SHOWN = {"04_durable_subscribers"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.spark
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_shows_a_plot_and_ends_what_it_started(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
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
    if keep := os.environ.get("NOTEBOOK_PICTURES"):  # to look at them
        for number, picture in enumerate(pictures):
            Path(keep, f"{path.stem}-{number}.png").write_bytes(picture)
    # Spark's JVM needs a moment to end after its kernel has.
    _, alive = psutil.wait_procs(set(here.children(recursive=True)) - before, timeout=30)
    assert not alive


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs_or_with_those_of_one_clean_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if path.stem not in SHOWN:
        assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
        return
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    shown = [output.get("text", "") for output in outputs]
    shown += [text for output in outputs for kind, text in output.get("data", {}).items() if "text" in kind]
    assert not re.search(r"(?<![<\w:/])/\w+/\w", "\n".join(shown)), "a path of somebody's machine"
