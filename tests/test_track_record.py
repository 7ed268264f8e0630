"""The track record stays readable, and each of its patches applies to the tree as it is now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.track_record.record import (
    DIRECTORY,
    REPOSITORY,
    git_apply,
    known_faults,
    read_patch,
    read_patches,
)

PATCHES = sorted(DIRECTORY.glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_a_patch_of_the_track_record_applies_to_the_tree(path: Path) -> None:
    patch = read_patch(path)
    if shutil.which("git") is None:
        pytest.skip("there is no git here to apply a patch with")
    assert git_apply(patch, REPOSITORY, "--check") == ""


def test_a_patch_names_a_test_that_is_there() -> None:
    for patch in read_patches():
        if not patch.seed:
            file, _, name = patch.caught_by.partition("::")
            assert f"def {name.split('::')[-1].partition('[')[0]}(" in Path(REPOSITORY, file).read_text(), (
                patch
            )


def test_every_known_fault_is_marked_strictly_so_that_its_mend_is_noticed() -> None:
    assert [fault for fault in known_faults() if not fault.strict] == []


HEADER = "Fault: rows came twice\nMended: 1234567\nCaught by: tests/log/test_writer.py::test_it\n"
DIFF = (
    "\ndiff --git a/zmq_datasource/receive.py b/zmq_datasource/receive.py\n+++ b/zmq_datasource/receive.py\n"
)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEADER.replace("Fault: rows came twice\n", "") + DIFF, "no .'Fault'."),
        (HEADER.replace("Mended:", "Repaired:") + DIFF, "Repaired"),
        (HEADER.replace("tests/log/test_writer.py::test_it", "a seed") + DIFF, "a seed"),
        (HEADER + "\nnot a diff", "git diff"),
        (HEADER + DIFF.replace("zmq_datasource/receive", "tests/test_docs"), "the package alone"),
    ],
)
def test_a_patch_without_its_whole_header_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.patch"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_patch(path)


def test_a_header_may_go_on_in_lines_that_begin_with_a_space(tmp_path: Path) -> None:
    path = tmp_path / "a.patch"
    path.write_text(HEADER.replace("came twice", "came\n twice") + DIFF)
    patch = read_patch(path)
    assert (patch.fault, patch.files) == ("rows came twice", ["zmq_datasource/receive.py"])


def test_a_patch_that_does_not_fit_the_tree_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.patch"
    path.write_text(
        HEADER
        + DIFF.replace("+++", "--- a/zmq_datasource/receive.py\n+++")
        + "@@ -1,1 +1,1 @@\n-a line that was never there\n+another\n"
    )
    if shutil.which("git") is None:
        pytest.skip("there is no git here to apply a patch with")
    assert "does not apply" in git_apply(read_patch(path), REPOSITORY, "--check")
