"""Programs in other languages that know this package only by its docs, as commands; each skips where it cannot run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.support import REPOSITORY
from tests.support.maven import JEROMQ, fetched

__all__ = ["DURABLE_CLIENTS", "java_program"]

_HERE = Path(__file__).parent
# What the packages of npm and Go modules are checked by is beside the programs; their own caches keep them.
_IS_TAMPERED = re.compile("EINTEGRITY|checksum mismatch|SECURITY ERROR")
_TIMEOUT_SECONDS = 60

# What the reader of the docs adds to its example: a handler, what is told of the answers, and where to connect.
_PYTHON_HANDLER = """

import sys
import time

endpoint, name, last = sys.argv[1:]
MAX_BYTES = 4096  # so that there are many answers


def ask_and_tell(*request, ask=ask):
    kind, answer, buffers = ask(*request)
    if answer.get("done"):
        print("acked", answer["done"] - 1, flush=True)
    return kind, answer, buffers


def handle(position, topic, value):
    print("got", position, value.decode(), topic.decode(), flush=True)
    time.sleep(0.001)  # so that there is a middle to be killed in
    return position != int(last)


ask = ask_and_tell
consume(endpoint, name, handle)
"""


def python_durable_client(directory: Path) -> list[str]:
    """The code of docs/proxy.md as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/proxy.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def consume(" in block]
    program = directory / "client.py"
    program.write_text(code + _PYTHON_HANDLER)
    return [sys.executable, str(program)]


def java_program(name: str) -> list[str]:
    """A source file that runs with JeroMQ: PySpark brings a compiler, so that a JRE will do."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin"))) if home else shutil.which("java")
    if java is None:
        pytest.skip("there is no Java runtime")
    jars = Path(pyspark.__file__).parent / "jars"
    compiler = [*jars.glob("janino-*.jar"), *jars.glob("commons-compiler-*.jar")]
    if len(compiler) != 2:
        pytest.skip("this PySpark brings no Janino, which compiles the client")
    path = os.pathsep.join(map(str, [fetched(JEROMQ), *compiler]))
    quick = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    source = str(_HERE / "java" / f"{name}.java")
    return [java, *quick, "-cp", path, "org.codehaus.janino.SimpleCompiler", source, name]


def c_durable_client(directory: Path) -> list[str]:
    """With the libzmq of the system."""
    compiler = _tool("cc")
    _try("libzmq with its headers (libzmq3-dev)", [compiler, "-E", "-include", "zmq.h", "-xc", os.devnull])
    program = str(directory / "client")
    source = str(_HERE / "c/durable_client.c")
    subprocess.run([compiler, "-Wall", "-Wextra", "-Werror", "-o", program, source, "-lzmq"], check=True)
    return [program]


def node_durable_client(directory: Path) -> list[str]:
    """With zeromq.js, which brings a compiled libzmq."""
    node, npm = _tool("node"), _tool("npm")
    place = Path(shutil.copytree(_HERE / "node", directory / "node"))
    quiet = ["--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund", "--fetch-retries=0"]
    _try("zeromq.js from npm", [npm, "ci", *quiet], place)
    return [node, str(place / "durable_client.js")]


def go_durable_client(directory: Path) -> list[str]:
    """With go-zeromq, which is pure Go."""
    go = _tool("go")
    place = Path(shutil.copytree(_HERE / "go", directory / "go"))
    _try("go-zeromq, or a Go for it,", [go, "mod", "download"], place)
    subprocess.run([go, "build", "-o", "client", "."], cwd=place, check=True)
    return [str(place / "client")]


DURABLE_CLIENTS = {
    "python": python_durable_client,
    "java": lambda directory: java_program("DurableClient"),
    "c": c_durable_client,
    "node": node_durable_client,
    "go": go_durable_client,
}


def _tool(name: str) -> str:
    """Where a program is."""
    place = shutil.which(name)
    if place is None:
        pytest.skip(f"there is no {name}")
    return place


def _try(what: str, command: list[str], directory: Path | None = None) -> None:
    """Run a command that gets ``what``; skip the test if it cannot be had, and fail if it is not what it must be."""
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    try:
        subprocess.run(
            command,
            cwd=directory,
            env=environment,
            timeout=_TIMEOUT_SECONDS,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what} cannot be had within {_TIMEOUT_SECONDS} s")
    except subprocess.CalledProcessError as e:
        assert not _IS_TAMPERED.search(e.stdout), e.stdout
        reason, *_ = e.stdout.strip().split("\n")
        pytest.skip(f"{what} cannot be had: {reason}")
