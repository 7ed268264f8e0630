"""Options of the command line, made of what ``options`` declares; and values, read as the data source reads them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from zmq_datasource.options import ProxyOptions, ReadOptions
from zmq_datasource.options.parser import OptionSet, describe
from zmq_datasource.options.schema import SETS
from zmq_datasource.options.socket import CURVE_KEY_CHARACTERS
from zmq_datasource.options.types import (
    MOST_MILLISECONDS,
    ByteSize,
    Choice,
    Duration,
    Endpoints,
    Linger,
    LogLocation,
    Topics,
)

__all__ = [
    "AGE",
    "DIRECTORY",
    "DURATION",
    "LINGER",
    "SIZE",
    "Read",
    "all_options",
    "given_options",
    "named_options",
    "number",
    "option_of",
    "other_options",
    "place_of",
    "prometheus_port",
    "set_by_user",
    "size",
]

_N = TypeVar("_N", int, float)
_F = TypeVar("_F", bound=Callable[..., Any])


if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:  # where it is generic only since click 8.4
    _ParamType = click.ParamType


class Read(_ParamType):
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
            shown = value if len(value) <= _MOST_SHOWN else f"{value[:_MOST_SHOWN]}..."
            self.fail(f"{shown!r}: {e}", param, ctx)


def named_options(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` each; ``NAME=@FILE`` is the content of a file, so that a secret is in no list of processes.

    Files of libzmq's options (``zmq.``) are read by whoever opens the socket.

    Raises:
        click.UsageError: Something else.
    """
    given = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            # It may be a secret: it is not shown.
            raise click.UsageError("an --option without '=': write NAME=VALUE, or NAME=@FILE")
        if value.startswith("@") and name.lower().startswith("zmq."):
            if Path(value[1:]).exists() or len(value) != CURVE_KEY_CHARACTERS:  # a key may begin so, too
                value = f"@{Path(value[1:]).absolute()}"  # read by whoever opens the socket
        elif value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as e:
                raise click.UsageError(f"--option {name}: reading {value[1:]}: {e}") from e
        given[name] = value
    return given


def _duration(text: str) -> float:
    return _within(0.0 if text == "0" else float(Duration.read(text)), 0, _MOST_SECONDS, "24 days at most")


def _age(text: str) -> float:
    return _within(0.0 if text == "0" else float(Duration.read(text)), 0, _MOST_AGE, "100 years at most")


def _size(text: str) -> int:
    return _within(0 if text == "0" else int(ByteSize.read(text)), 0, _MOST_BYTES, "8 EiB at most")


def number(least: float, most: float) -> Read:
    """A number in a range; nan and inf are none."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        return _within(value, least, most, f"a number from {least:,g} to {most:,.0f}")

    return Read("number", read)


def size(least: int, most: int) -> Read:
    """A size in a range."""
    allowed = f"{least:,} bytes to {ByteSize(most)}"
    return Read("size", lambda text: _within(_size(text), least, most, allowed))


def _within(value: _N, least: float, most: float, allowed: str) -> _N:
    if not least <= value <= most:  # also nan
        raise ValueError(f"write {allowed}")
    return value


def _linger(text: str) -> int:
    return int(Linger.read(text))


def _directory(text: str) -> str:
    """A path means what it means in the shell; what is none is left to the option."""
    return text if not text or ":" in text.split("/", 1)[0] else os.path.abspath(text)


# What can be waited for; and what is only compared.
_MOST_SECONDS, _MOST_AGE = MOST_MILLISECONDS / 1000, 100 * 366 * 86_400.0
_MOST_BYTES = 2**63 - 1
# Of a value that cannot be read.
_MOST_SHOWN = 100
DIRECTORY = Read("directory", _directory)
DURATION, AGE = Read("duration", _duration), Read("duration", _age)
SIZE, LINGER = Read("size", _size), Read("linger", _linger)
_METAVARS = {Endpoints: "URL,...", Topics: "TOPIC,...", Duration: "DURATION", ByteSize: "SIZE", int: "N"}


def option_of(
    options: type[OptionSet],
    *fields: str,
    choices: Sequence[str] | None = None,
    default: str | None = None,
    required: bool = False,
    help: str | None = None,  # noqa: A002 - click's word
) -> Callable[[_F], _F]:
    """``--option`` for each of these declared options, with its type, choices, default and meaning.

    Args:
        choices: Of those that are declared, the ones that make sense here.
        default: What it is here where it is not set, and otherwise is another.
        help: What it means here, if that is more than its declaration says.
    """
    declared = {option.field: option for option in describe(options)}

    def decorate(command: _F) -> _F:
        for field in reversed(fields):
            option = declared[field]
            shown = "all" if option.default_value == Topics(("",)) else default or option.default
            kind: dict[str, Any] = {"metavar": _METAVARS.get(option.kind)}
            names = [f"--{field.replace('_', '-')}"]
            if option.kind is bool:
                if option.default_value:
                    names = [f"--no-{field.replace('_', '-')}", field]
                kind, shown = {"is_flag": True, "flag_value": "false" if option.default_value else "true"}, ""
            elif option.kind is int:
                kind["type"] = int
            elif option.kind is LogLocation:
                kind, shown = {"type": DIRECTORY, "metavar": "DIR"}, ""
            elif issubclass(option.kind, Choice):
                kind = {"type": click.Choice(choices or option.kind.allowed, case_sensitive=False)}
            if default is not None:  # click takes a None for a value
                kind["default"] = default
            text = help or option.doc.replace("`", "")
            command = click.option(
                *names,
                required=required,
                help=f"{text}  [default: {shown}]" if shown else text,
                **kind,
            )(command)
        return command

    return decorate


def given_options(options: type[OptionSet], values: Mapping[str, object]) -> dict[str, str]:
    """What was set by ``option_of``, as the option's text by its name."""
    names = {option.field: option.name for option in describe(options)}
    return {names[field]: str(value) for field, value in values.items() if value is not None}


