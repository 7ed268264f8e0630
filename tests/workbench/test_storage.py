"""Whether object storage can hold a log: tried for real, and with one that does not keep its promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from zmq_datasource.cli import main
from zmq_datasource.errors import DiskFaultError, LogError
from zmq_datasource.host.object_store import ObjectStore, StoredObject
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor import storage as storage_module
from zmq_datasource.workbench.doctor.directory import Verdict
from zmq_datasource.workbench.doctor.storage import examine_storage

NAMES = ["put", "listing", "replace", "delete", "clock"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_ROUNDS", 3)


@pytest.fixture
def location(tmp_path: Path) -> Location:
    return Location(f"file://{tmp_path}/store")


def verdicts(location: Location) -> dict[str, Verdict]:
    return {promise.name: promise.verdict for promise in examine_storage(location)}


def test_a_storage_that_keeps_its_promises_is_fit(tmp_path: Path, location: Location) -> None:
    assert verdicts(location) == dict.fromkeys(NAMES, "kept")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_listing_that_lags_is_no_place_for_a_log(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "objects", lambda self, prefix: [])
    found = verdicts(location)
    assert (found["listing"], found["clock"]) == ("broken", "doubtful")
    assert {found[name] for name in ("put", "replace", "delete")} == {"kept"}


def test_what_was_replaced_or_deleted_must_not_come_back(
    location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: dict[str, bytes] = {}
    stored = ObjectStore.put

    def first_alone(self: ObjectStore, key: str, content: bytes) -> None:
        if key not in put:
            put[key] = content
            stored(self, key, content)

    monkeypatch.setattr(ObjectStore, "put", first_alone)
    monkeypatch.setattr(ObjectStore, "delete", lambda self, key: None)
    found = verdicts(location)
    assert {name for name, verdict in found.items() if verdict == "broken"} == {"replace", "delete"}


@pytest.mark.parametrize(("ahead", "verdict"), [(-90.0, "broken"), (90.0, "broken"), (20.0, "kept")])
def test_clocks_that_differ_much_are_named(
    location: Location, monkeypatch: pytest.MonkeyPatch, ahead: float, verdict: Verdict
) -> None:
    objects = ObjectStore.objects

    def elsewhere(self: ObjectStore, prefix: str) -> list[StoredObject]:
        return [found._replace(modified=found.modified + ahead) for found in objects(self, prefix)]

    monkeypatch.setattr(ObjectStore, "objects", elsewhere)
    assert verdicts(location)["clock"] == verdict


def test_one_that_does_not_answer_is_left_as_it_was_and_says_why(
    tmp_path: Path, location: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: ObjectStore, key: str) -> bytes:
        raise DiskFaultError(f"reading {self}/{key}: no answer")

    monkeypatch.setattr(ObjectStore, "get", refused)
    with pytest.raises(LogError, match="no answer"):
        examine_storage(location)
    assert list((tmp_path / "store").iterdir()) == []


def test_the_command_says_what_was_found(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(main, ["doctor", "--wal-store", str(location)])
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.output.splitlines()] == ["kept"] * len(NAMES)
    monkeypatch.setattr(ObjectStore, "objects", lambda self, prefix: [])
    told = CliRunner().invoke(main, ["doctor", "--wal-store", str(location), "--json"])
    assert told.exit_code == 1
    document = json.loads(told.output)
    assert document["location"] == str(location)
    assert [each["name"] for each in document["promises"]] == NAMES


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--wal-store", "hdfs://host/log"], "must be a URI of object storage"),
        (["--wal-store", "s3://key:hunter/2@bucket/log"], "hunter"),
        (["--wal-store", "file:///a", "--wal-location", "/a"], "run the doctor twice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], why: str) -> None:
    told = CliRunner().invoke(main, ["doctor", *arguments])
    assert told.exit_code == 2
    assert (why in told.output) == (why != "hunter")
