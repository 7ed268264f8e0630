"""Runs the snippets of a page as its reader would, and compares what they print with what the page shows.

A block of Python runs in one namespace with those before it. After ``<!-- test: program -->`` it is a program of its
own. In a block of ``sh`` each ``zmq-datasource`` command runs, too. Programs and commands go on until the page ends. A
block of ``text`` that follows shows what is printed by then: each of its lines must come, from any of them. In such a
line ``...`` stands for any text.
"""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql.streaming import StreamingQuery

from tests.support import REPOSITORY, wait_for
from tests.support.ports import free_port

_BLOCK = re.compile(r"(?:<!-- test: (\w+) -->\n)?```(python|sh|text)\n(.*?)```", re.DOTALL)
_PORT = re.compile(r"(tcp://(?:localhost|\*):)(\d+)")
_BATCH_SECONDS, _LINE_SECONDS = 90, 30


class Snippet(NamedTuple):
    """A block of a page, and the line in which it begins."""

    kind: str
    code: str
    line: int


def snippets(path: Path, directory: Path) -> Iterator[Snippet]:
    """The blocks of a page, with free ports and a directory in place of those that it names."""
    text, ports = path.read_text(encoding="utf-8"), {}
    for port in {match[2] for match in _PORT.finditer(text)}:
        ports[port] = str(free_port())
    for match in _BLOCK.finditer(text):
        code = _PORT.sub(lambda found: found[1] + ports[found[2]], match[3])
        line = text.count("\n", 0, match.start(3)) + 1
        yield Snippet(match[1] or match[2], code.replace("/tmp/", f"{directory}/"), line)


def marked(page: str, name: str) -> str:
    """The Python of a page of docs/ that is marked as ``<!-- test: name -->``."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    found = [match[3] for match in _BLOCK.finditer(text) if match[1] == name]
    assert found
    return "\n".join(found)


def has_progress(query: StreamingQuery) -> object:
    """Whether a micro-batch has ended."""
    return query.lastProgress


def has_rows(query: StreamingQuery) -> object:
    """How many rows its last micro-batches have read."""
    return sum(progress["numInputRows"] for progress in query.recentProgress)


def run(page: Iterator[Snippet], stack: ExitStack, directory: Path, *read_next: str) -> dict[str, Any]:
    """Run a page's snippets; its queries, programs and commands end with the stack.

    Args:
        directory: For what the programs print.
        read_next: Names of queries whose rows the next snippet shows.

    Returns:
        The namespace of the page's Python.
    """
    names: dict[str, Any] = {}
    started: list[StreamingQuery] = []
    printed = _Printed(directory, stack)
    for snippet in page:
        if snippet.kind == "text":
            for line in snippet.code.splitlines():
                printed.wait_for(line)
        elif snippet.kind == "program":
            printed.start("-c", snippet.code)
        elif snippet.kind == "sh":
            for line in snippet.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["zmq-datasource"]:
                    printed.start("-m", "zmq_datasource", *words[1:])
        elif snippet.kind == "python":
            code = compile("\n" * (snippet.line - 1) + snippet.code, "page", "exec")
            with redirect_stdout(printed.python):
                exec(code, names)
            for name, query in list(names.items()):
                if isinstance(query, StreamingQuery) and query not in started:
                    started.append(query)
                    stack.callback(query.stop)
                    _wait_for_batch(query, has_rows if name in read_next else has_progress, name)
    return names | {"printed": printed.text()}


def _wait_for_batch(query: StreamingQuery, done: Callable[[StreamingQuery], object], name: str) -> None:
    wait_for(lambda: done(query) or query.exception(), f"rows of {name}", _BATCH_SECONDS)
    assert query.exception() is None


class _Printed:
    """What the snippets of a page have printed so far."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.python = io.StringIO()
        self._directory = directory
        self._stack = stack
        self._files: list[Path] = []
        self._looking: tuple[tuple[str, ...], subprocess.Popen[bytes]] | None = None

    def start(self, *arguments: str) -> None:
        path = self._directory / f"printed-{len(self._files)}"
        self._files.append(path)
        output = self._stack.enter_context(path.open("w"))
        process = subprocess.Popen(
            [sys.executable, "-u", *arguments], cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT
        )
        if "log" in arguments:
            self._looking = arguments, process
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.terminate)

    def text(self) -> str:
        parts = (path.read_text(encoding="utf-8", errors="replace") for path in self._files)
        return "\n".join([self.python.getvalue(), *parts])

    def wait_for(self, line: str) -> None:
        try:
            wait_for(lambda: self._has(line) or self._repeat(), f"the line {line!r}", _LINE_SECONDS)
        except AssertionError as e:
            raise AssertionError(f"{e}\nPrinted was:\n{self.text()}") from None

    def _repeat(self) -> bool:
        """Run ``zmq-datasource log`` again: what was published a moment ago is not in the log's listing at first."""
        if self._looking is not None and self._looking[1].poll() is not None:
            self.start(*self._looking[0])
        return False

    def _has(self, line: str) -> bool:
        pattern = ".*".join(re.escape(part) for part in line.strip().split("..."))
        return any(re.fullmatch(pattern, found.strip()) for found in self.text().splitlines())
