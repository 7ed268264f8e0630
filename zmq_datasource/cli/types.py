"""Options of the command line, made from the declarations in ``options``, and values in the notation of options."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import click
from click.core import ParameterSource

from zmq_datasource.options.parser import OptionSet, describe
from zmq_datasource.options.socket import CURVE_KEY_CHARACTERS, Endpoints
from zmq_datasource.options.types import (
    MOST_MILLISECONDS,
    ByteSize,
    Duration,
    Linger,
    LocalPath,
    Topics,
)

_N = TypeVar("_N", int, float)
_F = TypeVar("_F", bound=Callable[..., Any])
_MOST_SHOWN = 100  # characters of a value that cannot be read
_METAVARS = {Endpoints: "URL,...", Topics: "TOPIC,...", Duration: "DURATION", ByteSize: "SIZE", int: "N"}


if TYPE_CHECKING:
    from zmq_datasource.monitoring.http import HttpAddress

    _ParamType = click.ParamType[Any]
else:  # at run time click.ParamType is generic only since click 8.4
    _ParamType = click.ParamType


# Values.


class Read(_ParamType):
    """A value that a function reads from text. The function raises ValueError with what should be written instead."""

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


def _within(value: _N, least: float, most: float, allowed: str) -> _N:
    if not least <= value <= most:  # also nan
        raise ValueError(f"write {allowed}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _seconds(text: str) -> float:
    return 0.0 if text == "0" else float(Duration.read(text))


def _bytes(text: str) -> int:
    return 0 if text == "0" else int(ByteSize.read(text))


def number(least: float, most: float) -> Read:
    """A number in a range, which nan and inf are not."""
    allowed = f"a number from {least:,g} to {most:,.0f}"
    return Read("number", lambda text: _within(_float(text), least, most, allowed))


def size(least: int, most: int) -> Read:
    """A size in a range, in bytes."""
    allowed = f"{least:,} bytes to {ByteSize(most)}"
    return Read("size", lambda text: _within(_bytes(text), least, most, allowed))


def _directory(text: str) -> str:
    """Make a path absolute. Return a URL and an empty text as they are: the option then checks them."""
    return text if not text or ":" in text.split("/", 1)[0] else os.path.abspath(text)


DURATION = Read(
    "duration", lambda text: _within(_seconds(text), 0, MOST_MILLISECONDS / 1000, "24 days at most")
)
LINGER = Read("linger", lambda text: int(Linger.read(text)))
DIRECTORY = Read("directory", _directory)


def setting(name: str, kind: _ParamType, default: Any, help: str) -> Callable[[_F], _F]:  # noqa: A002 - click's word
    """Give a command an option that the data source does not have."""
    return click.option(name, type=kind, default=default, show_default=True, help=help)


# Options that are declared in ``options``.


def option_of(
    options: type[OptionSet],
    *fields: str,
    choices: Sequence[str] | None = None,
    default: str | None = None,
    required: bool = False,
    help: str | None = None,  # noqa: A002 - click's word
) -> Callable[[_F], _F]:
    """Give a command ``--option`` for each of these fields, with the declared type, choices, default and meaning.

    Args:
        choices: The declared choices that this command accepts; by default all.
        default: The default of this command, if it is not the declared one.
        help: The help text of this command, if it is not the declared one.
    """
    declared = {option.field: option for option in describe(options)}

    def decorate(command: _F) -> _F:
        for field in reversed(fields):
            option = declared[field]
            shown = "all" if option.default_value == Topics(("",)) else default or option.default
            kind: dict[str, Any] = {"metavar": _METAVARS.get(option.kind)}
            if option.kind is int:
                kind["type"] = int
            elif option.kind is LocalPath:
                kind, shown = {"type": DIRECTORY, "metavar": "DIR"}, ""
            elif option.allowed:
                kind = {"type": click.Choice(choices or option.allowed, case_sensitive=False)}
            if default is not None:  # click takes a None for a value
                kind["default"] = default
            text = help or option.doc.replace("`", "")
            command = click.option(
                f"--{field.replace('_', '-')}",
                required=required,
                help=f"{text}  [default: {shown}]" if shown else text,
                **kind,
            )(command)
        return command

    return decorate


def other_options(example: str) -> Callable[[_F], _F]:
    """Give a command ``-o NAME=VALUE`` for every other option of a set; ``all_options`` reads them."""
    return click.option(
        "-o",
        "--option",
        "others",
        metavar="NAME=VALUE|@FILE",
        multiple=True,
        help=f"Any other option (docs/options.md), as in {example}; may be repeated. @FILE reads the value, such as a "
        "secret key.",
    )


def named_options(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=VALUE``. With ``NAME=@FILE`` the value is in a file, so that no list of processes shows a secret.

    The file of an option of libzmq (``zmq.``) is read later, when the socket is opened.

    Raises:
        click.UsageError: A text has another form, or a file cannot be read.
    """
    given = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            # The text is not shown, because it may be a secret.
            raise click.UsageError("an --option without '=': write NAME=VALUE, or NAME=@FILE")
        if value.startswith("@") and name.lower().startswith("zmq."):
            # A CURVE key may begin with @, too.
            if Path(value[1:]).exists() or len(value) != CURVE_KEY_CHARACTERS:
                value = f"@{Path(value[1:]).absolute()}"
        elif value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as e:
                raise click.UsageError(f"--option {name}: reading {value[1:]}: {e}") from e
        given[name] = value
    return given


