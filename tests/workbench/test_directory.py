"""Whether a directory can hold a log: tried for real, and with a file system that does not keep its promises."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import tiny_disk
from zmq_datasource.cli import main
from zmq_datasource.errors import LogError
from zmq_datasource.workbench.doctor import examine_directory
from zmq_datasource.workbench.doctor import place as place_module
from zmq_datasource.workbench.doctor.place import SecondProcess, Verdict


def verdicts(
    location: Path, start_second: Callable[[Path], SecondProcess] | None = None
) -> dict[str, Verdict]:
    return {promise.name: promise.verdict for promise in examine_directory(str(location), start_second)}


class Stopped(SecondProcess):
    """A second process that stands still, as in a lock on a file system of the network."""

    answer_seconds = 2.0

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        os.kill(self.pid, signal.SIGSTOP)


class Lying(SecondProcess):
    """A second process that gives one answer of its own."""

    lie = ("", "")

    def ask(self, *words: str) -> str:
        word, answer = self.lie
        return answer if words[0] == word else super().ask(*words)


def lying(word: str, answer: str) -> type[Lying]:
    return type("Lying", (Lying,), {"lie": (word, answer)})


NAMES = ["file system", "fsync", "link", "rename", "lock", "lock of the dead"]


def test_a_directory_of_this_machine_is_fit(tmp_path: Path) -> None:
    found = verdicts(tmp_path / "log")
    assert list(found) == NAMES
    assert {found[name] for name in NAMES[2:]} == {"kept"}
    assert list(tmp_path.iterdir()) == [], "what was made for that is removed"


def test_a_lock_that_hangs_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no answer within 2 s when asked for"):
        examine_directory(str(tmp_path), Stopped)


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
    "no other process can lock": ("hold", "no", "lock of the dead"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_broken_promise_is_named(tmp_path: Path, lie: str) -> None:
    word, answer, name = LIES[lie]
    expected = dict.fromkeys(NAMES, "kept") | {name: "broken"} | _of_this_disk(tmp_path)
    assert verdicts(tmp_path, lying(word, answer)) == expected


def test_the_command_exits_with_1_for_a_broken_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "SecondProcess", lying("hold", "no"))
    told = CliRunner().invoke(main, ["doctor", "--wal-location", str(tmp_path), "--json"])
    assert told.exit_code == 1
    broken = [p["name"] for p in json.loads(told.output)["promises"] if p["verdict"] == "broken"]
    assert broken == ["lock of the dead"]


def _of_this_disk(location: Path) -> dict[str, Verdict]:
    return {p.name: p.verdict for p in examine_directory(str(location)) if p.name in NAMES[:2]}


def test_an_object_store_is_no_place_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "file_system_of", lambda _: "fuse.s3fs")
    assert verdicts(tmp_path)["file system"] == "broken"
