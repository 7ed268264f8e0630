"""Where the log of a feed is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zmq_datasource.source.location as location_module
from zmq_datasource.errors import LogError
from zmq_datasource.source.location import default_location


def test_the_default_location_is_private_and_the_same_for_the_same_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_module.tempfile, "gettempdir", lambda: str(tmp_path))
    one = default_location({"connect": ["tcp://a:1"], "topics": [""]})
    assert one == default_location({"topics": [""], "connect": ["tcp://a:1"]})
    assert one != default_location({"connect": ["tcp://a:2"], "topics": [""]})
    parent = Path(one).parent
    assert parent.stat().st_mode & 0o777 == 0o700
    parent.chmod(0o755)
    with pytest.raises(LogError, match="only you can enter"):
        default_location({})
    shutil.rmtree(parent)
    parent.symlink_to(tmp_path)
    with pytest.raises(LogError, match="only you can enter"):
        default_location({})