def given_options(options: type[OptionSet], values: Mapping[str, object]) -> dict[str, str]:
    """The values of ``option_of`` that are not None, as text by the names of the options."""
    names = {option.field: option.name for option in describe(options)}
    return {names[field]: str(value) for field, value in values.items() if value is not None}


def all_options(
    options: type[OptionSet], named: Mapping[str, object], others: tuple[str, ...], *more: str
) -> dict[str, str]:
    """The values of ``option_of`` and of ``other_options``, as text by the names of the options.

    Args:
        more: Names that ``-o`` does not take, because the command has options of its own for them.

    Raises:
        UsageError: An option is given twice, or is one of ``more``.
    """
    given = given_options(options, named)
    declared = {option.name.lower(): option for option in describe(options)}
    refused = {name.lower() for name in more}
    for name, value in named_options(others).items():
        option = declared.get(name.lower())
        if name.lower() in refused or (option and option.field in named and set_by_user(option.field)):
            raise click.UsageError(f"--option {name}=...: it has an option of its own; see --help")
        if option is not None:
            given.pop(option.name, None)  # a default
        given[name] = value
    return given


def set_by_user(field: str) -> bool:
    """Whether the user gave this parameter of the command; False if it has its default."""
    return click.get_current_context().get_parameter_source(field) not in (None, ParameterSource.DEFAULT)


def _address(text: str) -> HttpAddress:
    from zmq_datasource.monitoring.http import HttpAddress  # noqa: PLC0415 - imports http.server

    return HttpAddress.read(text)


prometheus_address = click.option(
    "--prometheus",
    type=Read("[HOST:]PORT", _address),
    metavar="[HOST:]PORT",
    help="Serve the figures for Prometheus, at http://HOST:PORT/metrics. Without HOST only programs on this machine "
    "can ask; 0.0.0.0:9400 listens on all addresses of this machine.",
)

Form: TypeAlias = Literal["text", "json", "none"]


def figures_options(command: _F) -> _F:
    """Give a command the options of ``monitoring.view.Figures``."""
    command = setting("--figures-every", DURATION, "10s", "How often figures are printed.")(command)
    return click.option(
        "--figures",
        type=click.Choice(get_args(Form)),
        default="text",
        show_default=True,
        help="How to print figures: a line in the log output while messages come, or JSON objects on standard output.",
    )(command)
