"""``zmq-datasource options``."""

from __future__ import annotations

import json

import click

__all__ = ["options"]


@click.command(short_help="List the options of the source, the sink and the proxy.")
@click.argument(
    "kind", metavar="[source|sink|proxy]", type=click.Choice(["source", "sink", "proxy"]), required=False
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON Schema, which programs and editors can check with."
)
def options(kind: str | None, as_json: bool) -> None:
    """List the options of the source, the sink and the proxy.

    \b
    Examples:
      zmq-datasource options sink
      zmq-datasource options --json > zmq-options.schema.json
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from zmq_datasource.options.parser import describe  # noqa: PLC0415
    from zmq_datasource.options.schema import SETS, json_schema  # noqa: PLC0415

    if as_json:
        schema = json_schema()
        click.echo(json.dumps(schema["$defs"][kind] if kind else schema, indent=2))
        return
    console = Console()
    for name in (kind,) if kind else SETS:
        table = Table(
            "Option", "Value", "Default", "Meaning", title=f"Options of the {name}", title_justify="left"
        )
        for option in describe(SETS[name]):
            table.add_row(option.name, option.words, option.default, option.doc.replace("`", ""))
        console.print(table)
