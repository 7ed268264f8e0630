"""When a query serves its log, and to which executors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from tests.support import (
    REPOSITORY,
    Socket,
    bound,
)
from zmq_datasource.errors import EndpointError
from zmq_datasource.log.storage import LogStorage
from zmq_datasource.spark.serving import Serving
from zmq_datasource.transport import opened

_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
_CHILD = "from zmq_datasource.spark.serving import in_local_mode; print(in_local_mode())"


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
    _, taken = bound(context, zmq.ROUTER)
    with pytest.raises(EndpointError, match=r"serving the log at serveLog=tcp://.*free port"):
        Serving(taken).access(LogStorage(str(tmp_path)), "a log")
