"""``zmq-datasource options``."""

from __future__ import annotations

import difflib
import json
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from zmq_datasource.options import SETS
from zmq_datasource.options.parser import OptionDoc, OptionSet, Role, describe
from zmq_datasource.options.types import Choice

__all__ = ["options"]

_TYPES: Final[dict[type, str]] = {bool: "boolean", int: "integer"}
# Spark passes every value as text.
_TEXT: Final = "string"


def _names() -> list[str]:
    return [*SETS, *sorted({option.name for options in SETS.values() for option in describe(options)})]


def _complete(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in _names() if name.lower().startswith(begun.lower())]


@click.command(short_help="List all options, or explain one of them.")
@click.argument("name", metavar="[source|sink|proxy|OPTION]", required=False, shell_complete=_complete)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON Schema, which programs and editors can check with."
)
def options(name: str | None, as_json: bool) -> None:
    """List the options of the source, the sink and the proxy, or explain one of them.

    \b
    Examples:
      zmq-datasource options sink
      zmq-datasource options walRetention
      zmq-datasource options --json > zmq-options.schema.json
    """
    if name is not None and name not in SETS:
        if as_json:
            raise click.UsageError(
                f"--json is for source, sink or proxy, or for all of them, and not for {name}"
            )
        _explain(name)
    elif as_json:
        schema = _json_schema()
        click.echo(json.dumps(schema["$defs"][name] if name else schema, indent=2))
    else:
        _list([name] if name else list(SETS))


def _list(kinds: list[str]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    for kind in kinds:
        table = Table(
            "Option", "Value", "Default", "Meaning", title=f"Options of the {kind}", title_justify="left"
        )
        for option in describe(SETS[kind]):
            table.add_row(option.name, option.words, option.default, option.doc.replace("`", ""))
        Console().print(table)


def _explain(name: str) -> None:
    """Print what an option means. Where it means the same in several places, print that once."""
    found: dict[str, tuple[OptionDoc, list[str]]] = {}
    for kind, of_set in SETS.items():
        for option in describe(of_set):
            if option.name.lower() == name.lower():
                found.setdefault(option.doc, (option, []))[1].append(kind)
    if not found:
        near = difflib.get_close_matches(name.lower(), {n.lower(): n for n in _names()}, n=1)
        hint = f"; did you mean {next(n for n in _names() if n.lower() == near[0])}?" if near else ""
        raise click.UsageError(f"there is no option {name!r}{hint}")
    for option, kinds in found.values():
        default = f", {option.default} if it is not set" if option.default else ""
        click.echo(f"{option.name}: {option.words}{default} ({', '.join(kinds)})")
        click.echo(click.wrap_text(option.doc.replace("`", ""), initial_indent="  ", subsequent_indent="  "))


def _json_schema() -> dict[str, Any]:
    """The JSON Schema of all options, for editors and for programs that check a job's settings."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of zmq_datasource",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in SETS},
        "$defs": {name: _of_set(options) for name, options in SETS.items()},
    }


def _of_set(options: type[OptionSet]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {option.name: _of_option(option) for option in describe(options)},
        "patternProperties": {
            r"^zmq\.": {"description": "A socket option of libzmq.", "type": ["string", "integer"]}
        },
    }


def _of_option(option: OptionDoc) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": option.doc, "type": _TEXT}
    if issubclass(option.kind, Choice):
        schema["enum"] = list(option.kind.allowed)
    elif option.kind in _TYPES:
        schema["type"] = _TYPES[option.kind]
        limits = option.hint.__metadata__[0]
        found = {"minimum": limits.ge, "maximum": limits.le}
        schema |= {name: limit for name, limit in found.items() if limit is not None}
    if option.default:
        schema["default"] = option.default_value if option.kind in _TYPES else option.default
    for role, name in ((Role.STREAM, "streaming"), (Role.BATCH, "batch")):
        if role in option.roles:
            schema["$comment"] = f"Only for a {name} read."
    return schema
