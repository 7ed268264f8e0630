"""``make chaos-proof`` itself: it believes a patch only if the named test is green without it and red with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.track_record.proof import Tree, Verdict
from tests.track_record.record import read_patch

MODULE, TESTS = "zmq_datasource/five.py", "tests/test_five.py"
GREEN, RED = f"{TESTS}::test_it_is_five", f"{TESTS}::test_it_is_six"
PATCH = """Fault: five was {new}
Mended: never
Caught by: {caught_by}

diff --git a/{module} b/{module}
--- a/{module}
+++ b/{module}
@@ -1,1 +1,1 @@
-FIVE = {old}
+FIVE = {new}
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A copy with a module of one line, a test that is green, and one that is red."""
    tree = Tree(tmp_path_factory.mktemp("tree").resolve())
    Path(tree.root, MODULE).write_text("FIVE = 5\n")
    Path(tree.root, TESTS).write_text(
        "import subprocess, sys\n\n\n"
        "def five() -> str:\n"
        "    told = 'from zmq_datasource import five; print(five.FIVE)'\n"
        "    return subprocess.check_output([sys.executable, '-c', told], text=True, cwd='/').strip()\n\n\n"
        "def test_it_is_five() -> None:\n    assert five() == '5'\n\n\n"
        "def test_it_is_six() -> None:\n    assert five() == '6'\n"
    )
    return tree


def prove(tree: Tree, path: Path, caught_by: str, new: str, old: str = "5") -> Verdict:
    path.write_text(PATCH.format(module=MODULE, caught_by=caught_by, old=old, new=new))
    return tree.prove(read_patch(path))


@pytest.mark.slow
@pytest.mark.spark  # processes of their own
@pytest.mark.parametrize(
    ("caught_by", "new", "old", "why"),
    [
        (GREEN, "6", "5", None),
        (GREEN, "2 + 3", "5", "it is green with the patch"),
        (GREEN, "6", "4", "does not apply"),
        (RED, "4", "5", "without the patch it is red"),
    ],
)
def test_only_a_test_that_goes_red_with_the_patch_alone_has_caught_it(
    tree: Tree, tmp_path: Path, caught_by: str, new: str, old: str, why: str | None
) -> None:
    verdict = prove(tree, tmp_path / "a.patch", caught_by, new, old)
    assert verdict.caught == (why is None), verdict
    assert why is None or verdict.why.startswith(why)
    assert Path(tree.root, MODULE).read_text() == "FIVE = 5\n"
