"""What fuzzing begins with, and what it has found: no input that anybody sends ends or misleads its reader."""

from __future__ import annotations

import pytest

from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_kept_inputs_are_stood(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[target](path.read_bytes())
