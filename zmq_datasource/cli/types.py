"""Values of the command line, read as the data source reads its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["DURATION", "LINGER", "SIZE", "Read"]


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


def _duration(text: str) -> float:
    from zmq_datasource.option_types import Duration  # noqa: PLC0415 - only a call pays for it

    return 0.0 if text == "0" else float(Duration.read(text))


def _size(text: str) -> int:
    from zmq_datasource.option_types import ByteSize  # noqa: PLC0415

    return 0 if text == "0" else int(ByteSize.read(text))


def _linger(text: str) -> int:
    from zmq_datasource.option_types import Linger  # noqa: PLC0415

    return int(Linger.read(text))


DURATION, SIZE, LINGER = Read("duration", _duration), Read("size", _size), Read("linger", _linger)
