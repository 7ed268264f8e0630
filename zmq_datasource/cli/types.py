"""Values of the command line, read as the data source reads its options."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

__all__ = ["DIRECTORY", "DURATION", "LINGER", "SIZE", "Read", "named_options"]


class Read(click.ParamType[Any]):
    """A value that a function reads from text; what it cannot read, is named with its option."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as e:
            self.fail(f"{value!r}: {e}", param, ctx)


def named_options(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` each; ``NAME=@FILE`` reads the value from a file, so that a secret is in no list of processes.

    Raises:
        click.UsageError: Something else.
    """
    given = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            # It may be a secret: it is not shown.
            raise click.UsageError("an --option without '=': write NAME=VALUE, or NAME=@FILE")
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as e:
                raise click.UsageError(f"--option {name}: reading {value[1:]}: {e}") from e
        given[name] = value
    return given


def _duration(text: str) -> float:
    from zmq_datasource.options.types import Duration  # noqa: PLC0415 - only a call pays for it

    return 0.0 if text == "0" else float(Duration.read(text))


def _size(text: str) -> int:
    from zmq_datasource.options.types import ByteSize  # noqa: PLC0415

    return 0 if text == "0" else int(ByteSize.read(text))


def _linger(text: str) -> int:
    from zmq_datasource.options.types import Linger  # noqa: PLC0415

    return int(Linger.read(text))


def _directory(text: str) -> str:
    """A path means what it means in the shell; what is none is left to the option."""
    return text if not text or ":" in text.split("/", 1)[0] else os.path.abspath(text)


DIRECTORY = Read("directory", _directory)
DURATION, SIZE, LINGER = Read("duration", _duration), Read("size", _size), Read("linger", _linger)
