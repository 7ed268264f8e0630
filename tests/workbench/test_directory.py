"""Whether a directory can hold a log: tried for real, and with a file system that does not keep its promises."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import tiny_disk
from zmq_datasource.cli import main
from zmq_datasource.errors import LogError
from zmq_datasource.workbench.doctor import examine_directory
from zmq_datasource.workbench.doctor import place as place_module
from zmq_datasource.workbench.doctor.place import Verdict


def verdicts(location: Path) -> dict[str, Verdict]:
    return {promise.name: promise.verdict for promise in examine_directory(str(location))}


@contextmanager
def stopped_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The second process stands still, as in a lock on a file system of the network."""
    init = place_module.SecondProcess.__init__

    def stopped(self: place_module.SecondProcess, directory: Path) -> None:
        init(self, directory)
        self._process.send_signal(signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(place_module.SecondProcess, "__init__", stopped)
        yield


NAMES = ["file system", "fsync", "link", "rename", "directory times", "lock", "lock of the dead"]


def test_a_directory_of_this_machine_is_fit(tmp_path: Path) -> None:
    found = verdicts(tmp_path / "log")
    assert list(found) == NAMES
    assert {found[name] for name in NAMES[2:]} == {"kept"}
    assert list(tmp_path.iterdir()) == [], "what was made for that is removed"


def test_a_lock_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module.SecondProcess, "answer_seconds", 2.0)
    with stopped_second(monkeypatch), pytest.raises(LogError, match="no answer within 2 s when asked for"):
        examine_directory(str(tmp_path))


def test_memory_is_said_to_be_memory(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "4m") as disk:
        assert verdicts(disk)["file system"] == "doubtful"


def test_a_directory_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", "64k") as disk, pytest.raises(LogError, match="No space left"):
        examine_directory(str(disk))
    (tmp_path / "file").touch()
    told = CliRunner().invoke(main, ["doctor", "--wal-location", str(tmp_path / "file" / "log")])
    assert told.exit_code == 2
    assert "File exists" in told.output


# What the second process says where a promise is broken.
LIES = {
    "two hold one lock": ("lock", "yes", "lock"),
    "a lock stays held": ("lock", "no", "lock"),
    "a name is not seen": ("see", "-1 0", "rename"),
    "a file is seen in part": ("see", "0.1 17", "rename"),
    "nobody else can lock": ("hold", "no", "lock of the dead"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_broken_promise_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    word, answer, name = LIES[lie]
    ask = place_module.SecondProcess.ask
    monkeypatch.setattr(
        place_module.SecondProcess,
        "ask",
        lambda second, *words: answer if words[0] == word else ask(second, *words),
    )
    assert verdicts(tmp_path) == dict.fromkeys(NAMES, "kept") | {name: "broken"} | _of_this_disk(tmp_path)
    told = CliRunner().invoke(main, ["doctor", "--wal-location", str(tmp_path), "--json"])
    assert told.exit_code == 1
    assert {each["name"] for each in json.loads(told.output)["promises"] if each["verdict"] == "broken"} == {
        name
    }


def _of_this_disk(location: Path) -> dict[str, Verdict]:
    return {p.name: p.verdict for p in examine_directory(str(location)) if p.name in NAMES[:2]}


def test_an_object_store_is_no_place_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "file_system_of", lambda _: "fuse.s3fs")
    assert verdicts(tmp_path)["file system"] == "broken"


def test_directory_times_that_do_not_change_are_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = place_module.SecondProcess.ask
    monkeypatch.setattr(
        place_module.SecondProcess,
        "ask",
        lambda second, *words: "no" if words[0] == "stamped" else ask(second, *words),
    )
    assert verdicts(tmp_path)["directory times"] == "doubtful"
