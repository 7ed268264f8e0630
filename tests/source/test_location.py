"""Where the log of a feed is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zmq_datasource.source.location as location_module
from tests.support import stream_options
from zmq_datasource.errors import LogError
from zmq_datasource.source.location import default_location


def test_the_default_location_is_private_and_the_same_for_the_same_feed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location_module.tempfile, "gettempdir", lambda: str(tmp_path))
    feed = stream_options(connect="tcp://a:1,tcp://b:1", topics="a,b")
    one = default_location(feed)
    assert one == default_location(stream_options(connect="tcp://b:1,tcp://a:1", topics="b,a"))
    assert one != default_location(stream_options(connect="tcp://a:1,tcp://b:1", topics="a"))
    parent = Path(one).parent
    assert parent.stat().st_mode & 0o777 == 0o700
    parent.chmod(0o755)
    with pytest.raises(LogError, match="only you can enter"):
        default_location(feed)
    shutil.rmtree(parent)
    parent.symlink_to(tmp_path)
    with pytest.raises(LogError, match="only you can enter"):
        default_location(feed)
