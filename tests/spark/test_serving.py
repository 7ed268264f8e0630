"""When a query serves its log, and to which executors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from pyspark.sql.streaming.datasource import ReadMaxRows

from tests.support import (
    REPOSITORY,
    Socket,
    bound,
    keep_handlers,
    stop_sooner,
    stream_options,
    wait_for,
)
from zmq_datasource.errors import EndpointError
from zmq_datasource.spark.stream_reader import ZmqStreamReader
from zmq_datasource.transport import opened

ALL = ReadMaxRows(1)
_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
_CHILD = "from zmq_datasource.spark.serving import in_local_mode; print(in_local_mode())"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_handlers(monkeypatch)
    stop_sooner(monkeypatch)


@pytest.mark.parametrize(
    ("words", "local"),
    [
        (["--conf", "spark.master=local[2]", "pyspark-shell"], True),
        (["--master", "local"], True),
        (["--conf", "spark.master=local-cluster[2,1,1024]"], False),
        (["--master", "spark://localhost:7077"], False),
    ],
)
def test_local_mode_is_found_on_the_command_line_of_the_jvm(words: list[str], local: bool) -> None:
    said = subprocess.run(
        [sys.executable, "-c", _PARENT, _CHILD, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == f"{local}\n"


def test_an_endpoint_in_use_is_an_error(
    context: zmq.Context[Socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "BIND_SECONDS", 0.1)
    push, endpoint = bound(context, zmq.PUSH)
    _, taken = bound(context, zmq.ROUTER)
    reader = ZmqStreamReader(
        stream_options(connect=endpoint, socketType="PULL", walLocation=tmp_path, serveLog=taken)
    )
    try:
        start = reader.initialOffset()
        reader.latestOffset(start, ALL)  # from here on it receives
        push.send(b"v")
        end = wait_for(lambda: _news(reader, start), "a message")
        with pytest.raises(EndpointError, match=r"serving the log at serveLog=tcp://.*free port"):
            reader.partitions(start, end or {})
    finally:
        reader.stop()


def _news(reader: ZmqStreamReader, start: dict[str, dict[str, int]]) -> dict[str, dict[str, int]] | None:
    end = reader.latestOffset(start, ALL)
    return end if end != start else None
