"""The command line, ``zmq-datasource``. A call imports only what its command needs."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from zmq_datasource.cli.log import log
from zmq_datasource.cli.running import demo, proxy, receive
from zmq_datasource.cli.setup import keygen
from zmq_datasource.cli.workbench import doctor, hwm
from zmq_datasource.errors import OptionError, ZmqDataSourceError

__all__ = ["main"]


def _show_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    import zmq  # noqa: PLC0415 - only for this

    from zmq_datasource import __version__  # noqa: PLC0415
    from zmq_datasource.transport import core  # noqa: PLC0415

    libraries = f"{core.NAME} core, libzmq {zmq.zmq_version()}"
    click.echo(f"{context.info_name}, version {__version__} ({libraries})")
    context.exit()


class _RefusedError(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        # SIGTERM ends a command as Ctrl-C does: the command ends the processes that it has started.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as e:
            if e.ctx is not None and "others" in {each.name for each in e.ctx.command.params}:
                hint = (
                    "an option of the data source that has no flag is written -o NAME=VALUE (docs/options.md)"
                )
                raise click.UsageError(f"{e.format_message()}; {hint}", e.ctx) from e
            raise
        except OptionError as e:  # exits with 2, as click does for wrong arguments
            raise _RefusedError(str(e)) from e
        except ZmqDataSourceError as e:
            raise click.ClickException(str(e)) from e
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
            raise click.exceptions.Exit(130) from None


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version, which core is in use, and libzmq's version.",
)
def main() -> None:
    """ZeroMQ as a source and sink of Spark Structured Streaming."""


for _command in (demo, receive, proxy, log, doctor, hwm, keygen):
    main.add_command(_command)