def all_options(
    options: type[OptionSet], named: Mapping[str, object], others: tuple[str, ...], *more: str
) -> dict[str, str]:
    """What was set by ``option_of`` and by ``-o``.

    Args:
        more: Names that ``-o`` does not take, because the command reads their own options.

    Raises:
        UsageError: An option was set by both, is one of ``more``, or is set elsewhere.
    """
    given = given_options(options, named)
    own = {option.name.lower(): option for option in describe(options) if option.field in named}
    refused = {name.lower() for name in more}
    for name, value in named_options(others).items():
        option = own.get(name.lower())
        if name.lower() in refused or (option is not None and set_by_user(option.field)):
            raise click.UsageError(f"--option {name}=...: it has an option of its own; see --help")
        known = any(each.name.lower() == name.lower() for each in describe(options))
        if not known and (place := place_of(name, None)):
            raise click.UsageError(f"--option {place}")
        if option is not None:
            given.pop(option.name, None)  # a default
        given[name] = value
    return given


def place_of(name: str, command: str | None) -> str | None:
    """Where to set an option that a command does not know under this name; None if there is no such option.

    Args:
        name: As in ``--max-messages`` or ``maxMessages``.
    """
    plain = name.replace("-", "").lower()
    for kind, options in SETS.items():
        declared = next((option.name for option in describe(options) if option.name.lower() == plain), None)
        if declared is None:
            continue
        if _OWN_SETS.get(command or "") is options and name.startswith("-"):
            return f"{name}: write -o {declared}=..."
        return f"{name} has no effect here: {declared} is set at {_PLACES[kind]}"
    return None


_OWN_SETS = {"proxy": ProxyOptions, "doctor": ReadOptions}
_PLACES = {
    "source": 'a query that reads (spark.readStream.format("zmq"))',
    "sink": 'a query that writes (df.writeStream.format("zmq"))',
    "proxy": "zmq-datasource proxy",
}


def set_by_user(field: str) -> bool:
    """Whether a parameter of this command was given, and is not its default."""
    return click.get_current_context().get_parameter_source(field) not in (None, ParameterSource.DEFAULT)


def other_options(example: str, options: type[OptionSet]) -> Callable[[_F], _F]:
    """``-o NAME=VALUE`` for every other option of a set, to be read by ``named_options``."""

    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
        name, separator, value = begun.partition("=")
        found = []
        for option in describe(options):
            if not separator and option.name.lower().startswith(name.lower()):
                found.append(CompletionItem(f"{option.name}=", help=option.words))
            elif separator and option.name.lower() == name.lower() and issubclass(option.kind, Choice):
                found += [
                    CompletionItem(f"{name}={one}") for one in option.kind.allowed if one.startswith(value)
                ]
        return found

    return click.option(
        "-o",
        "--option",
        "others",
        metavar="NAME=VALUE|@FILE",
        multiple=True,
        shell_complete=complete,
        help=f"Any other option (docs/options.md), as in {example}; may be repeated. @FILE reads the value, such as a "
        "secret key.",
    )


prometheus_port = click.option(
    "--prometheus",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Serve the figures for Prometheus, at http://HOST:PORT/metrics.",
)
