"""``zmq-datasource completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]


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
