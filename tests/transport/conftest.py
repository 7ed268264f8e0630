"""Tests of the core run with each of the two."""

from __future__ import annotations

import pytest

from tests.transport.cores import use


@pytest.fixture(params=["compiled", "python"])
def core_name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which core is in use."""
    use(monkeypatch, request.param)
    return str(request.param)
