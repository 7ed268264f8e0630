"""``zmq-datasource options``."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from zmq_datasource.options.parser import OptionDoc

__all__ = ["options"]


def _complete(_: click.Context, __: click.Parameter, begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in _names() if name.lower().startswith(begun.lower())]


def _names() -> list[str]:
    from zmq_datasource.options.parser import describe  # noqa: PLC0415
    from zmq_datasource.options.schema import SETS  # noqa: PLC0415

    return [*SETS, *sorted({option.name for of_set in SETS.values() for option in describe(of_set)})]


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
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from zmq_datasource.options.parser import describe  # noqa: PLC0415
    from zmq_datasource.options.schema import SETS, json_schema  # noqa: PLC0415

    if as_json:
        if name is not None and name not in SETS:
            raise click.UsageError(
                f"--json is for source, sink or proxy, or for all of them, and not for {name}"
            )
        schema = json_schema()
        click.echo(json.dumps(schema["$defs"][name] if name else schema, indent=2))
    elif name is not None and name not in SETS:
        _explain(name)
    else:
        console = Console()
        for kind in (name,) if name else SETS:
            table = Table(
                "Option", "Value", "Default", "Meaning", title=f"Options of the {kind}", title_justify="left"
            )
            for option in describe(SETS[kind]):
                table.add_row(option.name, option.words, option.default, option.doc.replace("`", ""))
            console.print(table)


def _explain(name: str) -> None:
    """Print what an option means, once where it means the same in several places."""
    from zmq_datasource.options.parser import describe  # noqa: PLC0415
    from zmq_datasource.options.schema import SETS  # noqa: PLC0415

    found: dict[OptionDoc, list[str]] = {}
    for kind, of_set in SETS.items():
        for option in describe(of_set):
            if option.name.lower() == name.lower():
                same = next((known for known in found if known.doc == option.doc), option)
                found.setdefault(same, []).append(kind)
    if not found:
        near = difflib.get_close_matches(name.lower(), {n.lower(): n for n in _names()}, n=1)
        hint = f"; did you mean {next(n for n in _names() if n.lower() == near[0])}?" if near else ""
        raise click.UsageError(f"there is no option {name!r}{hint}")
    for option, kinds in found.items():
        default = f", {option.default} if it is not set" if option.default else ""
        click.echo(f"{option.name}: {option.words}{default} ({', '.join(kinds)})")
        click.echo(click.wrap_text(option.doc.replace("`", ""), initial_indent="  ", subsequent_indent="  "))
