"""Run the notebooks and keep what they show in them: python scripts/notebooks.py [name ...]."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIGEST = "outputs_of"  # in the notebook's metadata: of the code whose outputs it holds


def digest(notebook: dict[str, Any]) -> str:
    """Of a notebook's code, to notice outputs of other code. A cell's source may be a string or its lines."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def stale(path: Path) -> bool:
    """Whether a notebook's outputs are missing, or are those of other code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    shows = any(cell.get("outputs") for cell in notebook["cells"])
    return not shows or notebook["metadata"].get(DIGEST) != digest(notebook)


def executed(path: Path) -> str:
    """The text of the notebook with new outputs, run in an empty directory."""
    import nbformat  # noqa: PLC0415 - it takes two seconds, and nothing else needs it
    from nbclient import NotebookClient  # noqa: PLC0415

    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(
            notebook, timeout=180, record_timing=False, resources={"metadata": {"path": directory}}
        )
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # what Java says when it starts is no result
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    # Which Python ran it says nothing about the notebook.
    notebook.metadata = nbformat.from_dict(metadata | {DIGEST: digest(notebook)})
    return nbformat.writes(notebook) + "\n"


def main(names: list[str]) -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if names and not any(name in path.stem for name in names):
            continue
        text = executed(path)
        for place in (str(ROOT), str(Path.home())):
            if place in text:
                raise SystemExit(f"{path.name} shows {place}, which is a place of this machine")
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: {len(text) // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
