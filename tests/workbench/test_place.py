"""Whether a directory or a bucket can hold a log: tried for real, and with places that lack something."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support import tiny_disk
from zmq_datasource.cli import main
from zmq_datasource.errors import DiskFaultError
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor import examine_bucket, examine_directory
from zmq_datasource.workbench.doctor.facts import Place
from zmq_datasource.workbench.doctor.findings import findings_of


def ids(place: Place) -> set[str]:
    return {finding.id for finding in findings_of(place)}


def ask(*arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code of the command, and its rows."""
    told = CliRunner().invoke(main, ["doctor", *arguments, "--json"])
    return told.exit_code, {row["id"]: row["what"] for row in json.loads(told.stdout)}


# A directory.


def test_a_directory_of_this_machine_is_fit_and_left_as_it_was(tmp_path: Path) -> None:
    assert ids(examine_directory(str(tmp_path / "no" / "log"))) == set()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "full", "64k") as disk:
        with suppress(OSError):
            (disk / "much").write_bytes(bytes(1 << 20))
        found = examine_directory(str(disk))
    assert "No space left" in found.failed
    assert ids(found) == {"place_unusable"}


def test_a_file_system_without_hard_links_is_no_place_for_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    code, rows = ask("--wal-location", str(tmp_path))
    assert code == 1
    assert "Operation not permitted" in rows["place_unusable"]
    monkeypatch.setattr(os, "link", lambda *_: None)
    assert ids(examine_directory(str(tmp_path))) == {"name_given_twice"}


# A bucket.


@pytest.fixture
def location(bucket: str) -> Location:
    return Location(bucket)


class Replacing(BucketStore):
    """Replaces an object with a key that is taken."""

    def put_new(self, key: str, content: Sequence[Any]) -> None:
        self.put(key, b"".join(content))


class Silent(BucketStore):
    def put_new(self, key: str, content: Sequence[Any]) -> None:
        raise DiskFaultError(f"writing {self.path_of(key)}: no answer")


def test_a_bucket_that_keeps_its_promises_is_fit_and_left_as_it_was(location: Location) -> None:
    assert ask("--wal-store", location.with_credentials) == (0, {})
    assert BucketStore(location).list() == []


def test_a_bucket_that_replaces_an_object_whose_key_is_taken_is_no_place_for_a_log(
    location: Location,
) -> None:
    assert ids(examine_bucket(location, Replacing)) == {"name_given_twice"}
    assert BucketStore(location).list() == []


def test_a_bucket_that_does_not_answer_is_named(location: Location) -> None:
    found = examine_bucket(location, Silent)
    assert ids(found) == {"place_unusable"}
    assert "no answer" in found.failed
