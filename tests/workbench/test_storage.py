"""Whether a bucket can hold a log: tried for real, and with one that does not keep its promises."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.bucket_server import BucketServer
from zmq_datasource.cli import main
from zmq_datasource.errors import DiskFaultError, LogError
from zmq_datasource.log.bucket_store import BucketStore
from zmq_datasource.log.store import Entry
from zmq_datasource.options.types import Location
from zmq_datasource.workbench.doctor import examine_storage
from zmq_datasource.workbench.doctor.place import Verdict

NAMES = ["put", "put if absent", "listing", "replace", "delete", "clock"]


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with BucketServer() as running_server:
        yield running_server


@pytest.fixture
def location(server: BucketServer) -> Location:
    return Location(server.location(f"logs/{uuid.uuid4().hex}"))


def verdicts(location: Location, open_store: type[BucketStore] = BucketStore) -> dict[str, Verdict]:
    return {promise.name: promise.verdict for promise in examine_storage(location, open_store, rounds=3)}


class Replacing(BucketStore):
    """Replaces an object with a key that is taken."""

    def put_new(self, key: str, content: Sequence[Any]) -> None:
        self.put(key, b"".join(content))


class Lagging(BucketStore):
    """A listing shows nothing yet."""

    def list(self) -> list[Entry]:
        return []


class Forgetful(BucketStore):
    """Neither replaces nor deletes."""

    def put(self, key: str, content: bytes) -> None: ...

    def delete(self, key: str) -> None: ...


class Unreadable(BucketStore):
    def open(self, key: str) -> Any:
        raise DiskFaultError(f"reading {self.path_of(key)}: no answer")


def test_a_bucket_that_keeps_its_promises_is_fit(location: Location) -> None:
    assert verdicts(location) == dict.fromkeys(NAMES, "kept")
    assert BucketStore(location).list() == []


def test_a_bucket_that_replaces_an_object_whose_key_is_taken_is_no_place_for_a_log(
    location: Location,
) -> None:
    found = verdicts(location, Replacing)
    assert {name for name, verdict in found.items() if verdict == "broken"} == {"put if absent"}


def test_a_listing_that_lags_is_no_place_for_a_log(location: Location) -> None:
    found = verdicts(location, Lagging)
    assert (found["listing"], found["clock"]) == ("broken", "doubtful")
    assert {found[name] for name in NAMES if name not in ("listing", "clock")} == {"kept"}


def test_what_was_replaced_or_deleted_must_not_come_back(location: Location) -> None:
    found = verdicts(location, Forgetful)
    assert {name for name, verdict in found.items() if verdict == "broken"} == {"replace", "delete"}


@pytest.mark.parametrize(("ahead", "verdict"), [(-90.0, "broken"), (90.0, "broken"), (20.0, "kept")])
def test_clocks_that_differ_much_are_named(location: Location, ahead: float, verdict: Verdict) -> None:
    class Elsewhere(BucketStore):
        def list(self) -> list[Entry]:
            return [found._replace(modified=found.modified + ahead) for found in super().list()]

    assert verdicts(location, Elsewhere)["clock"] == verdict


def test_a_bucket_that_does_not_answer_is_left_as_it_was(location: Location) -> None:
    with pytest.raises(LogError, match="no answer"):
        verdicts(location, Unreadable)
    assert BucketStore(location).list() == []


def test_the_command_says_what_was_found(location: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    told = CliRunner().invoke(main, ["doctor", "--wal-store", location.with_credentials])
    assert told.exit_code == 0, told.output
    assert [line.split()[0] for line in told.output.splitlines()] == ["kept"] * len(NAMES)
    monkeypatch.setattr(BucketStore, "list", lambda self: [])
    told = CliRunner().invoke(main, ["doctor", "--wal-store", location.with_credentials, "--json"])
    assert told.exit_code == 1
    document = json.loads(told.output)
    assert document["location"] == str(location)
    assert [each["name"] for each in document["promises"]] == NAMES


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--wal-store", "hdfs://host/log"], "must be a URI of a bucket"),
        (["--wal-store", "s3://key:hunter/2@bucket/log"], "hunter"),
        (["--wal-store", "s3://bucket/a", "--wal-location", "/a"], "run the doctor twice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], why: str) -> None:
    told = CliRunner().invoke(main, ["doctor", *arguments])
    assert told.exit_code == 2
    assert (why in told.output) == (why != "hunter")
