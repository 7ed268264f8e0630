"""Commands to set programs up: ``options``, ``keygen`` and ``completion``."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from zmq_datasource.options import SETS
from zmq_datasource.options.parser import OptionDoc, OptionSet, Role, describe

__all__ = ["completion", "keygen", "options"]


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
    if option.allowed:
        schema["enum"] = list(option.allowed)
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


# A file's name has 255 bytes.
_MOST_NAME_BYTES = 200
_MOST_SHOWN = 200


@click.command(short_help="Make a pair of CURVE keys.")
@click.argument("name")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="Where to make the two files. A missing directory is made, for its owner alone.  [default: here]",
)
@click.option(
    "--only",
    metavar="NAME",
    multiple=True,
    help="A name of a producer or durable subscriber, or a pattern such as orders-*. If the key is in allowedClients, "
    "its owner may use only these names, and no other client may use them.",
)
def keygen(name: str, directory: Path, only: tuple[str, ...]) -> None:
    """Make a pair of CURVE keys: NAME.key is public, NAME.key_secret is for its owner alone.

    The files are certificates of ZeroMQ, which other programs read, too (zmq.auth, czmq, zcert).
    """
    import zmq.auth  # noqa: PLC0415 - only for this

    wrong = next((text for text in only if not text or any(c.isspace() or c in "\"'" for c in text)), None)
    if wrong is not None:
        raise click.UsageError(
            f"--only {wrong!r}: a name here has no spaces and no quotes; ? stands for any character"
        )
    if (
        not 0 < len(name.encode(errors="replace")) <= _MOST_NAME_BYTES
        or not name.isprintable()
        or "/" in name
    ):
        raise click.UsageError(
            f"NAME {name[:_MOST_NAME_BYTES]!r}: a name is 1 to {_MOST_NAME_BYTES} bytes of printable text without a "
            "slash; write the place with --directory"
        )
    directory = directory.absolute()  # options need an absolute path
    public, secret = directory / f"{name}.key", directory / f"{name}.key_secret"
    try:
        for path in (public, secret):
            if path.exists():
                raise click.UsageError(f"{path} exists; remove it, or choose another name")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # No other user may read the file, even while it is written.
        secret.touch(mode=0o600)
        zmq.auth.create_certificates(directory, name)
        secret.chmod(0o600)
        if only:  # a server reads the public certificate; pyzmq would write metadata only into the secret one
            named = f'metadata\n    names = "{" ".join(only)}"\n'
            public.write_text(public.read_text().replace("metadata\n", named, 1))
    except OSError as e:
        raise click.UsageError(
            f"making keys in {str(directory)[:_MOST_SHOWN]!r}: {e.strerror}; name a directory that can be written with "
            "--directory"
        ) from e
    click.echo(f"{public}: give it to the programs that are to know {name}")
    click.echo(f"{secret}: keep it where {name} runs")
    click.echo(f"-o zmq.curve_publickey=@{public} -o zmq.curve_secretkey=@{secret}")


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script with which a shell completes commands and options.

    \b
    Examples:
      eval "$(zmq-datasource completion bash)"
      zmq-datasource completion fish > ~/.config/fish/completions/zmq-datasource.fish
    """
    program = context.find_root().info_name or "zmq-datasource"
    kind = get_completion_class(shell)
    assert kind is not None, shell
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    click.echo(kind(context.find_root().command, {}, program, variable).source())
