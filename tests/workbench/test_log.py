"""``zmq-datasource log``: what it shows of a real log, in a directory and in a bucket, and what it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import zmq
from click.testing import CliRunner, Result

from tests.source.test_feed import Context, filled, querying, send
from tests.support import batch_of, bound, keep_handlers, need, wait_for
from zmq_datasource.cli import main
from zmq_datasource.log import read_index
from zmq_datasource.log.leases import Lease, LeaseFiles, SubscriberNotes
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.log.writer import LogWriter


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["log", *map(str, arguments)])


def shown(location: object) -> dict[str, Any]:
    result = run(location, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_the_table_shows_the_ids_the_writer_and_the_readers(context: Context, tmp_path: Path) -> None:
    push, endpoint = bound(context, zmq.PUSH)
    with querying(tmp_path, connect=endpoint, walRetention="1h") as query:
        query.step()
        send(push, 0, 10)
        query.until(10)
        with querying(tmp_path, reader="desk", readerTimeout="1d", maxMessagesPerTrigger=3) as desk:
            desk.step()
            wait_for(lambda: shown(tmp_path)["readers"][0]["next"] == 3, "the lease to be written")
            there = shown(tmp_path)
            assert "running" in run(tmp_path).output
    assert (there["first"], there["end"]) == (0, 10)
    assert str(os.getpid()) in str(there["writer"])
    readers = {reader["name"]: reader for reader in there["readers"]}
    assert (readers["desk"]["next"], readers["desk"]["behind"], readers["desk"]["running"]) == (
        3,
        7,
        True,
    )
    assert shown(tmp_path)["writer"] is None
    (desk_after,) = [reader for reader in shown(tmp_path)["readers"] if reader["name"] == "desk"]
    assert desk_after["running"] is False
    assert (desk_after["timeout"], desk_after["kind"]) == (86_400.0, "query")


def test_showing_a_log_changes_nothing_in_it(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    before = sorted(tmp_path.rglob("*"))
    shown(tmp_path)
    run("verify", tmp_path)
    run("cat", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_without_a_log_is_an_error(tmp_path: Path) -> None:
    for place, why in (
        (tmp_path / "none", "there is no log in this directory"),
        (tmp_path, "there is no log in this directory"),
    ):
        for command in ((), ("verify",), ("cat",)):
            result = run(*command, place)
            assert result.exit_code == 1
            assert why in result.output
    assert list(tmp_path.iterdir()) == []


def test_verify_names_the_file_and_the_ids_of_what_is_damaged(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    assert "no damage found" in run("verify", tmp_path).output
    path = sorted((tmp_path / "chunks").glob("*.arrow"))[1]
    content = bytearray(path.read_bytes())
    content[content.rindex(b"1" + bytes(7))] ^= 1  # the value of the row
    path.write_bytes(content)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert f"{path}: reading batch 0 of chunk {path} (ids 1 to 1): its checksum differs" in result.output
    path.unlink()
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "the chunk with the ids from 1 to 1 is missing" in result.output
    (tmp_path / "readers").mkdir(exist_ok=True)
    (tmp_path / "readers" / "desk.json").write_text("no record")
    assert "desk.json" in run("verify", tmp_path).output


def test_cat_prints_messages_as_text_or_hexadecimal(tmp_path: Path) -> None:
    log = filled(tmp_path, 3)
    log.append(batch_of([b"\x1b[31mred\n\xff", None, "grün".encode()], 1_500_000))
    log.close()
    lines = run("cat", tmp_path).output.splitlines()
    assert lines[0] == "0\t1970-01-01T00:00:00.000000Z\t\t0"
    assert lines[3] == "3\t1970-01-01T00:00:01.500000Z\t\t\\x1b[31mred\\n\\xff"
    assert lines[4].endswith("\t\\N"), "a message that does not fit its framing"
    assert lines[5].endswith("\tgrün")
    assert [line.split("\t")[0] for line in run("cat", tmp_path, "--ids", "1:3").output.splitlines()] == [
        "1",
        "2",
    ]
    assert run("cat", tmp_path, "--last", 1, "--hex").output.endswith(f"\t{'grün'.encode().hex()}\n")
    assert run("cat", tmp_path, "--ids", "5").exit_code == 2


def test_what_the_log_has_no_more_is_said_by_cat_and_the_readers(tmp_path: Path) -> None:
    log = LogWriter(LogStorage(str(tmp_path)), chunk_bytes=1 << 20, max_bytes=1 << 30)
    log.open()

    def add(value: bytes) -> None:
        log.append(batch_of([value]))
        log.cut().result(30)

    for value in (b"0", b"1", b"2"):
        add(value)
    for value in (b"3", b"4"):
        add(value)
    need(tmp_path, 4)
    wait_for(lambda: read_index(LogStorage(str(tmp_path))).earliest == 4, "the chunks to be deleted")
    log.close()
    result = run("cat", tmp_path, "--ids", "1:")
    assert "ids 1 to 3 were deleted" in result.stderr
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == ["4"]
    need(tmp_path, 1)
    (desk,) = shown(tmp_path)["readers"]
    assert (desk["behind"], desk["gone"]) == (1, 3)


def test_a_reader_that_runs_is_neither_dropped_nor_moved(tmp_path: Path) -> None:
    filled(tmp_path, 3).close()
    with querying(tmp_path, reader="desk") as query:
        query.step()
        result = run("readers", "drop", tmp_path, "desk")
        assert result.exit_code == 1
        assert "its query runs" in result.output
    assert run("readers", "drop", tmp_path, "desk").exit_code == 0
    assert shown(tmp_path)["readers"] == []
    result = run("readers", "drop", tmp_path, "desk")
    assert "log has no such reader" in result.output.replace(str(tmp_path), "").replace("  ", " ")


@pytest.mark.parametrize("name", ["billing", "Würze / 7"])
def test_a_durable_subscriber_is_shown_and_dropped_by_its_name(name: str, tmp_path: Path) -> None:
    filled(tmp_path, 5).close()
    files = LeaseFiles(LogStorage(str(tmp_path)))
    lease = files.write(Lease(name, 3, 60.0, subscriber=SubscriberNotes(7, [b"orders."], snapshot=4)))
    (reader,) = shown(tmp_path)["readers"]
    assert (reader["name"], reader["kind"], reader["next"], reader["behind"]) == (name, "subscriber", 3, 2)
    result = run("readers", "drop", tmp_path, name)
    assert result.exit_code == 1
    assert "its client may be there" in result.output.replace("\n", " ")
    os.utime(files.path_of(lease.key), (0, 0))
    assert run("readers", "drop", tmp_path, name).exit_code == 0
    assert shown(tmp_path)["readers"] == []


def test_a_damaged_lease_is_shown_and_dropped(tmp_path: Path) -> None:
    filled(tmp_path, 5).close()
    need(tmp_path, 3, "good")
    (tmp_path / "readers" / "bad.json").write_text("{}")
    bad, good = shown(tmp_path)["readers"]
    assert (bad["name"], bad["kind"], bad["next"]) == ("bad", "damaged", 0)
    assert (good["name"], good["next"]) == ("good", 3)
    assert run("readers", "drop", tmp_path, "bad").exit_code == 0
    assert len(shown(tmp_path)["readers"]) == 1


def test_a_log_in_a_bucket_is_shown_like_one_in_a_directory(bucket: str) -> None:
    log = filled(bucket, 2)
    there = shown(bucket)
    assert there["end"] == 2
    assert there["writer"] is not None
    assert "no damage found" in run("verify", bucket).output
    assert len(run("cat", bucket).output.splitlines()) == 2
    log.close()
    for words in ((), ("--json",)):
        assert "any:any" not in run(bucket, *words).output
